"""One step of a load test: what is void, what is steady, what is kept, and with which words."""

from __future__ import annotations

import math
import random

import pytest

from eval_suites.load_steps import (
    Around,
    crop_of,
    is_truncated,
    judge_step,
    rate_sent,
    requests_at,
    times_of,
    within_sla,
)
from eval_suites.percentiles import requests_for
from tests.unit.load_builders import Queue, Row, evenly, profile, row

ONE_LOOK = profile(looks=1)


NOTHING = Around()


def cache(queries: float, hits: float, expected: float | None = None) -> Around:
    counters = {"vllm:prefix_cache_queries_total": queries, "vllm:prefix_cache_hits_total": hits}
    return Around(counters, expected_hits=expected)


def times(count: int, over: int = 0, failed: int = 0, seed: int = 1) -> list[float | None]:
    """Requests of 0.1 s, some of 3 s, some failed, in a random order after the start."""
    found: list[float | None] = [100.0] * count
    start = round(0.1 * count)
    places = random.Random(seed).sample(range(start, count), over + failed)
    for index, place in enumerate(places):
        found[place] = 3000.0 if index < over else None
    return found


# -- void ------------------------------------------------------------------------------------


def test_a_hit_rate_above_the_band_voids_the_step_and_names_repeated_prompts() -> None:
    result = judge_step(ONE_LOOK, 10, [evenly(10, times(600))], cache(1000, 560))
    assert (result.void, result.answer, result.hit_rate) == ("cache", "undecided", 0.56)
    assert result.cause == (
        "prefix-cache hit rate 0.56 outside 0 to 0.05: prompts repeat what was asked before"
    )
    assert (result.n, result.failed, result.clauses) == (600, 0, ())


def test_a_hit_rate_below_the_band_names_the_prefix_that_is_not_shared() -> None:
    shared = profile(looks=1, cache_band=[0.5, 0.6])
    rows = evenly(10, times(600))
    result = judge_step(shared, 10, [rows], cache(1000, 40))
    assert result.void
    assert result.cause == ("prefix-cache hit rate 0.04 outside 0.5 to 0.6: no prefix is shared")
    assert not judge_step(shared, 10, [rows], cache(1000, 550)).void


def test_without_counters_no_hit_rate_is_claimed() -> None:
    for around in (NOTHING, cache(0, 0)):
        result = judge_step(ONE_LOOK, 10, [evenly(10, times(600))], around)
        assert (result.hit_rate, result.void, result.answer) == (None, "", "kept")


def test_a_generator_that_is_too_slow_voids_the_step() -> None:
    result = judge_step(ONE_LOOK, 10, [evenly(8, times(600))], NOTHING)
    assert (result.void, result.answer) == ("generator", "undecided")
    assert result.cause == "the generator sent 8 of 10 requests/s"
    assert judge_step(ONE_LOOK, 10, [evenly(9.5, times(600))], NOTHING).answer == "kept"


def test_hits_that_the_prompts_do_not_explain_void_the_step() -> None:
    """Inside of a wide band, and yet more than the blocks that these prompts share."""
    wide = profile(looks=1, cache_band=[0, 0.6])
    rows = evenly(10, times(600))
    assert judge_step(wide, 10, [rows], cache(1000, 400, expected=0.4)).answer == "kept"
    result = judge_step(wide, 10, [rows], cache(1000, 400, expected=0.1))
    assert (result.void, result.answer) == ("cache", "undecided")
    assert result.cause == (
        "prefix-cache hit rate 0.40, and the prompts of this measurement explain 0.10: they were "
        "asked before"
    )


def test_prompts_that_begin_alike_are_named_as_the_cause() -> None:
    rows = evenly(10, times(600))
    result = judge_step(ONE_LOOK, 10, [rows], cache(1000, 560, expected=0.5))
    assert result.cause == (
        "prefix-cache hit rate 0.56 outside 0 to 0.05: 50% of the prompts' blocks stand in earlier "
        "ones"
    )


