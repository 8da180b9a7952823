"""The settings that `make simulate` goes through, family by family.

A row is one kind of release on one number of items; its cells are the truths: how much of the
margin the candidate really loses. 1 is at the margin, where a PASS is wrong and may happen to
one release in twenty.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from benchmarks.deciding import (
    LEVEL,
    Asked,
    PValues,
    Rates,
    any_passed,
    binary_p,
    evidence_of,
    graded_p,
    policy_of,
    predicted_power,
    rates_of,
)
from benchmarks.releases import (
    SHAPES,
    Array,
    Binary,
    Clustered,
    Graded,
    Rng,
    Stratified,
    discordances,
    sharing_a_teacher,
    tokens,
)
from eval_suites.power_plan import plan_power
from eval_suites.statistics import ExactProportion

SEED = 20_300_102
TEACHERS = (0.60, 0.75, 0.90, 0.97)
ITEMS = (100, 200, 500, 1000, 3000)
LOSSES = (1.4, 1.2, 1.0, 0.8, 0.5)
"""Of the margin. With a retention of 0.90: 0.86, 0.88, 0.90, 0.92 and 0.95."""
BINARY_FACTOR = 10
"""Counts are drawn so fast that 0/1 settings take this many times the releases."""
POPULATION = 200_000


@dataclass(frozen=True)
class Size:
    """How many releases and bootstrap replicates."""

    releases: int = 2000
    replicates: int = 1000


@dataclass(frozen=True)
class Cell:
    """The verdicts at one truth. `loss` is what is lost, as a share of the margin."""

    loss: float
    rates: Rates
    predicted: float | None = None
    """Power that `pilotage power` says."""

    @property
    def wrong_pass(self) -> bool:
        return self.loss >= 1


@dataclass(frozen=True)
class Row:
    """One setting at all its truths."""

    family: str
    label: str
    items: str
    compute: Callable[[Size], list[Cell]] = field(repr=False)

    @property
    def key(self) -> str:
        return f"{self.family}: {self.label}, {self.items} items"


def rng_of(*names: object) -> Rng:
    """A stream of its own for each setting, whatever else is run."""
    return np.random.default_rng([SEED, zlib.crc32(repr(names).encode())])


# -- one gate, one look ----------------------------------------------------------------------


@dataclass(frozen=True)
class Margin:
    """A gate's margin: the least retention, or the largest loss."""

    name: str
    asked: Asked

    def retention(self, mean: float, loss: float) -> float:
        """The true retention of a candidate that loses `loss` of the margin."""
        room = 1 - self.asked.limit if self.asked.scale == "ratio" else -self.asked.limit / mean
        return 1 - loss * room


RETENTION_90 = Margin("retention 0.90", Asked("ratio", 0.90))
RETENTION_97 = Margin("retention 0.97", Asked("ratio", 0.97))
LOSS_05 = Margin("non-inferiority 0.05", Asked("difference", -0.05))
LOSS_02 = Margin("non-inferiority 0.02", Asked("difference", -0.02))
MARGINS = (RETENTION_90, RETENTION_97, LOSS_05, LOSS_02)


def binary_rows(margin: Margin) -> Iterator[Row]:
    for teacher in TEACHERS:
        names = [name for name, _ in _truths(margin, teacher, 1.0)]
        for name in names:
            for n in ITEMS:
                compute = partial(_binary, margin, teacher, name, n)
                label = f"teacher {teacher:g}, {name}"
                yield Row(f"0/1, {margin.name}", label, str(n), compute)


def _truths(margin: Margin, teacher: float, loss: float) -> list[tuple[str, Binary]]:
    own = teacher * margin.retention(teacher, loss)
    return list(discordances(teacher, own))


def _binary(margin: Margin, teacher: float, name: str, n: int, size: Size) -> list[Cell]:
    cells = []
    for loss in LOSSES:
        # Nearer to the teacher fewer discordances are possible.
        truth = dict(_truths(margin, teacher, loss)).get(name)
        if truth is None:
            continue
        rng = rng_of("binary", margin.name, teacher, name, n, loss)
        table = truth.tables(rng, size.releases * BINARY_FACTOR, n)
        predicted = None
        if loss < 1:
            predicted = predicted_power(
                *truth.population(), margin.asked, truth.candidate / teacher, n
            )
        cells.append(Cell(loss, rates_of(binary_p(table, margin.asked)), predicted))
    return cells


