"""Simulated releases: scores of a reference and of candidates whose truth is known.

Every generator is exact: the mean that its population has is the one asked for, so that a
candidate "at the margin" is at the margin. Arrays have one row per release, one column per item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval_suites.statistics import PairedTable

Array = NDArray[np.float64]
Rng = np.random.Generator


# -- 0/1 scores ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binary:
    """Right or wrong: the reference's share of right items, the candidate's, and who gained.

    `gained` is the share of items that only the candidate has right; 0 is the fewest discordant
    items that the two shares allow.
    """

    reference: float
    candidate: float
    gained: float

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """Of all items: both right, the candidate only, the reference only, neither."""
        lost = self.reference - self.candidate + self.gained
        return self.candidate - self.gained, self.gained, lost, 1 - self.candidate - lost

    def tables(self, rng: Rng, releases: int, n: int) -> PairedTable:
        """Counts of `releases` releases of `n` items."""
        return PairedTable(*rng.multinomial(n, self.shares, releases).T)

    def growing(self, rng: Rng, releases: int, looks: Sequence[int]) -> list[PairedTable]:
        """Counts after each look at one growing sample."""
        steps = np.diff([0, *looks])
        drawn = [rng.multinomial(int(step), self.shares, releases) for step in steps]
        return [PairedTable(*total.T) for total in np.cumsum(drawn, axis=0)]

    def population(self, items: int = 10_000) -> tuple[Array, Array]:
        """Scores of candidate and reference with just these shares."""
        counts = np.diff(np.round(items * np.cumsum([0.0, *self.shares])).astype(int))
        own = np.repeat([1.0, 1.0, 0.0, 0.0], counts)
        return own, np.repeat([1.0, 0.0, 1.0, 0.0], counts)


def discordances(reference: float, candidate: float) -> Iterator[tuple[str, Binary]]:
    """From the fewest discordant items to independence, as far as that reaches."""
    independent = candidate * (1 - reference)
    for name, gained in (("nested", 0.0), ("+0.02", 0.01), ("+0.10", 0.05)):
        if gained < independent:
            yield name, Binary(reference, candidate, gained)
    yield "independent", Binary(reference, candidate, independent)


def sharing_a_teacher(
    truths: Sequence[Binary], rng: Rng, releases: int, looks: Sequence[int]
) -> list[list[PairedTable]]:
    """Counts by look and candidate: one teacher's items, on which candidates lose independently."""
    found: list[list[PairedTable]] = []
    reference = truths[0].reference
    counts = [np.zeros((4, releases), int) for _ in truths]
    for step in np.diff([0, *looks]):
        right = rng.binomial(int(step), reference, releases)
        wrong = int(step) - right
        for place, truth in enumerate(truths):
            both = rng.binomial(right, truth.shares[0] / reference)
            gained = rng.binomial(wrong, truth.shares[1] / (1 - reference))
            counts[place] = counts[place] + np.array([both, gained, right - both, wrong - gained])
        found.append([PairedTable(*one) for one in counts])
    return found


# -- graded scores ---------------------------------------------------------------------------

RUBRIC = np.array([0.0, 0.3, 0.5, 0.8, 1.0])
RUBRIC_SHARES = np.array([0.04, 0.06, 0.10, 0.30, 0.50])
RUBRIC_MEAN = float(RUBRIC @ RUBRIC_SHARES)
RUBRIC_STEP = float(np.diff(RUBRIC) @ RUBRIC_SHARES[1:])
"""What the rubric's mean loses when every item falls by one step."""


@dataclass(frozen=True)
class Graded:
    """A shape of graded scores: how the teacher's fall, and how a candidate's follow them."""

    name: str
    mean: float
    teacher: Callable[[Rng, tuple[int, int]], Array]
    candidate: Callable[[Rng, Array, float], Array]
    """Scores for a teacher's, at a true retention of at most 1."""

    def pairs(self, rng: Rng, releases: int, n: int, retention: float) -> tuple[Array, Array]:
        """Scores of candidate and teacher."""
        teacher = self.teacher(rng, (releases, n))
        return self.candidate(rng, teacher, retention), teacher


def _noisy(rng: Rng, teacher: Array, retention: float) -> Array:
    mean = retention * teacher
    return mean + rng.uniform(-1, 1, teacher.shape) * np.minimum(mean, 1 - mean)


def _rubric(rng: Rng, shape: tuple[int, int]) -> Array:
    return rng.choice(RUBRIC, shape, p=RUBRIC_SHARES)


