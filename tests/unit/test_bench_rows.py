"""From vLLM's detailed result to request rows and load points, by hand-worked numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval_suites import loader
from registry.errors import InfrastructureError, UserError
from registry.evidence import REQUEST_COLUMNS, LoadPoint
from tasks.engines.fixed_rates import judged, request_count, requests_of
from tasks.engines.load_evidence import load_point
from tasks.engines.load_generator import Batch
from tasks.engines.load_prompts import from_file
from tasks.engines.load_run import Seen
from tasks.engines.vllm_bench import request_rows
from tests.unit.load_builders import profile


def batch(*ids: str, rate: float = 2.0, **changes: Any) -> Batch:
    rows = [{"id": identity, "messages": []} | changes for identity in ids]
    return Batch(rows, seed=0, rate=rate)


def seen(rows: list[dict[str, Any]], duration: float, **growth: float) -> Seen:
    counters = {f"vllm:{name}_total": value for name, value in growth.items()}
    return Seen([rows], duration, growth=counters)


FIXED = profile(search=None, rates=[2.0], sla=[], scenarios={})


def point_of(rows: list[dict[str, Any]], duration: float, **growth: float) -> LoadPoint:
    measured = seen(rows, duration, **growth)
    return load_point(FIXED, judged(FIXED, None, measured), measured)


def raw(**changes: list[Any]) -> dict[str, Any]:
    """vLLM's lists of three requests, in seconds: two answered, one refused with a 503."""
    return {
        "start_times": [100.0, 100.5, 102.0],
        "errors": ["", "Service Unavailable", ""],
        "input_lens": [20, 12, 30],
        "output_lens": [4, 0, 1],
        "ttfts": [0.1, 0.0, 0.25],
        "itls": [[0.1, 0.1, 0.4], [], []],
        "latencies": [0.7, 0.0, 0.25],
        **changes,
    }


def test_rows_in_milliseconds() -> None:
    first, refused, single = request_rows(batch("a", "b", "c"), raw(), max_tokens=8)
    assert tuple(first) == tuple(refused) == tuple(single) == REQUEST_COLUMNS
    assert (first["start_s"], refused["start_s"], single["start_s"]) == (0.0, 0.5, 2.0)
    assert first["ttft_ms"] == pytest.approx(100)
    assert first["e2el_ms"] == pytest.approx(700)
    assert first["tpot_ms"] == pytest.approx(200), "600 ms over the 3 tokens after the first"
    assert first["itl_ms"] == pytest.approx([100, 100, 400])
    assert (first["prompt_tokens"], first["output_tokens"]) == (20, 4)
    assert refused["ok"] is False
    assert refused["error"] == "Service Unavailable"
    assert all(refused[name] is None for name in REQUEST_COLUMNS[5:-1]), "no time is no zero"
    assert single["ok"] and single["error"] is None
    assert single["tpot_ms"] is None, "one token has no time between tokens"
    assert single["itl_ms"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latencies": [0.7, 0.0]}, r"3 requests were asked.*'latencies': 2"),
        ({"output_lens": [9, 0, 1]}, "request a: 20 prompt tokens, 9 of at most 8"),
        ({"output_lens": [0, 0, 1]}, "request a: 20 prompt tokens, 0 of at most 8"),
        ({"input_lens": [20, 12, 0]}, "request c: 0 prompt tokens"),
        ({"ttfts": [0.0, 0.0, 0.25]}, "TTFT 0.0 s"),
    ],
)
def test_a_result_that_is_not_what_was_asked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InfrastructureError, match=message):
        request_rows(batch("a", "b", "c"), raw(**changes), max_tokens=8)


def test_point_of_three() -> None:
    rows = request_rows(batch("a", "b", "c"), raw(), max_tokens=8)
    point = point_of(rows, 2.5, prefix_cache_queries=50.0, prefix_cache_hits=1.0)
    assert (point.total, point.ok, point.failed) == (3, 2, 1)
    assert point.achieved_rate == pytest.approx(1.0), "2 intervals in 2 s"
    assert point.output_tokens_per_s == pytest.approx(2.0), "5 tokens in 2.5 s"
    # Three requests, the failed one the last: P50 is the second, P90 lies beyond it.
    assert point.ttft_ms["p50"] == pytest.approx(250)
    assert point.ttft_ms["p90"] is None
    # One answer has a TPOT, one has failed: P50 lies between them.
    assert point.tpot_ms["p50"] is None
    # Three intervals of two answers; the failed request weighs ceil(3 / 2) = 2: P50 is the
    # third of five.
    assert point.itl_ms["p50"] == pytest.approx(400)
    assert point.itl_ms["p90"] is None
    assert point.prefix_cache_hit_rate == pytest.approx(0.02), "1 of 50 tokens"
    assert point.acceptance_length is None, "no draft"
    assert (point.one_token, point.truncated) == (1, 0)
    assert (point.answer, point.within_sla, point.goodput) == (None, None, None), "no SLA"


def test_goodput_counts_what_keeps_every_line_by_itself() -> None:
    rows = request_rows(batch("a", "b", "c"), raw(), max_tokens=8)
    for sla, within in (
        (["e2el p99 2s"], 2), (["e2el p99 500ms"], 1), (["e2el p99 2s", "ttft p50 200ms"], 1),
        (["tpot p90 100ms"], 1), (["itl p90 150ms"], 1), (["e2el p99 1ms"], 0),
    ):  # fmt: skip
        written = profile(search=None, rates=[2.0], sla=sla, scenarios={})
        measured = seen(rows, 2.5)
        point = load_point(written, judged(written, 2.0, measured), measured)
        assert point.within_sla == within
        assert point.goodput == pytest.approx(within / 2.5)


