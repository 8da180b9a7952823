"""From vLLM's detailed result to request rows and load points, by hand-worked numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval_suites import loader
from registry.errors import InfrastructureError, UserError
from registry.evidence import REQUEST_COLUMNS
from tasks.engines.vllm_bench import load_point, request_count, request_rows, share_out


def raw(**changes: list[Any]) -> dict[str, Any]:
    """vLLM's lists of three requests, in seconds: two answered, one refused with a 503."""
    return {
        "start_times": [100.0, 100.5, 102.0],
        "errors": ["", "Service Unavailable", ""],
        "input_lens": [20, 12, 30],
        "output_lens": [4, 0, 1],
        "ttfts": [0.1, 0.0, 0.25],
        # First the interval between the role's chunk and the first token's, then 3 and none.
        "itls": [[0.00001, 0.1, 0.1, 0.4], [], [0.00001]],
        "latencies": [0.7, 0.0, 0.25],
        **changes,
    }


def test_rows_in_milliseconds() -> None:
    first, refused, single = request_rows(2.0, ["a", "b", "c"], raw(), max_tokens=8)
    assert tuple(first) == tuple(refused) == tuple(single) == REQUEST_COLUMNS
    assert (first["start_s"], refused["start_s"], single["start_s"]) == (0.0, 0.5, 2.0)
    assert first["ttft_ms"] == pytest.approx(100)
    assert first["e2el_ms"] == pytest.approx(700)
    assert first["tpot_ms"] == pytest.approx(200), "600 ms over the 3 tokens after the first"
    assert first["itl_ms"] == pytest.approx([100, 100, 400])
    assert (first["prompt_tokens"], first["output_tokens"]) == (20, 4)
    assert refused["ok"] is False
    assert refused["error"] == "Service Unavailable"
    assert all(refused[name] is None for name in REQUEST_COLUMNS[5:]), "no time is no zero"
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
        request_rows(2.0, ["a", "b", "c"], raw(**changes), max_tokens=8)


def test_point_of_three() -> None:
    rows = request_rows(2.0, ["a", "b", "c"], raw(), max_tokens=8)
    before = {"vllm:prefix_cache_queries_total": 100.0, "vllm:prefix_cache_hits_total": 50.0}
    after = {"vllm:prefix_cache_queries_total": 150.0, "vllm:prefix_cache_hits_total": 60.0}
    point = load_point(2.0, rows, 2.5, before, after)
    assert (point.total, point.ok, point.failed) == (3, 2, 1)
    assert point.achieved_rate == pytest.approx(1.0), "2 intervals in 2 s"
    assert point.output_tokens_per_s == pytest.approx(2.0), "5 tokens in 2.5 s"
    # Ranks over three requests: P50 is the second, the failed one is the last.
    assert point.ttft_ms["p50"] == pytest.approx(250)
    assert point.ttft_ms["p90"] is None
    # One answer has a TPOT, one has failed: P50 is the first of two.
    assert point.tpot_ms["p50"] == pytest.approx(200)
    assert point.tpot_ms["p90"] is None
    # Three intervals of two answers; the failed request weighs ceil(3 / 2) = 2: P50 is the
    # third of five.
    assert point.itl_ms["p50"] == pytest.approx(400)
    assert point.itl_ms["p90"] is None
    assert point.prefix_cache_hit_rate == pytest.approx(0.2), "10 of 50 tokens"
    assert point.acceptance_length is None, "no draft"


def test_acceptance_length_counts_the_targets_own_token() -> None:
    rows = request_rows(2.0, ["a", "b", "c"], raw(), max_tokens=8)
    before = {
        "vllm:spec_decode_num_drafts_total": 10.0,
        "vllm:spec_decode_num_accepted_tokens_total": 10.0,
    }
    after = {
        "vllm:spec_decode_num_drafts_total": 110.0,
        "vllm:spec_decode_num_accepted_tokens_total": 180.0,
    }
    assert load_point(2.0, rows, 1.0, before, after).acceptance_length == pytest.approx(2.7)


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
        "itls": [[] if index in failed else [0.0] + [0.05] * 10 for index in range(40)],
        "latencies": latencies,
    }
    rows = request_rows(10.0, [f"r{index:02}" for index in range(40)], result, 64)
    point = load_point(10.0, rows, 5.0, {}, {})
    assert (point.total, point.ok, point.failed) == (40, 30, 10)
    # Rank 20 of 40 is the 20th of the answered: 720 + 19 * 40. Rank 36 is a failed request; over
    # the answered alone P95 would be 1822 ms and within a limit of 2000 ms.
    assert point.e2el_ms == {"p50": pytest.approx(1480), "p90": None, "p95": None, "p99": None}
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
    point = load_point(1.0, request_rows(1.0, list("abcde"), result, 8), 5.0, {}, {})
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


def test_no_prompt_is_sent_twice(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, ["a", "b", "a", "c", "d", "e", "f", "g"])
    warmup, parts = share_out(path, 2, [1, 3])
    assert [row["id"] for row in warmup] == ["p0", "p1"]
    assert [[row["id"] for row in part] for part in parts] == [["p3"], ["p4", "p5", "p6"]]
    assert warmup[0]["messages"] == [{"role": "user", "content": "a"}]


def test_too_few_prompts_says_how_many_are_needed(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, ["a", "b", "a"])
    with pytest.raises(UserError, match=r"holds 2 different prompts, 7 are needed") as caught:
        share_out(path, 2, [1, 4])
    assert "raise the size of the load part to 7" in str(caught.value)


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b", "prompt": "x"}\n[]\nnonsense\n', encoding="utf-8")
    with pytest.raises(UserError) as caught:
        share_out(path, 0, [1])
    assert [problem.where.rpartition(":")[2] for problem in caught.value.problems] == [
        "1",
        "3",
        "4",
    ]


@pytest.mark.parametrize("name", ["demo_cpu_2core", "smollm2_cpu_2core", "smoke_cpu"])
def test_shipped_profiles(name: str) -> None:
    profile = loader.load_profile(name)
    assert len(profile.rates) >= 3
    assert profile.sampling.temperature == 0
    assert profile.smoke == name.startswith("smoke")


@pytest.mark.parametrize("name", ["freight", "freight_smoke", "intent_label"])
def test_shipped_accuracy_suites(name: str) -> None:
    suite = loader.load_accuracy(name)
    assert (loader.TASKS_DIR / suite.task).is_file()
    assert suite.smoke == name.endswith("smoke")
