"""Two bundles in turn on one machine (A B A B ...): how much faster is B, and how sure is that?

A busy host slows both turns of a repeat by about the same factor, so their ratio survives what
either time does not. One ratio per repeat, then Student's t on the logarithms: paired observations
(Jain 1991, The Art of Computer Systems Performance Analysis, 13.4.1) of ratios, whose fair mean is
the geometric one (Fleming and Wallace 1986, CACM 29:218). Requests of one turn are no repeats: they
share the server's start and the host's mood, so they say nothing about the next turn. One repeat
has no interval.

B always comes one turn after A. A host that drifts by a factor d from turn to turn puts that
factor into every ratio; `drift_of_turns` says how large it is. (All of A before all of B would put
it in r times.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from eval_suites.load_steps import times_of
from eval_suites.percentiles import Percentile

Row = Mapping[str, Any]
Pair = tuple[Sequence[Row], Sequence[Row]]

LEVEL = 0.95
METRICS = ("ttft", "tpot", "e2el")
PERCENTS = (50.0, 90.0, 99.0)

FEWEST_FOR_DRIFT = 3
"""Two points always lie on a line: nothing is left to judge it by."""


@dataclass(frozen=True)
class TurnRatio:
    """B over A with a two-sided interval at `level`; below 1: B's number is smaller.

    `low` and `high` are None with fewer than two repeats; all of it is None with a `reason` where
    there is no ratio.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    repeats: int = 0
    level: float = LEVEL
    reason: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"no ratio: {self.reason}"
        if self.low is None or self.high is None:
            return f"{self.value:.3f} (no interval: {self.repeats} repeat)"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}, {self.repeats} repeats)"


@dataclass(frozen=True)
class TurnDrift:
    """How A's number moved over the repeats: a straight line through its logarithms.

    `whole` is the change from the first to the last repeat as a share of 1, `per_turn` the part of
    it that stands in every ratio B / A; `p` the two-sided p-value of no drift (Student's t of the
    slope). `spread` is A's largest over its smallest number, less 1.
    """

    repeats: int
    spread: float | None
    whole: float | None = None
    per_turn: float | None = None
    p: float | None = None


def percentile_ratio(
    pairs: Sequence[Pair], metric: str, percent: float, level: float = LEVEL
) -> TurnRatio:
    """B over A of a percentile of `ttft`, `tpot` or `e2el`, one pair of turns per repeat.

    A percentile that lies among failed requests is infinite; then there is no ratio.
    """
    found: list[tuple[float, float]] = []
    for number, pair in enumerate(pairs, start=1):
        values = []
        for name, rows in zip("AB", pair, strict=True):
            value = percentile_of(rows, metric, percent)
            if value is None or not math.isfinite(value):
                what = "has no request" if value is None else "lies among failed requests"
                reason = f"{metric} p{percent:g} of {name} in repeat {number} {what}"
                return TurnRatio(None, repeats=len(pairs), level=level, reason=reason)
            values.append(value)
        found.append((values[0], values[1]))
    return ratio(found, level)


def ratio(values: Sequence[tuple[float, float]], level: float = LEVEL) -> TurnRatio:
    """B over A of positive numbers (A, B), one pair per repeat.

    exp(m +- t * s / sqrt(r)) with mean m and standard deviation s of the r logarithms, t of r - 1
    degrees of freedom.
    """
    repeats = len(values)
    if not values:
        return TurnRatio(None, level=level, reason="no repeat was measured")
    if not all(0 < one < math.inf for pair in values for one in pair):
        reason = "a number is not above 0 and finite"
        return TurnRatio(None, repeats=repeats, level=level, reason=reason)
    logs = np.log([b / a for a, b in values])
    middle = float(logs.mean())
    if repeats == 1:
        return TurnRatio(math.exp(middle), repeats=1, level=level)
    t = float(stdtrit(repeats - 1, (1 + level) / 2))
    half = t * float(logs.std(ddof=1)) / math.sqrt(repeats)
    return TurnRatio(
        math.exp(middle), math.exp(middle - half), math.exp(middle + half), repeats, level
    )


def all_ratios(pairs: Sequence[Pair], level: float = LEVEL) -> dict[str, TurnRatio]:
    """`{"ttft_p50": ..., "e2el_p99": ...}`."""
    return {
        f"{metric}_p{percent:g}": percentile_ratio(pairs, metric, percent, level)
        for metric in METRICS
        for percent in PERCENTS
    }


def percentile_of(rows: Sequence[Row], metric: str, percent: float) -> float | None:
    """Milliseconds, by nearest rank; infinite among failed requests, None without a time."""
    times = times_of(rows, metric)
    return Percentile(times, percent).value if len(times) else None


def drift_of_turns(values: Sequence[float]) -> TurnDrift:
    """Of A's number in each repeat, in the order of the repeats; positive and finite."""
    repeats = len(values)
    if not values or not all(0 < one < math.inf for one in values):
        return TurnDrift(repeats, None)
    spread = max(values) / min(values) - 1
    if repeats < FEWEST_FOR_DRIFT:
        return TurnDrift(repeats, spread)
    at = np.arange(repeats) - (repeats - 1) / 2
    logs = np.log(values)
    squares = float((at**2).sum())
    slope = float((at * logs).sum()) / squares
    rest = logs - logs.mean() - slope * at
    error = math.sqrt(float((rest**2).sum()) / (repeats - 2) / squares)
    if error > 0:
        p = 2 * float(stdtr(repeats - 2, -abs(slope) / error))
    else:
        p = 1.0 if slope == 0 else 0.0
    # From one A to the next there are two turns.
    return TurnDrift(repeats, spread, math.expm1(slope * (repeats - 1)), math.expm1(slope / 2), p)