def test_costs_are_of_what_was_answered() -> None:
    rows = request_rows(batch("a", "b", "c"), raw(), max_tokens=8)
    measured = seen(rows, 2.5)
    result = judged(FIXED, 2.0, measured)
    point = load_point(FIXED, result, measured, price_per_hour=3.6)
    # A thousandth per second: 2 answers and 5 tokens in 2.5 s.
    assert point.cost["per_request"] == pytest.approx(0.001 / 0.8)
    assert point.cost["per_million_output_tokens"] == pytest.approx(0.001 / 2 * 1e6)
    assert set(load_point(FIXED, result, measured).cost.values()) == {None}


def test_exactly_as_many_tokens_as_asked_or_failed() -> None:
    (row,) = request_rows(
        batch("a", output_tokens=4), {name: values[:1] for name, values in raw().items()}, 8
    )
    assert (row["ok"], row["output_tokens"]) == (True, 4)
    (row,) = request_rows(
        batch("a", output_tokens=9), {name: values[:1] for name, values in raw().items()}, 8
    )
    assert (row["ok"], row["error"]) == (False, "4 of exactly 9 tokens came")
    (row,) = request_rows(
        batch("a", output_tokens=9), {name: values[:1] for name, values in raw().items()}, None
    )
    assert row["ok"], "an endpoint that is not ours counts as it likes"


def test_acceptance_length_counts_the_targets_own_token() -> None:
    rows = request_rows(batch("a", "b", "c"), raw(), max_tokens=8)
    point = point_of(rows, 1.0, spec_decode_num_drafts=100.0, spec_decode_num_accepted_tokens=170.0)
    assert point.acceptance_length == pytest.approx(2.7)


def test_failed_requests_stay_in_the_percentiles() -> None:
    """40 requests, 30 answered in 720, 760, ... 1880 ms, 10 turned away or timed out."""
    failed = {3, 7, 8, 14, 19, 22, 27, 30, 33, 38}
    times = iter(range(720, 1881, 40))
    latencies = [0.0 if index in failed else next(times) / 1000 for index in range(40)]
    result = {
        "start_times": [index * 0.1 for index in range(40)],
        "errors": ["503" if index in failed else "" for index in range(40)],
        "input_lens": [10] * 40,
        "output_lens": [0 if index in failed else 11 for index in range(40)],
        "ttfts": [0.0 if index in failed else 0.12 for index in range(40)],
        "itls": [[] if index in failed else [0.05] * 10 for index in range(40)],
        "latencies": latencies,
    }
    ids = [f"r{index:02}" for index in range(40)]
    point = point_of(request_rows(batch(*ids, rate=10.0), result, 64), 5.0)
    assert (point.total, point.ok, point.failed) == (40, 30, 10)
    # Between the 20th and the 21st of the answered: 720 + 19.5 * 40. P90 lies among the failed;
    # over the answered alone P95 would be 1822 ms and within a limit of 2000 ms.
    assert point.e2el_ms == {"p50": pytest.approx(1500), "p90": None, "p95": None, "p99": None}
    assert point.itl_ms["p50"] == pytest.approx(50)
    assert point.itl_ms["p90"] is None


def test_nothing_answered_is_no_zero() -> None:
    result = {
        "start_times": [1.0, 2.0, 3.0, 4.0, 5.0],
        "errors": ["503", "timeout", "503", "timeout", "503"],
        "input_lens": [10] * 5,
        "output_lens": [0] * 5,
        "ttfts": [0.0] * 5,
        "itls": [[]] * 5,
        "latencies": [0.0] * 5,
    }
    point = point_of(request_rows(batch(*"abcde", rate=1.0), result, 8), 5.0)
    assert (point.total, point.ok, point.failed) == (5, 0, 5)
    for times in (point.ttft_ms, point.tpot_ms, point.itl_ms, point.e2el_ms):
        assert set(times.values()) == {None}
    assert point.output_tokens_per_s == 0
    assert point.prefix_cache_hit_rate is None


def test_request_count_is_not_raised_by_rounding() -> None:
    assert request_count(0.1, 30) == 3, "0.1 * 30 is 3.0000000000000004 in floating point"
    assert request_count(1.5, 3) == 5
    assert request_count(0.01, 1) == 1


def prompts_file(folder: Path, prompts: list[str]) -> Path:
    path = folder / "load.jsonl"
    rows = [{"id": f"p{index}", "prompt": prompt} for index, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_what_a_profile_sends_is_known_before(tmp_path: Path) -> None:
    written = profile(search=None, rates=[1, 4], seconds_per_rate=1, warmup_requests=2)
    assert requests_of(written) == 2 + 1 + 4
    assert requests_of(written.model_copy(update={"repeats": 3})) == 2 + 3 * 5
    loop = profile(search=None, concurrencies=[2, 3], seconds_per_rate=2, warmup_requests=0)
    assert requests_of(loop) == 2 * 2 + 3 * 2
    supply = from_file(prompts_file(tmp_path, ["a", "b", "a"]))
    with pytest.raises(UserError, match=r"holds 2 different prompts, 7 are needed"):
        supply.require(7)


@pytest.mark.parametrize("name", ["demo_cpu_2core", "smollm2_cpu_2core", "smoke_cpu"])
def test_shipped_profiles(name: str) -> None:
    shipped = loader.load_profile(name)
    assert len(shipped.rates) >= 3
    assert shipped.sampling.temperature == 0
    assert shipped.smoke == name.startswith("smoke")


@pytest.mark.parametrize("name", ["freight", "freight_smoke", "intent_label"])
def test_shipped_accuracy_suites(name: str) -> None:
    suite = loader.load_accuracy(name)
    assert (loader.TASKS_DIR / suite.task).is_file()
    assert suite.smoke == name.endswith("smoke")
