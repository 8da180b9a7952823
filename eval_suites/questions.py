"""From a rule and evidence to questions: is this number on the right side of that limit?

A gate asks one question, or one for each slice. What cannot be asked (missing, incomplete, not a
number, not comparable) raises `Unusable`, and the gate is INVALID with that reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from eval_suites.bootstrap import Bootstrap, Pair, Resampling, Scores
from eval_suites.comparable import (
    check_alike,
    check_same_columns,
    check_same_items,
    check_same_metric,
    items_of,
    summary_of,
)
from eval_suites.load_points import times_of
from eval_suites.percentiles import Percentile
from eval_suites.policy import GateRule
from eval_suites.statistics import (
    Estimate,
    ExactProportion,
    PairedDifference,
    PairedRatio,
    PairedTable,
    Scaled,
)
from registry.evidence import AccuracyEvidence, Unusable

if TYPE_CHECKING:
    from registry.evidence_folders import CandidateEvidence
    from registry.items import Items

Array = NDArray[np.float64]
Scale = Literal["ratio", "difference", "mean", "percentile"]

SUMMARY_TOLERANCE = 1e-6
"""Relative difference up to which a summary's mean is that of its rows."""

LARGEST_SCORE = 1e100
"""Scores beyond it, or below its inverse, have squares that floating point cannot add up."""

FEWEST_CLUSTERS = 20
"""Fewer clusters than this do not show how much clusters differ."""


@dataclass(frozen=True, eq=False)
class Question:
    """Whether the truth lies above (`side` 1) or below (-1) `limit`, from scores per item."""

    scale: Scale
    limit: float
    side: int
    candidate: Array
    reference: Array | None
    ids: NDArray[Any] | None = None
    slice: str | None = None
    strata: NDArray[Any] | None = None
    clusters: NDArray[Any] | None = None
    design: tuple[str | None, ...] = ()
    noise: float | None = None
    same_bundle: bool = False
    percent: float | None = None

    @property
    def n(self) -> int:
        return len(self.candidate)

    @property
    def units(self) -> int | None:
        """Clusters, where items are clustered."""
        return len(self._sizes) if self.clusters is not None else None

    @property
    def even_units(self) -> float | None:
        """As many clusters of one size weigh as much (Kish 1965, 11.7): one large one is one."""
        if self.clusters is None:
            return None
        return float(self.n**2 / (self._sizes**2).sum())

    @cached_property
    def _sizes(self) -> NDArray[np.float64]:
        """Items of every cluster."""
        assert self.clusters is not None
        return np.unique(self.clusters, return_counts=True)[1].astype(float)

    @property
    def room(self) -> float | None:
        """The margin as a difference of means; None for an absolute limit."""
        if self.reference is None:
            return None
        if self.scale == "ratio":
            return abs(self.limit - 1) * float(self.reference.mean())
        return abs(self.limit)


def scale_of(rule: GateRule) -> tuple[Scale, float, int]:
    """Scale, limit and side of a rule's question."""
    if rule.kind == "retention":
        return "ratio", rule.margin, 1
    if rule.kind == "length":
        return "ratio", rule.margin, -1
    if rule.kind == "floor":
        return "mean", rule.margin, 1
    if rule.kind == "ceiling":
        return "mean", rule.margin, -1
    better = 1 if rule.direction == "higher" else -1
    # Plus 0, so that no margin is not a margin of -0.
    return "difference", -better * rule.margin + 0.0, better


def questions_of(
    rule: GateRule,
    candidate: CandidateEvidence,
    reference: CandidateEvidence | None,
    repeated: tuple[CandidateEvidence, CandidateEvidence] | None = None,
) -> list[Question]:
    """The rule's questions, one per slice. Raises `Unusable`.

    `repeated` are two runs of one bundle (A/A), for the noise of the measurement itself.
    """
    own = items_of(candidate, "candidate")
    scores = checked_metric(rule.metric, candidate, "candidate")
    theirs: Array | None = None
    if rule.reference is not None:
        if reference is None:
            raise Unusable(f"there is no evidence of the {rule.reference}")
        other = items_of(reference, rule.reference)
        theirs = checked_metric(rule.metric, reference, rule.reference)
        check_alike(rule, candidate, reference)
        check_same_items(rule, own, other)
        check_same_columns(rule, own, other)
        check_same_metric(rule, own, other, scores, theirs)
    scale, limit, side = scale_of(rule)
    strata = column_of(rule, own, rule.strata)
    clusters = column_of(rule, own, rule.cluster)
    if clusters is None and rule.reference is not None:
        # What depends on each other does so on both sides, whichever of them recorded it.
        clusters = column_of(rule, other, rule.cluster)
    if clusters is not None and len(np.unique(clusters)) == len(own):
        clusters = None
    noise = None if repeated is None or theirs is None else _repeats(rule.metric, own, repeated)
    found = []
    for column, label, rows in slices_of(rule, own):
        reference_scores = None if theirs is None else theirs[rows]
        part = f" in {label}" if label else ""
        if scale == "ratio" and reference_scores is not None and reference_scores.mean() <= 0:
            raise Unusable(
                f"the {rule.reference}'s {rule.metric} is {reference_scores.mean():g}{part}: "
                "no ratio to it exists"
            )
        found.append(
            Question(
                scale=scale,
                limit=limit,
                side=side,
                candidate=scores[rows],
                reference=reference_scores,
                ids=own.ids[rows],
                slice=label,
                strata=None if strata is None else strata[rows],
                clusters=None if clusters is None else clusters[rows],
                design=(rule.strata, rule.cluster, column, label),
                noise=None if noise is None else noise_of(noise[0][rows], noise[1][rows]),
                same_bundle=_is_same(candidate, reference, scores, theirs),
            )
        )
    return found


