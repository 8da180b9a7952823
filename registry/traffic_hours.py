"""Arrivals by hour of the day, and how bursty they are within a quarter of an hour.

A quarter is short against a day's rhythm, so what varies within it is burstiness and not the day.
Time zones differ by whole quarters, so every quarter lies in one hour of any zone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo

import numpy as np
from numpy.typing import NDArray

from registry.traffic_requests import CHUNK, MICRO, Ints, binned

QUARTER = 900 * MICRO
BIN_S = 10
"""Arrivals are counted in so many seconds for the index of dispersion."""

LEAST_SECONDS = 60.0
"""Of an hour that the log must cover before it has a rate."""

FEWEST_GAPS = 10
MOST_BINS = 40_000_000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class HourCount:
    hour: int
    days: int
    seconds: float
    requests: int
    rate: float | None
    dispersion: float | None


@dataclass(frozen=True)
class Arrivals:
    hours: list[HourCount]
    days: int
    gap_days: int
    gap_cv: float | None
    dispersion: float | None
    resolution_s: float


def arrivals_of(arrived: Ints, zone: tzinfo) -> Arrivals:
    """Of at least one request. `arrived` in microseconds since 1970, in any order."""
    ordered = np.sort(arrived)
    first, last = int(ordered[0]), int(ordered[-1])
    begin = first // QUARTER
    counts = binned(ordered, begin * QUARTER, QUARTER).astype(np.int64)
    filled = np.flatnonzero(counts)
    local = [_local((begin + int(quarter)) * QUARTER, zone) for quarter in filled]
    hour_of = dict(zip(filled.tolist(), (one.hour for one in local), strict=True))
    days = sorted({one.date() for one in local})
    requests = [0] * 24
    for quarter, hour in hour_of.items():
        requests[hour] += int(counts[quarter])
    spread = _dispersion(ordered, begin, first, last)
    seconds, seen = _covered(days, zone, first, last)
    hours = []
    for hour in range(24):
        rate = requests[hour] / seconds[hour] if seconds[hour] >= LEAST_SECONDS else None
        inside = [q for q in spread if hour_of.get(q) == hour]
        hours.append(
            HourCount(hour, seen[hour], seconds[hour], requests[hour], rate,
                      _weighted(inside, spread, counts))
        )  # fmt: skip
    resolution = _resolution(ordered)
    cv2 = _gap_cv2(ordered, begin, len(counts))
    return Arrivals(
        hours,
        len(days),
        (days[-1] - days[0]).days + 1 - len(days),
        _usable_cv(cv2, counts, resolution),
        _weighted(list(spread), spread, counts),
        resolution,
    )


def _local(us: int, zone: tzinfo) -> datetime:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).astimezone(zone)


def _covered(
    days: list[date], zone: tzinfo, first: int, last: int
) -> tuple[list[float], list[int]]:
    """Seconds of each hour of these days between first and last arrival, and on how many days."""
    seconds, seen = [0.0] * 24, [0] * 24
    for day in days:
        midnight = datetime(day.year, day.month, day.day)
        # An hour that a change of clocks leaves out has no length; a double one has two.
        edges = [_utc_us(midnight + timedelta(hours=hour), zone) for hour in range(25)]
        for hour in range(24):
            inside = min(edges[hour + 1], last) - max(edges[hour], first)
            if inside > 0:
                seconds[hour] += inside / MICRO
                seen[hour] += 1
    return seconds, seen


def _utc_us(local: datetime, zone: tzinfo) -> int:
    since = local.replace(tzinfo=zone).astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return since // timedelta(microseconds=1)


def _dispersion(ordered: Ints, begin: int, first: int, last: int) -> dict[int, float]:
    """Variance over mean of the counts per 10 s, by quarter that the log covers as a whole.

    Given its sum, the counts of Poisson arrivals are multinomial and the ratio's mean is 1.
    """
    per = 900 // BIN_S
    quarters = last // QUARTER - begin + 1
    if quarters * per > MOST_BINS:
        return {}
    bins = binned(ordered, begin * QUARTER, BIN_S * MICRO, count=quarters * per)
    table = bins.reshape(quarters, per)
    means = table.mean(axis=1)
    starts = (begin + np.arange(quarters)) * QUARTER
    whole = (starts >= first) & (starts + QUARTER <= last) & (means > 0)
    ratios = table[whole].var(axis=1, ddof=1) / means[whole]
    return dict(zip(np.flatnonzero(whole).tolist(), ratios.tolist(), strict=True))


def _weighted(quarters: list[int], values: dict[int, float], counts: Ints) -> float | None:
    weights = [float(counts[quarter]) for quarter in quarters]
    if not weights:
        return None
    chosen = [values[quarter] for quarter in quarters]
    return float(np.average(chosen, weights=weights))


def _gap_cv2(ordered: Ints, begin: int, quarters: int) -> tuple[Floats, Floats, Floats]:
    """(gaps, mean gap in seconds, squared coefficient of variation) within each quarter."""
    number, total, squares = (np.zeros(quarters) for _ in range(3))
    for start in range(0, len(ordered) - 1, CHUNK):
        part = ordered[start : start + CHUNK + 1]
        quarter = part // QUARTER - begin
        same = quarter[1:] == quarter[:-1]
        gaps, where = np.diff(part)[same] / MICRO, quarter[1:][same]
        number += np.bincount(where, minlength=quarters)
        total += np.bincount(where, gaps, minlength=quarters)
        squares += np.bincount(where, gaps * gaps, minlength=quarters)
    mean = np.divide(total, number, out=np.zeros(quarters), where=number > 0)
    # Of even gaps rounding leaves a little, of either sign.
    spread = np.maximum(squares - number * mean * mean, 0) / np.maximum(number - 1, 1)
    cv2 = np.divide(spread, mean * mean, out=np.zeros(quarters), where=mean > 0)
    return number, mean, cv2


def _usable_cv(
    found: tuple[Floats, Floats, Floats], counts: Ints, resolution: float
) -> float | None:
    """By requests; None where gaps are few, or times too coarse to tell a gap's length."""
    number, mean, cv2 = found
    enough = (number >= FEWEST_GAPS) & (mean > 0)
    if not enough.any():
        return None
    weights = counts[enough].astype(float)
    if resolution > 0.1 * float(np.average(mean[enough], weights=weights)):
        return None
    return float(np.sqrt(np.average(cv2[enough], weights=weights)))


def _resolution(ordered: Ints) -> float:
    for unit, seconds in ((MICRO, 1.0), (1000, 0.001)):
        parts = (ordered[at : at + CHUNK] for at in range(0, len(ordered), CHUNK))
        if not any((part % unit).any() for part in parts):
            return seconds
    return 1e-6
