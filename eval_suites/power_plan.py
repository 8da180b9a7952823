"""How many items each gate needs before a night is spent: what `pilotage power` computes.

The truth is taken to be the effect that the caller names: the candidate's value is `effect` times
the reference's (for floor and ceiling: times the evidence's own). How scores scatter around that
is taken from the evidence, and so is how far the items of one cluster depend on each other. From
two paired runs: items that only the candidate has right stay as frequent as they were, and the
loss comes on top. From one run alone: the other is taken to be independent of it, which asks for
more items than two models usually need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from eval_suites.comparable import check_same_items, items_of
from eval_suites.policy import GateRule, Policy
from eval_suites.power import MOST_ITEMS, items_for, power_of, units_to_see
from eval_suites.questions import (
    Array,
    Question,
    checked_metric,
    column_of,
    right_score,
    scale_of,
    slices_of,
)
from eval_suites.statistics import PairedTable, difference_statistic, ratio_statistic
from registry.evidence import Unusable
from registry.evidence_folders import CandidateEvidence
from registry.outcome import Result

LARGE = 1e9
"""Items of a table of expected counts: its statistics are those of the probabilities."""


class GatePower(Result):
    """What one gate needs."""

    name: str
    kind: str
    metric: str
    tier: str
    slice: str | None = Field(default=None, description="The slice that needs most items.")
    level: float | None = Field(default=None, description="One-sided error it is judged at.")
    reference: float | None = Field(default=None, description="Mean the truth is relative to.")
    truth: float | None = Field(default=None, description="The candidate's assumed mean.")
    items: int | None = Field(default=None, description="For 80 % power; null: no number would.")
    evidence_items: int | None = None
    power: float | None = Field(default=None, description="On as many items as the evidence has.")
    note: str = ""


def plan_power(
    policy: Policy,
    effect: float,
    evidence: CandidateEvidence,
    reference: CandidateEvidence | None = None,
    *,
    candidates: int = 1,
) -> list[GatePower]:
    """One row per gate, in the policy's order. Defects of the evidence are notes, not errors."""
    rows = []
    for rule in policy.gates:
        try:
            rows.append(_row(policy, rule, effect, evidence, reference, candidates))
        except Unusable as unusable:
            rows.append(_blank(rule, str(unusable)))
    return rows


def _row(
    policy: Policy,
    rule: GateRule,
    effect: float,
    evidence: CandidateEvidence,
    reference: CandidateEvidence | None,
    candidates: int,
) -> GatePower:
    if rule.on_latency or rule.kind in ("ratio", "implausible"):
        return _blank(rule, "has no bound, so no number of items belongs to it")
    level = (1 - rule.confidence) / candidates
    notes = []
    if policy.looks:
        level *= policy.looks[-1].share
        notes.append("at the last planned look alone")
    assumed = _assumed(rule, evidence, reference)
    parts = [_part(question, effect, level, share) for question, share in assumed]
    if any(question.clusters is not None for question, _ in assumed):
        notes.append(f"items of one {rule.cluster} count as dependent, as in the evidence")
    worst = max(parts, key=lambda part: math.inf if part["items"] is None else part["items"])
    if worst["items"] is None:
        notes.append(worst.pop("why"))
    elif worst["items"] < rule.min_items:
        worst["items"] = rule.min_items
        notes.append("min_items decides")
    worst.pop("why", None)
    return GatePower(
        name=rule.name,
        kind=rule.kind,
        metric=rule.metric,
        tier=rule.tier,
        level=level,
        note="; ".join(notes),
        **worst,
    )


def _blank(rule: GateRule, note: str) -> GatePower:
    return GatePower(name=rule.name, kind=rule.kind, metric=rule.metric, tier=rule.tier, note=note)


def _assumed(
    rule: GateRule, evidence: CandidateEvidence, reference: CandidateEvidence | None
) -> list[tuple[Question, float]]:
    """The rule's questions with the share of all items that each is about."""
    items = items_of(evidence, "evidence")
    scores = checked_metric(rule.metric, evidence, "evidence")
    theirs: Array | None = None
    if rule.reference is not None and reference is not None:
        check_same_items(rule, items, items_of(reference, rule.reference))
        theirs = checked_metric(rule.metric, reference, rule.reference)
    scale, limit, side = scale_of(rule)
    clusters = column_of(rule, items, rule.cluster)
    if clusters is not None and len(np.unique(clusters)) == len(items):
        clusters = None
    return [
        (
            Question(
                scale=scale,
                limit=limit,
                side=side,
                candidate=scores[rows],
                reference=None if theirs is None else theirs[rows],
                slice=label,
                clusters=None if clusters is None else clusters[rows],
            ),
            float(rows.mean()),
        )
        for _, label, rows in slices_of(rule, items)
    ]


