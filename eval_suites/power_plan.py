"""How many items each gate needs before a night is spent: what `pilotage power` computes.

The truth is taken to be the effect that the caller names: the candidate's value is `effect` times
the reference's (for floor and ceiling: times the evidence's own). How scores scatter around that
is taken from the evidence, and so is how far the items of one cluster depend on each other. From
two paired runs: items that only the candidate has right stay as frequent as they were, and the
loss comes on top; graded scores are scaled, and the 0/1 scores of clusters are lost a whole
cluster at a time. From one run alone: the other is taken to be independent of it, which asks for
more items than two models usually need. `eval_suites.power_releases` draws releases of that truth.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from pydantic import Field

from eval_suites.comparable import check_same_items, items_of
from eval_suites.policy import GateRule, Policy
from eval_suites.power import MOST_ITEMS
from eval_suites.power_releases import truth_of
from eval_suites.questions import (
    Array,
    Question,
    checked_metric,
    column_of,
    scale_of,
    slices_of,
)
from registry.evidence import Unusable
from registry.evidence_folders import CandidateEvidence
from registry.outcome import Result


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
    level, notes = (1 - rule.confidence) / candidates, []
    if policy.looks:
        level *= policy.looks[-1].share
        notes.append("at the last planned look alone")
    level = round(level, 12)  # 1 - 0.95 is not quite 0.05
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
    if any(question.n < rule.min_items for question, _ in assumed):
        worst["power"] = 0.0
        notes.append(f"the evidence has fewer than {rule.min_items} items, which never pass")
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
    truth = truth_of(question, effect)
    base = question.candidate if question.reference is None else question.reference
    mean, distance = float(base.mean()), truth.distance
    wanted = truth.items(level) if distance > 0 else None
    return {
        "slice": question.slice,
        "reference": mean,
        "truth": effect * mean,
        "why": "the effect named is not on the passing side of the margin"
        if distance <= 0
        else f"more than {MOST_ITEMS:,} items: the effect named is too close to the margin",
        "items": None if wanted is None else math.ceil(wanted / share),
        "evidence_items": round(question.n / share),
        "power": float(f"{truth.power(question.n, level):.4g}"),
    }