def test_a_generator_whose_own_clock_is_late_voids_the_step() -> None:
    rows = evenly(10, times(600))
    assert judge_step(ONE_LOOK, 10, [rows], Around(client_lag_ms=199)).answer == "kept"
    tokens = profile(looks=1, sla=["tpot p99 50ms"])
    assert judge_step(tokens, 10, [rows], Around(client_lag_ms=250)).answer == "kept"
    result = judge_step(ONE_LOOK, 10, [rows], Around(client_lag_ms=250))
    assert (result.void, result.answer) == ("generator", "undecided")
    assert result.cause == (
        "the generator's own clock was 250 ms late (P99), over 10% of the tightest limit"
    )


def test_what_is_lost_by_more_than_the_generators_lateness_is_lost() -> None:
    slow = [row(i / 10, 30_000.0) for i in range(600)]
    late = Around(client_lag_ms=250)
    result = judge_step(ONE_LOOK, 10, [slow], late)
    assert (result.void, result.answer) == ("", "not kept")
    barely = [row(i / 10, 2100.0) for i in range(600)]
    assert judge_step(ONE_LOOK, 10, [barely], late).void == "generator"
    assert judge_step(ONE_LOOK, 10, [barely], NOTHING).answer == "not kept"


def test_preemptions_are_named_where_nothing_is_steady() -> None:
    full = Around({"vllm:num_preemptions_total": 12.0})
    result = judge_step(ONE_LOOK, 10, [growing(600)], full)
    assert result.cause.endswith(", the KV cache was full: 12 preemptions")
    assert judge_step(ONE_LOOK, 10, [evenly(10, times(600))], full).answer == "kept"


def test_a_service_that_slows_is_told_from_a_queue_that_grows() -> None:
    queue = [row(i / 10, 100 + i, tpot_ms=25.0) for i in range(600)]
    slow = [row(i / 10, 100.0, ttft_ms=20.0, tpot_ms=25 + i / 10) for i in range(600)]
    both = [row(i / 10, 100 + 5 * i, tpot_ms=25 + i / 10) for i in range(600)]
    for batch, words in (
        (queue, "the queue grows ("),
        (slow, "the service slows (TPOT +"),
        (both, "requests pile up and each token takes longer ("),
    ):
        result = judge_step(ONE_LOOK, 10, [batch], NOTHING)
        assert words in result.cause
        assert not result.steady


def test_truncated_answers_are_over_where_the_prompts_are_the_business_own() -> None:
    batch = evenly(10, times(600))
    for one in batch[::2]:
        one["output_tokens"] = 64
    synthetic, business = ONE_LOOK, profile(looks=1, scenarios={})
    assert is_truncated(business, batch[0])
    assert not is_truncated(business, batch[1])
    result = judge_step(business, 10, [batch], NOTHING)
    assert (result.answer, result.truncated) == ("not kept", 300)
    assert judge_step(synthetic, 10, [batch], NOTHING).answer == "kept", "lengths as asked"
    allowed = profile(looks=1, scenarios={}, truncated="allowed")
    assert judge_step(allowed, 10, [batch], NOTHING).answer == "kept"
    over = profile(looks=1, truncated="over")
    assert judge_step(over, 10, [batch], NOTHING).answer == "not kept"


