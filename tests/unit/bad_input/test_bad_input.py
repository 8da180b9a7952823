"""The corpus of malformed input: never a traceback, a hang, exit 1, or something half written.

Each case is one run of the command line in this process; `docs/bad_input.md` is the table of the
run (PILOTAGE_BAD_INPUT_TABLE names the file to write it to, without it the two are compared).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from registry.settings import CHECKOUT
from tests.unit.bad_input import file_cases, word_cases, yaml_cases
from tests.unit.bad_input.cases import Case, Said, files_of, run

pytestmark = pytest.mark.timeout(120)

CASES = [*yaml_cases.CASES, *file_cases.CASES, *word_cases.CASES]
TABLE = CHECKOUT / "docs" / "bad_input.md"
_held: Counter[str] = Counter()


def check(case: Case, folder: Path, said: Said) -> None:
    told = said.out + said.err
    assert "Traceback" not in told, told[-3000:]
    assert said.status == case.status, (said.status, told[-2000:])
    for words in case.says:
        wanted = words.replace("{}", str(folder))
        assert wanted in told, f"{wanted!r} is not in:\n{told[-2000:]}"
    if case.status == 2:
        assert said.out == "" or said.out.lstrip().startswith("Usage:")
        assert len(told) < 20_000, "a message that nobody reads to its end"
        assert not case.remedy or "remedy: " in told or "Usage:" in told


def left_in(home: Path) -> dict[str, int]:
    """But for Prefect's folder, locks, and the note that goes when a process of its own ends."""
    found = files_of(home) if home.exists() else {}
    return {
        name: size
        for name, size in found.items()
        if not name.startswith(("run/", "prefect/")) and not name.endswith(".lock")
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_malformed_input_is_refused_in_words(case: Case, tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    words = case.words(folder)
    before = files_of(folder), left_in(home)
    said = run(words)
    check(case, folder, said)
    assert (files_of(folder), left_in(home)) == before
    _held[case.kind] += 1


@pytest.mark.parametrize("case", CASES[:: len(CASES) // 6], ids=lambda case: case.id)
def test_it_is_the_same_as_a_process_of_its_own(case: Case, tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, case.words(folder))],
        cwd=CHECKOUT, env={**os.environ, "PILOTAGE_HOME": str(home)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    check(case, folder, Said(done.returncode, done.stdout, done.stderr))


def test_names_are_distinct() -> None:
    names = Counter(case.id for case in CASES)
    assert [name for name, times in names.items() if times > 1] == []


def test_the_table_in_the_docs_is_the_run_s() -> None:
    if sum(_held.values()) < len(CASES):
        pytest.skip("only a part was run")
    text = table(_held)
    if os.environ.get("PILOTAGE_BAD_INPUT_TABLE"):
        TABLE.write_text(text, encoding="utf-8")
    assert TABLE.read_text(encoding="utf-8") == text, (
        "PILOTAGE_BAD_INPUT_TABLE=1 pytest tests/unit/bad_input writes it"
    )


def table(held: Counter[str]) -> str:
    rows = "\n".join(f"| {kind} | {count} |" for kind, count in sorted(held.items()))
    return HEAD.format(total=sum(held.values()), rows=rows)


HEAD = """# Bad input

{total} malformed inputs, each one run of the command line in `make test`
(`tests/unit/bad_input`), of which a sample runs as a process of its own. Each ends with status 2,
or for evidence with 10 and the verdict INVALID; none with a traceback or a hang, none writes
anything. A message names the file, the place in it, the value and the remedy.

`test_shipped_mutated.py` changes shipped recipes, suites and policies in 1500 further ways
(Hypothesis): each is read, or refused with place and remedy.

| what is malformed | inputs |
|---|---|
{rows}

This table is written by the run (`PILOTAGE_BAD_INPUT_TABLE=1`), and compared with it otherwise.
"""
