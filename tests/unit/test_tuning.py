"""Batch arguments: the points, what is dropped before a start, and the choice."""

from __future__ import annotations

import pytest

from eval_suites.tuning import Choice, Interval, Tried, choose, outside, points_of
from registry.candidate_memory import MemoryPlan
from registry.errors import UserError


def test_points_are_all_combinations() -> None:
    assert points_of(["max-num-seqs=16,32,16", "max-num-batched-tokens=1024,2048"]) == [
        {"max-num-seqs": 16, "max-num-batched-tokens": 1024},
        {"max-num-seqs": 16, "max-num-batched-tokens": 2048},
        {"max-num-seqs": 32, "max-num-batched-tokens": 1024},
        {"max-num-seqs": 32, "max-num-batched-tokens": 2048},
    ]


def test_every_mistake_is_named_at_once() -> None:
    axes = ["gpu-memory-utilization=0.9", "max-num-seqs=", "max-num-batched-tokens=1k,2"]
    with pytest.raises(UserError) as error:
        points_of([*axes, "max-num-batched-tokens=1", "max-num-batched-tokens=2"])
    assert [one.what for one in error.value.problems] == [
        "'gpu-memory-utilization' is not tuned",
        "has no list of whole numbers",
        "has no list of whole numbers",
        "max-num-batched-tokens is given twice",
    ]
    with pytest.raises(UserError, match="are 16 points"):
        points_of(["max-num-seqs=1,2,3,4", "max-num-batched-tokens=10,20,30,40"])


def plan(**facts: object) -> MemoryPlan:
    return MemoryPlan.model_validate({"candidate": "c", "hardware": "h", **facts})


def test_what_lies_outside_of_the_plan_is_not_started() -> None:
    cache = plan(kv_cache_tokens=10_000, max_model_len=1000)
    assert outside(cache, {"max-num-seqs": 10, "max-num-batched-tokens": 10}) == ""
    assert outside(cache, {"max-num-seqs": 11, "max-num-batched-tokens": 2048}) == (
        "by the plan the KV cache holds 10 sequences of 1000 tokens: more of that length would "
        "be preempted"
    )
    assert outside(cache, {"max-num-seqs": 8, "max-num-batched-tokens": 7}) == (
        "vLLM takes no max-num-batched-tokens (7) below max-num-seqs (8)"
    )
    assert outside(plan(refusal="too little memory"), {"max-num-seqs": 1}) == "too little memory"


def test_what_the_plan_does_not_know_is_tried() -> None:
    unknown = plan(unknown="512M is no whole number", kv_cache_tokens=1, max_model_len=1)
    assert outside(unknown, {"max-num-seqs": 99}) == ""
    assert outside(plan(max_model_len=1000), {"max-num-seqs": 99}) == ""


def tried(
    sequences: int, low: float | None, high: float | None, void: str = "", **tpot: float
) -> Tried:
    times = {
        float(rate.removeprefix("at")): Interval(value, value - 1, value + 1)
        for rate, value in tpot.items()
    }
    return Tried({"max-num-seqs": sequences}, (low, high), times, void)


NOTHING: dict[str, int] = {}


def test_the_highest_kept_rate_is_taken() -> None:
    found = choose([tried(16, 4, 5), tried(32, 8, 10), tried(64, 6, 8)], NOTHING)
    assert found == Choice(
        {"max-num-seqs": 32}, "kept rate", (), "max-num-seqs 32: keeps 8 requests/s"
    )


def test_overlapping_intervals_are_not_distinguished() -> None:
    found = choose([tried(64, 8, 10), tried(32, 7, 9), tried(16, 4, 5)], NOTHING)
    assert found.chosen == {"max-num-seqs": 64}
    assert found.equal == ({"max-num-seqs": 32},)
    assert found.reason == (
        "not distinguishable from max-num-seqs 32: max-num-seqs 64, as it takes the most sequences "
        "at once"
    )


def test_what_is_there_stays_among_equals() -> None:
    found = choose([tried(64, 8, None), tried(32, 7, 9)], {"max-num-seqs": 64})
    assert found.chosen == {"max-num-seqs": 64}
    assert found.reason.endswith("as it is what is there")


def test_among_equal_rates_the_tpot_decides() -> None:
    ours = [
        tried(16, 8, None, at4=10, at8=30), tried(32, 8, None, at4=10, at8=20),
        tried(64, 4, 8, at4=1, at8=1),
    ]  # fmt: skip
    found = choose(ours, {"max-num-seqs": 16})
    assert (found.chosen, found.by, found.equal) == ({"max-num-seqs": 32}, "TPOT", ())
    assert found.reason == "max-num-seqs 32: TPOT 20 ms (19 to 21) at 8/s"


def test_tpots_that_overlap_do_not() -> None:
    found = choose([tried(16, 8, None, at8=20), tried(32, 8, None, at8=21.5)], NOTHING)
    assert (found.chosen, found.by) == ({"max-num-seqs": 32}, "kept rate")
    assert found.equal == ({"max-num-seqs": 16},)


def test_what_was_void_or_kept_nothing_is_not_chosen() -> None:
    ours = [tried(16, 8, None, void="emulated"), tried(32, None, 1)]
    assert choose(ours, NOTHING) == Choice(None, reason="no point kept any rate")
    assert choose([*ours, tried(64, 1, 2)], NOTHING).chosen == {"max-num-seqs": 64}
