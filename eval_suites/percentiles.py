"""What a sample of request times says about a percentile, whatever their distribution.

`P99 <= 2 s` is a claim about a share: at most 1 % of requests take longer. So many over the limit
in so many requests is a binomial count, and order statistics bound the percentile itself (David
and Nagaraja 2003, Order Statistics, 7.1). With none over, 299 requests are the fewest that show a
P99 at 95 % confidence; twenty never do.

Requests of one moment are not independent: a stall hits a whole block of them. `effective` divides
the sample by the design effect of consecutive blocks before anything is concluded from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc

from eval_suites.statistics import NothingUnseen

Array = NDArray[np.float64]

BLOCKS = 20
"""Consecutive blocks that a sample is cut into to see whether its requests depend on each other."""

FEWEST_IN_BLOCK = 5


@dataclass(frozen=True, eq=False)
class Percentile(NothingUnseen):
    """A percentile of times in the order in which they were sent; a failed request is infinite.

    An estimate like those of `eval_suites.statistics`, except that nothing about it scales with
    the square root of n: `requests_for` says how many requests a claim needs.
    """

    times: Array
    percent: float

    @property
    def method(self) -> str:
        return "binomial order statistics"

    @property
    def n(self) -> int:
        return len(self.times)

    @property
    def value(self) -> float:
        """The smallest time that at least `percent` % of all requests stay at or below."""
        rank = math.ceil(self.percent / 100 * self.n - 1e-9)
        return float(np.sort(self.times)[max(rank, 1) - 1])

    def p_below(self, limit: float) -> float:
        """One-sided p-value of `the percentile is above the limit`."""
        over, n = self._effective(limit)
        return float(bdtr(over, n, 1 - self.percent / 100))

    def p_above(self, limit: float) -> float:
        """One-sided p-value of `the percentile is at most the limit`."""
        over, n = self._effective(limit)
        return float(bdtrc(over - 1, n, 1 - self.percent / 100)) if over else 1.0

    def upper(self, alpha: float) -> float:
        """The smallest observed time that the percentile is below with error `alpha`, or inf."""
        return self._edge(alpha, self.p_below, np.sort(self.times), math.inf)

    def lower(self, alpha: float) -> float:
        """The largest observed time that the percentile is above with error `alpha`, or 0."""
        just_below = np.nextafter(np.sort(self.times)[::-1], -np.inf)
        return self._edge(alpha, self.p_above, just_below, 0.0)

    def unit_sd(self, limit: float) -> float:
        """Of the indicator that a request is within the limit, the binomial's."""
        return math.sqrt(self.percent * (100 - self.percent)) / 100

    def _effective(self, limit: float) -> tuple[int, int]:
        """Requests over the limit, and all, of an independent sample that tells as much."""
        over = self.times > limit
        effect = design_effect(over)
        n = math.floor(self.n / effect + 1e-9)
        # Rounded up: a request over the limit never disappears.
        return min(math.ceil(over.sum() / effect - 1e-9), n), n

    def _edge(self, alpha: float, p_value: object, ordered: Array, none: float) -> float:
        """The first of the ordered times whose p-value is small enough, by bisection."""
        assert callable(p_value)
        low, high = 0, len(ordered)
        while low < high:
            middle = (low + high) // 2
            if p_value(float(ordered[middle])) <= alpha:
                high = middle
            else:
                low = middle + 1
        return float(ordered[low]) if low < len(ordered) else none


def design_effect(over: NDArray[np.bool_]) -> float:
    """How many dependent requests tell as much as one: at least 1.

    The variance of block means against what independent requests would have (Kish 1965, Survey
    Sampling, 5.4). Fewer than 20 blocks of five requests, or none over, show nothing.
    """
    size = len(over) // BLOCKS
    if size < FEWEST_IN_BLOCK:
        return 1.0
    blocks = over[: size * BLOCKS].reshape(BLOCKS, size)
    if blocks.all() or not blocks.any():
        return 1.0
    return max(1.0, size * float(blocks.mean(axis=1).var(ddof=1) / blocks.var(ddof=1)))


def requests_for(percent: float, alpha: float, over: int = 0) -> int:
    """Fewest requests that show a percentile with error `alpha` when `over` are over the limit."""
    share = 1 - percent / 100
    too_few, enough = over, 2 * over + 1
    while bdtr(over, enough, share) > alpha:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if bdtr(over, middle, share) > alpha:
            too_few = middle
        else:
            enough = middle
    return enough