def latency_questions(rule: GateRule, candidate: CandidateEvidence) -> list[Question]:
    """The question of a percentile at the rule's rate. Raises `Unusable`."""
    times, percent = times_of(rule, candidate, "candidate")
    if not len(times):
        raise Unusable(f"no request has a {rule.metric.removeprefix('latency.')}")
    side = -1 if rule.kind == "ceiling" else 1
    return [Question("percentile", rule.margin, side, times, None, percent=percent)]


def checked_metric(name: str, evidence: CandidateEvidence, who: str) -> Array:
    """The scores per item, their mean being the summary's. Raises `Unusable`."""
    items, summary = items_of(evidence, who), summary_of(evidence, who)
    scores: Array = items.metric(name, LARGEST_SCORE)
    mean, said = float(scores.mean()), None
    if summary is not None:
        known = metric_named(name, summary)
        said = summary.metrics.get(known)
        if known in summary.metrics and said is None:
            raise Unusable(
                f"the {who}'s summary has no number for {name}, its items have {mean:.6g} "
                f"({items.where})"
            )
    if said is not None and not abs(mean - said) <= SUMMARY_TOLERANCE * max(abs(mean), abs(said)):
        raise Unusable(
            f"the {who}'s summary says {name} {said:.6g}, its items have {mean:.6g} ({items.where})"
        )
    return scores


def metric_named(name: str, summary: AccuracyEvidence) -> str:
    """`name`, or the one metric of the summary that is it with a filter (`name,filter`)."""
    found = [known for known in summary.metrics if known.partition(",")[0] == name]
    return found[0] if name not in summary.metrics and len(found) == 1 else name


def column_of(rule: GateRule, items: Items, column: str | None) -> NDArray[Any] | None:
    """Labels of a stratum or cluster column; one that only the defaults name may be missing."""
    if column is None:
        return None
    absent = not items.has(column) or not any(map(_written, items.frame[column]))
    if absent and column not in rule.named_columns:
        return None
    return items.labels(column)


def _written(label: Any) -> bool:
    """Whether a cell holds something: null, NaN and blank text are nothing."""
    return label is not None and label == label and str(label).strip() != ""


def slices_of(
    rule: GateRule, items: Items
) -> Iterator[tuple[str | None, str | None, NDArray[np.bool_]]]:
    """Column, label and rows of every slice, or all rows without either. Raises `Unusable`."""
    if not rule.slices:
        yield None, None, np.ones(len(items), bool)
        return
    seen = set()
    for column in rule.slices:
        labels = items.labels(column)
        for value in np.unique(labels):
            seen.add(str(value))
            yield column, f"{column}={value}", labels == value
    missing = [value for value in rule.expected if value not in seen]
    if missing:
        raise Unusable(f"no item is in the slices {', '.join(missing)}")


def _repeats(
    metric: str, own: Items, repeated: tuple[CandidateEvidence, CandidateEvidence]
) -> tuple[Array, Array]:
    bundles = {evidence.bundle for evidence in repeated}
    if len(bundles) > 1:
        named = " and ".join(sorted(bundle[:12] or "none" for bundle in bundles))
        raise Unusable(f"the A/A runs are of two bundles: {named}")
    first, second = (items_of(evidence, "A/A run") for evidence in repeated)
    if not (np.array_equal(first.ids, own.ids) and np.array_equal(second.ids, own.ids)):
        raise Unusable("the A/A run has other items than the candidate")
    return first.metric(metric), second.metric(metric)


def _is_same(
    candidate: CandidateEvidence,
    reference: CandidateEvidence | None,
    scores: Array,
    theirs: Array | None,
) -> bool:
    """Whether the candidate is the reference: one bundle, one measurement."""
    return (
        reference is not None
        and bool(candidate.bundle)
        and candidate.bundle == reference.bundle
        and np.array_equal(scores, theirs if theirs is not None else [])
    )


# -- estimates -------------------------------------------------------------------------------


