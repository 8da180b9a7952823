"""Paired bootstrap of means: stratified by segment, by whole conversations, studentized.

`scipy.stats.bootstrap` has neither strata nor clusters nor studentized bounds. A studentized
bound (Efron 1979; Hall 1988, Annals of Statistics 16:927) is the one whose one-sided error is
right to second order. On scores with rare large losses, where 5 % are promised, a percentile
bound passed 8 to 12 % of candidates at the margin, and this one at most 5 % (docs/simulation.md).

One resampling serves all gates of all candidates: a replicate draws items, and the mean of every
score follows by one matrix product. Nothing depends on which gates are asked together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtr

from eval_suites.power import distance_to_see, items_for, units_to_see
from eval_suites.statistics import LARGEST_RATIO

REPLICATES = 10_000
SEED = 20_240_229
MIN_STRATUM = 10
"""Strata with fewer units than this are drawn together."""
THREADS = 2
BATCH_ENTRIES = 4_000_000
"""Counts held at once by a thread: 32 MB."""
BLOCK_ENTRIES = 1 << 15
"""Counts made at once: 256 KiB, which stay in the processor's cache."""

Array = NDArray[np.float64]
Pair = tuple[str, str | None]
"""Names of the candidate's and the reference's scores; no reference for an absolute limit."""


@dataclass(frozen=True)
class Means:
    """Means of a pair, relative to the observed ones, and the (co)variances of those means.

    Numbers for what was observed, arrays of one entry per replicate for the bootstrap.
    """

    candidate: Any
    reference: Any
    var_candidate: Any
    covariance: Any
    var_reference: Any

    def contrast(self, ratio: float) -> Any:
        """`candidate - ratio * reference`."""
        return self.candidate - ratio * self.reference

    def standard_error(self, ratio: float) -> Any:
        variance = self.var_candidate - 2 * ratio * self.covariance + ratio**2 * self.var_reference
        scale = np.asarray(self.var_candidate + ratio**2 * self.var_reference)
        # What is left of equal numbers after subtraction is rounding, not spread.
        return np.sqrt(np.where(variance > 1e-12 * scale, variance, 0.0))


# -- resampling ------------------------------------------------------------------------------


