"""From GuideLLM's report to request rows, by hand-worked numbers, and every fault that it hides."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from registry.errors import InfrastructureError, UserError
from registry.evidence import REQUEST_COLUMNS
from tasks.engines.guidellm_bench import GRACE, GuidellmBench, longest, sent
from tasks.engines.load_generator import Batch, Row, Traffic

ROWS: list[Row] = [
    {"id": "a", "messages": [{"role": "user", "content": "first"}], "scenario": "chat"},
    {"id": "b", "messages": [{"role": "user", "content": "second"}]},
    {"id": "c", "messages": [{"role": "user", "content": "third"}], "output_tokens": 1},
]


def traffic(**changes: Any) -> Traffic:
    sampling = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8, "seed": 3}
    return Traffic("http://here", "m", Path("unused"), sampling, **changes)


def answered(number: int, start: float, arrived: list[float], end: float, **changes: Any) -> Row:
    """A request of GuideLLM's report, Unix times in seconds; connecting took 0.02 s."""
    tokens = len(arrived)
    return {
        "info": {
            "conversation_id": str(number),
            "status": "completed",
            "error": None,
            "timings": {
                "resolve_start": start,
                "request_start": start + 0.02,
                "first_token_iteration": arrived[0],
                "last_token_iteration": arrived[-1],
                "request_end": end,
                "resolve_end": end + 0.001,
            },
        },
        "request_args": json.dumps({"body": {"messages": ROWS[number]["messages"]}}),
        "output": "one two three",
        # What GuideLLM makes of it; none of it is taken.
        "output_tokens": 99,
        "time_to_first_token_ms": 99.0,
        "time_per_output_token_ms": 99.0,
        "response_metrics": {
            "pilotage": {
                "usage": {"prompt_tokens": 20, "completion_tokens": tokens},
                "arrived": arrived,
            }
        },
    } | changes


def errored(number: int, start: float, end: float, error: str | None, status: str) -> Row:
    timings = {"resolve_start": start, "request_end": None, "resolve_end": end}
    info = {"conversation_id": str(number), "status": status, "error": error, "timings": timings}
    return {"info": info, "request_args": None, "response_metrics": None, "output": None}


A = answered(0, 100.0, [100.1, 100.2, 100.3, 100.7], 100.7)
B = errored(1, 100.5, 101.0, "HTTP 503 Service Unavailable", "errored")
C = answered(2, 102.0, [102.25], 102.3)


def report(*successful: Row, errors: list[Row], incomplete: list[Row] | None = None) -> Row:
    groups = {"successful": list(successful), "errored": errors, "incomplete": incomplete or []}
    return {"benchmarks": [{"requests": groups}]}


def usage(one: Row, **changes: Any) -> Row:
    """`one` with another usage; none at all where nothing is given."""
    kept = one["response_metrics"]["pilotage"]
    changed = {**kept["usage"], **changes} if changes else None
    return one | {"response_metrics": {"pilotage": {**kept, "usage": changed}}}


def test_rows_in_milliseconds_matched_by_number() -> None:
    # GuideLLM lists requests as they end; the rows come as they were sent.
    result = sent(traffic(), Batch(ROWS, seed=1, rate=2.0), report(C, A, errors=[B]), 4.0)
    first, refused, single = result.rows
    assert tuple(first) == tuple(refused) == tuple(single) == REQUEST_COLUMNS
    assert [row["request_id"] for row in result.rows] == ["a", "b", "c"]
    assert [row["start_s"] for row in result.rows] == pytest.approx([0.0, 0.5, 2.0])
    assert {row["rate"] for row in result.rows} == {2.0}
    assert first["ttft_ms"] == pytest.approx(100), "from before connecting"
    assert first["e2el_ms"] == pytest.approx(700)
    assert first["tpot_ms"] == pytest.approx(200), "600 ms over the 3 tokens after the first"
    assert first["itl_ms"] == pytest.approx([100, 100, 400])
    assert (first["prompt_tokens"], first["output_tokens"]) == (20, 4)
    assert (first["scenario"], single["scenario"]) == ("chat", None)
    assert (refused["ok"], refused["error"]) == (False, "HTTP 503 Service Unavailable")
    assert all(refused[name] is None for name in REQUEST_COLUMNS[5:]), "no time is no zero"
    assert single["ok"] and single["error"] is None
    assert single["tpot_ms"] is None, "one token has no time between tokens"
    assert single["itl_ms"] == []
    assert single["e2el_ms"] == pytest.approx(300), "the stream's end, not the last token"
    assert result.duration == pytest.approx(2.3)
    assert result.client_lag_ms == 4.0


def test_the_last_to_end_may_have_failed() -> None:
    late = errored(1, 100.5, 109.0, "no end within 8.5 s", "errored")
    result = sent(traffic(), Batch(ROWS, seed=1), report(C, A, errors=[late]))
    assert result.duration == pytest.approx(9.0)
    assert result.rows[0]["rate"] is None


