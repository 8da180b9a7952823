"""Requests in flight and arrivals over time, counted; sums of whole microseconds, so exact.

A request is in flight from its arrival up to, and not at, its end: one that ends when another
begins is not beside it, and one of no duration is never in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from registry.traffic_requests import CHUNK, MICRO, NO_TIME, Ints, binned

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
    starts, ends = starts_and_ends(arrived, latency)
    peak, peak_at = _peak(starts, ends)
    begin, span = int(starts[0]), int(ends[-1] - starts[0])
    area = float(latency.sum())
    window = round(window_s * MICRO)
    if span <= window:
        whole = Window(area / span, begin) if span else None
        return Levels(peak, peak_at, whole, whole.value if whole else None, whole, span / MICRO)
    step = window // STEPS
    stable = _largest(areas_of(starts, ends, step), step, begin)
    del starts, ends
    little = _largest(binned(arrived, begin, step, latency), step, begin)
    return Levels(peak, peak_at, stable, area / span, little, STEPS * step / MICRO)


def starts_and_ends(arrived: Ints, latency: Ints) -> tuple[Ints, Ints]:
    """Both in order, of requests with an end."""
    ends = arrived + latency
    ends.sort()
    return np.sort(arrived), ends


def _peak(starts: Ints, ends: Ints) -> tuple[int, int]:
    """The most in flight at once, and when first; both in order."""
    peak, peak_at = 0, int(starts[0])
    for at in range(0, len(starts), CHUNK):
        part = starts[at : at + CHUNK]
        # Of several that start at once the last one counts all of them.
        begun = np.arange(at + 1, at + len(part) + 1)
        in_flight = begun - np.searchsorted(ends, part, side="right")
        most = int(np.argmax(in_flight))
        if in_flight[most] > peak:
            peak, peak_at = int(in_flight[most]), int(part[most])
    return peak, peak_at


def areas_of(starts: Ints, ends: Ints, step: int) -> Floats:
    """Request-microseconds in flight in each step from the first start on; both in order.

    What was in flight when the step began, for all of it; what starts within, from then to the
    step's end; less what ends within, from then on.
    """
    begin = int(starts[0])
    count = (int(ends[-1]) - begin) // step + 1
    begun, begun_left = _begun(starts, begin, step, count)
    ended, ended_left = _begun(ends, begin, step, count)
    before = np.concatenate([[0.0], np.cumsum(begun - ended)[:-1]])
    return before * step + begun_left - ended_left


def _begun(times: Ints, begin: int, step: int, count: int) -> tuple[Floats, Floats]:
    """How many times lie in each step, and the sum of what of the step is left after them."""
    number = np.zeros(count)
    left = np.zeros(count)
    for at in range(0, len(times), CHUNK):
        where, within = np.divmod(times[at : at + CHUNK] - begin, step)
        number += np.bincount(where, minlength=count)
        left += np.bincount(where, (step - within).astype(float), minlength=count)
    return number, left


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
    found = _largest(binned(arrived, begin, step), step, begin)
    return Window(found.value * MICRO, found.begin)
