"""What a registered version holds in MLflow, read without this machine's store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from registry.bundle import Bundle
from registry.lineage import LINEAGE_FILE, Edge, Lineage
from registry.settings import settings
from registry.tracking import BUNDLE_FILE, OUTCOME_FILE, Tracker, asking_mlflow, quiet_mlflow
from tasks.lineage import lineage_for

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


class Registered(NamedTuple):
    version: ModelVersion
    aliases: list[str]


def registered_versions() -> list[Registered]:
    """Every version of every registered model, with the aliases that point to it."""
    client = Tracker(settings().tracking_uri, settings().mlartifacts_dir).client
    found, held = [], dict[str, dict[str, str]]()
    for version in _versions(client):
        if version.name not in held:
            with asking_mlflow(f"read {version.name}"):
                # The search leaves the aliases out.
                held[version.name] = client.get_registered_model(version.name).aliases
        aliases = held[version.name].items()
        names = [alias for alias, to in sorted(aliases) if int(to) == int(version.version)]
        found.append(Registered(version, names))
    return sorted(found, key=lambda one: (one.version.name, int(one.version.version)))


def _versions(client: MlflowClient) -> Iterator[ModelVersion]:
    token = None
    while True:
        with asking_mlflow("list the versions"):
            page = client.search_model_versions(page_token=token)
        yield from page
        token = page.token
        if not token:
            return


class VersionFiles:
    """The small files of one version's LoggedModel; each is read when it is asked for."""

    def __init__(self, version: ModelVersion) -> None:
        self.version = version
        self.title = f"{version.name} version {version.version}"

    @cached_property
    def names(self) -> set[str]:
        """Names at the top of the folder. Raises `InfrastructureError` when it cannot be asked."""
        quiet_mlflow()
        import mlflow

        mlflow.set_tracking_uri(settings().tracking_uri)
        with asking_mlflow(f"list the files of {self.title}"):
            found = mlflow.artifacts.list_artifacts(artifact_uri=self.version.source)
        return {item.path.rsplit("/", 1)[-1] for item in found}

    def text(self, name: str) -> str | None:
        """A file's text; None where the version has no such file."""
        if name not in self.names:
            return None
        import mlflow

        with asking_mlflow(f"read {name} of {self.title}"):
            return str(mlflow.artifacts.load_text(f"{self.version.source.rstrip('/')}/{name}"))

    def document(self, name: str) -> dict[str, Any] | None:
        """A JSON file; None where it is missing or no JSON object."""
        text = self.text(name)
        try:
            document = json.loads(text) if text is not None else None
        except ValueError:
            return None
        return document if isinstance(document, dict) else None

    @cached_property
    def bundle(self) -> tuple[Bundle, str] | None:
        """What was gated, and the digest that its file names; None where it cannot be read."""
        document = self.document(BUNDLE_FILE)
        if document is None:
            return None
        named = str(document.pop("digest", ""))
        try:
            return Bundle.model_validate(document), named
        except ValidationError:
            return None

    @cached_property
    def outcome(self) -> dict[str, Any]:
        return self.document(OUTCOME_FILE) or {}

    def recorded_lineage(self) -> Lineage | None:
        """As it was when the version was made; None for a version without, or a broken file."""
        text = self.text(LINEAGE_FILE)
        try:
            return Lineage.model_validate_json(text) if text is not None else None
        except ValidationError:
            return None

    def lineage(self, store: Lineage) -> Lineage | None:
        """The recorded one, or that of this machine's store; None where nothing is known."""
        recorded = self.recorded_lineage()
        if recorded is not None or self.bundle is None:
            return recorded
        return with_evidence(lineage_for(self.bundle[0], {}), self.outcome, store)


def with_evidence(lineage: Lineage, outcome: Mapping[str, Any], store: Lineage) -> Lineage:
    """A bundle's lineage and the evidence that its outcome names by digest, where that is here."""
    by_digest = {node.digest: node for node in store.nodes.values()}
    top = lineage.of_kind("bundle")[0]
    nodes, edges = dict(lineage.nodes), dict.fromkeys(lineage.edges)
    for kind, digest in (outcome.get("evidence") or {}).items():
        node = by_digest.get(str(digest))
        if node is None:
            continue
        edges[Edge(child=top.id, role=f"evidence.{kind}", parent=node.id)] = None
        below = store.below([node.id])
        nodes = {**{name: store.nodes[name] for name in below}, **nodes}
        edges |= {edge: None for edge in store.edges if edge.child in below}
    return Lineage(nodes=nodes, edges=list(edges))
