"""Requests in flight and arrivals over time, counted; sums of whole microseconds, so exact.

A request is in flight from its arrival up to, and not at, its end: one that ends when another
begins is not beside it, and one of no duration is never in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from registry.traffic_requests import MICRO, NO_TIME, Ints

Floats = NDArray[np.float64]
STEPS = 60
"""Windows begin at every 60th of their length."""


@dataclass(frozen=True)
class Window:
    """The largest value of any window, and when that window begins (microseconds since 1970)."""

    value: float
    begin: int


@dataclass(frozen=True)
class Levels:
    peak: int
    peak_at: int
    stable: Window | None
    """Of the time-weighted mean in flight; None: nothing was in flight for any time."""

    mean: float | None
    little_peak: Window | None
    """Of arrival rate x mean latency of the arrivals of a window."""

    window_s: float


def levels_of(arrived: Ints, latency: Ints, window_s: float) -> Levels:
    """Of the requests with an end; there must be one.

    The peak is a sweep over starts and ends. The stable peak is the largest time-weighted mean
    over all windows of `window_s` that begin at a multiple of `window_s / 60` after the first
    arrival and lie in the log; a log shorter than that is one window.
    """
    known = latency != NO_TIME
    if not known.all():
        arrived, latency = arrived[known], latency[known]
    starts = np.sort(arrived)
    ends = arrived + latency
    ends.sort()
    # Of several that start at once the last one counts all of them.
    in_flight = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, side="right")
    at = int(np.argmax(in_flight))
    peak, peak_at = int(in_flight[at]), int(starts[at])
    del in_flight
    begin, span = int(starts[0]), int(ends[-1] - starts[0])
    area = float(latency.sum())
    window = round(window_s * MICRO)
    if span <= window:
        whole = Window(area / span, begin) if span else None
        return Levels(peak, peak_at, whole, whole.value if whole else None, whole, span / MICRO)
    step = window // STEPS
    stable = _largest(areas_of(starts, ends, step), step, begin)
    del starts, ends
    little = _largest(_bincount((arrived - begin) // step, latency), step, begin)
    return Levels(peak, peak_at, stable, area / span, little, STEPS * step / MICRO)


def _bincount(numbers: Ints, weights: Ints) -> Floats:
    return np.bincount(numbers, weights.astype(float)).astype(float)


def areas_of(starts: Ints, ends: Ints, step: int) -> Floats:
    """Request-microseconds in flight in each step from the first start on; both in order.

    What was in flight when the step began, for all of it; what starts within, from then to the
    step's end; less what ends within, from then on.
    """
    begin = starts[0]
    count = int((ends[-1] - begin) // step) + 1

    def counted(times: Ints) -> tuple[Floats, Floats]:
        number, within = np.divmod(times - begin, step)
        left = np.bincount(number, (step - within).astype(float), minlength=count)
        return np.bincount(number, minlength=count).astype(float), left.astype(float)

    begun, begun_left = counted(starts)
    ended, ended_left = counted(ends)
    before = np.concatenate([[0.0], np.cumsum(begun - ended)[:-1]])
    areas: Floats = before * step + begun_left - ended_left
    return areas


def _largest(areas: NDArray[np.float64], step: int, begin: int) -> Window:
    """Of the sums over `STEPS` steps, per microsecond."""
    sums = np.concatenate([[0.0], np.cumsum(areas)])
    if len(areas) < STEPS:
        return Window(float(sums[-1]) / (STEPS * step), begin)
    windows = sums[STEPS:] - sums[:-STEPS]
    at = int(np.argmax(windows))
    return Window(float(windows[at]) / (STEPS * step), begin + at * step)


def peak_rate(arrived: Ints, window_s: float) -> Window | None:
    """Requests per second in the busiest window, the windows being those of `levels_of`.

    None: all arrived within a second, which is no rate.
    """
    begin, last = int(arrived.min()), int(arrived.max())
    span, window = last - begin, round(window_s * MICRO)
    if span < MICRO:
        return None
    if span <= window:
        return Window(len(arrived) / span * MICRO, begin)
    step = window // STEPS
    found = _largest(np.bincount((arrived - begin) // step).astype(float), step, begin)
    return Window(found.value * MICRO, found.begin)
