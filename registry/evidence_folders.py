"""Evidence folders: what a gate is given of one bundle, whoever measured it.

Our own folders (`summary.json` with Parquet rows beside it), a plain `items.csv` or `items.jsonl`,
or the output of lm-eval. Whatever is wrong inside a folder is kept as a reason and makes the gates
that need it INVALID; only a folder that is none is the caller's mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from registry import lm_eval_files
from registry.errors import UserError
from registry.evidence import (
    ITEMS,
    REQUESTS,
    SUMMARY,
    AccuracyEvidence,
    Evidence,
    LatencyEvidence,
    Recorded,
    ServingEvidence,
    Unusable,
    read_summary,
)
from registry.items import ITEMS_CSV, ITEMS_JSONL, Items, read_items

Source = Literal["pilotage", "lm-eval", "table"]

_MODELS: dict[str, type[Recorded]] = {
    "accuracy": AccuracyEvidence,
    "latency": LatencyEvidence,
    "serving": ServingEvidence,
}

ACCEPTED = (
    f"a folder of evidence holds {SUMMARY}, or folders {', '.join(_MODELS)}, or {ITEMS_CSV}, "
    f"or {ITEMS_JSONL}, or the results of lm-eval"
)


@dataclass(frozen=True)
class CandidateEvidence:
    """All evidence of one bundle: a candidate's, or a reference's.

    `bundle` is the digest that every piece of evidence must name; empty where whoever measured
    knows no bundles, and then nothing can be promoted. `requests` is the file of single requests
    of the latency evidence. `unreadable` holds, by kind (`accuracy`, `items`, `latency`,
    `serving`), why a piece could not be read; a gate that needs it is then INVALID with that
    reason. A `table` has items and nothing else: its settings are unknown.
    """

    bundle: str
    accuracy: AccuracyEvidence | None = None
    items: Items | None = None
    latency: LatencyEvidence | None = None
    serving: ServingEvidence | None = None
    requests: Path | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    source: Source = "pilotage"
    folder: str = ""

    @classmethod
    def read(
        cls,
        bundle: str,
        *,
        accuracy: Path | None = None,
        latency: Path | None = None,
        serving: Path | None = None,
        folder: str = "",
    ) -> CandidateEvidence:
        """Read evidence folders. What cannot be read is kept as a reason, never raised."""
        folders = {"accuracy": accuracy, "latency": latency, "serving": serving}
        found: dict[str, Any] = {}
        unreadable: dict[str, str] = {}
        for kind, path in folders.items():
            if path is None:
                continue
            try:
                evidence = _summary(path)
            except Unusable as unusable:
                unreadable[kind] = str(unusable)
                continue
            if evidence.kind == kind:
                found[kind] = evidence
            else:
                unreadable[kind] = f"{path} holds {evidence.kind} evidence, not {kind}"
        if accuracy is not None and "accuracy" in found:
            try:
                found["items"] = _items_beside(accuracy, found["accuracy"])
            except Unusable as unusable:
                unreadable["items"] = str(unusable)
        if latency is not None and "latency" in found and (latency / REQUESTS).exists():
            found["requests"] = latency / REQUESTS
        return cls(bundle=bundle, unreadable=unreadable, folder=folder, **found)


def read_folder(folder: Path) -> CandidateEvidence:
    """The evidence of whatever kind a folder holds.

    Raises `UserError` for what is no folder. Broken, unknown or doubled content is a reason in
    `unreadable`.
    """
    try:
        exists = folder.exists()
    except OSError as error:
        raise UserError.at(
            f"{str(folder)[:200]}",
            f"no such folder: {error.strerror}",
            "name a folder with evidence",
        ) from None
    if not exists:
        raise UserError.at(folder, "no such folder", "name a folder with evidence")
    if not folder.is_dir():
        raise UserError.at(folder, "is a file", "name the folder that holds it")
    try:
        kinds = _kinds(folder)
    except OSError as error:
        raise UserError.at(
            folder, f"cannot be read: {error.strerror}", "make it readable"
        ) from None
    if not kinds:
        rows = f"{ITEMS} without its {SUMMARY}, " if (folder / ITEMS).exists() else ""
        return _unusable(folder, f"{folder}: {rows}nothing that is evidence: {ACCEPTED}")
    if len(kinds) > 1:
        several = " and ".join(kinds)
        return _unusable(folder, f"{folder}: evidence of several kinds ({several}): keep one")
    ((kind, found),) = kinds.items()
    if kind == "lm-eval":
        return _lm_eval(folder, found)
    if kind in (ITEMS_CSV, ITEMS_JSONL):
        return _table(folder, folder / kind)
    return _own(folder, {path.name: path for path in found} if kind != SUMMARY else None)


def _kinds(folder: Path) -> dict[str, Any]:
    """The kinds of evidence in a folder, each with where it is."""
    kinds: dict[str, Any] = {
        name: folder / name
        for name in (SUMMARY, ITEMS_CSV, ITEMS_JSONL)
        if (folder / name).exists()
    }
    below = [folder / kind for kind in _MODELS if (folder / kind).is_dir()]
    if below:
        kinds[", ".join(f"{path.name}/" for path in below)] = below
    runs = lm_eval_files.find_files(folder)
    if runs:
        kinds["lm-eval"] = runs
    return kinds


def _own(folder: Path, folders: Mapping[str, Path] | None) -> CandidateEvidence:
    """Our own evidence: of one kind in `folder` itself, or of several below it."""
    if folders is None:
        try:
            folders = {_summary(folder).kind: folder}
        except Unusable as unusable:
            return _unusable(folder, str(unusable))
    read = CandidateEvidence.read("", folder=str(folder), **folders)
    # That they all name one bundle is for the gate to say, of the piece that it needs.
    named = (piece.bundle for piece in (read.accuracy, read.latency, read.serving) if piece)
    return replace(read, bundle=next(named, ""))


def _table(folder: Path, path: Path) -> CandidateEvidence:
    try:
        return CandidateEvidence("", items=read_items(path), source="table", folder=str(folder))
    except Unusable as unusable:
        reasons = {"items": str(unusable)}
        return CandidateEvidence("", unreadable=reasons, source="table", folder=str(folder))


def _lm_eval(folder: Path, runs: Sequence[lm_eval_files.Files]) -> CandidateEvidence:
    try:
        if len(runs) > 1:
            names = ", ".join(run.folder.name for run in runs)
            raise Unusable(f"{folder}: runs of several models or dates: {names}: name one of them")
        accuracy, items = lm_eval_files.read_run(runs[0])
    except Unusable as unusable:
        reasons = {"accuracy": str(unusable), "items": str(unusable)}
        return CandidateEvidence("", unreadable=reasons, source="lm-eval", folder=str(folder))
    return CandidateEvidence(
        accuracy.bundle, accuracy=accuracy, items=items, source="lm-eval", folder=str(folder)
    )


def _unusable(folder: Path, reason: str) -> CandidateEvidence:
    return CandidateEvidence("", unreadable={"accuracy": reason}, folder=str(folder))


def _summary(folder: Path) -> Evidence:
    """The summary of a folder. Raises `Unusable`, for another schema version by its number."""
    path = folder / SUMMARY
    # A pipe would be waited for without end, a device read without end.
    if path.exists() and not path.is_file():
        raise Unusable(f"{path}: is no regular file: measure again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind is not None and not isinstance(kind, str):
        raise Unusable(f"{path}: kind {kind!r} is not one of {', '.join(_MODELS)}: measure again")
    if isinstance(content, dict) and kind in _MODELS:
        ours = _MODELS[kind].model_fields["schema_version"].default
        version = content.get("schema_version")
        if type(version) is not int or version != ours:
            shown = f"schema version {version!r}" if "schema_version" in content else "no version"
            raise Unusable(f"{path}: {shown}; this version reads {ours}: measure again")
    try:
        return read_summary(folder)
    except UserError as error:
        problem = error.problems[0]
        raise Unusable(f"{problem.where}: {problem.what}: {problem.remedy}") from None
    except RecursionError:
        raise Unusable(f"{path}: not JSON: nested too deeply: measure again") from None


def _items_beside(folder: Path, evidence: AccuracyEvidence) -> Items | None:
    """The items of our own accuracy evidence, None where none were kept. Raises `Unusable`."""
    path = folder / ITEMS
    if not path.exists():
        return None
    expected = {
        "bundle": evidence.bundle,
        "engine": evidence.engine,
        "harness": evidence.harness,
    }
    items = read_items(path, expected)
    if not evidence.items_scored <= len(items) <= evidence.items_asked:
        raise Unusable(
            f"{path}: {len(items)} rows; the summary says {evidence.items_scored} of "
            f"{evidence.items_asked} items were scored: measure again"
        )
    return items
