"""Confidence bounds for paired scores of two models on the same items.

Every estimate here answers four questions about one number (a ratio, a difference or a mean):
`p_above(limit)` and `p_below(limit)`, one-sided p-values of the hypotheses that the truth is at
most, or at least, `limit`; and `lower(alpha)` and `upper(alpha)`, the one-sided bounds with error
`alpha` that belong to them. `unit_sd(limit)` is the standard deviation that one item contributes
when the truth is `limit`; sample sizes follow from it. Where a method also allows for losses that
were never seen, `unseen_distance` and `unseen_units` say what that alone asks for.

scipy and statsmodels have no public score interval for paired proportions, so those are here with
their source; `tests/unit/test_statistics.py` holds them to published examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, betainc, betaincinv, ndtr, ndtri

LARGEST_RATIO = 1e6
"""An upper bound of a ratio beyond this is reported as infinite."""

SMALLEST_RATIO = 1e-9
"""Stands for a ratio of 0, where the score statistic is 0 / 0."""


class Estimate(Protocol):
    """A number with its uncertainty."""

    @property
    def value(self) -> float: ...
    @property
    def method(self) -> str: ...
    def p_above(self, limit: float) -> float: ...
    def p_below(self, limit: float) -> float: ...
    def lower(self, alpha: float) -> float: ...
    def upper(self, alpha: float) -> float: ...
    def unit_sd(self, limit: float) -> float: ...
    def unseen_distance(self, limit: float, side: int, alpha: float, units: int) -> float: ...
    def unseen_units(self, limit: float, alpha: float) -> float: ...


class NothingUnseen:
    """Methods for 0/1 scores: what may not have been seen is part of their distribution."""

    def unseen_distance(self, limit: float, side: int, alpha: float, units: int) -> float:
        return 0.0

    def unseen_units(self, limit: float, alpha: float) -> float:
        return 0.0


# -- one proportion --------------------------------------------------------------------------


@dataclass(frozen=True)
class ExactProportion(NothingUnseen):
    """Clopper-Pearson: the exact binomial bound (Clopper and Pearson 1934, Biometrika 26:404)."""

    hits: int
    n: int
    method: str = "Clopper-Pearson"

    @property
    def value(self) -> float:
        return self.hits / self.n

    def p_above(self, limit: float) -> float:
        if limit < 0:
            return 0.0
        if self.hits == 0:
            return 1.0
        return float(betainc(self.hits, self.n - self.hits + 1, limit)) if limit < 1 else 1.0

    def p_below(self, limit: float) -> float:
        return ExactProportion(self.n - self.hits, self.n).p_above(1 - limit)

    def lower(self, alpha: float) -> float:
        if self.hits == 0:
            return 0.0
        return float(betaincinv(self.hits, self.n - self.hits + 1, alpha))

    def upper(self, alpha: float) -> float:
        return 1 - ExactProportion(self.n - self.hits, self.n).lower(alpha)

    def unit_sd(self, limit: float) -> float:
        share = limit if 0 < limit < 1 else (self.hits + 1) / (self.n + 2)
        return math.sqrt(share * (1 - share))


@dataclass(frozen=True)
class Scaled(NothingUnseen):
    """An estimate of 0/1 scores for scores of 0 and `unit`."""

    of: Estimate
    unit: float

    @property
    def value(self) -> float:
        return self.of.value * self.unit

    @property
    def method(self) -> str:
        return self.of.method

    def p_above(self, limit: float) -> float:
        return self.of.p_above(limit / self.unit)

    def p_below(self, limit: float) -> float:
        return self.of.p_below(limit / self.unit)

    def lower(self, alpha: float) -> float:
        return self.of.lower(alpha) * self.unit

    def upper(self, alpha: float) -> float:
        return self.of.upper(alpha) * self.unit

    def unit_sd(self, limit: float) -> float:
        return self.of.unit_sd(limit / self.unit) * self.unit


# -- two proportions on the same items -------------------------------------------------------


@dataclass(frozen=True)
class PairedTable:
    """Counts of items by who is right. Arrays of counts work as well as numbers."""

    both: Any
    candidate_only: Any
    reference_only: Any
    neither: Any

    @property
    def n(self) -> Any:
        return self.both + self.candidate_only + self.reference_only + self.neither

    @property
    def candidate(self) -> Any:
        """Items that the candidate has right."""
        return self.both + self.candidate_only

    @property
    def reference(self) -> Any:
        return self.both + self.reference_only


def ratio_statistic(table: PairedTable, ratio: Any) -> tuple[Any, Any]:
    """Score statistic of `candidate / reference = ratio`, and one item's variance under it.

    Constrained maximum likelihood of Tang, Tang and Chan (2003, Statistics in Medicine
    22:1217); Nam and Blackwelder (2002, Statistics in Medicine 21:689) is the same test. The
    variance carries the factor n / (n - 1), as Laud's R package ratesci has it (2017,
    Pharmaceutical Statistics 16:334, for unpaired proportions), without which a few settings of
    our simulation exceed their level.
    """
    n = table.n
    a = n * (1 + ratio)
    b = table.reference * ratio**2 - table.candidate - 2 * table.reference_only
    anyone = table.both + table.candidate_only + table.reference_only
    c = table.reference_only * (1 - ratio) * anyone / n
    lost = (np.sqrt(np.maximum(b * b - 4 * a * c, 0)) - b) / (2 * a)
    shared = (anyone / n - (1 + ratio) * lost) / ratio
    gained = ratio * lost - (1 - ratio) * shared
    variance = _unbiased(np.maximum(ratio * (gained + lost), 0), n)
    return _standardized(table.candidate - ratio * table.reference, n * variance), variance


def difference_statistic(table: PairedTable, difference: Any) -> tuple[Any, Any]:
    """Score statistic of `candidate - reference = difference`, and one item's variance under it.

    Tango (1998, Statistics in Medicine 17:891), with the same factor n / (n - 1).
    """
    n, gained, lost = table.n, table.candidate_only, table.reference_only
    a = 2 * n
    b = (2 * n - gained + lost) * difference - gained - lost
    c = -lost * difference * (1 - difference)
    constrained = (np.sqrt(np.maximum(b * b - 4 * a * c, 0)) - b) / (2 * a)
    variance = _unbiased(np.maximum(2 * constrained + difference * (1 - difference), 0), n)
    return _standardized(gained - lost - n * difference, n * variance), variance


def _unbiased(variance: Any, n: Any) -> Any:
    """`variance * n / (n - 1)`; a single item says nothing of its variance."""
    return np.where(np.asarray(n) > 1, variance * n / np.maximum(n - 1, 1), np.inf)


def _standardized(numerator: Any, variance: Any) -> Any:
    """`numerator / sqrt(variance)`; 0 / 0 is 0, anything else over 0 is infinite."""
    numerator, variance = np.asarray(numerator, float), np.asarray(variance, float)
    tiny = variance <= 1e-12
    safe = np.sqrt(np.where(tiny, 1.0, variance))
    infinite = np.where(np.abs(numerator) <= 1e-9, 0.0, np.copysign(np.inf, numerator))
    return np.where(tiny, infinite, numerator / safe)


@dataclass(frozen=True)
class PairedRatio(NothingUnseen):
    """candidate / reference of 0/1 scores; the reference has at least one item right."""

    table: PairedTable
    method: str = "score interval for a paired ratio"

    @property
    def value(self) -> float:
        return float(self.table.candidate / self.table.reference)

    def p_above(self, limit: float) -> float:
        return float(ndtr(-self._z(limit)))

    def p_below(self, limit: float) -> float:
        return float(ndtr(self._z(limit)))

    def lower(self, alpha: float) -> float:
        if self.table.candidate == 0:
            return 0.0
        z = -float(ndtri(alpha))
        least = self.value * 1e-9
        return _root(self._z, z, least, self.value) if self._z(least) > z else 0.0

    def upper(self, alpha: float) -> float:
        z, high = float(ndtri(alpha)), max(self.value, 1.0)
        while self._z(high) > z:
            high *= 2
            if high > LARGEST_RATIO:
                return math.inf
        return _root(self._z, z, max(self.value, 1e-12), high)

    def unit_sd(self, limit: float) -> float:
        share = self.table.reference / self.table.n
        positive = max(limit, SMALLEST_RATIO)
        return math.sqrt(float(ratio_statistic(self.table, positive)[1])) / share

    def _z(self, limit: float) -> float:
        return float(ratio_statistic(self.table, limit)[0])


@dataclass(frozen=True)
class PairedDifference(NothingUnseen):
    """candidate - reference of 0/1 scores."""

    table: PairedTable
    method: str = "score interval for a paired difference"

    @property
    def value(self) -> float:
        table = self.table
        return float((table.candidate_only - table.reference_only) / table.n)

    def p_above(self, limit: float) -> float:
        if abs(limit) >= 1:
            return float(limit >= 1)
        return float(ndtr(-self._z(limit)))

    def p_below(self, limit: float) -> float:
        if abs(limit) >= 1:
            return float(limit <= -1)
        return float(ndtr(self._z(limit)))

    def lower(self, alpha: float) -> float:
        z, least = -float(ndtri(alpha)), -1 + 1e-12
        return _root(self._z, z, least, self.value) if self._z(least) > z else -1.0

    def upper(self, alpha: float) -> float:
        z, most = float(ndtri(alpha)), 1 - 1e-12
        return _root(self._z, z, self.value, most) if self._z(most) < z else 1.0

    def unit_sd(self, limit: float) -> float:
        inside = min(max(limit, -1 + 1e-9), 1 - 1e-9)
        return math.sqrt(float(difference_statistic(self.table, inside)[1]))

    def _z(self, limit: float) -> float:
        return float(difference_statistic(self.table, limit)[0])


def _root(statistic: Callable[[float], float], z: float, low: float, high: float) -> float:
    """The limit at which a statistic that falls in the limit is `z`."""
    return float(brentq(lambda limit: statistic(limit) - z, low, high, xtol=1e-13))


def exact_mcnemar(candidate_only: int, reference_only: int) -> float:
    """Two-sided exact p-value of equal proportions (McNemar 1947, Psychometrika 12:153)."""
    fewer, total = min(candidate_only, reference_only), candidate_only + reference_only
    return min(1.0, 2 * float(bdtr(fewer, total, 0.5))) if total else 1.0


# -- several candidates ----------------------------------------------------------------------


def holm_shares(relative_p: Sequence[float]) -> list[float]:
    """The share of its level that each candidate is judged at (Holm 1979, Scand J Stat 6:65).

    `relative_p` is each candidate's p-value over its level. The smallest is judged at 1/m, the
    next at 1/(m-1) once that was rejected, and so on; what comes after the first that was not
    rejected shares that one's level. A candidate passes when its p is within its share.
    """
    shares = [0.0] * len(relative_p)
    left, stopped = len(relative_p), False
    for place in sorted(range(len(relative_p)), key=lambda i: relative_p[i]):
        shares[place] = 1 / left
        stopped = stopped or relative_p[place] > shares[place]
        if not stopped:
            left -= 1
    return shares