class Resampling:
    """How items are drawn: singly or by cluster, within strata where there are any.

    `strata` and `clusters` hold one label per item. Where a cluster has items of several strata
    only the clusters are kept, which widens the bounds. The draws depend on nothing but this
    design and the seed.
    """

    def __init__(
        self,
        n: int,
        strata: NDArray[Any] | None = None,
        clusters: NDArray[Any] | None = None,
        replicates: int = REPLICATES,
        seed: int = SEED,
    ) -> None:
        self.n, self.replicates, self.seed = n, replicates, seed
        self.unit_of_item = (
            np.arange(n) if clusters is None else np.unique(clusters, return_inverse=True)[1]
        )
        self.units = int(self.unit_of_item.max()) + 1 if n else 0
        self.clustered = self.units < n
        stratum_of_unit = np.zeros(self.units, int)
        self.stratified = False
        if strata is not None and n:
            codes = np.unique(strata, return_inverse=True)[1]
            stratum_of_unit[self.unit_of_item] = codes
            self.stratified = bool(np.all(stratum_of_unit[self.unit_of_item] == codes))
            if not self.stratified:
                stratum_of_unit[:] = 0
        stratum_of_unit = _without_small(stratum_of_unit)
        self.stratified = self.stratified and len(np.unique(stratum_of_unit)) > 1
        self.order = np.argsort(stratum_of_unit, kind="stable")
        self.sizes: list[int] = np.unique(stratum_of_unit, return_counts=True)[1].tolist()

    @property
    def described(self) -> str:
        text = "studentized paired bootstrap"
        if self.stratified:
            text += f", {len(self.sizes)} strata"
        if self.clustered:
            text += f", {self.units} clusters"
        return text

    @property
    def design(self) -> tuple[Any, ...]:
        """Equal for two resamplings that draw the same."""
        drawn = (self.unit_of_item.tobytes(), self.order.tobytes(), *self.sizes)
        return (self.n, self.replicates, self.seed, self.described, *drawn)

    def means(
        self, scores: Mapping[str, Array], pairs: Sequence[Pair]
    ) -> dict[Pair, tuple[Means, Means]]:
        """Observed and bootstrapped `Means` of every pair of `scores`."""
        return self.means_of_each([(scores, pairs)])[0]

    def means_of_each(
        self, asked: Sequence[tuple[Mapping[str, Array], Sequence[Pair]]]
    ) -> list[dict[Pair, tuple[Means, Means]]]:
        """The same for several sets of scores with their pairs, all with the same draws.

        Each set has a matrix product of its own: its numbers are to the last bit those that it
        has alone.
        """
        tables = [self._columns(scores, pairs) for scores, pairs in asked]
        batch = max(1, min(self.replicates, BATCH_ENTRIES // max(self.units, 1)))
        starts = range(0, self.replicates, batch)
        streams = np.random.SeedSequence(self.seed).spawn(len(starts))

        def draw(start: int, stream: np.random.SeedSequence) -> list[list[Means]]:
            rng = np.random.default_rng(stream)
            rows = min(batch, self.replicates - start)
            drawn: list[list[Array]] = [[] for _ in asked]
            for stratum, size in enumerate(self.sizes):
                counts = _counts(rng, rows, size)
                for sums, (columns, _) in zip(drawn, tables, strict=True):
                    sums.append(counts @ columns[stratum])
            return [
                [_Sums(place, sums, self.sizes).means(pair, self.clustered) for pair in pairs]
                for sums, (_, place), (_, pairs) in zip(drawn, tables, asked, strict=True)
            ]

        # Every batch has a stream of its own, so the result does not depend on the threads.
        with ThreadPoolExecutor(THREADS) as threads:
            parts = list(threads.map(draw, starts, streams))
        return [
            {
                pair: (self._observed(table, pair), _joined([part[which][at] for part in parts]))
                for at, pair in enumerate(pairs)
            }
            for which, (table, (_, pairs)) in enumerate(zip(tables, asked, strict=True))
        ]

    def _observed(self, table: tuple[list[Array], dict[tuple[str, str], int]], pair: Pair) -> Means:
        columns, place = table
        sums = _Sums(place, [group.sum(axis=0, keepdims=True) for group in columns], self.sizes)
        return _single(sums.means(pair, self.clustered))

    def _columns(
        self, scores: Mapping[str, Array], pairs: Sequence[Pair]
    ) -> tuple[list[Array], dict[tuple[str, str], int]]:
        """Per stratum a matrix of units by sums and products of centred scores."""
        names = sorted({name for pair in pairs for name in pair if name is not None})
        by_unit = {
            name: np.bincount(self.unit_of_item, scores[name] - scores[name].mean(), self.units)
            for name in names
        }
        size = np.bincount(self.unit_of_item, minlength=self.units).astype(float)
        wanted = {(name, ""): by_unit[name] for name in names}
        for own, other in pairs:
            for left, right in ((own, own), (own, other or own), (other or own, other or own)):
                wanted[left, right] = by_unit[left] * by_unit[right]
        wanted["", ""] = size
        if self.clustered:
            wanted |= {(name, "*"): by_unit[name] * size for name in names}
            wanted["*", "*"] = size * size
        matrix = np.column_stack(list(wanted.values())).astype(float)[self.order]
        groups: list[Array] = list(np.split(matrix, np.cumsum(self.sizes)[:-1]))
        return groups, {key: index for index, key in enumerate(wanted)}


@dataclass(frozen=True)
class _Sums:
    """Sums over drawn units, one matrix of replicates by columns for each stratum."""

    place: dict[tuple[str, str], int]
    strata: list[Array]
    sizes: list[int]

    def means(self, pair: Pair, clustered: bool) -> Means:
        """Combined ratio estimate over strata with its linearized variance (Cochran 1977, 6.11)."""
        own, other = pair[0], pair[1] or pair[0]
        items = self._total("", "")
        shift_own = self._total(own, "") / items
        shift_other = self._total(other, "") / items
        shifts = {own: shift_own, other: shift_other}

        def covariance(left: str, right: str) -> Any:
            total: Any = 0.0
            for drawn, size in zip(self.strata, self.sizes, strict=True):
                one = drawn[:, self.place[left, ""]]
                two = drawn[:, self.place[right, ""]]
                many = drawn[:, self.place["", ""]]
                a, b = shifts[left], shifts[right]
                if clustered:
                    with_size = (
                        a * drawn[:, self.place[right, "*"]] + b * drawn[:, self.place[left, "*"]]
                    )
                    sizes_squared = drawn[:, self.place["*", "*"]]
                else:
                    with_size, sizes_squared = a * two + b * one, many
                crossed = drawn[:, self.place[left, right]] - with_size + a * b * sizes_squared
                crossed = crossed - (one - a * many) * (two - b * many) / size
                total = total + crossed * size / max(size - 1, 1)
            return total / items**2

        if pair[1] is None:
            zero = np.zeros_like(shift_own)
            return Means(shift_own, zero, covariance(own, own), zero, zero)
        return Means(
            shift_own,
            shift_other,
            covariance(own, own),
            covariance(own, other),
            covariance(other, other),
        )

    def _total(self, left: str, right: str) -> Any:
        return sum(drawn[:, self.place[left, right]] for drawn in self.strata)


def _without_small(strata: NDArray[np.int_]) -> NDArray[np.int_]:
    """Strata of fewer than `MIN_STRATUM` units joined, with the largest if still too few."""
    codes, counts = np.unique(strata, return_counts=True)
    small = codes[counts < MIN_STRATUM]
    if not len(small):
        return strata
    together = np.isin(strata, small)
    into = small[0] if together.sum() >= MIN_STRATUM else codes[counts.argmax()]
    return np.where(together, into, strata)


def _counts(rng: np.random.Generator, rows: int, size: int) -> Array:
    """How often each of `size` units is drawn in each of `rows` replicates."""
    counts = np.empty((rows, size))
    block = max(1, min(rows, BLOCK_ENTRIES // size))
    first = size * np.arange(block)[:, np.newaxis]
    for start in range(0, rows, block):
        part = counts[start : start + block]
        # Several replicates are counted as one, each with numbers of its own for its units.
        drawn = rng.integers(0, size, part.shape) + first[: len(part)]
        part[:] = np.bincount(drawn.ravel(), minlength=part.size).reshape(part.shape)
    return counts


def _single(means: Means) -> Means:
    return Means(**{name: float(value[0]) for name, value in vars(means).items()})


def _joined(parts: Sequence[Means]) -> Means:
    return Means(*(np.concatenate(columns) for columns in zip(*map(_fields, parts), strict=True)))


def _fields(means: Means) -> list[Any]:
    return list(vars(means).values())


# -- bounds ----------------------------------------------------------------------------------


FEW = 6
"""Fewer items than this that differ from all others are counted, not resampled.

A share of `exp(-6)` = 0.25 % of resamples has none of six, which is below the levels that are
used, so that such resamples alone cannot set the bound.
"""


@dataclass(frozen=True)
class Scores:
    """What is known of a pair beside its moments.

    `usual` is the commonest difference (or value), `below` and `above` the units that have a
    lower or higher one; with clusters a unit weighs at most `stretch` times the mean one.
    """

    candidate: float
    reference: float
    units: int
    low: float
    high: float
    usual: float
    below: int
    above: int
    stretch: float = 1.0

    @classmethod
    def of(cls, candidate: Array, reference: Array | None, resampling: Resampling) -> Scores:
        both = candidate if reference is None else np.concatenate([candidate, reference])
        low, high = min(0.0, float(both.min())), max(0.0, float(both.max()))
        difference = candidate if reference is None else candidate - reference
        values, counts = np.unique(difference, return_counts=True)
        usual = float(values[counts.argmax()])
        unit, sizes = resampling.unit_of_item, np.bincount(resampling.unit_of_item)
        return cls(
            candidate=float(candidate.mean()),
            reference=0.0 if reference is None else float(reference.mean()),
            units=resampling.units,
            low=low,
            # Where every score is 0, a right item is taken to score 1, as for 0/1 scores.
            high=high if high > low else 1.0,
            usual=usual,
            below=len(np.unique(unit[difference < usual])),
            above=len(np.unique(unit[difference > usual])),
            stretch=float(sizes.max() / sizes.mean()),
        )


@dataclass(frozen=True)
class Bootstrap:
    """A ratio, a difference or a mean of graded scores.

    Two bounds hold together, and the weaker one counts: the studentized bootstrap's, and one for
    what was never seen. A loss that none of n items showed may still befall a share of
    `1 - alpha ** (1 / n)` of all items (with alpha = 5 %, 3 in n), and no resampling of items
    without it can tell.

    Where fewer than `FEW` items differ at all, resamples without any of them have no spread.
    There the items that lost are counted instead (Clopper-Pearson), each as a total loss.
    """

    scale: str
    scores: Scores
    observed: Means
    replicates: Means
    method: str

    @property
    def value(self) -> float:
        if self.scale == "ratio":
            return self.scores.candidate / self.scores.reference
        return self.scores.candidate - (self.scores.reference if self._ratio(0.0) else 0.0)

    def p_above(self, limit: float) -> float:
        return self._p(limit, 1)

    def p_below(self, limit: float) -> float:
        return self._p(limit, -1)

    def lower(self, alpha: float) -> float:
        return self._bound(alpha, 1)

    def upper(self, alpha: float) -> float:
        return self._bound(alpha, -1)

    def unit_sd(self, limit: float) -> float:
        error = float(self.observed.standard_error(self._ratio(limit)))
        spread = error * math.sqrt(self.scores.units)
        return spread / self.scores.reference if self.scale == "ratio" else spread

    def unseen_distance(self, limit: float, side: int, alpha: float, units: int) -> float:
        distance = distance_to_see(units, side * self._worst(limit, side), alpha)
        return distance / self.scores.reference if self.scale == "ratio" else distance

    def unseen_units(self, limit: float, alpha: float) -> float:
        """Units without further losers that a decision needs, however alike they are."""
        side = 1 if self._distance(limit) > 0 else -1
        if self._few:
            share = self._losing_share(limit, side)
            if not 0 < share < 1:
                return 0.0 if share >= 1 else math.inf
            seen = self._losers(side) / self.scores.units
            counted = items_for(
                share - seen, math.sqrt(share * (1 - share)), math.sqrt(seen * (1 - seen)), alpha
            )
            return max(counted or math.inf, math.log(alpha) / math.log1p(-share))
        return units_to_see(side * self._distance(limit), side * self._worst(limit, side), alpha)

    # `side` is 1 for "above the limit" and -1 for "below it".

    def _ratio(self, limit: float) -> float:
        """The reference's coefficient in `candidate - ratio * reference - offset`."""
        return {"ratio": limit, "difference": 1.0, "mean": 0.0}[self.scale]

    def _distance(self, limit: float) -> float:
        """How far the observed contrast lies above its limit."""
        if self.scale == "ratio":
            # Not `candidate - limit * reference`, which is not 0 at the value itself in floats.
            return (self.value - limit) * self.scores.reference
        return self.value - limit

    def _statistics(self, limit: float, side: int) -> Array:
        """The replicates' studentized statistics; one without spread counts as extreme."""
        ratio = self._ratio(limit)
        shift, error = self.replicates.contrast(ratio), self.replicates.standard_error(ratio)
        flat = error == 0
        return np.where(flat, np.inf, side * shift / np.where(flat, 1.0, error))

    def _p(self, limit: float, side: int) -> float:
        distance = side * self._distance(limit)
        if distance <= 0:
            return 1.0
        if self._few:
            return self._counted_p(limit, side)
        error = float(self.observed.standard_error(self._ratio(limit)))
        statistics, beyond = self._statistics(limit, side), 0
        if error > 0:
            beyond = int(np.count_nonzero(statistics >= distance / error))
        # Without any spread, only what was never seen could bring the contrast down.
        return max(self._unseen_p(limit, side), (1 + beyond) / (len(statistics) + 1))

    @property
    def _few(self) -> bool:
        return self.scores.below + self.scores.above < FEW

    def _unseen_p(self, limit: float, side: int) -> float:
        """Chance that n items show nothing of a loss so common that it brings down the mean."""
        distance, worst = side * self._distance(limit), side * self._worst(limit, side)
        return float((1 - distance / (distance - worst)) ** self.scores.units) if worst < 0 else 0.0

    def _counted_p(self, limit: float, side: int) -> float:
        """Chance of so few losers when the mean is at the limit and every one loses all."""
        share = self._losing_share(limit, side)
        if share <= 0:
            return 1.0
        losers = self._losers(side)
        return float(bdtr(losers, self.scores.units, share)) if share < 1 else 0.0

    def _losers(self, side: int) -> int:
        return self.scores.below if side > 0 else self.scores.above

    def _losing_share(self, limit: float, side: int) -> float:
        """The share of units that lose all when the mean is at the limit; 1 where none could."""
        scores = self.scores
        if self.scale == "mean":
            usual, worst = scores.usual, scores.low if side > 0 else scores.high
            room = side * (usual - limit)
        else:
            usual, worst = scores.usual, side * (scores.low - scores.high)
            # The limit of a ratio leaves room in proportion to the reference's mean.
            allowed = (1 - limit) * scores.reference if self.scale == "ratio" else -limit
            room = side * (usual + allowed)
        total_loss = side * (usual - worst) * scores.stretch
        if room <= 0:
            return 0.0
        return room / total_loss if room < total_loss else 1.0

    def _worst(self, limit: float, side: int) -> float:
        """The contrast of an item that tells most against `side`."""
        low, high = self.scores.low, self.scores.high
        own, other = (low, high) if side > 0 else (high, low)
        offset = 0.0 if self.scale == "ratio" else limit
        return own - self._ratio(limit) * other - offset

    def _bound(self, alpha: float, side: int) -> float:
        """The limit at which the p-value is `alpha`; infinite where no limit has one so small."""
        near, step = self.value, max(abs(self.value), self.scores.high - self.scores.low)
        far = near - side * step
        while self._p(far, side) > alpha:
            if step > LARGEST_RATIO * (abs(self.value) + self.scores.high - self.scores.low):
                return -side * math.inf
            near, step = far, 2 * step
            far = near - side * step
        low, high = min(near, far), max(near, far)
        return float(brentq(lambda limit: self._p(limit, side) - alpha, low, high))
