"""Requests in flight and arrivals: values worked out by hand, and laws that hold for any log."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.traffic_levels import levels_of, peak_rate
from registry.traffic_requests import MICRO, NO_TIME
from tests.unit.traffic_builders import micro

# Starts and latencies in seconds; the first request arrives at 0.
#   a 0-10, b 2-4, c 3-9, d 9-12 (c ends as d begins)
# In flight: 0-2: 1, 2-3: 2, 3-4: 3, 4-9: 2, 9-10: 2, 10-12: 1
STARTS, LATENCIES = (0, 2, 3, 9), (10, 2, 6, 3)


def test_levels_of_four_requests_by_hand() -> None:
    levels = levels_of(micro(STARTS), micro(LATENCIES), 300)
    assert (levels.peak, levels.peak_at) == (3, 3 * MICRO)
    # The log is shorter than the window: 2*1 + 1*2 + 1*3 + 5*2 + 1*2 + 2*1 = 21 over 12 s.
    assert levels.mean == pytest.approx(21 / 12)
    assert levels.stable is not None and levels.stable.value == pytest.approx(21 / 12)
    assert levels.window_s == 12
    # Little: 4 requests in 12 s, mean latency 21/4 s.
    assert levels.mean == pytest.approx(4 / 12 * (21 / 4))


def test_stable_peak_of_the_best_window_by_hand() -> None:
    # Windows of 6 s begin every 0.1 s; the best one is 3-9: 3 for 1 s, then 2 for 5 s. 2.5-8.5 has
    # 2 for 0.5 s, 3 for 1 s and 2 for 4.5 s: the same. The first of them is named: 2-8 (2*5+3)/6.
    levels = levels_of(micro(STARTS), micro(LATENCIES), 6)
    assert levels.stable is not None
    assert levels.stable.value == pytest.approx((1 * 3 + 5 * 2) / 6)
    assert levels.stable.begin == 2 * MICRO
    # Arrivals' latency in the best window of 6 s: a, b and c (0 to 6): 18 / 6 s.
    assert levels.little_peak is not None and levels.little_peak.value == pytest.approx(3.0)


def test_one_that_ends_as_another_begins_is_not_beside_it() -> None:
    assert levels_of(micro([0, 5, 10]), micro([5, 5, 5]), 300).peak == 1


def test_no_duration_is_never_in_flight() -> None:
    levels = levels_of(micro([7, 7]), micro([0, 0]), 300)
    assert (levels.peak, levels.stable, levels.mean) == (0, None, None)


def test_all_at_one_instant() -> None:
    levels = levels_of(micro([7] * 5), micro([2] * 5), 300)
    assert levels.peak == 5 and levels.stable is not None and levels.stable.value == 5


def test_requests_without_an_end_are_not_counted() -> None:
    latency = micro([10, 10])
    latency[1] = NO_TIME
    assert levels_of(micro([0, 1]), latency, 300).peak == 1


def test_a_short_spike_is_the_peak_and_not_the_stable_peak() -> None:
    # Ten in flight for 1000 s, made of requests of 100 s; fifty more for 2 s.
    starts = [10 * n for n in range(100)] + [500] * 50
    latencies = [100] * 100 + [2] * 50
    levels = levels_of(micro(starts), micro(latencies), 300)
    assert levels.peak == 60
    # 300 s of ten, and 50 * 2 s.
    assert levels.stable is not None and levels.stable.value == pytest.approx(10 + 100 / 300)


def test_littles_law_holds_for_a_simulated_service() -> None:
    """M/M/infinity, 5 requests/s of 4 s in the mean: Poisson with mean 20 in flight.

    The mean of the counts over T seconds has a standard error of about sqrt(2 * 20 * 4 / T).
    """
    random, seconds = np.random.default_rng(8), 40_000
    count = random.poisson(5 * seconds)
    arrived = micro(random.uniform(0, seconds, count))
    latency = micro(random.exponential(4, count))
    levels = levels_of(arrived, latency, 300)
    error = math.sqrt(2 * 20 * 4 / seconds)
    assert levels.mean == pytest.approx(20, abs=5 * error)
    assert levels.stable is not None and levels.little_peak is not None
    # In a window both vary alike; they differ by what is in flight at its two edges, each with a
    # standard deviation of sqrt(20) requests of 4 s left.
    edge = math.sqrt(2 * 20 * 2) * 4 / 300
    assert levels.stable.value == pytest.approx(levels.little_peak.value, abs=5 * edge)
    assert 20 < levels.stable.value < levels.peak
    # Sampled Poisson: the largest of some 20 000 independent looks.
    assert 20 + 3 * math.sqrt(20) < levels.peak < 20 + 7 * math.sqrt(20)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 900)), min_size=1, max_size=40
)  # tenths of a second


def _levels(rows: list[tuple[int, int]], window: float = 60) -> tuple[int, float, float]:
    starts, latencies = (np.array(one, np.int64) * 100_000 for one in zip(*rows, strict=True))
    levels = levels_of(starts, latencies, window)
    stable = levels.stable.value if levels.stable else 0.0
    return levels.peak, stable, levels.mean or 0.0


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.randoms(use_true_random=False))
def test_order_does_not_matter_at_all(rows: list[tuple[int, int]], random: object) -> None:
    mixed = list(rows)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert _levels(mixed) == _levels(rows)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_counted_second_by_second(rows: list[tuple[int, int]]) -> None:
    """Against the plainest count there is: every tenth of a second by itself."""
    starts = [start for start, _ in rows]
    begin, end = min(starts), max(start + length for start, length in rows)
    in_flight = [
        sum(start <= at < start + length for start, length in rows) for at in range(begin, end)
    ]
    peak, stable, mean = _levels(rows)
    assert peak == max(in_flight, default=0)
    if end > begin:
        assert mean == pytest.approx(sum(in_flight) / (end - begin))
    if end - begin > 600:
        windows = [
            sum(in_flight[at : at + 600]) / 600 for at in range(0, end - begin - 600 + 1, 10)
        ]
        # The last window may reach a step over the log's end.
        assert max(windows) - 1e-9 <= stable <= max(windows) + max(in_flight) / 60 + 1e-9
    assert stable <= peak + 1e-9


@settings(max_examples=40, deadline=None)
@given(REQUESTS, st.integers(2, 4))
def test_twice_the_traffic_is_twice_the_level(rows: list[tuple[int, int]], times: int) -> None:
    peak, stable, mean = _levels(rows)
    more = _levels(rows * times)
    assert more[0] == times * peak
    assert more[1:] == (pytest.approx(times * stable), pytest.approx(times * mean))


def test_peak_rate() -> None:
    # One a second for 1000 s, and 300 more within the 10 s from 600 on.
    arrived = micro([*range(1001), *(600 + n / 30 for n in range(300))])
    found = peak_rate(arrived, 300)
    assert found is not None and found.value == pytest.approx((300 + 300) / 300)
    assert peak_rate(micro([5, 5, 5.5]), 300) is None
    short = peak_rate(micro([0, 5, 10]), 300)
    assert short is not None and short.value == pytest.approx(3 / 10)
