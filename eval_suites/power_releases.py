"""The share of releases that pass when the truth is known: what a plan is made from.

Score intervals at small n are discrete, and a bootstrap's bound follows skew and rare losses that
no normal formula knows. So releases are drawn from the assumed truth and decided by the same
functions as in a gate. All draws have fixed seeds: the same evidence gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, ndtr, ndtri

from eval_suites.bootstrap import Bootstrap, Means, Resampling, Scores
from eval_suites.power import (
    MOST_ITEMS,
    POWER,
    distance_to_see,
    items_for,
    units_to_see,
)
from eval_suites.questions import FEWEST_CLUSTERS, Array, Question, right_score
from eval_suites.statistics import PairedTable, difference_statistic, ratio_statistic
from registry.evidence import Unusable

SEED = 20_260_301
TABLES = 20_000
"""Releases of 0/1 scores."""
RELEASES, IN_SEARCH = 1000, 300
"""Releases that are bootstrapped for a power, and for each number of items that is tried."""
REPLICATES = 1000
MOST_UNITS = 3000
"""More items or clusters than this are not drawn: there the normal formula, set right here."""
AT_ONCE = 100
"""Releases in one matrix product."""
COPIES = 8
"""Pairings of one run with itself that stand for two independent runs."""
LARGE = 1e9
"""Items of a table of expected counts: its statistics are those of the probabilities."""
NEAR = 0.2
"""Evidence is taken as it is where its own effect is off by less than this of the distance."""


class Truth(Protocol):
    """An assumed truth: how far it lies beyond the limit, and how often releases of it pass."""

    @property
    def distance(self) -> float: ...
    def power(self, n: int, level: float, releases: int | None = None) -> float: ...
    def items(self, level: float) -> int | None: ...


def truth_of(question: Question, effect: float) -> Truth:
    """What releases look like if the candidate has `effect` times the reference's mean."""
    base = question.candidate if question.reference is None else question.reference
    mean = float(base.mean())
    if mean <= 0:
        raise Unusable(f"{effect:g} times a mean of {mean:.4g}: no ratio exists")
    unit = right_score(question.candidate, question.reference)
    if unit is not None and effect * mean > unit:
        raise Unusable(f"{effect:g} times {mean:.4g} is more than every item can score")
    if unit is None or question.clusters is not None:
        return _drawn(question, effect, effect * mean, unit)
    if question.scale == "mean":
        return Hits(question.limit / unit, effect * mean / unit, question.side)
    paired = None if question.reference is None else question.reference > 0
    shares = _expected(question.candidate > 0, paired, effect)
    limit = question.limit if question.scale == "ratio" else question.limit / unit
    return Tables(question.scale == "ratio", limit, question.side, shares)


def power_at(
    question: Question, effect: float, n: int, level: float, releases: int | None = None
) -> float:
    """The share of releases of `n` items that pass."""
    return truth_of(question, effect).power(n, level, releases)


# -- 0/1 scores ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hits:
    """Right items of independent ones: exact."""

    limit: float
    share: float
    side: int

    @property
    def distance(self) -> float:
        return self.side * (self.share - self.limit)

    def power(self, n: int, level: float, releases: int | None = None) -> float:
        limit, share = self.limit, self.share
        if self.side < 0:
            limit, share = 1 - limit, 1 - share
        if not 0 <= limit < 1:
            return float(limit < 0)
        # The fewest hits that Clopper and Pearson's bound passes: between `low` and `high`.
        low, high = 0, n + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if bdtrc(middle - 1, n, limit) <= level else (middle, high)
        return float(bdtrc(high - 1, n, share)) if high <= n else 0.0

    def items(self, level: float) -> int | None:
        limit, share = (math.sqrt(one * (1 - one)) if 0 < one < 1 else 0.0 for one in
                        (self.limit, self.share))  # fmt: skip
        return lasting(self, items_for(self.distance, limit, share, level), level)


