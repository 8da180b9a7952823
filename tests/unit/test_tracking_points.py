"""Names and steps of the metrics that MLflow gets of a load test."""

from __future__ import annotations

from typing import Any

import pytest

from registry.evidence import LoadPoint
from registry.tracking_points import clean_name, kept_rate_metrics, point_metrics, scalar_metrics

AT = 1_900_000_000_000
TIMES = {"p50": 10.0, "p90": 20.0, "p95": 30.0, "p99": None}
BARE: dict[str, Any] = {
    "achieved_rate": None, "total": 10, "ok": 8, "failed": 2, "duration_s": 5.0,
    "ttft_ms": TIMES, "tpot_ms": TIMES, "itl_ms": TIMES, "e2el_ms": TIMES,
    "output_tokens_per_s": None,
}  # fmt: skip
FULL = LoadPoint(
    rate=5.657,
    answer="kept",
    goodput=5.5,
    acceptance_length=2.5,
    prefix_cache_hit_rate=0.02,
    truncated=1,
    one_token=3,
    concurrency=16,
    client_lag_ms=0.4,
    engine={
        "running_max": 8.0,
        "waiting_max": 7.0,
        "kv_cache_usage_max": 0.9,
        "preemptions": 0.0,
        "memory_peak_bytes": 2e9,
        "gpu_memory_peak_bytes": None,
    },
    cost={"per_request": 0.001, "per_million_output_tokens": None},
    **BARE | {"output_tokens_per_s": 99.0, "achieved_rate": 5.6},
)
OLD = LoadPoint(rate=4.0, **BARE)
"""As evidence of version 0.1 has it."""


def logged(*points: LoadPoint) -> list[dict[str, float]]:
    """By step, in order; names without `latency.`."""
    metrics = point_metrics(points, AT)
    assert {metric.timestamp for metric in metrics} <= {AT}
    return [
        {m.key.removeprefix("latency."): m.value for m in metrics if m.step == number}
        for number in range(len(points) + 1)
    ]


def test_the_number_of_the_point_is_the_step_and_the_rate_stands_beside() -> None:
    nothing, *steps = logged(OLD, FULL, OLD)
    assert nothing == {}
    assert [step["rate"] for step in steps] == [4.0, 5.657, 4.0]


def test_every_number_of_a_point_has_its_name() -> None:
    times = {
        f"{metric}_{percent}_ms": value
        for metric in ("ttft", "tpot", "itl", "e2el")
        for percent, value in (("p50", 10.0), ("p90", 20.0), ("p95", 30.0))
    }
    assert logged(FULL)[1] == times | {
        "rate": 5.657,
        "achieved_rate": 5.6,
        "concurrency": 16,
        "requests": 10,
        "failed": 2,
        "truncated": 1,
        "one_token": 3,
        "goodput": 5.5,
        "output_tokens_per_s": 99,
        "acceptance_length": 2.5,
        "prefix_cache_hit_rate": 0.02,
        "kept": 1,
        "void": 0,
        "client_lag_ms": 0.4,
        "running_max": 8,
        "waiting_max": 7,
        "kv_cache_usage_max": 0.9,
        "preemptions": 0,
        "memory_peak_bytes": 2e9,
        "cost_per_request": 0.001,
    }


def test_what_is_not_known_is_not_logged() -> None:
    names = set(logged(OLD)[1])
    assert names >= {"rate", "requests", "failed", "e2el_p50_ms"}
    assert not names & {"e2el_p99_ms", "goodput", "kept", "void", "cost_per_request"}


@pytest.mark.parametrize(
    ("answer", "kept", "void"),
    [("kept", 1, 0), ("not kept", 0, 0), ("undecided", None, 0), ("void", None, 1)],
)
def test_an_answer_is_a_number(answer: str, kept: int | None, void: int) -> None:
    shown = logged(FULL.model_copy(update={"answer": answer}))[1]
    assert (shown.get("kept"), shown["void"]) == (kept, void)


@pytest.mark.parametrize(
    ("kept_rate", "names"),
    [
        (None, []),
        ((None, None), []),
        ((5.0, None), ["latency.kept_rate_low"]),
        ((None, 6.0), ["latency.kept_rate_high"]),
        ((5.0, 6.0), ["latency.kept_rate_low", "latency.kept_rate_high"]),
    ],
)
def test_kept_rate(kept_rate: tuple[float | None, float | None] | None, names: list[str]) -> None:
    metrics = kept_rate_metrics(kept_rate, AT, "m-1")
    assert [metric.key for metric in metrics] == names
    assert {(metric.step, metric.model_id) for metric in metrics} <= {(0, "m-1")}


def test_numbers_that_are_none() -> None:
    values = {"a": 1.0, "b": None, "c": float("nan"), "d": float("inf"), "p99@2,0": 2.0}
    assert [metric.key for metric in scalar_metrics(values, AT)] == ["a", "p99_2_0"]


def test_metric_names() -> None:
    assert clean_name("exact_match,strict-match") == "exact_match_strict-match"
    assert clean_name("p99@2.0") == "p99_2.0"
