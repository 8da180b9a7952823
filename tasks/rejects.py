"""Rows of a prompt file that cannot be used: refused together, or left out and written down.

`max_reject_share` of the recipe says how many may be left out. Nothing is dropped silently: what
is left out stands in rejects.jsonl of the prompts, `{line, reason, text}` in file order.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from registry.errors import Problem, UserError

REJECTS = "rejects.jsonl"
LONGEST_ROW = 8 << 20
"""Characters. A longer row is a file without line breaks or a picture in a column, no prompt."""

TEXT_KEPT = 200
MAX_PROBLEMS_SHOWN = 20
REMEDY = "correct or remove that row"


@dataclass(frozen=True)
class Reject:
    """A row that cannot be used. `kind` is what is counted, `reason` says it of this row."""

    line: int
    kind: str
    reason: str
    text: str = ""
    """Begin of the row, for people."""
    remedy: str = REMEDY

    def problem(self, path: Path) -> Problem:
        return Problem(f"{path}:{self.line}", self.reason, self.remedy)

    def record(self) -> dict[str, Any]:
        return {"line": self.line, "reason": self.reason, "text": self.text}


def bad_byte(line: int, text: str) -> Reject:
    """For a row whose bytes that are no UTF-8 were read as lone surrogates."""
    place, char = next((n, char) for n, char in enumerate(text) if "\udc80" <= char <= "\udcff")
    reason = f"character {place + 1} is a byte (0x{ord(char) - 0xDC00:02x}) that is not UTF-8"
    return Reject(line, "not UTF-8", reason, begin_of(text), "save it as UTF-8")


def too_long(line: int, text: str) -> Reject:
    reason = f"is {len(text)} characters long, at most {LONGEST_ROW} are read"
    return Reject(line, "too long", reason, begin_of(text))


def is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def begin_of(row: str | Mapping[str, Any]) -> str:
    """The first characters of a row, as a text that can be written to a file.

    Bytes that are no UTF-8 and halves of surrogate pairs are spelled with a backslash.
    """
    text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
    text = text[:TEXT_KEPT]
    try:
        spelled = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        spelled = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return spelled[:TEXT_KEPT]


def refuse(problems: Sequence[Problem], path: Path) -> UserError:
    """The error for a file that must have no bad row; the first ones are named one by one."""
    rest = len(problems) - MAX_PROBLEMS_SHOWN
    shown = [
        replace(problem, remedy=problem.remedy or REMEDY)
        for problem in problems[:MAX_PROBLEMS_SHOWN]
    ]
    if rest > 0:
        shown.append(Problem(str(path), f"and {rest} more bad rows"))
    return UserError(shown)


def check_share(rejects: Sequence[Reject], rows: int, max_share: float, path: Path) -> None:
    """Raise `UserError` with the table of reasons where more than the share is bad.

    `rows` counts all rows of the file that are not blank, good and bad.
    """
    if len(rejects) <= max_share * rows:
        return
    problems = [
        Problem(
            str(path),
            f"{len(rejects)} of {rows} rows ({len(rejects) / rows:.1%}) are bad, more than "
            f"prompts.max_reject_share {max_share:.1%}",
            "correct the rows, or raise the share",
        )
    ]
    for kind, found in sorted(by_kind(rejects).items(), key=lambda one: -len(one[1])):
        first = found[0]
        problems.append(
            Problem(f"{path}:{first.line}", f"{len(found)} x {kind}; here: {first.reason}")
        )
    raise UserError(problems)


def by_kind(rejects: Sequence[Reject]) -> dict[str, list[Reject]]:
    kinds: dict[str, list[Reject]] = defaultdict(list)
    for reject in rejects:
        kinds[reject.kind].append(reject)
    return dict(kinds)


def records_of(rejects: Sequence[Reject]) -> Iterator[dict[str, Any]]:
    return (reject.record() for reject in rejects)
