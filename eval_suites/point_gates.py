"""Gates without a bound: latency, plain ratios of summaries, implausible gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval_suites.comparable import check_alike, present, summary_of
from eval_suites.load_points import VoidStep, latency_of, number
from eval_suites.policy import KEPT_RATE, GateRule
from eval_suites.questions import checked_metric, metric_named
from registry.evidence import LatencyEvidence, Unusable
from registry.outcome import Verdict

if TYPE_CHECKING:
    from registry.evidence_folders import CandidateEvidence

ROUNDING = 1e-9
"""A point estimate of exactly the limit must not fail by its last bit."""


@dataclass(frozen=True)
class Point:
    """What a gate without a bound found."""

    verdict: Verdict
    reason: str
    estimate: float
    candidate: float
    n: int
    reference: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.candidate / self.reference if self.reference else None


def point_of(
    rule: GateRule, candidate: CandidateEvidence, reference: CandidateEvidence | None
) -> Point:
    """Raises `Unusable`, `VoidStep`, or `OverEveryLimit` where failed requests decide."""
    if rule.metric == KEPT_RATE:
        return _kept_rate(rule, candidate)
    if rule.on_latency:
        return _latency(rule, candidate)
    who = str(rule.reference)
    if reference is None:
        raise Unusable(f"there is no evidence of the {who}")
    own, n = _mean(rule.metric, candidate, "candidate")
    theirs, _ = _mean(rule.metric, reference, who)
    check_alike(rule, candidate, reference)
    make = _ratio if rule.kind == "ratio" else _gain
    verdict, reason, estimate = make(rule, own, theirs)
    return Point(verdict, reason, estimate, own, n, theirs)


def _latency(rule: GateRule, candidate: CandidateEvidence) -> Point:
    own, n = latency_of(rule, candidate, "candidate")
    if rule.kind == "ceiling":
        within, least = own <= rule.margin + ROUNDING, "at most"
    else:
        within, least = own >= rule.margin - ROUNDING, "at least"
    reason = (
        f"{rule.metric} at {rule.rate:g} requests/s is {own:.6g}, {least} {rule.margin:g} asked"
    )
    return Point(Verdict.PASS if within else Verdict.FAIL, reason, own, own, n)


def _kept_rate(rule: GateRule, candidate: CandidateEvidence) -> Point:
    found: LatencyEvidence = present("latency", candidate, "candidate")
    if found.kept_rate is None:
        raise Unusable("the latency evidence is of fixed rates, not of a search")
    low, high = (number(one, "kept rate") if one is not None else None for one in found.kept_rate)
    n = sum(point.total for point in found.points)
    asked = f"at least {rule.margin:g} asked"
    sla = ", ".join(found.sla)
    if low is None and high is None:
        why = "; ".join(found.notes) or "no step decided anything"
        if found.points and all(point.answer == "void" for point in found.points):
            raise VoidStep(f"every step of the search is void: {found.points[-1].cause}")
        raise Unusable(f"the search decided about no rate: {why}")
    kept = "no rate was kept" if low is None else f"kept at {low:.4g} requests/s"
    lost = "not lost at any" if high is None else f"not kept at {high:.4g}"
    reason = f"{sla}: {kept}, {lost}; {asked}"
    value = low if low is not None else 0.0
    if high is not None and high <= rule.margin:
        return Point(Verdict.FAIL, reason, value, value, n)
    if value < rule.margin:
        return Point(Verdict.INCONCLUSIVE, f"{reason}, which lies between", value, value, n)
    if not found.sustained:
        return Point(Verdict.INCONCLUSIVE, f"{reason}; no longer run confirms it", value, value, n)
    return Point(Verdict.PASS, reason, value, value, n)


def _ratio(rule: GateRule, own: float, theirs: float) -> tuple[Verdict, str, float]:
    if theirs <= 0:
        raise Unusable(f"the {rule.reference}'s {rule.metric} is {theirs:g}: no ratio to it exists")
    ratio = own / theirs
    reason = (
        f"{rule.metric} is {ratio:.4f} of the {rule.reference}'s ({own:.4g} / {theirs:.4g}), "
        f"{rule.margin:g} asked; means alone have no bound"
    )
    kept = ratio >= rule.margin - ROUNDING
    return Verdict.PASS if kept else Verdict.FAIL, reason, ratio


def _gain(rule: GateRule, own: float, theirs: float) -> tuple[Verdict, str, float]:
    gain = own - theirs
    text = f"{rule.metric} is {gain:+.4g} against the {rule.reference} ({own:.4g} / {theirs:.4g})"
    if (gain if rule.direction == "higher" else -gain) > rule.margin + ROUNDING:
        reason = f"{text}: better by more than {rule.margin:g} is implausible"
        return Verdict.ANOMALOUS, reason, gain
    return Verdict.PASS, f"{text}, within {rule.margin:g}", gain


def _mean(metric: str, evidence: CandidateEvidence, who: str) -> tuple[float, int]:
    """A mean from the items, or from the summary where there are no items."""
    if evidence.items is not None or "items" in evidence.unreadable:
        scores = checked_metric(metric, evidence, who)
        return float(scores.mean()), len(scores)
    summary = summary_of(evidence, who)
    if summary is None:
        raise Unusable(f"there are no scores of the {who}")
    metric = metric_named(metric, summary)
    if metric not in summary.metrics:
        has = ", ".join(sorted(summary.metrics)) or "none"
        raise Unusable(f"the {who}'s evidence has no metric {metric!r} (it has: {has})")
    return number(summary.metrics[metric], f"{who}'s {metric}"), summary.items_scored
