"""Gates: from evidence and a policy to results. Pure functions; nothing here measures or waits.

The order of the checks is the contract: whether the numbers exist and may be compared at all,
then whether a confidence bound clears the margin. PASS when the bound clears it, FAIL when the
opposite bound is beyond it, INCONCLUSIVE when the interval straddles it. A comparison with a
missing or not-a-number value would be false, and false must never read as "no loss": it is
INVALID.

All critical gates must pass, so each keeps its own level (intersection-union test: Berger 1982,
Technometrics 24:295). What inflates the error is choosing among candidates and looking again:
levels are shared among the candidates of a release (Holm) and among looks planned beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from eval_suites.comparable import present
from eval_suites.load_points import (
    Emulated,
    OverEveryLimit,
    VoidStep,
    check_real,
    is_percentile,
)
from eval_suites.percentile_gates import judged_percentile
from eval_suites.percentiles import Percentile
from eval_suites.point_gates import Point, point_of
from eval_suites.policy import GateRule, Policy
from eval_suites.power import minimum_detectable, needed_items
from eval_suites.questions import (
    FEWEST_CLUSTERS,
    Question,
    estimates_of_each,
    latency_questions,
    questions_of,
    table_of,
)
from eval_suites.statistics import Estimate, exact_mcnemar, holm_shares
from registry.evidence import ServingEvidence, Unusable
from registry.outcome import Flips, GateResult, Verdict, Waived

if TYPE_CHECKING:
    from registry.evidence_folders import CandidateEvidence

FLIPS_SHOWN = 20

FEWEST_SPREAD = 10
"""Fewer items than this do not show how scores scatter, so nothing can be said of how many do."""


@dataclass(frozen=True)
class Judging:
    """What all gates of a release are judged with."""

    policy: Policy
    references: Mapping[str, CandidateEvidence]
    repeated: tuple[CandidateEvidence, CandidateEvidence] | None
    today: date

    def waiver(self, gate: str) -> Waived | None:
        """The waiver of a gate that still stands today."""
        for waiver in self.policy.waivers:
            if waiver.gate == gate and waiver.expires >= self.today:
                return Waived(owner=waiver.owner, reason=waiver.reason, expires=waiver.expires)
        return None


@dataclass(frozen=True)
class _Case:
    """One rule on one candidate, before the levels are known."""

    rule: GateRule
    waived: Waived | None
    questions: list[Question] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    share_of_look: float = 1.0
    settled: GateResult | None = None
    never: str = ""
    """Why no items of this suite could pass."""
    held: str = ""
    """Why these items cannot pass, though more of them might."""
    refusal: str = ""
    scored: int = 0
    """All items of the candidate, in whatever slice."""
    later_looks: Sequence[int] | None = None
    """Numbers of items at which may be judged again; None where no looks are planned."""

    @property
    def level(self) -> float:
        return error_of(self.rule) * self.share_of_look

    @property
    def cannot_pass(self) -> bool:
        refused = self.settled is not None and self.settled.result is not Verdict.PASS
        return refused or bool(self.never or self.held or self.refusal)

    def p_value(self) -> float:
        """The largest of the slices' p-values: the gate passes only where all slices do."""
        return max(map(_p_pass, self.questions, self.estimates))


def error_of(rule: GateRule) -> float:
    """The error that a rule's confidence leaves; 1 - 0.95 is 0.050000000000000044 in floats."""
    return float(f"{1 - rule.confidence:.12g}")


def judge_all(
    policy: Policy,
    candidates: Mapping[str, CandidateEvidence],
    references: Mapping[str, CandidateEvidence],
    *,
    repeated: tuple[CandidateEvidence, CandidateEvidence] | None = None,
    planned: int = 0,
    today: date | None = None,
) -> dict[str, list[GateResult]]:
    """Every rule's result for every candidate, in the policy's order.

    `references` by the names that rules use. `repeated` are two runs of one bundle (A/A).
    `planned` is the number of candidates of the release where only some are judged here.
    Never raises for what the evidence holds: every defect is a result with its reason.
    """
    judging = Judging(policy, references, repeated, today or datetime.now(UTC).date())
    cases = dict(zip(candidates, _cases(judging, list(candidates.values())), strict=True))
    relative = [_relative_p(of_one) for of_one in cases.values()]
    absent = [math.inf] * (planned - len(relative))
    shares = holm_shares([*relative, *absent])
    return {
        name: [_result(case, share) for case in of_one]
        for (name, of_one), share in zip(cases.items(), shares, strict=False)
    }


def _relative_p(cases: Sequence[_Case]) -> float:
    """A candidate's p-value over its level: the largest of its critical gates'."""
    deciding = [case for case in cases if case.rule.tier == "critical" and case.waived is None]
    if any(case.cannot_pass for case in deciding):
        return math.inf
    return max((case.p_value() / case.level for case in deciding if case.questions), default=0.0)