def graded_rows(
    margin: Margin,
    losses: Sequence[float],
    names: Sequence[str],
    items: Sequence[int] = ITEMS,
) -> Iterator[Row]:
    for name in names:
        for n in items:
            compute = partial(_graded, margin, SHAPES[name], n, losses)
            yield Row(f"graded, {margin.name}", name, str(n), compute)


def _graded(
    margin: Margin, shape: Graded, n: int, losses: Sequence[float], size: Size
) -> list[Cell]:
    cells = []
    for loss in losses:
        retention = margin.retention(shape.mean, loss)
        rng = rng_of("graded", margin.name, shape.name, n, loss)
        own, teacher = shape.pairs(rng, size.releases, n, retention)
        rates = rates_of(graded_p(own, teacher, margin.asked, size.replicates))
        predicted = None
        if loss < 1:
            scores = population(shape.name, retention)
            predicted = predicted_power(*scores, margin.asked, retention, n)
        cells.append(Cell(loss, rates, predicted))
    return cells


@cache
def population(shape: str, retention: float) -> tuple[Array, Array]:
    """Scores enough to stand for the truth."""
    pairs = SHAPES[shape].pairs(rng_of("population", shape, retention), 1, POPULATION, retention)
    return pairs[0][0], pairs[1][0]


# -- several candidates, several looks -------------------------------------------------------

LOOKS = {
    "one look": ((1.0, 1.0),),
    "two looks": ((0.5, 0.5), (1.0, 0.5)),
    "three looks": ((0.25, 0.2), (0.5, 0.3), (1.0, 0.5)),
}
"""Each look's part of the items and its share of the error."""

GROUPS = {
    "one candidate": (1.0,),
    "five, all at the margin": (1.0,) * 5,
    "three at the margin, two far better": (1.0, 1.0, 1.0, 0.2, 0.2),
}
"""What each candidate loses, as a share of the margin."""


def repeated_rows() -> Iterator[Row]:
    """Wrong PASS of any candidate at any look, where one look at one candidate is no choice."""
    for group, losses in GROUPS.items():
        for plan, looks in LOOKS.items():
            if len(losses) == len(looks) == 1:
                continue
            for n in (400, 2000):
                for teacher in TEACHERS:
                    for name in ("nested", "independent"):
                        label = f"0/1, teacher {teacher:g}, {name}"
                        compute = partial(_binary_chosen, losses, looks, teacher, name, n)
                        yield Row(f"{group}, {plan}", label, str(n), compute)
            for shape in _shapes_for(group, plan):
                compute = partial(_graded_chosen, losses, looks, SHAPES[shape], 400)
                yield Row(f"{group}, {plan}", f"graded, {shape}", "400", compute)


def _shapes_for(group: str, plan: str) -> Sequence[str]:
    """Five graded candidates at three looks are fifteen bootstraps a release: not for all."""
    if group == "one candidate":
        return list(SHAPES)
    if group == "five, all at the margin" and plan != "three looks":
        return ["beta with noise", "rubric, steps and total losses", "rare catastrophe"]
    return []


def _binary_chosen(
    losses: Sequence[float],
    looks: Sequence[tuple[float, float]],
    teacher: float,
    name: str,
    n: int,
    size: Size,
) -> list[Cell]:
    truths = [dict(_truths(RETENTION_90, teacher, loss))[name] for loss in losses]
    rng = rng_of("chosen", losses, looks, teacher, name, n)
    items = [round(part * n) for part, _ in looks]
    drawn = sharing_a_teacher(truths, rng, size.releases * BINARY_FACTOR, items)
    p = [[binary_p(table, RETENTION_90.asked).to_pass for table in at_look] for at_look in drawn]
    return [_any_wrong(p, losses, looks)]


def _graded_chosen(
    losses: Sequence[float],
    looks: Sequence[tuple[float, float]],
    shape: Graded,
    n: int,
    size: Size,
) -> list[Cell]:
    rng = rng_of("chosen", losses, looks, shape.name, n)
    teacher = shape.teacher(rng, (size.releases, n))
    own = [shape.candidate(rng, teacher, RETENTION_90.retention(1, loss)) for loss in losses]
    p = []
    for part, _ in looks:
        m = round(part * n)
        asked = RETENTION_90.asked
        p.append(
            [graded_p(one[:, :m], teacher[:, :m], asked, size.replicates).to_pass for one in own]
        )
    return [_any_wrong(p, losses, looks)]


