"""What a registered version holds in MLflow, read without this machine's store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from eval_suites.policy import Policy
from registry.bundle import Bundle
from registry.errors import UserError
from registry.evidence import SUMMARY, Evidence, read_summary
from registry.lineage import LINEAGE_FILE, Edge, Lineage
from registry.outcome import CandidateOutcome
from registry.release_facts import RELEASE_FILE, ReleaseFacts
from registry.settings import settings
from registry.tracking import BUNDLE_FILE, OUTCOME_FILE, asking_mlflow, pages, quiet_mlflow
from tasks.bundles import tracker
from tasks.lineage import lineage_for
from tasks.recorded import no_numbers

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


Model = TypeVar("Model", bound=BaseModel)


class Registered(NamedTuple):
    version: ModelVersion
    aliases: list[str]


def registered_versions() -> list[Registered]:
    """Every version of every registered model, with the aliases that point to it."""
    client = tracker().client
    found, held = [], dict[str, dict[str, str]]()
    with asking_mlflow("list the versions"):
        versions = list(pages(client.search_model_versions))
    for version in versions:
        if version.name not in held:
            with asking_mlflow(f"read {version.name}"):
                # The search leaves the aliases out.
                held[version.name] = client.get_registered_model(version.name).aliases
        aliases = held[version.name].items()
        names = [alias for alias, to in sorted(aliases) if int(to) == int(version.version)]
        found.append(Registered(version, names))
    return sorted(found, key=lambda one: (one.version.name, int(one.version.version)))


class ModelFiles:
    """The small files of one LoggedModel; each is read when it is asked for.

    A reader gives None for a file that is not there. It raises `ValueError`, in a few words, for
    one that is not what its name says.
    """

    def __init__(self, source: str, title: str) -> None:
        self.source = source.rstrip("/")
        self.title = title

    @cached_property
    def names(self) -> set[str]:
        """Files at the top of the folder. Raises `InfrastructureError` when it cannot be asked."""
        quiet_mlflow()
        import mlflow

        mlflow.set_tracking_uri(settings().tracking_uri)
        with asking_mlflow(f"list the files of {self.title}"):
            found = mlflow.artifacts.list_artifacts(artifact_uri=self.source)
        return {item.path.rsplit("/", 1)[-1] for item in found if not item.is_dir}

    def text(self, name: str) -> str | None:
        if name not in self.names:
            return None
        from mlflow.artifacts import download_artifacts

        # MLflow's own `load_text` makes a failed download of bytes that are no UTF-8.
        with (
            asking_mlflow(f"read {name} of {self.title}"),
            TemporaryDirectory(prefix="pilotage-") as folder,
        ):
            content = Path(download_artifacts(f"{self.source}/{name}", dst_path=folder))
            return content.read_bytes().decode("utf-8")

    def document(self, name: str) -> dict[str, Any] | None:
        """A JSON object of numbers and texts that JSON can hold."""
        text = self.text(name)
        if text is None:
            return None
        try:
            document = json.loads(text)
            # Escaped halves of characters are read without a word, and no digest takes them.
            json.dumps(document, ensure_ascii=False).encode("utf-8")
            place = next(no_numbers(document), None)
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        if place is not None:
            raise ValueError(f"{place} is no number")
        if not isinstance(document, dict):
            raise ValueError("is no JSON object")
        return document

    def read_bundle(self) -> tuple[Bundle, str] | None:
        """What was gated, and the digest that its file names."""
        document = self.document(BUNDLE_FILE)
        if document is None:
            return None
        named = str(document.pop("digest", ""))
        return _parsed(Bundle, document), named

    def read_outcome(self) -> CandidateOutcome | None:
        document = self.document(OUTCOME_FILE)
        return _parsed(CandidateOutcome, document) if document is not None else None

    def read_facts(self) -> tuple[ReleaseFacts, Policy] | None:
        """How it was judged; None for a version from before releases recorded that."""
        document = self.document(RELEASE_FILE)
        if document is None:
            return None
        facts = _parsed(ReleaseFacts, document)
        return facts, _parsed(Policy, facts.policy)

    def read_evidence(self, kind: str) -> Evidence | None:
        """The summary of accuracy, latency or serving evidence."""
        name = f"evidence-{kind}.json"
        document = self.document(name)
        if document is None:
            return None
        with TemporaryDirectory(prefix="pilotage-") as folder:
            place = Path(folder) / SUMMARY
            place.write_text(json.dumps(document), encoding="utf-8")
            try:
                found = read_summary(place.parent)
            except UserError as error:
                problem = error.problems[0]
                where = problem.where.removeprefix(str(place)).lstrip(": ")
                told = f"{where}: {problem.what}" if where else problem.what
                raise ValueError(told) from None
        if found.kind != kind:
            raise ValueError(f"it is {found.kind} evidence")
        return found

    def read_lineage(self) -> Lineage | None:
        document = self.document(LINEAGE_FILE)
        if document is None:
            return None
        lineage = _parsed(Lineage, document)
        if flaw := lineage.flaw():
            raise ValueError(flaw)
        return lineage


class VersionFiles(ModelFiles):
    """The small files of one version's LoggedModel. A property is None for a broken file too."""

    def __init__(self, version: ModelVersion) -> None:
        super().__init__(version.source or "", f"{version.name} version {version.version}")
        self.version = version

    @cached_property
    def bundle(self) -> tuple[Bundle, str] | None:
        """What was gated, and the digest that its file names; None where it cannot be read."""
        with suppress(ValueError):
            return self.read_bundle()
        return None

    def recorded_lineage(self) -> Lineage | None:
        """As it was when the version was made; None for a version without, or a broken file."""
        with suppress(ValueError):
            return self.read_lineage()
        return None

    def lineage(self, store: Lineage) -> Lineage | None:
        """The recorded one, or that of this machine's store; None where nothing is known."""
        recorded = self.recorded_lineage()
        if recorded is not None or self.bundle is None:
            return recorded
        outcome = None
        with suppress(ValueError):
            outcome = self.read_outcome()
        evidence = outcome.evidence if outcome is not None else {}
        return with_evidence(lineage_for(self.bundle[0], {}), evidence, store)


def _parsed(kind: type[Model], document: Any) -> Model:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None


def with_evidence(lineage: Lineage, evidence: Mapping[str, str], store: Lineage) -> Lineage:
    """A bundle's lineage and the evidence, by kind its digest, where that is here."""
    by_digest = {node.digest: node for node in store.nodes.values()}
    top = lineage.of_kind("bundle")[0]
    nodes, edges = dict(lineage.nodes), dict.fromkeys(lineage.edges)
    for kind, digest in evidence.items():
        node = by_digest.get(digest)
        if node is None:
            continue
        edges[Edge(child=top.id, role=f"evidence.{kind}", parent=node.id)] = None
        below = store.below([node.id])
        nodes = {**{name: store.nodes[name] for name in below}, **nodes}
        edges |= {edge: None for edge in store.edges if edge.child in below}
    return Lineage(nodes=nodes, edges=list(edges))