# -- before the levels are known -------------------------------------------------------------


def _cases(judging: Judging, candidates: Sequence[CandidateEvidence]) -> list[list[_Case]]:
    """Every rule of each candidate; the bootstraps of all gates share their draws."""
    found = [[_case(judging, rule, one) for rule in judging.policy.gates] for one in candidates]
    asked = [[question for case in cases for question in case.questions] for cases in found]
    return [
        [replace(case, estimates=[next(answers) for _ in case.questions]) for case in cases]
        for cases, answers in zip(found, map(iter, estimates_of_each(asked)), strict=True)
    ]


def _case(judging: Judging, rule: GateRule, candidate: CandidateEvidence) -> _Case:
    waived = judging.waiver(rule.name)
    try:
        refusal = _infeasible(candidate)
    except Unusable as unusable:
        return _Case(rule, waived, settled=_settled(rule, waived, Verdict.INVALID, str(unusable)))
    reference = judging.references.get(rule.reference or "")
    never = _held_suite(judging.policy, rule, candidate, reference)
    try:
        if rule.on_latency:
            check_real(candidate)
        if is_percentile(rule):
            found = _Case(rule, waived, latency_questions(rule, candidate))
        elif rule.on_latency or rule.kind in ("ratio", "implausible"):
            point = point_of(rule, candidate, reference)
            found = _Case(rule, waived, settled=_pointed(rule, waived, point, never))
        else:
            found = _asked(judging, rule, candidate, reference, waived)
    except Unusable as unusable:
        found = _Case(rule, waived, settled=_settled(rule, waived, Verdict.INVALID, str(unusable)))
    except Emulated as why:
        found = _Case(rule, waived, settled=_settled(rule, waived, Verdict.INFEASIBLE, str(why)))
    except VoidStep as void:
        found = _Case(rule, waived, settled=_settled(rule, waived, Verdict.ANOMALOUS, str(void)))
    except OverEveryLimit as over:
        found = _Case(rule, waived, settled=_settled(rule, waived, Verdict.FAIL, str(over)))
    # Accuracy may come from a reference engine; what cannot be served is not promoted.
    return replace(found, never=never, refusal=refusal)


def _asked(
    judging: Judging,
    rule: GateRule,
    candidate: CandidateEvidence,
    reference: CandidateEvidence | None,
    waived: Waived | None,
) -> _Case:
    policy = judging.policy
    if policy.noise_floor and judging.repeated is None and rule.reference is not None:
        raise Unusable("the policy demands an A/A run, and there is none")
    questions = questions_of(rule, candidate, reference, judging.repeated)
    n = len(candidate.items) if candidate.items is not None else 0
    return _Case(
        rule,
        waived,
        questions,
        share_of_look=_share_of_look(policy, n),
        held=_held(rule, questions),
        scored=n,
        later_looks=[look.items for look in policy.looks if look.items > n]
        if policy.looks
        else None,
    )


def _share_of_look(policy: Policy, n: int) -> float:
    if not policy.looks:
        return 1.0
    for look in policy.looks:
        if look.items == n:
            return look.share
    planned = ", ".join(str(look.items) for look in policy.looks)
    raise Unusable(f"{n} items are no planned look (the policy plans {planned})")


def _held_suite(
    policy: Policy,
    rule: GateRule,
    candidate: CandidateEvidence,
    reference: CandidateEvidence | None,
) -> str:
    """Why numbers of this suite can never pass, however good they are; or nothing."""
    kind = "latency" if rule.on_latency else "accuracy"
    smoke = _smoke(kind, candidate, reference)
    if smoke:
        return f"measured with the smoke suite {', '.join(smoke)}, which can never pass a gate"
    sides = [side.accuracy for side in (candidate, reference) if side is not None]
    limited = any(side is not None and side.limited for side in sides)
    if kind == "accuracy" and limited and not policy.allow_limited:
        return "the task's items were cut by a limit, and the policy does not allow that"
    return ""


def _held(rule: GateRule, questions: Sequence[Question]) -> str:
    """The same for these items: too few of them, or a margin below the measurement's noise."""
    for question in questions:
        part = f" in {question.slice}" if question.slice else ""
        if question.n < rule.min_items:
            return _few(question.n, rule, part)
        if question.units is not None and question.units < FEWEST_CLUSTERS:
            return f"{question.units} clusters{part}; fewer than {FEWEST_CLUSTERS} decide nothing"
        if question.even_units is not None and question.even_units < FEWEST_CLUSTERS:
            return (
                f"{question.units} clusters{part} so uneven that they weigh as much as "
                f"{question.even_units:.1f} of one size; fewer than {FEWEST_CLUSTERS} decide "
                "nothing"
            )
        room = question.room
        if question.noise is not None and room is not None and room < question.noise:
            return (
                f"the margin is {room:.4g} of the score{part}, and two runs of one bundle may "
                f"differ by {question.noise:.4g}: below the noise of the measurement"
            )
    return ""