def _rubric_loss(rng: Rng, teacher: Array, retention: float) -> Array:
    """Half of the loss in total losses, the other half in steps down the rubric."""
    total = (1 - retention) / 2
    step = (1 - retention / (1 - total)) * RUBRIC_MEAN / RUBRIC_STEP
    places = np.searchsorted(RUBRIC, teacher)
    places = np.maximum(places - (rng.random(teacher.shape) < step), 0)
    return np.where(rng.random(teacher.shape) < total, 0.0, RUBRIC[places])


def _catastrophe(rng: Rng, teacher: Array, retention: float) -> Array:
    return np.where(rng.random(teacher.shape) < retention, teacher, 0.0)


def _top_lost(rng: Rng, teacher: Array, retention: float) -> Array:
    """The whole loss falls on items with the full score."""
    share = (1 - retention) * RUBRIC_MEAN / float(RUBRIC_SHARES[-1])
    return np.where((teacher == 1) & (rng.random(teacher.shape) < share), 0.0, teacher)


def _independent(rng: Rng, teacher: Array, retention: float) -> Array:
    own = 0.75 * retention
    return rng.beta(4 * own, 4 * (1 - own), teacher.shape)


SHAPES = {
    shape.name: shape
    for shape in (
        Graded("beta with noise", 0.75, lambda rng, shape: rng.beta(6, 2, shape), _noisy),
        Graded("rubric, steps and total losses", RUBRIC_MEAN, _rubric, _rubric_loss),
        Graded("rubric, full scores lost", RUBRIC_MEAN, _rubric, _top_lost),
        Graded("rare catastrophe", 0.80, lambda rng, shape: rng.beta(8, 2, shape), _catastrophe),
        Graded("independent", 0.75, lambda rng, shape: rng.beta(3, 1, shape), _independent),
        Graded(
            "sparse, rare catastrophe",
            0.30 * 5 / 7,
            lambda rng, shape: (rng.random(shape) < 0.30) * rng.beta(5, 2, shape),
            _catastrophe,
        ),
    )
}


def tokens(rng: Rng, releases: int, n: int, ratio: float) -> tuple[Array, Array]:
    """Output tokens of candidate and reference: log-normal, correlated, of a ratio of means."""
    spread = 0.6
    shared = rng.normal(0, spread, (releases, n))
    own, other = (rng.normal(0, spread, (releases, n)) for _ in range(2))
    return ratio * 200 * np.exp(shared + own), 200 * np.exp(shared + other)


# -- strata and clusters ---------------------------------------------------------------------


@dataclass(frozen=True)
class Clustered:
    """Conversations of one to nine items of which whole ones fail.

    Where `long_fail` is above 0, a conversation fails the likelier the longer it is. With
    `graded`, right items score a beta value instead of 1.
    """

    name: str
    clusters: int
    graded: bool = False
    long_fail: float = 0.0

    def release(self, rng: Rng, retention: float) -> tuple[Array, Array, NDArray[np.int64]]:
        """Scores of candidate and teacher, and the items' conversations, for one release."""
        sizes = rng.integers(1, 10, self.clusters)
        # Sizes 1 to 9 have mean 5 and mean square 95 / 3; so 1 - retention of all items fail.
        tilt = 1 + self.long_fail * (sizes - 5)
        expected = 1 + self.long_fail * (95 / 3 / 5 - 5)
        fails = rng.random(self.clusters) < (1 - retention) * tilt / expected
        conversation = np.repeat(np.arange(self.clusters), sizes)
        teacher = (rng.random(len(conversation)) < 0.8).astype(float)
        if self.graded:
            teacher = rng.beta(6, 2, len(conversation))
        return np.where(fails[conversation], 0.0, teacher), teacher, conversation


@dataclass(frozen=True)
class Stratified:
    """Segments of unlike scores, of which some carry the loss.

    `shares` of the items, the teacher's `means`, and how much of the whole loss each carries.
    """

    name: str
    shares: tuple[float, ...]
    means: tuple[float, ...]
    carried: tuple[float, ...]

    def segments(self, n: int) -> NDArray[np.int64]:
        """The items' segments: as many of each as its share, in every release."""
        edges = np.round(n * np.cumsum(self.shares)).astype(int)
        return np.searchsorted(edges, np.arange(n), side="right")

    def pairs(self, rng: Rng, releases: int, n: int, retention: float) -> tuple[Array, Array]:
        segment = self.segments(n)
        mean = np.array(self.means)
        sizes = np.bincount(segment, minlength=len(mean))
        loss = (1 - retention) * float(sizes @ mean) * np.array(self.carried) / (sizes * mean)
        own = mean[segment]
        teacher = rng.beta(4 * own, 4 * (1 - own), (releases, n))
        lost = rng.random((releases, n)) < loss[segment]
        return np.where(lost, 0.0, teacher), teacher