@pytest.mark.parametrize(
    ("changed", "options", "error"),
    [
        (usage(A), {}, "the stream ended without a token count"),
        (usage(A, completion_tokens=0), {}, "the stream ended without a token count"),
        (usage(A) | {"output": " "}, {"count_words": True}, "without a token count"),
        (usage(C, completion_tokens=2), {}, "2 of exactly 1 tokens came"),
        (errored(0, 100.0, 101.0, None, "errored"), {}, r"failed without a reason \(errored\)"),
    ],
)
def test_what_guidellm_calls_answered_and_is_not(
    changed: Row, options: dict[str, Any], error: str
) -> None:
    number = int(changed["info"]["conversation_id"])
    others = [one for one in (A, C) if int(one["info"]["conversation_id"]) != number]
    result = sent(traffic(**options), Batch(ROWS, seed=1), report(changed, *others, errors=[B]))
    row = next(row for row in result.rows if row["request_id"] == ROWS[number]["id"])
    assert not row["ok"]
    assert re.search(error, row["error"])
    assert all(row[name] is None for name in REQUEST_COLUMNS[5:11])


def test_words_stand_for_tokens_only_where_asked() -> None:
    counted = sent(
        traffic(count_words=True, exact_counts=False),
        Batch(ROWS, seed=1),
        report(usage(A), C, errors=[B]),
    ).rows[0]
    assert counted["ok"]
    assert (counted["prompt_tokens"], counted["output_tokens"]) == (None, 3)
    assert counted["tpot_ms"] == pytest.approx(300)


def test_an_endpoint_that_is_not_ours_counts_as_it_likes() -> None:
    other = traffic(exact_counts=False)
    odd = usage(C, completion_tokens=12, prompt_tokens=0)
    row = sent(other, Batch(ROWS, seed=1), report(A, odd, errors=[B])).rows[2]
    assert row["ok"] and row["output_tokens"] == 12


def test_cut_off_requests_are_rows() -> None:
    cut = errored(1, 100.5, 101.0, "Request was cancelled", "cancelled")
    rows = sent(traffic(), Batch(ROWS, seed=1), report(A, C, errors=[], incomplete=[cut])).rows
    assert (rows[1]["ok"], rows[1]["error"]) == (False, "Request was cancelled")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (report(A, errors=[B]), "1 of 3 requests are missing in GuideLLM's report.* is c"),
        (report(errors=[]), "3 of 3 requests are missing.* is a"),
        ({"benchmarks": []}, "3 of 3 requests are missing"),
        (report(A, A, C, errors=[B]), "3 requests were asked.*one about row 0"),
        (
            report(A, C, errors=[errored(3, 1.0, 2.0, "x", "errored")]),
            "3 requests were asked.*one about row 3",
        ),
        (
            report(A | {"request_args": C["request_args"]}, C, errors=[B]),
            "request a: GuideLLM sent other messages",
        ),
        (report(usage(A, completion_tokens=9), C, errors=[B]), "request a: .* 9 of at most 8"),
        (report(usage(A, prompt_tokens=0), C, errors=[B]), "request a: 0 prompt tokens"),
        (report(answered(0, 100.0, [99.9], 100.7), C, errors=[B]), "request a: .*cannot be right"),
        (report(answered(0, 100.0, [100.8], 100.7), C, errors=[B]), "request a: .*cannot be right"),
    ],
)
def test_a_report_that_is_not_about_what_was_asked(content: Row, message: str) -> None:
    with pytest.raises(InfrastructureError, match=message):
        sent(traffic(), Batch(ROWS, seed=1), content)


def test_arrivals_that_guidellm_does_not_have(tmp_path: Path) -> None:
    bench = GuidellmBench("", log=tmp_path / "bench.log")
    with pytest.raises(UserError, match=r"burstiness 0\.5: .*Poisson.*\n.*set burstiness to 1"):
        bench.send(traffic(burstiness=0.5), Batch(ROWS, seed=1, rate=2.0), tmp_path / "raw.json")


def test_the_driver_imports_no_guidellm() -> None:
    code = "import sys, tasks.engines.guidellm_bench; print({'guidellm', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_no_batch_takes_longer() -> None:
    slow = traffic(request_timeout=30.0)
    assert longest(slow, Batch(ROWS, seed=1)) == GRACE + 30
    assert longest(slow, Batch(ROWS, seed=1, concurrency=2)) == GRACE + 60
    many = ROWS * 100
    # 300 gaps of 0.5 s with a standard deviation of 8.7 s.
    assert longest(slow, Batch(many, seed=1, rate=2.0)) == pytest.approx(
        GRACE + 150 + 86.6 + 30, 1e-3
    )
