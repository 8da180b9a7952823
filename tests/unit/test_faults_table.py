"""The table of `make faults`: what ran, what failed, what did not run."""

from __future__ import annotations

from pathlib import Path

from tests.faults.table import Row, read_rows, table, write_row

TESTS = [("a.py::kill[x]", "killed"), ("a.py::hang", "hung"), ("a.py::fill", "full")]


def row(test: str, passed: bool, **words: str) -> Row:
    where = {"at": "2026-11-30", "git": "0123", "machine": "a CPU"}
    return Row(test=test, fault="f", passed=passed, seconds=3, **where, **words)


def test_each_line_says_what_its_test_saw_and_what_did_not_run_is_named(tmp_path: Path) -> None:
    write_row(tmp_path, row("a.py::kill[x]", False, seen="no | retry"))
    write_row(tmp_path, row("a.py::kill[x]", True, seen="a | b\nin /tmp/x/home/store", status="4"))
    write_row(tmp_path, row("a.py::hang", False, seen="nothing"))
    write_row(tmp_path, row("gone.py::test", True, seen="a test that is no more"))
    text = table(read_rows(tmp_path), TESTS)
    assert "| f |  |  | a \\| b in HOME/store | 4 |  | 3 |" in text
    assert "**FAILED.** nothing" in text
    assert "Of 3 faults 1 passed, 1 failed, 1 were not run." in text
    assert "* 2 of them ran on 2026-11-30 at revision 0123, on a CPU." in text
    assert text.endswith("Not run when this was written:\n\n* full (`a.py::fill`)\n")
    assert "no more" not in text