def _any_wrong(
    p: Sequence[Sequence[Array]], losses: Sequence[float], looks: Sequence[tuple[float, float]]
) -> Cell:
    wrong = [place for place, loss in enumerate(losses) if loss >= 1]
    found = [
        any_passed(at_look, wrong, LEVEL * share)
        for at_look, (_, share) in zip(p, looks, strict=True)
    ]
    passed = np.max(found, axis=0)
    return Cell(1.0, Rates(float(passed.mean()), math.nan, len(passed)))


# -- strata and clusters ---------------------------------------------------------------------

CLUSTERED = (
    Clustered("0/1, whole conversations fail", 40),
    Clustered("0/1, whole conversations fail", 200),
    Clustered("0/1, long ones fail more", 100, long_fail=0.15),
    Clustered("graded, whole conversations fail", 200, graded=True),
)

THREE, TWO = (0.6, 0.3, 0.1), (0.5, 0.5)
STRATIFIED = (
    Stratified("three, the small ones lose", THREE, (0.9, 0.8, 0.6), (0, 0.5, 0.5)),
    Stratified("two of unlike scores", TWO, (0.9, 0.4), (0.7, 0.3)),
)


def design_rows() -> Iterator[Row]:
    for one in CLUSTERED:
        items = f"about {5 * one.clusters} in {one.clusters}"
        yield Row("clusters, retention 0.90", one.name, items, partial(_clustered, one))
    for other in STRATIFIED:
        for n in (200, 1000):
            compute = partial(_stratified, other, n)
            yield Row("strata, retention 0.90", other.name, str(n), compute)