def _few(n: int, rule: GateRule, part: str = "") -> str:
    return f"{n} items were scored{part}; fewer than {rule.min_items} decide nothing"


def _smoke(
    kind: str, candidate: CandidateEvidence, reference: CandidateEvidence | None
) -> list[str]:
    """Names of the smoke suites behind the numbers."""
    found = [getattr(side, kind) for side in (candidate, reference) if side is not None]
    return sorted(
        {
            evidence.suite if kind == "accuracy" else evidence.profile
            for evidence in found
            if evidence is not None and evidence.smoke
        }
    )


def _infeasible(candidate: CandidateEvidence) -> str:
    """The engine's reason why it cannot serve the candidate, or nothing.

    Serving evidence may be absent (scores alone can be gated), but what is there must be sound.
    """
    if candidate.serving is None and "serving" not in candidate.unreadable:
        return ""
    serving: ServingEvidence = present("serving", candidate, "candidate")
    if serving.feasible:
        return ""
    return f"{serving.engine} cannot serve it on this hardware: {serving.reason or 'no reason'}"


def _settled(
    rule: GateRule, waived: Waived | None, verdict: Verdict, reason: str, **numbers: object
) -> GateResult:
    """A result that needs no level."""
    fields: dict[str, object] = {"estimate": None, "candidate": None, "n": None, **numbers}
    return GateResult.model_validate(
        {
            "name": rule.name,
            "kind": rule.kind,
            "metric": rule.metric,
            "tier": rule.tier,
            "result": verdict,
            "margin": rule.margin,
            "reference_name": rule.reference,
            "rate": rule.rate,
            "waived": waived,
            "reason": reason,
            **fields,
        }
    )


def _pointed(rule: GateRule, waived: Waived | None, point: Point, held: str) -> GateResult:
    verdict, reason = point.verdict, point.reason
    if verdict is Verdict.PASS and not held and not rule.on_latency and point.n < rule.min_items:
        held = _few(point.n, rule)
    if verdict is Verdict.PASS and held:
        verdict, reason = Verdict.INCONCLUSIVE, held
    return _settled(
        rule,
        waived,
        verdict,
        reason,
        estimate=point.estimate,
        candidate=point.candidate,
        reference=point.reference,
        ratio=point.ratio,
        n=point.n,
        limit=rule.margin,
        method="point estimate, no bound",
    )


# -- with the level --------------------------------------------------------------------------


def _p_pass(question: Question, estimate: Estimate) -> float:
    """One-sided p-value of `no better than the limit`."""
    if question.same_bundle:
        return 0.0 if _shortfall(question, estimate) <= 0 else 1.0
    side = estimate.p_above if question.side > 0 else estimate.p_below
    return side(question.limit)


def _p_fail(question: Question, estimate: Estimate) -> float:
    if question.same_bundle:
        return 1.0 if _shortfall(question, estimate) <= 0 else 0.0
    side = estimate.p_below if question.side > 0 else estimate.p_above
    return side(question.limit)


def _result(case: _Case, share: float) -> GateResult:
    """The gate's result; `share` is the part of its level that the candidate is judged at."""
    result = case.settled or _judged(case, share)
    if case.refusal:
        return result.model_copy(update={"result": Verdict.INFEASIBLE, "reason": case.refusal})
    return result


def _judged(case: _Case, share: float) -> GateResult:
    level = case.level * share
    if isinstance(case.estimates[0], Percentile):
        return judged_percentile(case.rule, case.waived, case.estimates[0], level, case.never)
    pairs = list(zip(case.questions, case.estimates, strict=True))
    # One slice in twenty would fail by chance alone.
    failed = [pair for pair in pairs if _p_fail(*pair) <= level / len(pairs)]
    worst = max(failed or pairs, key=lambda pair: (_p_pass(*pair), _shortfall(*pair)))
    question, estimate = worst
    p_value = _p_pass(question, estimate)
    verdict = Verdict.PASS if p_value <= level else Verdict.INCONCLUSIVE
    if failed:
        verdict = Verdict.FAIL
    bound, opposite = _bounds(question, estimate, level)
    text = _described(case.rule, question, estimate, verdict, bound, opposite, level)
    needed = None
    if verdict is Verdict.INCONCLUSIVE:
        further = needed_items(estimate, question.limit, level, question.n, question.units)
        needed, more = _needed(case, question, further)
        held = case.never or case.held
        if not held or needed is not None:
            text += f"; {more}"
        text += f"; {held}" if held else ""
    if verdict is Verdict.PASS and (case.never or case.held):
        verdict, text = Verdict.INCONCLUSIVE, case.never or case.held
        if not case.never and question.n < case.rule.min_items:
            needed, more = _needed(case, question, 0)
            text += f"; {more}" if case.later_looks is not None else ""
    own, theirs = float(question.candidate.mean()), None
    if question.reference is not None:
        theirs = float(question.reference.mean())
    return GateResult(
        name=case.rule.name,
        kind=case.rule.kind,
        metric=case.rule.metric,
        tier=case.rule.tier,
        result=verdict,
        estimate=estimate.value,
        bound=_finite(bound),
        opposite_bound=_finite(opposite),
        margin=case.rule.margin,
        limit=question.limit,
        level=level,
        p_value=p_value,
        method="the reference itself" if question.same_bundle else estimate.method,
        candidate=own,
        reference=theirs,
        reference_name=case.rule.reference,
        ratio=own / theirs if theirs else None,
        n=question.n,
        units=question.units,
        slice=question.slice,
        mde=_finite(
            minimum_detectable(
                estimate, question.limit, question.side, level, question.units or question.n
            )
        ),
        needed=needed,
        flips=_flips(question),
        waived=case.waived,
        reason=text,
    )


