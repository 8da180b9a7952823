"""`docs/reliability.md`: one line per fault, from what its test saw when it ran last."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from registry.provenance import git_revision, hardware

HEAD = """# What was broken, and what came of it

Written by `make faults`; do not edit. Each line is a test in `tests/faults` that hurts the real
tool (a tiny release with real engines; endpoints are the test's own servers, and of a promotion
that waits for a person the engine alone is pretended) and asserts that the fault fired in the stage
named, and that the next run succeeds, or says what a person must do. Where a whole release was
hurt an audit follows (where several kills hit one home, after the last of them). It counts what the
home holds against a home that nothing happened to: no store entry, MLflow version, LoggedModel,
ledger line or prompt row is lost or there twice, the ledger's chain verifies, aliases are where
they were, no process is left, nothing half-written is left.
"""


@dataclass
class Row:
    """What one test saw."""

    test: str
    fault: str
    passed: bool
    seconds: int
    caused: str = ""
    stage: str = ""
    seen: str = ""
    status: str = ""
    then: str = ""
    at: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d}")
    git: str = field(default_factory=lambda: revision())
    machine: str = field(default_factory=lambda: machine())


def revision() -> str:
    commit, changed, _ = git_revision().partition("+")
    return f"{commit[:12]}{' with changes' if changed else ''}"


def machine() -> str:
    facts = hardware()
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    return f"{facts['cpu']}, {facts['cores']} cores, {gpus}"


def write_row(folder: Path, row: Row) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", row.test)
    (folder / f"{name}.json").write_text(json.dumps(asdict(row), indent=1), encoding="utf-8")


def read_rows(folder: Path) -> list[Row]:
    return [Row(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def write_table(path: Path, rows: Sequence[Row], tests: Sequence[tuple[str, str]]) -> None:
    path.write_text(table(rows, tests), encoding="utf-8")


def table(rows: Sequence[Row], tests: Sequence[tuple[str, str]]) -> str:
    """Rows in the order of `tests` (id and first line of each that exists); others are left out."""
    by_test = {row.test: row for row in rows}
    run = [by_test[test] for test, _ in tests if test in by_test]
    parts = [HEAD]
    for when in sorted({(row.at, row.git, row.machine) for row in run}):
        count = sum((row.at, row.git, row.machine) == when for row in run)
        parts.append(f"* {count} of them ran on {when[0]} at revision {when[1]}, on {when[2]}.\n")
    failed = [row for row in run if not row.passed]
    missing = [f"{name} (`{test}`)" for test, name in tests if test not in by_test]
    parts.append(
        f"\nOf {len(tests)} faults {len(run) - len(failed)} passed, {len(failed)} failed, "
        f"{len(missing)} were not run.\n\n"
    )
    parts.append(
        "| fault | how it was caused | stage | what was seen | exit | the next run | seconds |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for row in run:
        seen = row.seen if row.passed else f"**FAILED.** {row.seen}"
        cells = [
            row.fault, row.caused, row.stage, seen, row.status, row.then, str(row.seconds),
        ]  # fmt: skip
        parts.append(f"| {' | '.join(map(_cell, cells))} |\n")
    if missing:
        parts.append("\nNot run when this was written:\n\n")
        parts += [f"* {name}\n" for name in missing]
    return "".join(parts)


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"/[\w./-]*/(home|finished|logs)\b", r"HOME", line)