def _clustered(kind: Clustered, size: Size) -> list[Cell]:
    cells = []
    for loss in (1.0, 0.5):
        rng, predicted = rng_of("clustered", kind, loss), None
        p = [_one_clustered(kind, rng, 1 - 0.1 * loss, size) for _ in range(size.releases)]
        joined = PValues(
            np.concatenate([one.to_pass for one in p]), np.concatenate([one.to_fail for one in p])
        )
        if loss < 1:
            many = replace(kind, clusters=POPULATION // 5)
            own, teacher, conversation = many.release(rng, 1 - 0.1 * loss)
            predicted = predicted_power(
                *(own, teacher, RETENTION_90.asked, 1 - 0.1 * loss),
                *(5 * kind.clusters, conversation),
            )
        cells.append(Cell(loss, rates_of(joined), predicted))
    return cells


def _one_clustered(kind: Clustered, rng: Rng, retention: float, size: Size) -> PValues:
    own, teacher, conversation = kind.release(rng, retention)
    return graded_p(
        own[None], teacher[None], RETENTION_90.asked, size.replicates, clusters=conversation
    )


def _stratified(kind: Stratified, n: int, size: Size) -> list[Cell]:
    cells = []
    for loss in (1.0, 0.5):
        rng = rng_of("stratified", kind.name, n, loss)
        own, teacher = kind.pairs(rng, size.releases, n, 1 - 0.1 * loss)
        p = graded_p(own, teacher, RETENTION_90.asked, size.replicates, strata=kind.segments(n))
        cells.append(Cell(loss, rates_of(p)))
    return cells


# -- other kinds of gates --------------------------------------------------------------------


def other_rows() -> Iterator[Row]:
    for n in ITEMS:
        for margin in (0.6, 0.9, 0.97):
            compute = partial(_floor, margin, n)
            yield Row("floor", f"0/1, margin {margin:g}", str(n), compute)
        yield Row("floor", "graded, beta, margin 0.75", str(n), partial(_graded_floor, n))
        yield Row("length", "log-normal, margin 1.2", str(n), partial(_length, n))
    for n in (400, 2000):
        for teacher in (0.6, 0.9):
            compute = partial(_slices, teacher, n)
            label = f"0/1, teacher {teacher:g}, one of four slices at the margin"
            yield Row("slices, non-inferiority 0.05", label, str(n), compute)


def _floor(margin: float, n: int, size: Size) -> list[Cell]:
    rng = rng_of("floor", margin, n)
    hits = rng.binomial(n, margin, size.releases * BINARY_FACTOR)
    distinct, places = np.unique(hits, return_inverse=True)
    estimates = [ExactProportion(int(one), n) for one in distinct]
    to_pass = np.array([one.p_above(margin) for one in estimates])[places]
    to_fail = np.array([one.p_below(margin) for one in estimates])[places]
    return [Cell(1.0, rates_of(PValues(to_pass, to_fail)))]


def _graded_floor(n: int, size: Size) -> list[Cell]:
    scores = rng_of("graded floor", n).beta(6, 2, (size.releases, n))
    return [Cell(1.0, rates_of(graded_p(scores, None, Asked("mean", 0.75), size.replicates)))]


def _length(n: int, size: Size) -> list[Cell]:
    own, other = tokens(rng_of("length", n), size.releases, n, 1.2)
    return [Cell(1.0, rates_of(graded_p(own, other, Asked("ratio", 1.2, -1), size.replicates)))]


def _slices(teacher: float, n: int, size: Size) -> list[Cell]:
    rng, releases = rng_of("slices", teacher, n), size.releases * BINARY_FACTOR
    truths = [Binary(teacher, teacher - loss, 0.01) for loss in (0.05, 0.0, 0.0, 0.0)]
    found = [binary_p(truth.tables(rng, releases, n // 4), LOSS_05.asked) for truth in truths]
    to_pass = np.max([p.to_pass for p in found], axis=0)
    # A slice fails the gate at its part of the level.
    to_fail = np.min([p.to_fail for p in found], axis=0) * len(truths)
    return [Cell(1.0, rates_of(PValues(to_pass, to_fail)))]


# -- as many items as `pilotage power` says --------------------------------------------------


def planned_rows() -> Iterator[Row]:
    """Releases of just as many items as the plan wants for 80 % power."""
    for loss in (0.8, 0.5):
        effect = RETENTION_90.retention(1, loss)
        for teacher in TEACHERS:
            for name, truth in _truths(RETENTION_90, teacher, loss):
                n = _wanted(*truth.population(), effect)
                if n is None:
                    continue
                label = f"0/1, teacher {teacher:g}, {name}, truth {effect:g}"
                compute = partial(_planned_binary, truth, n, loss)
                yield Row("as many items as planned", label, str(n), compute)
        for shape in SHAPES.values():
            n = _wanted(*population(shape.name, effect), effect)
            if n is None:
                continue
            label = f"graded, {shape.name}, truth {effect:g}"
            compute = partial(_planned_graded, shape, n, loss)
            yield Row("as many items as planned", label, str(n), compute)


def _wanted(own: Array, teacher: Array, effect: float) -> int | None:
    """Items by `pilotage power`; None where its least number decides."""
    policy = policy_of("retention", 0.90)
    (gate,) = plan_power(policy, effect, evidence_of(own), evidence_of(teacher))
    return gate.items if not gate.note else None


def _planned_binary(truth: Binary, n: int, loss: float, size: Size) -> list[Cell]:
    table = truth.tables(rng_of("planned", truth, n), size.releases * BINARY_FACTOR, n)
    said = predicted_power(
        *truth.population(), RETENTION_90.asked, truth.candidate / truth.reference, n
    )
    return [Cell(loss, rates_of(binary_p(table, RETENTION_90.asked)), said)]


def _planned_graded(shape: Graded, n: int, loss: float, size: Size) -> list[Cell]:
    rng = rng_of("planned", shape.name, n)
    effect = RETENTION_90.retention(1, loss)
    own, teacher = shape.pairs(rng, size.releases, n, effect)
    rates = rates_of(graded_p(own, teacher, RETENTION_90.asked, size.replicates))
    said = predicted_power(*population(shape.name, effect), RETENTION_90.asked, effect, n)
    return [Cell(loss, rates, said)]


# -- all of them -----------------------------------------------------------------------------

FAMILIES: dict[str, Callable[[], Iterator[Row]]] = {
    "binary": lambda: (row for margin in MARGINS for row in binary_rows(margin)),
    "graded": lambda: graded_rows(RETENTION_90, LOSSES, list(SHAPES)),
    "graded_margins": lambda: (
        row
        for margin in MARGINS[1:]
        for row in graded_rows(margin, (1.0, 0.5), list(SHAPES)[:4], (100, 300, 1000))
    ),
    "repeated": repeated_rows,
    "designs": design_rows,
    "others": other_rows,
    "planned": planned_rows,
}
