"""Where is the largest request rate that keeps the SLA? A ramp, then bisection.

Pure: given the points measured so far, what to measure next, or what is known. So a search that was
killed goes on from the points that the store has, and a test can play it against queueing theory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Answer = Literal["kept", "not kept", "undecided"]

FINEST = 1 / 3
"""Beside rates that stay undecided, gaps of this share of the tolerance are not halved again."""


@dataclass(frozen=True)
class RatePlan:
    """A `RateSearch` whose start is known. Rates in requests/s."""

    start: float
    factor: float = 2.0
    tolerance: float = 0.2
    lowest: float = 0.01
    highest: float = 1000.0


@dataclass(frozen=True)
class KeptRate:
    """`low` was kept and `high` was not; None where there is no such rate."""

    low: float | None
    high: float | None
    contradictions: tuple[str, ...] = ()

    @property
    def width(self) -> float | None:
        """Width of the interval over its middle."""
        if self.low is None or self.high is None:
            return None
        return 2 * (self.high - self.low) / (self.high + self.low)


def kept_rate(points: Mapping[float, Answer]) -> KeptRate:
    """What the points say. Where a higher rate was kept than one that was not, nothing between.

    The SLA is kept at `low` and at every decided rate below it; `high` is the lowest rate that was
    not kept. A rate kept above one that was not is a contradiction, named and not believed.
    """
    kept = sorted(rate for rate, answer in points.items() if answer == "kept")
    lost = sorted(rate for rate, answer in points.items() if answer == "not kept")
    high = lost[0] if lost else None
    low = max((rate for rate in kept if high is None or rate < high), default=None)
    against = tuple(
        f"{rate:g} requests/s was kept, {high:g} was not"
        for rate in kept
        if high is not None and rate > high
    )
    return KeptRate(low, high, against)


def next_rate(plan: RatePlan, points: Mapping[float, Answer]) -> float | None:
    """The rate to measure next; None when the search is over.

    The ramp rises until a rate is not kept (and falls first where the start is not). Then the
    wider of two gaps is halved: from the highest kept rate up to the next one measured, and from
    the last one measured up to the lowest that was not kept. They are one gap where no rate
    between stayed undecided.
    """
    if not points:
        return plan.start
    found = kept_rate(points)
    if found.high is None:
        return _beyond(max(points) * plan.factor, plan, points)
    if found.low is None:
        return _beyond(min(points) / plan.factor, plan, points)
    if found.width is not None and found.width <= plan.tolerance:
        return None
    low, high = found.low, found.high
    between = sorted(rate for rate in points if low < rate < high) or [high, low]
    gaps = [(low, between[0]), (between[-1], high)]
    below, above = max(gaps, key=lambda gap: round(gap[1] / gap[0], 9))
    if above / below - 1 < plan.tolerance * FINEST:
        return None
    return (below * above) ** 0.5


def _beyond(rate: float, plan: RatePlan, points: Mapping[float, Answer]) -> float | None:
    bounded = min(max(rate, plan.lowest), plan.highest)
    return bounded if bounded not in points else None