@dataclass(frozen=True)
class Tables:
    """Pairs of 0/1 scores, `shares` being those of a `PairedTable`."""

    is_ratio: bool
    limit: float
    side: int
    shares: tuple[float, ...]

    @property
    def distance(self) -> float:
        both, gained, lost, _ = self.shares
        if self.is_ratio:
            return self.side * (both + gained - self.limit * (both + lost))
        return self.side * (gained - lost - self.limit)

    def power(self, n: int, level: float, releases: int | None = None) -> float:
        rng = np.random.default_rng([SEED, n])
        shares = np.maximum(self.shares, 0.0)
        drawn = rng.multinomial(n, shares / shares.sum(), releases or TABLES)
        table = PairedTable(*drawn.T)
        passed = ndtr(-self.side * self._statistic(table)[0]) <= level
        if self.is_ratio:
            passed &= table.reference > 0
        return float(passed.mean())

    def items(self, level: float) -> int | None:
        counts = PairedTable(*(share * LARGE for share in self.shares))
        ratio = self.limit if self.is_ratio else 1.0
        both, gained, lost, _ = self.shares
        at_truth = gained + ratio**2 * lost + (1 - ratio) ** 2 * both
        at_truth -= (both + gained - ratio * (both + lost)) ** 2
        at_limit = float(self._statistic(counts)[1])
        start = items_for(self.distance, math.sqrt(at_limit), math.sqrt(max(at_truth, 0)), level)
        return lasting(self, start, level)

    def _statistic(self, table: PairedTable) -> tuple[Any, Any]:
        if not self.is_ratio and abs(self.limit) >= 1:
            return np.full(np.shape(table.n), -math.copysign(math.inf, self.limit)), 0.0
        return (ratio_statistic if self.is_ratio else difference_statistic)(table, self.limit)


def _expected(
    scores: NDArray[np.bool_], paired: NDArray[np.bool_] | None, effect: float
) -> tuple[float, ...]:
    """Shares of both, candidate only, reference only, neither, if the effect is the truth."""
    reference = float((scores if paired is None else paired).mean())
    own = effect * reference
    gained = own * (1 - reference) if paired is None else float((scores & ~paired).mean())
    gained = min(max(gained, own - reference, 0.0), own, 1 - reference)
    lost = gained + reference - own
    return own - gained, gained, lost, 1 - own - lost


# -- graded scores and clusters --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drawn:
    """Items, or whole clusters of them, drawn with replacement; `starts` where each one begins."""

    question: Question
    limit: float
    own: Array
    other: Array | None
    starts: NDArray[np.int_]
    sizes: NDArray[np.int_]

    @property
    def contrast(self) -> Array:
        """Above 0 in the mean where the truth is above the limit."""
        if self.other is None:
            return self.own - self.limit
        if self.question.scale == "ratio":
            return self.own - self.limit * self.other
        return self.own - self.other - self.limit

    @property
    def distance(self) -> float:
        return self.question.side * float(self.contrast.mean())

    def power(self, n: int, level: float, releases: int | None = None) -> float:
        units = self._units(n)
        if units <= MOST_UNITS:
            return self.by_releases(units, level, releases or RELEASES)
        # What the formula does not know (skew) fades with the square root.
        shift = _shift(self, level) * math.sqrt(MOST_UNITS / units)
        return float(ndtr(self.probit(units, level) + shift))

    def items(self, level: float) -> int | None:
        spread, size = self._spread(), float(self.sizes.mean())
        units = items_for(self.distance, spread, spread, level)
        least = units_to_see(self.distance, self._worst(), level)
        if units is None or not max(units, least) * size <= MOST_ITEMS:
            return None
        start = math.ceil(max(units, least) * size)
        return first_with(lambda n: self.power(n, level, IN_SEARCH), start, 0.04)

    def _units(self, n: int) -> int:
        return max(1, round(n / float(self.sizes.mean())))

    def _sums(self) -> Array:
        """Of the contrast, by cluster."""
        return np.add.reduceat(self.contrast, self.starts)

    def _spread(self) -> float:
        """Standard deviation of a cluster's part in the mean contrast."""
        sums, units = self._sums(), len(self.sizes)
        residual = sums - self.contrast.mean() * self.sizes
        return math.sqrt(float((residual**2).sum()) / max(units - 1, 1)) / float(self.sizes.mean())

    def _worst(self) -> float:
        """The contrast of an item that tells most against the question's side."""
        both = self.own if self.other is None else np.concatenate([self.own, self.other])
        low, high = min(0.0, float(both.min())), max(0.0, float(both.max()))
        if self.question.scale == "mean":
            return low - self.limit if self.question.side > 0 else self.limit - high
        ratio = self.limit if self.question.scale == "ratio" else 1.0
        offset = self.limit if self.question.scale == "difference" else 0.0
        own, other = (low, high) if self.question.side > 0 else (high, low)
        return self.question.side * (own - ratio * other - offset)

    def probit(self, units: int, level: float) -> float:
        """Power by formula. Both conditions are on the observed mean: the further one counts."""
        spread, unseen = self._spread(), distance_to_see(units, self._worst(), level)
        wanted = max(-float(ndtri(level)) * spread / math.sqrt(units), unseen)
        if spread <= 0:
            return math.inf if self.distance >= wanted > 0 else -math.inf
        return (self.distance - wanted) * math.sqrt(units) / spread

    def by_releases(self, units: int, level: float, releases: int) -> float:
        rng = np.random.default_rng([SEED, units])
        clustered = len(self.own) > len(self.sizes)
        replicates = max(REPLICATES, math.ceil(20 / level))
        draws = Draws(rng, units, replicates)
        alike = None if clustered else Resampling(units, replicates=1)
        sums, passed = self._sums(), 0
        for start in range(0, releases, AT_ONCE):
            rows = rng.integers(0, len(self.sizes), (min(AT_ONCE, releases - start), units))
            means = draws.means(sums[rows], self.sizes[rows] if clustered else None)
            passed += sum(
                self._passes(chosen, alike, observed, replicated, level)
                for chosen, (observed, replicated) in zip(rows, means, strict=True)
            )
        return passed / releases

    def _passes(
        self,
        chosen: NDArray[np.int_],
        design: Resampling | None,
        one: Means,
        many: Means,
        level: float,
    ) -> bool:
        """Whether the items, or clusters, `chosen` pass; `design` is that of single items."""
        items = chosen
        if design is None:
            sizes = self.sizes[chosen]
            ends = np.cumsum(sizes)
            if len(chosen) < FEWEST_CLUSTERS or ends[-1] ** 2 / (sizes**2).sum() < FEWEST_CLUSTERS:
                return False
            items = np.repeat(self.starts[chosen] - (ends - sizes), sizes) + np.arange(ends[-1])
            clusters = np.repeat(np.arange(len(chosen)), sizes)
            design = Resampling(len(items), None, clusters, replicates=1)
        other = None if self.other is None else self.other[items]
        question = self.question
        if question.scale == "ratio" and other is not None and other.mean() <= 0:
            return False
        scores = Scores.of(self.own[items], other, design)
        # The means are those of the contrast at this limit, and the bound asks for no other.
        bound = Bootstrap(question.scale, scores, one, many, "")
        p_value = bound.p_above if question.side > 0 else bound.p_below
        return p_value(self.limit) <= level


