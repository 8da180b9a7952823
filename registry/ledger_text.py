"""The ledger as documents and as a file: JSON Lines, one ledger line each, checked by themselves.

Every line also says how many lines there were (`ledger_length`, no part of its hash), so that a
file tells by itself that its end was cut off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.digests import canonical_json
from registry.errors import UserError
from registry.gate_report import strict_line, write_text
from registry.ledger_lines import Broken, Entry, Head, LedgerDamaged, parsed, verify

TOTAL = "ledger_length"

_WORDS = (b'"sequence"', b'"previous"', f'"{TOTAL}"'.encode())
"""A file without any of them was never an export."""


@dataclass(frozen=True)
class Checked:
    """What a check found: the number of lines, the first bad one, and what it could not see."""

    lines: int
    broken: Broken | None
    notes: list[str] = field(default_factory=list)


def documents(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Lines as JSON values, with the number of all."""
    return [
        {**entry.model_dump(mode="json", exclude_unset=True), TOTAL: len(entries)}
        for entry in entries
    ]


def export(path: Path, entries: Sequence[Entry]) -> None:
    """Write the lines to a file, whole or not at all. Raises `UserError` naming the file."""
    write_text(path, "".join(f"{strict_line(one)}\n" for one in documents(entries)))


def verify_file(
    path: Path,
    model: str,
    anchor: Head | None,
    stored: Callable[[int], str | None] | None = None,
) -> Checked:
    """Check an export by itself, and by the anchor where there is one.

    stored: the hash of a line that the database has now, by number. An export that is older than
    the anchor is compared with it. Raises `UserError` for what is not an export of this model;
    damage to an export is an answer.
    """
    raw = _raw_lines(path)
    read, damage = _read(raw, path)
    entries = [entry for entry, _ in read]

    def lines() -> Iterator[Entry]:
        yield from entries
        if damage is not None:
            raise damage

    if entries and entries[0].model != model and verify(lines(), None) is None:
        raise UserError.at(path, f"is an export of {entries[0].model!r}, not of {model!r}")
    older = anchor if anchor is not None and anchor.length > len(raw) else None
    broken = verify(lines(), None if older else anchor) or _cut([total for _, total in read])
    if broken is not None:
        return Checked(len(raw), broken)
    if older is None:
        return Checked(len(raw), None, anchor_notes(anchor, len(raw)))
    return Checked(len(raw), *_older(entries[-1], older, stored))


def anchor_notes(anchor: Head | None, lines: int) -> list[str]:
    """What a check by this anchor could not see."""
    if anchor is None:
        return [
            "checked without an anchor: lines cut off at the end, and a chain of which every hash "
            "was made anew, cannot be seen"
        ]
    behind = lines - anchor.length
    if behind <= 0:
        return []
    return [
        f"the anchor in MLflow is {behind} behind the last line: a move that is under way or was "
        "killed leaves it 1 behind, until the next one"
    ]


# -- parts -----------------------------------------------------------------------------------


def _cut(totals: Sequence[int]) -> Broken | None:
    if not totals:
        return Broken(1, "is missing: the file is empty")
    # One line's number may have been changed; what most say, or what is there, is the right one.
    count = len(totals)
    right = count if count in totals else max(totals, key=totals.count)
    for place, total in enumerate(totals, start=1):
        if total != right:
            return Broken(place, f"was changed: its {TOTAL} is {total}, of other lines {right}")
    if count < right:
        return Broken(count + 1, f"is missing: the file was cut off, the ledger had {right} lines")
    if count > right:
        return Broken(right + 1, f"was added: the ledger had {right} lines")
    return None


def _older(
    last: Entry, anchor: Head, stored: Callable[[int], str | None] | None
) -> tuple[Broken | None, list[str]]:
    """An export of fewer lines than the anchor: its last line has to be the ledger's own."""
    number = last.sequence
    now = stored(number) if stored is not None else None
    if now == last.hash:
        return None, [f"older than the ledger, which has {anchor.length} lines and begins with it"]
    if stored is None:
        return None, [
            f"older than the anchor in MLflow, which is of line {anchor.length}: checked by itself"
        ]
    what = "is missing" if now is None else "is another one"
    why = "there, or in this file, lines were changed and hashed anew"
    return Broken(number, f"{what} in the ledger: {why}"), []


def _raw_lines(path: Path) -> list[bytes]:
    try:
        if not path.exists():
            raise UserError.at(path, "no such file", "`pilotage ledger MODEL --export FILE`")
        if not path.is_file():
            raise UserError.at(path, "is no regular file", "name a file that --export wrote")
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except (OSError, ValueError) as error:
        raise UserError.at(path, f"cannot be read: {error}") from None
    lines = [line.rstrip(b"\r") for line in content.split(b"\n")]
    lines = [line for line in lines if line.strip()]
    listed = bool(lines) and lines[0].lstrip().startswith(b"[")
    if listed or (lines and not any(word in content for word in _WORDS)):
        what = "is one JSON list" if listed else "is no export of a ledger"
        raise UserError.at(path, what, "`pilotage ledger MODEL --export FILE` writes one")
    return lines


def _read(raw: Sequence[bytes], path: Path) -> tuple[list[tuple[Entry, int]], LedgerDamaged | None]:
    """Lines with the number of all, up to the first that cannot be read."""
    read: list[tuple[Entry, int]] = []
    for place, text in enumerate(raw, start=1):
        try:
            read.append(_line(text))
        except ValueError as error:
            what = f"was changed: it cannot be read: {error}"
            return read, LedgerDamaged(str(path), Broken(place, what))
    return read, None


def _line(raw: bytes) -> tuple[Entry, int]:
    """A line of an export and the number of all. Raises `ValueError`."""
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    digest, total = content.pop("hash", None), content.pop(TOTAL, None)
    if not isinstance(digest, str) or type(total) is not int:
        raise ValueError(f"it has no hash or no {TOTAL}")
    return parsed(canonical_json(content), digest), total


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        # Readers differ in which of two they take.
        raise ValueError("a key stands in it twice")
    return content