def test_a_line_of_one_scenario_looks_at_its_requests_only() -> None:
    two = profile(
        looks=1,
        scenarios={
            "service": {"unit": "words", "input": 8, "weight": 3},
            "report": {"unit": "words", "input": 8},
        },
        sla=["service e2el p90 2s", "report tpot p90 50ms"],
    )
    batch = [
        row(i / 10, 100.0 if i % 4 else 3000.0, tpot_ms=25.0, scenario="service" if i % 4 else
            "report")
        for i in range(600)
    ]  # fmt: skip
    result = judge_step(two, 10, [batch], NOTHING)
    assert result.answer == "kept", "a report may take 3 s"
    assert [one.n for one in result.clauses] == [405, 135], "three quarters and one"
    open_ones = profile(
        looks=1, scenarios=two.scenarios, sla=["service e2el p99 2s"]
    )  # fmt: skip
    half = [
        one | {"e2el_ms": 3000.0} if i in (101, 201, 301) else one for i, one in enumerate(batch)
    ]
    cause = judge_step(open_ones, 10, [half], NOTHING).cause
    assert cause == "service e2el p99 2000ms: 3 of 405 over"
    assert within_sla(two, batch[0])
    assert not within_sla(two, batch[1] | {"e2el_ms": 3000.0})
    # A quarter of the requests are reports: four times as many show their line.
    only = profile(looks=1, sla=["e2el p90 2s"], seconds_per_rate=1)
    assert requests_at(two.model_copy(update={"seconds_per_rate": 1}), 1)[0] >= 4 * (
        requests_at(only, 1)[0] - 1
    )


def test_without_an_sla_nothing_is_claimed() -> None:
    measured = profile(search=None, rates=[10], sla=[], looks=1)
    assert judge_step(measured, 10, [evenly(10, times(600))], NOTHING).answer == "undecided"
    assert judge_step(measured, 10, [evenly(10, times(600))], cache(10, 9)).void == "cache"


def test_a_generator_that_stood_still_and_caught_up_voids_the_step() -> None:
    result = judge_step(ONE_LOOK, 10, [evenly(40, times(600))], NOTHING)
    assert (result.void, result.answer) == ("generator", "undecided")
    assert result.cause == (
        "the generator sent 40 requests/s where 10 were asked: it stood still and caught up"
    )
    # Few requests scatter: half a dozen may come twice as fast by chance.
    few = profile(looks=1, sla=["e2el p50 2s"], seconds_per_rate=1)
    assert judge_step(few, 10, [evenly(20, times(12))], NOTHING).void == ""


@pytest.mark.parametrize("failed", [10, 37, 108])
def test_failed_requests_weigh_as_many_intervals_as_others_have(failed: int) -> None:
    """Sixty intervals of an answer must not drown the one request that failed."""
    itl = profile(looks=1, sla=["itl p99 100ms"])
    batch = [
        row(i / 10, None) if i % (400 // failed) == 1 else row(i / 10, 700.0, itl_ms=[10.0] * 63)
        for i in range(400)
    ]
    result = judge_step(itl, 10, [batch], NOTHING)
    assert result.answer != "kept"
    assert result.clauses[0].value is None, "the P99 lies among the failed"


def test_what_gets_faster_is_undecided() -> None:
    falling = [row(i / 10, 700.0 - i, tpot_ms=25.0) for i in range(600)]
    result = judge_step(ONE_LOOK, 10, [falling], NOTHING)
    assert (result.answer, result.steady) == ("undecided", False)
    assert result.cause.startswith("perhaps no steady state: the start is not over (")


def test_one_slow_look_is_enough() -> None:
    batches = [evenly(10, times(300)), evenly(8, times(300))]
    assert judge_step(profile(), 10, batches, NOTHING).void


def test_rate_sent_counts_the_gaps() -> None:
    assert rate_sent(evenly(4, [1.0] * 9)) == pytest.approx(4)
    assert rate_sent([row(1.0), row(1.0)]) == math.inf
    assert rate_sent([row(2.0), row(0.0), row(1.0)]) == pytest.approx(1)


# -- kept, not kept, undecided ---------------------------------------------------------------


def test_a_kept_step_has_values_and_bounds() -> None:
    result = judge_step(ONE_LOOK, 10, [evenly(10, times(600, over=1))], cache(1000, 10))
    assert (result.answer, result.cause, result.steady) == ("kept", "", True)
    assert (result.n, result.cropped, result.failed) == (600, 60, 0)
    assert result.achieved_rate == pytest.approx(10)
    (clause,) = result.clauses
    assert (clause.answer, clause.value, clause.bound, clause.over) == ("kept", 100, 100, 1)


def test_a_step_that_is_not_kept_says_which_line_and_how_many() -> None:
    both = profile(looks=1, sla=["e2el p99 2s", "ttft p90 1s"])
    result = judge_step(both, 10, [evenly(10, times(600, over=40))], NOTHING)
    assert (result.answer, result.cause) == ("not kept", "e2el p99 2000ms: 40 over")
    assert [one.answer for one in result.clauses] == ["not kept", "kept"]


def test_one_open_line_leaves_the_step_undecided() -> None:
    both = profile(looks=1, sla=["e2el p99 2s", "ttft p90 1s"])
    result = judge_step(both, 10, [evenly(10, times(600, over=6))], NOTHING)
    assert (result.answer, result.cause) == ("undecided", "e2el p99 2000ms: 6 of 540 over")
    assert result.clauses[0].bound == 3000


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [221, 552, 2000, 20_000])
def test_failing_for_1_5_percent_never_keeps_a_p99(count: int, seed: int) -> None:
    batch = evenly(10, times(count, failed=math.ceil(0.015 * count), seed=seed))
    result = judge_step(ONE_LOOK, 10, [batch], NOTHING)
    assert result.answer != "kept"
    assert result.failed == math.ceil(0.015 * count)
    if count == 20_000:
        assert result.answer == "not kept"
        assert result.steady, "failing is no drift"
        assert result.clauses[0].value is None, "beyond every observed time"


