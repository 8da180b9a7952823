"""The gates' decision on many simulated releases at once, by the product's own functions.

`p_pass` and `p_fail` are what `eval_suites.gates` compares with the level; `checked_verdicts`
puts the same releases through `judge_all`, so that the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr

from benchmarks.releases import Array
from eval_suites.bootstrap import Bootstrap, Resampling, Scores
from eval_suites.gates import judge_all
from eval_suites.policy import Policy
from eval_suites.power_releases import power_at
from eval_suites.questions import Question, Scale, right_score
from eval_suites.statistics import (
    PairedTable,
    difference_statistic,
    holm_shares,
    ratio_statistic,
)
from registry.evidence_folders import CandidateEvidence
from registry.items import Items

LEVEL = 0.05
"""The error of a gate with the default confidence."""

PREDICTED_FROM = 2000
"""Releases that a predicted power is taken from; `pilotage power` draws fewer (or, 0/1, more)."""

AT_ONCE = 400
"""Releases whose scores share one resampling: 5 columns each in one matrix."""


@dataclass(frozen=True)
class Asked:
    """What a gate asks of all releases; the same words as `eval_suites.questions.Question`."""

    scale: Scale
    limit: float
    side: int = 1


@dataclass(frozen=True)
class PValues:
    """One p-value per release for "beyond the limit", and one for "on the wrong side of it"."""

    to_pass: Array
    to_fail: Array


# -- p-values --------------------------------------------------------------------------------


def binary_p(table: PairedTable, asked: Asked) -> PValues:
    """As `PairedRatio` and `PairedDifference`: the score statistics take arrays of counts."""
    statistic = ratio_statistic if asked.scale == "ratio" else difference_statistic
    z = asked.side * statistic(table, asked.limit)[0]
    return PValues(ndtr(-z), ndtr(z))


def graded_p(
    candidates: Array,
    references: Array | None,
    asked: Asked,
    replicates: int,
    strata: NDArray[Any] | None = None,
    clusters: NDArray[Any] | None = None,
) -> PValues:
    """The bootstrap's p-values, a release per row. Releases of one design share the draws.

    So they do in use: the draws depend on nothing but the design and a fixed seed.
    """
    resampling = Resampling(candidates.shape[1], strata, clusters, replicates)
    to_pass, to_fail = np.empty((2, len(candidates)))
    for start in range(0, len(candidates), AT_ONCE):
        rows = range(start, min(start + AT_ONCE, len(candidates)))
        for row, estimate in zip(
            rows, _bootstraps(candidates, references, rows, asked, resampling), strict=True
        ):
            above, below = estimate.p_above(asked.limit), estimate.p_below(asked.limit)
            to_pass[row], to_fail[row] = (above, below) if asked.side > 0 else (below, above)
    return PValues(to_pass, to_fail)


def _bootstraps(
    candidates: Array,
    references: Array | None,
    rows: range,
    asked: Asked,
    resampling: Resampling,
) -> list[Bootstrap]:
    scores: dict[str, Array] = {f"own {row}": candidates[row] for row in rows}
    if references is not None:
        scores |= {f"other {row}": references[row] for row in rows}
    pairs = [(f"own {row}", None if references is None else f"other {row}") for row in rows]
    means = resampling.means(scores, pairs)
    return [
        Bootstrap(
            asked.scale,
            Scores.of(candidates[row], None if references is None else references[row], resampling),
            *means[pair],
            resampling.described,
        )
        for row, pair in zip(rows, pairs, strict=True)
    ]


# -- verdicts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Shares of releases by verdict; the rest is INCONCLUSIVE. NaN where FAIL is not counted."""

    passed: float
    failed: float
    releases: int


def rates_of(p: PValues, level: float = LEVEL) -> Rates:
    passed, failed = p.to_pass <= level, p.to_fail <= level
    return Rates(float((passed & ~failed).mean()), float(failed.mean()), len(p.to_pass))


def any_passed(p: Sequence[Array], wrong: Sequence[int], level: float = LEVEL) -> Array:
    """Per release, whether one of the `wrong` candidates passed under Holm's correction."""
    table = np.column_stack(p) / level
    shares = np.array([holm_shares(row) for row in table.tolist()])
    return np.asarray((table <= shares)[:, list(wrong)].any(axis=1), float)


def predicted_power(
    own: Array,
    reference: Array,
    asked: Asked,
    effect: float,
    n: int,
    clusters: NDArray[Any] | None = None,
) -> float:
    """What `pilotage power` says of `n` items, `effect` being the true retention.

    `own` and `reference` are so many scores that they stand for the population.
    """
    question = Question(asked.scale, asked.limit, asked.side, own, reference, clusters=clusters)
    binary = clusters is None and right_score(own, reference) is not None
    return power_at(question, effect, n, LEVEL, None if binary else PREDICTED_FROM)


# -- the whole way ---------------------------------------------------------------------------


def evidence_of(scores: Array, **labels: NDArray[Any]) -> CandidateEvidence:
    """Scores as evidence in memory, like those of an `items.csv`."""
    names = [f"i{place:06d}" for place in range(len(scores))]
    columns = {"item_id": pd.Series(names, dtype=object), "score": scores}
    columns |= {name: pd.Series(map(str, values), dtype=object) for name, values in labels.items()}
    return CandidateEvidence("", items=Items("simulated", pd.DataFrame(columns)), source="table")


def policy_of(kind: str, margin: float, **more: Any) -> Policy:
    """A policy of one critical gate on the metric `score`."""
    gate = {"name": "g", "metric": "score", "kind": kind, "margin": margin}
    if kind not in ("floor", "ceiling"):
        gate["reference"] = "teacher"
    rule = {key: more.pop(key) for key in ("slices",) if key in more}
    document = {"kind": "policy", "description": "simulated", "gates": [{**gate, **rule}], **more}
    return Policy.model_validate(document)


def judged(
    policy: Policy, candidates: Sequence[CandidateEvidence], teacher: CandidateEvidence
) -> list[str]:
    """The verdicts that `judge_all` gives the candidates of one release."""
    named = {f"c{place}": one for place, one in enumerate(candidates)}
    results = judge_all(policy, named, {"teacher": teacher})
    return [results[name][0].result.value for name in named]


def expected_verdict(p: PValues, row: int, level: float = LEVEL) -> str:
    """The verdict that the p-values of one release mean."""
    if p.to_fail[row] <= level:
        return "FAIL"
    return "PASS" if p.to_pass[row] <= level else "INCONCLUSIVE"
