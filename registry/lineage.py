"""Where a bundle comes from: its artifacts, and what each one was made of, down to the prompts.

A lineage is small (names, digests, short facts; never a prompt) and travels with a version as
`lineage.json`, so that it can be read where the store is not, and after the store was pruned. It
is collected from the store's manifests alone; no file of weights or data is read.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from registry.artifacts import Manifest
from registry.digests import digest_of_listing
from registry.lineage_facts import facts_of
from registry.store import MANIFEST

LINEAGE_FILE = "lineage.json"
PROMPTS = "prompts"
BUNDLE = "bundle"
EVIDENCE = ("serving", "accuracy", "latency", "draft_proof")

_RANK = {BUNDLE: 0, "serving": 1, "accuracy": 2, "latency": 3, "draft_proof": 4,
         "draft_choice": 5, "draft": 6, "quantize": 7, "distill": 8, "teacher_data": 9, "model": 10,
         PROMPTS: 99}  # fmt: skip
"""Which of two kinds is told first, where neither was made of the other."""
_UNKNOWN_RANK = 50


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Node(_Part):
    """One artifact, or the bundle itself (its key is its digest)."""

    kind: str = Field(description="Name of the stage, or `bundle`.")
    key: str
    digest: str
    label: str = Field(default="", description="Which one, for people.")
    facts: dict[str, str] = Field(
        default_factory=dict, description="Settings, counts, tools, revision, hardware; short."
    )
    gone: bool = Field(
        default=False, description="Named by what was made of it; not in the store it was read in."
    )

    @property
    def id(self) -> str:
        """Content made anew under one key is another node."""
        return f"{self.kind}/{self.key[:16]}/{self.digest[:16]}"

    @property
    def title(self) -> str:
        return f"{self.kind} {self.label}".strip()


class Edge(_Part):
    """`child` was made of `parent`; both are ids."""

    child: str
    role: str = Field(description="target, draft, student, data, calibration, prompts, ...")
    parent: str


class Lineage(_Part):
    schema_version: int = 1
    nodes: dict[str, Node] = Field(description="By id.")
    edges: list[Edge] = Field(default_factory=list)

    def parents(self, child: str) -> dict[str, Node]:
        """What a node was made of, by role."""
        return {edge.role: self.nodes[edge.parent] for edge in self.edges if edge.child == child}

    def of_kind(self, kind: str) -> list[Node]:
        return sorted((n for n in self.nodes.values() if n.kind == kind), key=lambda n: n.id)

    def ordered(self) -> list[Node]:
        """Every node after all that was made of it: the bundle first, the prompts last.

        The order depends on nothing but the lineage. Raises `ValueError` for a circle.
        """
        parents = self._parents()
        children = Counter(edge.parent for edge in self.edges)
        ready = [_turn(node) for node in self.nodes.values() if not children[node.id]]
        heapq.heapify(ready)
        found = []
        while ready:
            node = self.nodes[heapq.heappop(ready)[-1]]
            found.append(node)
            for parent in parents[node.id]:
                children[parent] -= 1
                if not children[parent]:
                    heapq.heappush(ready, _turn(self.nodes[parent]))
        if len(found) != len(self.nodes):
            raise ValueError("a lineage in which something is made of itself")
        return found

    def flaw(self) -> str:
        """What no collected lineage has, of one that was read from a file; empty: nothing."""
        for name, node in self.nodes.items():
            if name != node.id:
                return f"node {name} is {node.id}"
        for edge in self.edges:
            for end in (edge.child, edge.parent):
                if end not in self.nodes:
                    return f"an edge names {end}, which is no node"
        try:
            self.ordered()
        except ValueError as error:
            return str(error)
        return ""

    def prompts_digest(self) -> str:
        """Digests of the prompt sets behind it, comma separated; empty where there is none."""
        return ",".join(sorted({node.digest for node in self.of_kind(PROMPTS)}))

    def below(self, roots: Iterable[str]) -> set[str]:
        """Ids of `roots` and of all they were made of."""
        parents = self._parents()
        found, open_ = set[str](), list(roots)
        while open_:
            one = open_.pop()
            if one not in found:
                found.add(one)
                open_ += parents[one]
        return found

    def _parents(self) -> dict[str, list[str]]:
        """Ids of what each node was made of; an id may stand there twice, in two roles."""
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for edge in self.edges:
            found[edge.child].append(edge.parent)
        return found


def merged(lineages: Iterable[Lineage]) -> Lineage:
    """All of them as one. What one store still has is not gone."""
    nodes: dict[str, Node] = {}
    edges: dict[Edge, None] = {}
    for one in lineages:
        for name, node in one.nodes.items():
            if name not in nodes or nodes[name].gone:
                nodes[name] = node
        edges |= dict.fromkeys(one.edges)
    return Lineage(nodes=nodes, edges=list(edges))


class Named(NamedTuple):
    """An artifact to begin with. `digest` is of its folder `below`; empty: as the store has it."""

    stage: str
    key: str
    digest: str = ""
    below: str = ""


def collect(store_root: Path, top: Node, roots: Mapping[str, Named]) -> Lineage:
    """What `top` was made of, by role, and all that those were made of."""
    walk = _Walk(store_root)
    walk.nodes[top.id] = top
    for role, named in roots.items():
        walk.edges[Edge(child=top.id, role=role, parent=walk.root(named))] = None
    return walk.result()


def whole_store(store_root: Path) -> tuple[Lineage, list[str]]:
    """Every artifact of a store, and the manifests that cannot be read."""
    walk = _Walk(store_root)
    broken = []
    for path in sorted(store_root.glob(f"[!.]*/*/{MANIFEST}")):
        manifest = _read(path)
        if manifest is None:
            broken.append(path.relative_to(store_root).as_posix())
        else:
            walk.visit(manifest.stage, manifest.key, manifest.digest)
    return walk.result(), broken


class _Walk:
    """Follows manifests downwards; each is read once."""

    def __init__(self, store_root: Path) -> None:
        self._root = store_root
        self._read: dict[tuple[str, str], Manifest | None] = {}
        self.nodes: dict[str, Node] = {}
        self.edges: dict[Edge, None] = {}

    def result(self) -> Lineage:
        return Lineage(nodes=self.nodes, edges=list(self.edges))

    def root(self, named: Named) -> str:
        manifest = self._manifest(named.stage, named.key)
        if manifest is None or named.digest not in ("", digest_below(manifest, named.below)):
            return self._gone(named.stage, named.key, named.digest)
        return self.visit(named.stage, named.key, manifest.digest)

    def visit(self, stage: str, key: str, digest: str) -> str:
        """Id of an artifact, once it and all that it was made of are nodes."""
        manifest = self._manifest(stage, key)
        if manifest is None or manifest.digest != digest:
            return self._gone(stage, key, digest)
        node = Node(
            kind=stage, key=key, digest=digest, label=manifest.label, facts=facts_of(manifest)
        )
        if node.id not in self.nodes:
            self.nodes[node.id] = node
            for role, parent in manifest.parents.items():
                below = self.visit(parent["stage"], parent["key"], parent["digest"])
                self.edges[Edge(child=node.id, role=role, parent=below)] = None
        return node.id

    def _gone(self, stage: str, key: str, digest: str) -> str:
        node = Node(kind=stage, key=key, digest=digest, gone=True)
        self.nodes.setdefault(node.id, node)
        return node.id

    def _manifest(self, stage: str, key: str) -> Manifest | None:
        if (stage, key) not in self._read:
            self._read[stage, key] = _read(self._root / stage / key / MANIFEST)
        return self._read[stage, key]


def digest_below(manifest: Manifest, below: str) -> str:
    """Digest of a folder within an artifact, from the digests in its manifest."""
    prefix = f"{below}/" if below else ""
    return digest_of_listing(
        {
            name.removeprefix(prefix): entry.sha256
            for name, entry in manifest.files.items()
            if name.startswith(prefix)
        }
    )


def _read(path: Path) -> Manifest | None:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _turn(node: Node) -> tuple[int, str, str]:
    return _RANK.get(node.kind, _UNKNOWN_RANK), node.label, node.id
