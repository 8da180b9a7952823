"""The table of a night: a row from a state, a line, an exit status."""

from __future__ import annotations

import pytest

from registry.outcome import Verdict
from tasks.night_digest import (
    Row,
    digest_table,
    exit_status,
    not_known,
    not_started,
    row_of,
    summary,
)

PASSED = row_of("a", "Promoted", "COMPLETED", "PASS: a@champion is version 3", 61.0, "http://x/1")
REFUSED = row_of("b", "Refused", "FAILED", "FAIL: nothing was promoted: bf16: ...", 5.0, "id-2")
UNSURE = row_of("c", "Refused", "FAILED", "INCONCLUSIVE: 40 items more", 5.0, "")
CRASHED = row_of("d", "Crashed", "CRASHED", "its process is gone\nlong story", 1.0, "")


def test_a_row_says_the_verdict_and_the_rest_of_the_first_line() -> None:
    assert (PASSED.verdict, PASSED.what, PASSED.passed) == (
        Verdict.PASS, "a@champion is version 3", True
    )  # fmt: skip
    assert (REFUSED.verdict, REFUSED.what) == (Verdict.FAIL, "nothing was promoted: bf16: ...")
    assert (CRASHED.verdict, CRASHED.what, CRASHED.passed) == (None, "its process is gone", False)


@pytest.mark.parametrize("message", [None, "", "All states completed.", "pass: well", "PASS"])
def test_a_run_that_says_no_verdict_did_not_pass(message: str | None) -> None:
    row = row_of("a", "Completed", "COMPLETED", message, 1.0, "")
    assert row.verdict is None and not row.passed
    assert row.what.startswith("the run says no verdict")


def test_a_run_that_said_pass_and_failed_did_not_pass() -> None:
    row = row_of("a", "Crashed", "CRASHED", "PASS: said too early", 1.0, "")
    assert not row.passed
    assert exit_status([row]) == 4


def test_the_line_counts_who_passed_and_names_the_others() -> None:
    assert summary([PASSED]) == "1 of 1 passed"
    rows = [PASSED, REFUSED, CRASHED, not_started("e", "no deployment")]
    assert summary(rows) == "1 of 4 passed; b: FAIL, d: Crashed, e: Not started"


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([PASSED], 0),
        ([PASSED, REFUSED], 10),
        ([PASSED, UNSURE], 11),
        ([UNSURE, REFUSED], 10),
        ([UNSURE, CRASHED], 4),
        ([not_started("e", "no deployment")], 4),
    ],
)
def test_the_exit_status_is_the_worst_of_the_night(rows: list[Row], status: int) -> None:
    assert exit_status(rows) == status


def test_the_table_has_a_line_per_recipe_and_lets_no_message_out_of_its_cell() -> None:
    nasty = row_of("x|y", "Failed", "FAILED", "a | b <img src=x> \\| c", None, "")
    table = digest_table([PASSED, REFUSED, nasty], "Night of 2026-11-30")
    lines = table.splitlines()
    assert lines[0] == "# Night of 2026-11-30"
    assert lines[2] == "1 of 3 passed; b: FAIL, x\\|y: Failed"
    assert lines[6] == (
        "| a | Promoted | PASS | a@champion is version 3 | 1 min 1 s | [open](http://x/1) |"
    )
    assert lines[7].endswith("| 5 s | id-2 |")
    assert lines[8] == "| x\\|y | Failed |  | a \\| b &lt;img src=x&gt; \\\\\\| c |  |  |"


def test_what_a_fault_says_is_shown_without_its_secrets() -> None:
    why = "OperationalError: postgresql://me:planted-word@db/prefect is away"
    for row in (not_started("a", why), not_known("a", why, "id-1")):
        assert "planted-word" not in row.what and "is away" in row.what
        assert (row.passed, exit_status([row])) == (False, 4)
    assert not_known("a", why, "id-1").state == "Unknown"


def test_a_long_message_is_cut() -> None:
    row = row_of("a", "Failed", "FAILED", "x" * 1000, 1.0, "")
    assert len(row.what) == 300 and row.what.endswith("...")