@lru_cache(maxsize=32)
def _shift(truth: Drawn, level: float) -> float:
    """How far drawn releases of the most units lie from the formula, as a probit."""
    most = -float(ndtri(1 / RELEASES))
    drawn = float(ndtri(truth.by_releases(MOST_UNITS, level, RELEASES)))
    known = truth.probit(MOST_UNITS, level)
    return min(max(drawn, -most), most) - min(max(known, -most), most)


class Draws:
    """How often each unit is drawn in each replicate, shared by all releases of one size.

    `Resampling` in one matrix product for many releases, each with clusters of its own sizes.
    """

    def __init__(self, rng: np.random.Generator, units: int, replicates: int) -> None:
        drawn = rng.integers(0, units, (replicates, units)) + units * np.arange(replicates)[:, None]
        self.counts = np.bincount(drawn.ravel(), minlength=replicates * units).astype(float)
        self.counts.shape = replicates, units
        self.units = units

    def means(self, sums: Array, sizes: NDArray[np.int_] | None) -> list[tuple[Means, Means]]:
        """Observed and replicated means of every row of cluster sums (sizes: all 1 if None)."""
        size = np.ones_like(sums) if sizes is None else sizes.astype(float)
        centred = sums - size * (sums.sum(axis=1) / size.sum(axis=1))[:, None]
        every = np.ones((1, self.units))
        observed = self._moments(every, centred, size, sizes is not None)
        replicated = self._moments(self.counts, centred, size, sizes is not None)
        return [
            (_means(*(float(column[0, row]) for column in observed)),
             _means(*(column[:, row] for column in replicated)))
            for row in range(len(sums))
        ]  # fmt: skip

    def _moments(
        self, counts: Array, sums: Array, size: Array, clustered: bool
    ) -> tuple[Array, Array]:
        """Ratio estimate and its linearized variance (Cochran 1977, 6.11) per replicate and row."""
        total, squares = counts @ sums.T, counts @ (sums**2).T
        items: Any = counts @ size.T if clustered else float(self.units)
        mean = total / items
        if clustered:
            variance = squares - 2 * mean * (counts @ (sums * size).T)
            variance += mean**2 * (counts @ (size**2).T)
        else:
            variance = squares - mean * total
        variance *= self.units / max(self.units - 1, 1) / items**2
        # What is left of equal numbers after subtraction is rounding, not spread.
        return mean, np.where(variance > 1e-12 * squares / items**2, variance, 0.0)


def _means(mean: Any, variance: Any) -> Means:
    zero = np.zeros_like(mean)
    return Means(mean, zero, variance, zero, zero)