def test_failing_for_1_5_percent_at_random_is_kept_no_more_often_than_promised() -> None:
    """With two looks, each taken as the search takes them."""
    looks, kept, runs = requests_at(profile(), 10), 0, 400
    for seed in range(runs):
        queue = Queue(service=0.01, error_share=0.015, seed=seed)
        batches: list[list[Row]] = []
        for count in looks:
            batches.append(queue.rows(10, count))
            answer = judge_step(profile(), 10, batches, NOTHING).answer
            if answer != "undecided":
                break
        kept += answer == "kept"
    assert kept <= 0.02 * runs


@pytest.mark.parametrize("count", [1, 2, 10, 20, 100, 298])
def test_twenty_requests_never_keep_a_p99(count: int) -> None:
    result = judge_step(ONE_LOOK, 10, [evenly(10, times(count))], NOTHING)
    assert result.answer == "undecided"
    assert all(clause.bound is None for clause in result.clauses)


def test_all_failed_is_not_kept() -> None:
    result = judge_step(profile(), 10, [evenly(10, [None] * 221)], NOTHING)
    assert (result.answer, result.failed, result.steady) == ("not kept", 221, True)
    assert result.clauses[0].over == 221, "what failed in the start has failed all the same"


def test_failures_stop_a_line_about_tokens_too() -> None:
    tpot = profile(looks=1, sla=["tpot p99 50ms"])
    assert judge_step(tpot, 10, [evenly(10, times(600))], NOTHING).answer == "kept"
    result = judge_step(tpot, 10, [evenly(10, times(600, failed=30))], NOTHING)
    assert (result.answer, result.clauses[0].over) == ("not kept", 30)


def test_one_token_answers_have_no_tpot() -> None:
    batch = evenly(10, times(600))
    for one in batch[::2]:
        one |= {"tpot_ms": None, "itl_ms": [], "output_tokens": 1}
    assert len(times_of(batch, "tpot")) == 300
    assert len(times_of(batch, "e2el")) == 600
    assert times_of(batch, "itl").tolist() == [25.0] * 900
    short = [one | {"tpot_ms": None, "itl_ms": []} for one in batch]
    result = judge_step(profile(looks=1, sla=["tpot p99 50ms"]), 10, [short], NOTHING)
    assert (result.answer, result.clauses[0].value) == ("undecided", None)