def _part(question: Question, effect: float, level: float, share: float) -> dict[str, Any]:
    """Items for one question; `share` of all items belong to it."""
    base = question.candidate if question.reference is None else question.reference
    mean = float(base.mean())
    truth = effect * mean
    if question.scale == "ratio":
        distance = question.side * (effect - question.limit) * mean
    elif question.scale == "difference":
        distance = question.side * (truth - mean - question.limit)
    else:
        distance = question.side * (truth - question.limit)
    unit = right_score(question.candidate, question.reference)
    if unit is not None and truth > unit:
        raise Unusable(f"{effect:g} times {mean:.4g} is more than every item can score")
    dependence = math.sqrt(_design_effect(question))
    at_limit, at_truth = (dependence * spread for spread in _spreads(question, effect))
    wanted = items_for(distance, at_limit, at_truth, level)
    n, least = question.n, 0.0
    if unit is None or question.clusters is not None:
        # Bootstrapped: however alike the items are, a loss that none shows may be that common.
        least = units_to_see(distance, _worst(question), level) * n / (question.units or n)
        wanted = None if wanted is None else max(wanted, math.ceil(least))
    elif wanted is not None and question.scale == "mean":
        wanted = _with_continuity(wanted, distance / unit)
    power = power_of(n, distance, at_limit, at_truth, level) if n >= least else 0.0
    return {
        "slice": question.slice,
        "reference": mean,
        "truth": truth,
        "why": "the effect named is not on the passing side of the margin"
        if distance <= 0
        else f"more than {MOST_ITEMS:,} items: the effect named is too close to the margin",
        "items": None if wanted is None else math.ceil(wanted / share),
        "evidence_items": round(n / share),
        "power": round(power, 4),
    }


def _worst(question: Question) -> float:
    """The contrast of an item that tells most against the question's side."""
    scores, paired = question.candidate, question.reference
    both = scores if paired is None else np.concatenate([scores, paired])
    low, high = min(0.0, float(both.min())), max(0.0, float(both.max()))
    if question.scale == "mean":
        return low - question.limit if question.side > 0 else question.limit - high
    ratio = question.limit if question.scale == "ratio" else 1.0
    offset = question.limit if question.scale == "difference" else 0.0
    own, other = (low, high) if question.side > 0 else (high, low)
    return question.side * (own - ratio * other - offset)


def _design_effect(question: Question) -> float:
    """How many dependent items are worth one independent item (Kish 1965, Survey Sampling, 5.4).

    The variance of the mean contrast by whole clusters over that by items; at least 1.
    """
    if question.clusters is None:
        return 1.0
    contrast = question.candidate
    if question.reference is not None:
        ratio = question.limit if question.scale == "ratio" else 1.0
        contrast = contrast - ratio * question.reference
    residual = contrast - contrast.mean()
    unit = np.unique(question.clusters, return_inverse=True)[1]
    by_cluster = np.bincount(unit, residual)
    k, n = len(by_cluster), question.n
    by_items = float((residual**2).sum()) * n / max(n - 1, 1)
    clustered = float((by_cluster**2).sum()) * k / max(k - 1, 1)
    return max(1.0, clustered / by_items) if by_items > 0 else 1.0


def _with_continuity(n: int, distance: float) -> int:
    """Fleiss, Levin and Paik (2003, Statistical Methods for Rates and Proportions, 2.4)."""
    return math.ceil(n / 4 * (1 + math.sqrt(1 + 2 / (n * distance))) ** 2)


def _spreads(question: Question, effect: float) -> tuple[float, float]:
    """Standard deviation of one item's contrast, under the limit and under the truth."""
    scores, paired = question.candidate, question.reference
    unit = right_score(scores, paired)
    ratio = {"ratio": question.limit, "difference": 1.0, "mean": 0.0}[question.scale]
    if question.scale == "mean":
        if unit is None:
            return float(scores.std(ddof=1)), float(scores.std(ddof=1))
        shares = question.limit / unit, effect * float(scores.mean()) / unit
        return (
            unit * math.sqrt(max(shares[0] * (1 - shares[0]), 0.0)),
            unit * math.sqrt(max(shares[1] * (1 - shares[1]), 0.0)),
        )
    if unit is None:
        return _graded_spread(scores, paired, effect, ratio)
    table = _expected(scores > 0, None if paired is None else paired > 0, effect)
    statistic = ratio_statistic if question.scale == "ratio" else difference_statistic
    limit = question.limit if question.scale == "ratio" else question.limit / unit
    counts = PairedTable(*(share * LARGE for share in table))
    both, gained, lost, _ = table
    at_truth = gained + ratio**2 * lost + (1 - ratio) ** 2 * both
    at_truth -= (both + gained - ratio * (both + lost)) ** 2
    spread = math.sqrt(max(at_truth, 0.0))
    return unit * math.sqrt(float(statistic(counts, limit)[1])), unit * spread


def _expected(
    scores: np.ndarray[Any, Any], paired: np.ndarray[Any, Any] | None, effect: float
) -> Sequence[float]:
    """Shares of both, candidate only, reference only, neither, if the effect is the truth."""
    reference = float((scores if paired is None else paired).mean())
    own = effect * reference
    if own > 1:
        raise Unusable(f"{effect:g} times a share of {reference:.4g} is more than all items")
    gained = own * (1 - reference) if paired is None else float((scores & ~paired).mean())
    gained = min(max(gained, own - reference, 0.0), own, 1 - reference)
    lost = gained + reference - own
    return own - gained, gained, lost, 1 - own - lost


def _graded_spread(
    scores: Array, paired: Array | None, effect: float, ratio: float
) -> tuple[float, float]:
    if paired is None:
        spread = float(scores.std(ddof=1)) * math.hypot(effect, ratio)
    else:
        scale = effect * paired.mean() / scores.mean() if scores.mean() else 1.0
        spread = float((scale * scores - ratio * paired).std(ddof=1))
    return spread, spread
