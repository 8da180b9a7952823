"""What a prompt reached: data sets, adapters, calibrations, drafts, evidence, versions, aliases.

Row by row: the store's files say which rows they hold, `reach.py` what each stage read of them,
and the lineage of every registered version whether one of those artifacts is in it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from registry.lineage import BUNDLE, PROMPTS, Edge, Lineage, Node, merged, whole_store
from registry.settings import settings
from registry.tracking import TAG_BUNDLE
from tasks.prompt_rows import asked_ids, column_of, find_ids, find_rows, ids_of
from tasks.reach import Found, Reach, spread, ways
from tasks.text_search import search_texts
from tasks.version_files import Registered, VersionFiles, registered_versions

PARTS = ("train", "calibration", "draft", "eval", "load", "foreign")
MOST_IDS = 1000
"""Ids that are listed of one artifact; their number is exact."""

READERS = 8


class Impact(NamedTuple):
    """`document` is what `pilotage impact --json` prints; `lineage` holds what was reached."""

    document: dict[str, Any]
    lineage: Lineage


def impact(words: Sequence[str]) -> Impact:
    """Follow prompts, by id or by files of ids. Raises `UserError` for a file without ids."""
    began = time.monotonic()
    asked = asked_ids(words)
    # MLflow takes seconds to start, and the search for rows is not Python's: side by side.
    beside = ThreadPoolExecutor(1)
    listing = beside.submit(registered_versions) if _has_registry() else None
    store, broken = whole_store(settings().store_dir)
    found, unread = rows_of_store(store, asked)
    known = {name for parts in found.values() for places in parts.values() for name in places}
    versions, unseen = _made_of(listing.result() if listing else [], store)
    everything = merged([store, *(one.lineage for one in versions)])
    reaches = spread(everything, found)
    artifacts = [
        _artifact(node, reaches[node.id], store)
        for node in everything.ordered()[::-1]
        if node.kind != BUNDLE and reaches[node.id].reached
    ]
    reached = [
        _version(one, reaches)
        for one in versions
        if any(reaches[node.id].reached for node in one.lineage.of_kind(BUNDLE))
    ]
    texts, not_searched = search_texts(store, found)
    document = {
        "asked": len(asked),
        "found": len(known),
        "unknown": [name for name in asked if name not in known],
        "artifacts": artifacts,
        "versions": reached,
        "aliases": [
            {"model": one["model"], "alias": alias, "version": one["version"],
             "used_for": one["used_for"]}
            for one in reached for alias in one["aliases"]
        ],
        "texts": texts,
        "unseen": [
            *(f"store/{path} cannot be read" for path in broken),
            *unread, *unseen, *not_searched,
        ],
        "store": str(settings().store_dir),
        "seconds": round(time.monotonic() - began, 3),
    }  # fmt: skip
    return Impact(document, _reached_only(everything, ways(everything, found, reaches), reached))


# -- the store -------------------------------------------------------------------------------


def rows_of_store(store: Lineage, asked: Collection[str]) -> tuple[dict[str, Found], list[str]]:
    """Rows of the asked ids in every artifact of the store that holds rows, by its digest.

    And a line for each whose files cannot be read: what it may have held counts as gone.
    """
    found: dict[str, Found] = {}
    unread = []
    # Prompts first: what was made of them holds no other ids.
    for node in reversed(store.ordered()):
        parent = store.parents(node.id).get(PROMPTS)
        above = found.get(parent.digest) if parent is not None else None
        try:
            rows = None if node.gone else _rows(node, parent, above, set(asked))
        except (OSError, ValueError, LookupError) as error:
            unread.append(f"{_place(node)}: its rows cannot be read ({type(error).__name__})")
            continue
        if rows is not None:
            # The same content may have been made from several prompts.
            known = found.get(node.digest, {})
            found[node.digest] = {part: {**known.get(part, {}), **rows[part]} for part in rows}
    return found, unread


def _rows(node: Node, parent: Node | None, above: Found | None, asked: set[str]) -> Found | None:
    """Rows by part; None for what holds none. `above` are those of its prompts, None: unknown."""
    folder = settings().home / _place(node) / "files"

    def within(*parts: str) -> set[str]:
        return asked if above is None else {name for part in parts for name in above[part]}

    if node.kind == PROMPTS:
        return {part: find_rows(folder / f"{part}.jsonl", asked) for part in PARTS}
    if node.kind == "teacher_data":
        aside = find_rows(folder / "set_aside.jsonl", within("train", "calibration"))
        train = folder / "train.jsonl"
        return {
            "train": find_rows(train, asked) if above is None else _kept(train, above, aside),
            "calibration": find_rows(folder / "calibration.jsonl", within("calibration")),
            "set_aside": aside,
        }
    if node.kind == "accuracy":
        return {"eval": find_ids(column_of(folder / "items.parquet", "item_id"), within("eval"))}
    measured = node.kind in ("latency", "draft_proof") and node.facts.get("load") != "synthetic"
    if measured and parent is not None and above is not None:
        prompts = settings().home / _place(parent) / "files" / "load.jsonl"
        return {"load": _sent(folder, prompts, above["load"])}
    return None


def _kept(file: Path, above: Found, aside: Mapping[str, int]) -> dict[str, int]:
    """Training prompts whose answers were kept: all but those set aside; the file is the largest.

    The numbers are those of the prompts' rows. Raises `OSError` without the file.
    """
    file.stat()
    return {name: place for name, place in above["train"].items() if name not in aside}


def _place(node: Node) -> str:
    """The folder of an artifact below the home."""
    return f"store/{node.kind}/{node.key}"


def _sent(folder: Path, prompts: Path, load: Mapping[str, int]) -> dict[str, int]:
    """Which of the load's prompts were sent: all up to the last one that was measured.

    They are taken in order, and those for warming up are not among the requests.
    """
    if not load:
        return {}
    names: set[str] = set()
    for file in folder.rglob("requests.parquet"):
        names |= set(column_of(file, "request_id").to_pylist())
    if not names:
        return dict(load)
    last = max(find_ids(ids_of(prompts), names).values(), default=-1)
    return {name: place for name, place in load.items() if place <= last}


def _artifact(node: Node, reach: Reach, store: Lineage) -> dict[str, Any]:
    here = node.id in store.nodes and not store.nodes[node.id].gone
    held = (*reach.rows.values(), *reach.evidence.values())
    names = sorted({name for places in held for name in places})
    return {
        "kind": node.kind,
        "label": node.label,
        "key": node.key,
        "digest": node.digest,
        "role": reach.role if reach.rows else "evidence",
        "prompts": len(names),
        "rows": _counts(reach.rows),
        "evidence_rows": _counts(reach.evidence),
        "ids": names[:MOST_IDS],
        "sure": reach.sure,
        "where": _place(node) if here else "",
    }


def _counts(rows: Found) -> dict[str, int]:
    return {part: len(places) for part, places in rows.items()}


def _reached_only(
    lineage: Lineage, taken: Sequence[Edge], versions: Sequence[Mapping[str, Any]]
) -> Lineage:
    """The ways that were taken, under the versions that they end in."""
    names = {name for edge in taken for name in (edge.child, edge.parent)}
    nodes = {name: lineage.nodes[name] for name in names}
    edges = list(taken)
    bundles = {node.digest: node for node in nodes.values() if node.kind == BUNDLE}
    for one in versions:
        named = f"{one['model']}/{one['version']}"
        label = " ".join([named, *(f"@{alias}" for alias in one["aliases"])])
        top = Node(kind="version", key=named, digest=one["bundle"], label=label)
        nodes[top.id] = top
        if one["bundle"] in bundles:
            below = bundles[one["bundle"]].id
            edges.append(Edge(child=top.id, role=one["used_for"], parent=below))
    return Lineage(nodes=nodes, edges=edges)


# -- the registry ----------------------------------------------------------------------------


class Made(NamedTuple):
    """A registered version with what it was made of."""

    one: Registered
    lineage: Lineage


def _made_of(registered: Sequence[Registered], store: Lineage) -> tuple[list[Made], list[str]]:
    """Every version with its lineage, and a line for each of which too little is known.

    The tag with the prompts' digests would spare reading most files, but it is written anew when a
    bundle is measured again, and then says nothing of the evidence before.
    """
    here = {node.digest for node in store.of_kind(PROMPTS) if not node.gone}
    files = [VersionFiles(one.version) for one in registered]
    # Each is a small file, perhaps on the other side of a network.
    with ThreadPoolExecutor(READERS) as readers:
        lineages = list(readers.map(lambda one: one.lineage(store), files))
    made, unseen = [], []
    for one, lineage in zip(registered, lineages, strict=True):
        title = f"{one.version.name} version {one.version.version}"
        if lineage is None or not lineage.of_kind(BUNDLE):
            unseen.append(f"{title}: nothing says what it was made of")
            continue
        made.append(Made(one, lineage))
        missing = sorted({n.digest[:12] for n in lineage.of_kind(PROMPTS) if n.digest not in here})
        if missing or not lineage.of_kind(PROMPTS):
            which = f"prompts {', '.join(missing)} are" if missing else "its prompts are"
            unseen.append(f"{title}: {which} not in this store; ask where it was made")
    return made, unseen


def _version(made: Made, reaches: Mapping[str, Reach]) -> dict[str, Any]:
    version, lineage = made.one.version, made.lineage
    top = lineage.of_kind(BUNDLE)[0]
    reach = reaches[top.id]
    return {
        "model": version.name,
        "version": int(version.version),
        "bundle": version.tags.get(TAG_BUNDLE, top.digest),
        "aliases": made.one.aliases,
        "used_for": "weights" if reach.rows else "evidence",
        "rows": _counts(reach.rows),
        "evidence_rows": _counts(reach.evidence),
        "through": [
            {"kind": node.kind, "key": node.key, "digest": node.digest}
            for node in lineage.ordered()
            if node.id != top.id and reaches[node.id].reached
        ],
        "sure": reach.sure,
        "where": f"models:/{version.name}/{version.version}",
    }


def _has_registry() -> bool:
    return bool(settings().mlflow_uri) or (settings().home / "mlflow.db").exists()