def _bounds(question: Question, estimate: Estimate, level: float) -> tuple[float, float]:
    """The bound that must clear the limit, and the opposite one."""
    if question.same_bundle:
        return estimate.value, estimate.value
    lower, upper = estimate.lower(level), estimate.upper(level)
    return (lower, upper) if question.side > 0 else (upper, lower)


def _shortfall(question: Question, estimate: Estimate) -> float:
    return question.side * (question.limit - estimate.value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _flips(question: Question) -> Flips | None:
    table = table_of(question)
    if table is None or question.ids is None:
        return None
    gained, lost = (question.ids[table[name]] for name in ("gained", "lost"))
    return Flips(
        gained=len(gained),
        lost=len(lost),
        gained_items=[str(one) for one in gained[:FLIPS_SHOWN]],
        lost_items=[str(one) for one in lost[:FLIPS_SHOWN]],
        mcnemar_p=exact_mcnemar(len(gained), len(lost)),
    )


def _described(
    rule: GateRule,
    question: Question,
    estimate: Estimate,
    verdict: Verdict,
    bound: float,
    opposite: float,
    level: float,
) -> str:
    """The sentence of a result: what was seen, what is certain, what was asked."""
    own = question.candidate.mean()
    what = rule.metric + (f" in {question.slice}" if question.slice else "")
    if question.reference is None:
        seen = f"{what} is {own:.4g}"
    else:
        versus = f"the {rule.reference}'s ({own:.4g} / {question.reference.mean():.4g})"
        if question.scale == "ratio":
            seen = f"{what} is {estimate.value:.4f} of {versus}"
        else:
            seen = f"{what} is {estimate.value:+.4f} against {versus}"
    if question.same_bundle:
        return f"{seen}: the candidate is the {rule.reference} itself"
    least, most = ("at least", "at most") if question.side > 0 else ("at most", "at least")
    asked = f"{'above' if question.side > 0 else 'below'} {question.limit:.4g} asked"
    confidence = f"{1 - level:.4g}"
    sure = f"with {'more than 0.9999' if confidence == '1' else confidence} confidence"
    if verdict is Verdict.PASS:
        return f"{seen}, {least} {bound:.4f} {sure}; {asked}"
    if verdict is Verdict.FAIL:
        return f"{seen}, {most} {opposite:.4f} {sure}; {asked}"
    low, high = sorted((bound, opposite))
    return f"{seen}, between {low:.4f} and {high:.4f} {sure} on each side; {asked}"


def _needed(case: _Case, question: Question, further: int | None) -> tuple[int | None, str]:
    """Further items that would decide and may be judged, and that as words.

    `further` is what the interval alone asks for. Fewer than `min_items` decide nothing, and
    where looks are planned only their numbers of items may be judged.
    """
    short = case.rule.min_items - question.n
    if case.never:
        return None, ""
    if further is None and question.n < FEWEST_SPREAD:
        return max(short, FEWEST_SPREAD - question.n), "too few items to say how many would decide"
    if further is None:
        return None, "no number of items would decide so close to the margin"
    further = max(further, short)
    told = _more(further, question)
    if case.later_looks is None:
        return further, told
    # The looks count all items, of which a slice has its share.
    share = question.n / case.scored
    enough = [look for look in case.later_looks if (look - case.scored) * share >= further]
    if enough:
        looked = math.ceil((enough[0] - case.scored) * share)
        return looked, f"{told}; the look planned at {enough[0]} items has as many"
    return None, f"{told}, and no look is planned at as many"


def _more(needed: int, question: Question) -> str:
    part = f" of {question.slice}" if question.slice else ""
    return f"about {needed} more items{part} would decide"