def estimates_of(questions: Sequence[Question]) -> list[Estimate]:
    """One estimate per question; those that need a bootstrap of one design share its draws."""
    return estimates_of_each([questions])[0]


def estimates_of_each(asked: Sequence[Sequence[Question]]) -> list[list[Estimate]]:
    """The same for the questions of several candidates: whoever resamples alike shares draws."""
    found: dict[tuple[int, int], Estimate] = {}
    by_design: dict[tuple[int, tuple[str | None, ...]], list[int]] = {}
    for who, questions in enumerate(asked):
        for index, question in enumerate(questions):
            simple = _closed_form(question)
            if simple is not None:
                found[who, index] = simple
            else:
                by_design.setdefault((who, question.design), []).append(index)
    groups = [[asked[who][index] for index in places] for (who, _), places in by_design.items()]
    for ((who, _), places), estimates in zip(by_design.items(), _bootstrapped(groups), strict=True):
        found |= {(who, index): one for index, one in zip(places, estimates, strict=True)}
    return [
        [found[who, index] for index in range(len(questions))]
        for who, questions in enumerate(asked)
    ]


def noise_of(first: Array, second: Array, error: float = 0.05) -> float:
    """The largest difference that two runs of one bundle leave possible, one-sided 95 %."""
    return _noise(first.tobytes(), second.tobytes(), error)


@lru_cache(maxsize=64)
def _noise(first: bytes, second: bytes, error: float) -> float:
    # Kept, because every candidate of a release asks for that of the same two runs.
    question = Question("difference", 0.0, 1, np.frombuffer(first), np.frombuffer(second))
    (estimate,) = estimates_of([question])
    return max(abs(estimate.lower(error)), abs(estimate.upper(error)))


def _closed_form(question: Question) -> Estimate | None:
    """Intervals of 0/1 scores, for items that are independent of each other."""
    if question.percent is not None:
        return Percentile(question.candidate, question.percent)
    unit = right_score(question.candidate, question.reference)
    if unit is None or question.clusters is not None:
        return None
    own = question.candidate > 0
    if question.reference is None:
        return Scaled(ExactProportion(int(own.sum()), question.n), unit)
    other = question.reference > 0
    table = PairedTable(
        both=int((own & other).sum()),
        candidate_only=int((own & ~other).sum()),
        reference_only=int((~own & other).sum()),
        neither=int((~own & ~other).sum()),
    )
    if question.scale == "ratio":
        return PairedRatio(table)
    return Scaled(PairedDifference(table), unit)


def right_score(candidate: Array, reference: Array | None) -> float | None:
    """The score of a right item where every score is that or 0; None for graded scores."""
    scores = candidate if reference is None else np.concatenate([candidate, reference])
    values = np.unique(scores)
    other = values[values != 0]
    if len(other) == 0:
        return 1.0
    return float(other[0]) if len(other) == 1 and other[0] > 0 else None


def _bootstrapped(groups: Sequence[Sequence[Question]]) -> list[list[Estimate]]:
    """Estimates of groups of questions, each group of one design."""
    designs = [Resampling(one.n, one.strata, one.clusters) for one, *_ in groups]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, resampling in enumerate(designs):
        alike.setdefault(resampling.design, []).append(place)
    named = [_scores_and_pairs(group) for group in groups]
    found: dict[int, list[Estimate]] = {}
    for places in alike.values():
        resampling = designs[places[0]]
        asked = [(named[place][0], list(dict.fromkeys(named[place][1]))) for place in places]
        for place, means in zip(places, resampling.means_of_each(asked), strict=True):
            found[place] = [
                Bootstrap(
                    question.scale,
                    Scores.of(question.candidate, question.reference, resampling),
                    *means[pair],
                    resampling.described,
                )
                for question, pair in zip(groups[place], named[place][1], strict=True)
            ]
    return [found[place] for place in range(len(groups))]


def _scores_and_pairs(questions: Sequence[Question]) -> tuple[dict[str, Array], list[Pair]]:
    """The scores of questions by name, and of each question the names of its own."""
    scores: dict[str, Array] = {}
    pairs: list[Pair] = []
    for question in questions:
        own = _named(scores, question.candidate)
        other = None if question.reference is None else _named(scores, question.reference)
        pairs.append((own, other))
    return scores, pairs


def _named(scores: dict[str, Array], wanted: Array) -> str:
    """The name of equal scores, so that a reference of several gates is drawn once."""
    for name, known in scores.items():
        if np.array_equal(known, wanted):
            return name
    name = f"scores {len(scores)}"
    scores[name] = wanted
    return name


def table_of(question: Question) -> Mapping[str, NDArray[np.bool_]] | None:
    """Which items only one side has right, for 0/1 scores."""
    if question.reference is None or right_score(question.candidate, question.reference) is None:
        return None
    own, other = question.candidate > 0, question.reference > 0
    return {"gained": own & ~other, "lost": ~own & other}
