"""Drift is found and a steady queue is left alone: over many computed queues."""

from __future__ import annotations

import numpy as np
import pytest

from eval_suites.load_steps import drift_of
from eval_suites.steady_state import in_flight, trend
from tests.unit.load_builders import Queue, evenly

RUNS = 200


def drifting(rate_share: float, requests: int, **queue: float) -> float:
    """Share of M/M/1 queues at this share of their capacity that are called drifting."""
    found = 0
    for seed in range(RUNS):
        one = Queue(service=0.05, seed=seed, **queue)  # type: ignore[arg-type]
        found += bool(drift_of(one.rows(rate_share / one.service, requests)))
    return found / RUNS


@pytest.mark.parametrize(("share", "most"), [(0.5, 0.04), (0.7, 0.06), (0.8, 0.1)])
def test_a_queue_below_its_capacity_is_rarely_called_drifting(share: float, most: float) -> None:
    assert drifting(share, 221) <= most
    assert drifting(share, 552) <= most


def test_a_queue_above_its_capacity_is_nearly_always_found() -> None:
    assert drifting(1.5, 221) >= 0.97
    assert drifting(1.5, 552) >= 0.99
    assert drifting(1.2, 552) >= 0.9


def test_more_requests_find_more_of_it() -> None:
    assert drifting(1.1, 1000) > drifting(1.1, 221)


def test_a_line_is_found_whichever_way_it_goes() -> None:
    noise = np.random.default_rng(2).normal(0, 5, 400)
    rising = trend(np.linspace(100, 200, 400) + noise)
    assert rising.drifts
    assert rising.change == pytest.approx(2 / 3, rel=0.15)
    falling = trend(np.linspace(200, 100, 400) + noise)
    assert falling.drifts
    assert falling.change == pytest.approx(-2 / 3, rel=0.15)


def test_a_change_that_is_sure_but_small_is_no_drift() -> None:
    found = trend(np.linspace(100, 120, 400))
    assert not found.drifts
    assert found.change == pytest.approx(0.165, abs=0.02)


def test_a_change_that_is_large_but_not_sure_is_no_drift() -> None:
    calm = np.random.default_rng(4)
    called = sum(trend(calm.exponential(1.0, 100)).drifts for _ in range(300))
    assert called <= 9


def test_constant_series_and_few_values_are_fine() -> None:
    for values in ([], [1.0], [1.0, 9.0] * 4, [5.0] * 400, [0.0] * 400):
        found = trend(np.array(values))
        assert not found.drifts
        assert found.change == 0.0
    assert not drift_of(evenly(10, [100.0] * 200))


def test_one_step_up_among_zeros_is_no_drift() -> None:
    assert not trend(np.array([0.0] * 399 + [5.0])).drifts


def test_the_words_say_what_drifts_and_why() -> None:
    waits = evenly(10, [100 + 10.0 * index for index in range(200)])
    grows = drift_of([row | {"tpot_ms": 25.0} for row in waits])
    assert grows.startswith("the queue grows (requests in flight +")
    assert grows.endswith("% over the step)")
    # One at a time whatever happens: the service itself slows.
    slow = [row | {"ttft_ms": 10.0} for row in evenly(1, [100 + float(i) for i in range(200)])]
    assert drift_of(slow).startswith("the service slows (TPOT +")
    falling = drift_of(evenly(1, [300 - float(i) for i in range(200)]))
    assert falling.startswith("the start is not over (TTFT -")


def test_the_start_is_left_out() -> None:
    assert not drift_of(evenly(10, [900.0] * 20 + [100.0] * 180))


def test_failed_requests_are_no_growing_queue() -> None:
    """They started and have no end; they count as over the limit, not as in flight for ever."""
    times: list[float | None] = [None if index % 33 == 7 else 100.0 for index in range(400)]
    assert not drift_of(evenly(10, times))
    assert not drift_of(evenly(10, [None] * 200))


def test_requests_in_flight_are_counted_at_each_start() -> None:
    assert in_flight([0, 1, 2, 3], [1.5, 10, 2.5, 10]).tolist() == [1, 2, 2, 2]
    assert in_flight([3, 0, 2, 1], [10, 2.5, 10, 1.5]).tolist() == [1, 2, 2, 2]
    assert in_flight([0, 1, 2], [1, 2, 3]).tolist() == [1, 1, 1], "one ends as the next starts"
    assert in_flight([], []).tolist() == []
