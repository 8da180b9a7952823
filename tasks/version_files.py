"""What a registered version holds in MLflow, read without this machine's store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from registry.bundle import Bundle
from registry.lineage import Edge, Lineage, Node
from registry.tracking import asking_mlflow, pages
from tasks.bundles import tracker
from tasks.lineage import lineage_for
from tasks.logged_files import ModelFiles

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


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


def with_evidence(lineage: Lineage, evidence: Mapping[str, str], store: Lineage) -> Lineage:
    """A bundle's lineage and the evidence, by kind its digest, where that is here.

    The same content may have been made from several prompts: every one of them counts.
    """
    by_digest = defaultdict[str, list[Node]](list)
    for node in store.nodes.values():
        by_digest[node.digest].append(node)
    top = lineage.of_kind("bundle")[0]
    nodes, edges = dict(lineage.nodes), dict.fromkeys(lineage.edges)
    for kind, digest in evidence.items():
        for number, node in enumerate(by_digest[digest], start=1):
            role = f"evidence.{kind}" if number == 1 else f"evidence.{kind}.{number}"
            edges[Edge(child=top.id, role=role, parent=node.id)] = None
            below = store.below([node.id])
            nodes = {**{name: store.nodes[name] for name in below}, **nodes}
            edges |= {edge: None for edge in store.edges if edge.child in below}
    return Lineage(nodes=nodes, edges=list(edges))