def _drawn(question: Question, effect: float, wanted: float, unit: float | None) -> Drawn:
    """The evidence with the effect applied, its items sorted by cluster."""
    labels = np.arange(question.n) if question.clusters is None else question.clusters
    unit_of = np.unique(labels, return_inverse=True)[1]
    order = np.argsort(unit_of, kind="stable")
    sizes = np.bincount(unit_of)
    own = question.candidate[order]
    other = None if question.reference is None else question.reference[order]
    rng = np.random.default_rng(SEED)
    if other is None and question.scale != "mean":
        copies = max(1, min(COPIES, 100_000 // question.n))
        other = np.tile(own, copies)
        own = np.concatenate([_independent(rng, own, sizes) for _ in range(copies)])
        sizes = np.tile(sizes, copies)
    starts = np.cumsum(sizes) - sizes
    if abs(_off(question, own, other, wanted)) > NEAR * abs(_room(question, effect, wanted)):
        own = (
            own * (wanted / own.mean() if own.mean() > 0 else 0.0)
            if unit is None
            else _turned(rng, own, other, wanted, unit, np.repeat(np.arange(len(sizes)), sizes))
        )
    # What is still off is taken off the limit, so that the distance to it is right.
    limit = question.limit + _off(question, own, other, wanted)
    return Drawn(question, limit, own, other, starts, sizes)


def _off(question: Question, own: Array, other: Array | None, wanted: float) -> float:
    """How far the scores' own value lies above the one wanted, on the limit's scale."""
    off = float(own.mean()) - wanted
    return off / float(other.mean()) if question.scale == "ratio" and other is not None else off


def _room(question: Question, effect: float, wanted: float) -> float:
    if question.scale == "mean":
        return wanted - question.limit
    return effect - question.limit if question.scale == "ratio" else (
        wanted - wanted / effect - question.limit
    )  # fmt: skip


def _independent(rng: np.random.Generator, scores: Array, sizes: NDArray[np.int_]) -> Array:
    """Every cluster with the scores of another one of about its size."""
    order = np.lexsort((rng.random(len(sizes)), sizes))
    partner = np.empty_like(order)
    partner[order] = np.roll(order, 1)
    starts = np.cumsum(sizes) - sizes
    within = np.arange(len(scores)) - np.repeat(starts, sizes)
    there = np.repeat(partner, sizes)
    found: Array = scores[starts[there] + within % sizes[there]]
    return found


def _turned(
    rng: np.random.Generator,
    own: Array,
    other: Array | None,
    wanted: float,
    unit: float,
    unit_of: NDArray[np.int_],
) -> Array:
    """Right or wrong items turned, a whole cluster at a time, until the mean is the one wanted."""
    below = own.mean() < wanted
    better = np.full_like(own, unit)
    targets = [np.zeros_like(own)] if not below else [better]
    if below and other is not None:
        targets = [np.maximum(own, other), better]
    for target in targets:
        change = np.bincount(unit_of, target - own)
        order = rng.permutation(len(change))
        room = abs(wanted * len(own) - own.sum())
        turned = order[np.abs(np.cumsum(change[order])) <= room + 1e-9]
        own = np.where(np.isin(unit_of, turned), target, own)
    return own


# -- how many items --------------------------------------------------------------------------


def first_with(power: Callable[[int], float], start: int, close: float) -> int | None:
    """A number of items with 80 % power, from a search around `start`: a bracket, then halves.

    `close` is how far it may lie above the smallest, as a share.
    """
    low, high = 0, start
    if power(start) >= POWER:
        while high > 1:
            trial = max(1, math.floor(high / 1.25))
            if power(trial) < POWER:
                low = trial
                break
            high = trial
    else:
        while True:
            low, high = high, math.ceil(high * 1.25) + 1
            if high > MOST_ITEMS:
                return None
            if power(high) >= POWER:
                break
    while high - low > 1 and high > low * (1 + close):
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


def lasting(truth: Hits | Tables, start: int | None, level: float) -> int | None:
    """The first number of items from which power stays at 80 %, to half as many again.

    0/1 scores are discrete: power goes up and down from one number of items to the next.
    """
    if start is None:
        return None
    releases = TABLES // 2
    found = first_with(lambda n: truth.power(n, level, releases), start, 0.01)
    if found is None:
        return None
    grid = np.unique(np.geomspace(max(found / 1.2, 1), 1.5 * found + 5, 50).astype(int))
    below = [truth.power(int(n), level, releases) < POWER for n in grid]
    last = max((place for place, short in enumerate(below) if short), default=-1)
    return int(grid[min(last + 1, len(grid) - 1)])
