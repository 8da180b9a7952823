"""Arrivals by hour: days, zones, changes of clocks, and burstiness with known answers."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from registry.traffic_hours import Arrivals, arrivals_of
from tasks.traffic_times import zone_of
from tests.unit.traffic_builders import micro


def seconds(*words: str) -> list[float]:
    return [datetime.fromisoformat(word).timestamp() for word in words]


def every(step: float, first: str, last: str) -> np.ndarray:
    begin, end = seconds(first, last)
    return np.arange(begin, end + step / 2, step)


def test_rate_of_an_hour_is_over_the_seconds_that_the_log_covers() -> None:
    # 10:30 to 12:00 every 10 s: half of hour 10, all of 11; the last one falls into hour 12.
    found = arrivals_of(micro(every(10, "2025-03-03T10:30+00:00", "2025-03-03T12:00+00:00")), UTC)
    ten, eleven, twelve = found.hours[10:13]
    assert (ten.requests, ten.seconds, ten.days) == (180, 1800, 1)
    assert ten.rate == pytest.approx(0.1) and eleven.rate == pytest.approx(0.1)
    assert (twelve.requests, twelve.seconds, twelve.rate) == (1, 0, None)
    assert found.hours[9].rate is None


def test_days_without_a_request_are_gaps_and_lower_no_rate() -> None:
    days = [every(60, f"2025-03-{day:02}T00:00+00:00", f"2025-03-{day:02}T23:59+00:00")
            for day in (3, 4, 9)]  # fmt: skip
    found = arrivals_of(micro(np.concatenate(days)), UTC)
    assert (found.days, found.gap_days) == (3, 4)
    assert [hour.requests for hour in found.hours] == [180] * 24
    assert found.hours[5].rate == pytest.approx(1 / 60) and found.hours[5].days == 3


def test_hours_are_those_of_the_zone() -> None:
    arrived = micro(every(10, "2025-03-03T18:00+00:00", "2025-03-03T18:30+00:00"))
    assert arrivals_of(arrived, ZoneInfo("Asia/Shanghai")).hours[2].requests == 181
    # India is at half past.
    india = arrivals_of(arrived, zone_of("+05:30"))
    assert (india.hours[23].requests, india.hours[0].requests) == (180, 1)


def test_an_hour_that_clocks_leave_out_or_repeat() -> None:
    berlin = ZoneInfo("Europe/Berlin")

    def of(first: str, last: str) -> Arrivals:
        return arrivals_of(micro(every(60, first, last)), berlin)

    spring = of("2025-03-30T00:00+01:00", "2025-03-30T23:59+02:00")
    assert (spring.hours[2].seconds, spring.hours[2].requests) == (0, 0)
    autumn = of("2025-10-26T00:00+02:00", "2025-10-26T23:59+01:00")
    assert (autumn.hours[2].seconds, autumn.hours[2].requests) == (7200, 120)
    assert autumn.hours[2].rate == pytest.approx(1 / 60)


def test_even_arrivals_have_no_spread_and_poisson_ones_have_one() -> None:
    even = arrivals_of(micro(1_760_000_000 + 0.5 * np.arange(20_000)), UTC)
    assert even.gap_cv == pytest.approx(0, abs=1e-6)
    assert even.dispersion == pytest.approx(0, abs=1e-6)
    random = np.random.default_rng(3)
    poisson = arrivals_of(micro(1_760_000_000 + np.cumsum(random.exponential(0.1, 200_000))), UTC)
    assert poisson.gap_cv == pytest.approx(1, abs=0.02)
    assert poisson.dispersion == pytest.approx(1, abs=0.1)


def test_gamma_gaps_have_the_spread_of_their_shape() -> None:
    # Shape 1/4: the gaps' CV is 2.
    gaps = np.random.default_rng(4).gamma(0.25, 4 * 0.1, 400_000)
    found = arrivals_of(micro(1_760_000_000 + np.cumsum(gaps)), UTC)
    assert found.gap_cv == pytest.approx(2, abs=0.05)
    # Counts over many gaps: the index of dispersion tends to CV^2.
    assert found.dispersion == pytest.approx(4, abs=0.6)


def test_a_days_rhythm_is_no_burstiness() -> None:
    """Ten times as many by day as by night, Poisson within every hour."""
    random, parts = np.random.default_rng(5), []
    for hour in range(72):
        rate = 2.0 if 8 <= hour % 24 < 20 else 0.2
        parts.append(
            1_760_000_400 + 3600 * hour + random.uniform(0, 3600, random.poisson(3600 * rate))
        )
    found = arrivals_of(micro(np.concatenate(parts)), UTC)
    assert found.gap_cv == pytest.approx(1, abs=0.03)
    assert found.dispersion == pytest.approx(1, abs=0.1)


def test_times_in_whole_seconds_hide_the_gaps() -> None:
    random = np.random.default_rng(6)
    whole = np.floor(1_760_000_000 + np.cumsum(random.exponential(0.5, 50_000)))
    found = arrivals_of(micro(whole), UTC)
    assert found.resolution_s == 1.0 and found.gap_cv is None
    assert found.dispersion == pytest.approx(1, abs=0.15)


def test_one_request() -> None:
    found = arrivals_of(micro([1_760_000_000]), UTC)
    assert (found.days, found.gap_days, found.gap_cv, found.dispersion) == (1, 0, None, None)
    assert all(hour.rate is None for hour in found.hours)