def test_a_failed_request_is_infinitely_slow() -> None:
    batch = [row(0, 100), row(1, None), row(2, 50)]
    assert times_of(batch, "e2el").tolist() == [100, math.inf, 50]
    assert times_of(batch, "tpot").tolist() == [25, math.inf, 12.5]
    assert times_of(batch, "itl").tolist() == [25] * 3 + [math.inf] * 3 + [12.5] * 3


# -- the start, and drift --------------------------------------------------------------------


def test_the_start_of_each_look_is_left_out_and_counted() -> None:
    slow = [3000.0] * 22 + [100.0] * 199
    batch = evenly(10, slow)
    assert crop_of(batch) == 22
    result = judge_step(profile(), 10, [batch, evenly(10, times(331))], NOTHING)
    assert (result.answer, result.cropped) == ("kept", 22 + 33)
    assert result.clauses[0].over == 0


def growing(count: int) -> list[Row]:
    """A queue: the wait grows, the time per token does not."""
    return [row(index / 10, 100.0 + index, tpot_ms=25.0) for index in range(count)]


def test_drift_in_every_look_is_no_steady_state() -> None:
    first = judge_step(profile(), 10, [growing(221)], NOTHING)
    assert (first.answer, first.steady) == ("undecided", False)
    assert first.cause.startswith("perhaps no steady state: the queue grows (")
    both = judge_step(profile(), 10, [growing(221), growing(331)], NOTHING)
    assert (both.answer, both.steady) == ("not kept", False)
    assert both.cause.startswith("no steady state: the queue grows (")
    assert judge_step(ONE_LOOK, 10, [growing(600)], NOTHING).answer == "not kept"


def test_drift_in_one_of_two_looks_is_a_queue_that_wanders() -> None:
    calm = evenly(10, times(331))
    for batches in ([growing(221), calm], [calm, growing(221)]):
        result = judge_step(profile(), 10, batches, NOTHING)
        assert (result.answer, result.steady) == ("kept", True)


def test_a_line_that_is_lost_says_so_beside_the_drift() -> None:
    rising = [row(index / 10, 100 + 20.0 * index, tpot_ms=25.0) for index in range(600)]
    result = judge_step(ONE_LOOK, 10, [rising], NOTHING)
    assert result.answer == "not kept"
    assert result.cause.startswith("e2el p99 2000ms: ")
    assert "over; the queue grows" in result.cause


# -- how many --------------------------------------------------------------------------------


def test_the_looks_share_the_error_and_the_requests() -> None:
    assert requests_at(ONE_LOOK, 1) == [359], "a fifth more than 299"
    first, second = requests_at(profile(), 1)
    assert first + second == math.ceil(1.2 * requests_for(99, 0.025))
    assert first == round(0.4 * (first + second))
    for looks in range(1, 6):
        wanted = requests_at(profile(looks=looks), 150)
        assert len(wanted) == looks
        assert sum(wanted) == 1500, "ten seconds at this rate are more"
        assert max(wanted[1:], default=0) - min(wanted[1:], default=0) <= 1


def test_the_strictest_line_decides_how_many() -> None:
    several = profile(looks=1, sla=["ttft p50 1s", "e2el p99 2s", "tpot p90 50ms"])
    assert requests_at(several, 1) == requests_at(ONE_LOOK, 1)
    assert requests_at(profile(looks=1, sla=["ttft p90 1s"], seconds_per_rate=1), 1) == [35]


def test_the_planned_requests_can_keep_every_line() -> None:
    for percent in ("p50", "p90", "p95", "p99", "p99.9"):
        for looks in (1, 2, 5):
            written = profile(sla=[f"e2el {percent} 2s"], looks=looks, seconds_per_rate=1)
            batches = [evenly(10, times(count)) for count in requests_at(written, 10)]
            assert judge_step(written, 10, batches, NOTHING).answer == "kept"
