"""What a night came to: one row per recipe, a table, one line, an exit status. All pure.

A release run says in the message of its state what it ended with, the verdict first
(`PASS: ...`, `FAIL: ...`). A run that says no verdict did not pass, whatever its state is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from registry.errors import EXIT_INFRASTRUCTURE, EXIT_PASS
from registry.gate_report import escaped
from registry.outcome import Verdict
from registry.redaction import redacted
from tasks.progress import spell

LONGEST = 300
"""Characters of a message that the table shows."""

COMPLETED = "COMPLETED"
"""Prefect's type of a state that is no failure."""


@dataclass(frozen=True)
class Row:
    """What came of one recipe. `seconds` None: it never began; `link` empty: there is no run."""

    recipe: str
    state: str
    type: str
    verdict: Verdict | None
    what: str
    seconds: float | None = None
    link: str = ""

    @property
    def passed(self) -> bool:
        return self.type == COMPLETED and self.verdict is Verdict.PASS


def row_of(
    recipe: str, name: str, kind: str, message: str | None, seconds: float | None, link: str
) -> Row:
    """A row from a state: its name, its type and its message."""
    first = (message or "").strip().partition("\n")[0].strip()
    word, colon, rest = first.partition(":")
    verdict = Verdict(word) if colon and word in Verdict.__members__ else None
    what = rest.strip() if verdict is not None else first
    if kind == COMPLETED and verdict is None:
        what = f"the run says no verdict{': ' + what if what else ''}"
    if len(what) > LONGEST:
        what = what[: LONGEST - 3] + "..."
    return Row(recipe, name, kind, verdict, what, seconds, link)


def not_started(recipe: str, why: str) -> Row:
    """A recipe of which there is no run: the server refused it, or there was none to ask."""
    return row_of(recipe, "Not started", "FAILED", redacted(why), None, "")


def not_known(recipe: str, why: str, link: str = "") -> Row:
    """A recipe whose run was begun, and nobody can say what came of it."""
    return row_of(recipe, "Unknown", "FAILED", redacted(why), None, link)


def digest_table(rows: Sequence[Row], title: str) -> str:
    """The table as Markdown."""
    lines = [
        f"# {title}",
        "",
        plain(summary(rows)),
        "",
        "| recipe | state | verdict | promoted, or why not | took | run |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        took = spell(row.seconds) if row.seconds is not None else ""
        link = f"[open]({row.link})" if row.link.startswith("http") else plain(row.link)
        cells = map(plain, (row.recipe, row.state, row.verdict or "", row.what, took))
        lines.append("| " + " | ".join([*cells, link]) + " |")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """One line: how many passed, and what the others ended with."""
    passed = sum(row.passed for row in rows)
    line = f"{passed} of {len(rows)} passed"
    others = [f"{row.recipe}: {row.verdict or row.state}" for row in rows if not row.passed]
    return f"{line}; {', '.join(others)}" if others else line


def exit_status(rows: Sequence[Row]) -> int:
    """0 if all passed; 4 where a run ended without a verdict; else the worst verdict's own."""
    others = [row for row in rows if not row.passed]
    if not others:
        return EXIT_PASS
    if any(row.verdict in (None, Verdict.PASS) for row in others):
        # A run that passed and failed nevertheless is a machine's fault as well.
        return EXIT_INFRASTRUCTURE
    # The statuses are 10 for refused and 11 for inconclusive: refused is the worse.
    return min(row.verdict.exit_status for row in others if row.verdict is not None)


def plain(text: str) -> str:
    """Text of others inside a page: no new column, no new row, no markup, no link."""
    return escaped(" ".join(text.split()))
