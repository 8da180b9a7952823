"""Gates: from evidence and a rule to a result. Pure functions; nothing here measures or waits.

What is judged are point estimates: a mean against a mean. There is no bound around them yet, so
a result close to its margin may be luck, and the report says so. The order of the checks is the
contract: first whether the numbers exist and may be compared at all, then the comparison. A
comparison with a missing or not-a-number value would be false, and false must never read as "no
loss".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_suites.schema import GateRule
from registry.errors import UserError
from registry.evidence import (
    AccuracyEvidence,
    LatencyEvidence,
    LoadPoint,
    ServingEvidence,
    read_summary,
)
from registry.outcome import GateResult, Verdict

REFUSALS = (
    Verdict.INFEASIBLE,
    Verdict.INVALID,
    Verdict.ANOMALOUS,
    Verdict.FAIL,
    Verdict.INCONCLUSIVE,
)
"""A candidate's verdict is the first of these that one of its critical gates has."""

RELEASE_ORDER = (
    Verdict.INCONCLUSIVE,
    Verdict.FAIL,
    Verdict.ANOMALOUS,
    Verdict.INVALID,
    Verdict.INFEASIBLE,
)
"""A release without a promotion has the best of its candidates' verdicts, in this order."""

SCHEMA_VERSION = 1

MAY_DIFFER = frozenset(
    {"batch_size", "concurrency", "model", "num_concurrent", "served_model", "timeout", "url"}
)
"""Settings that say how the questions were sent, not what was asked."""

ROUNDING = 1e-9
"""63 right of 70 against 0.90 must not fail by the last bit of a quotient."""


@dataclass(frozen=True)
class CandidateEvidence:
    """All evidence of one bundle: a candidate's, or a reference's.

    `bundle` is the digest that every piece of evidence must name. `unreadable` holds, by kind,
    why a piece could not be read; a gate that needs it is then INVALID with that reason.
    """

    bundle: str
    accuracy: AccuracyEvidence | None = None
    latency: LatencyEvidence | None = None
    serving: ServingEvidence | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        bundle: str,
        *,
        accuracy: Path | None = None,
        latency: Path | None = None,
        serving: Path | None = None,
    ) -> CandidateEvidence:
        """Read evidence folders. What cannot be read is kept as a reason, never raised."""
        folders = {"accuracy": accuracy, "latency": latency, "serving": serving}
        found: dict[str, Any] = {}
        unreadable: dict[str, str] = {}
        for kind, folder in folders.items():
            if folder is None:
                continue
            try:
                evidence = read_summary(folder)
            except UserError as error:
                unreadable[kind] = error.problems[0].where + ": " + error.problems[0].what
                continue
            if evidence.kind == kind:
                found[kind] = evidence
            else:
                unreadable[kind] = f"{folder} holds {evidence.kind} evidence, not {kind}"
        return cls(bundle=bundle, unreadable=unreadable, **found)


class _Unusable(Exception):
    """The numbers cannot be judged; the text is the reason."""


class _OverEveryLimit(Exception):
    """Requests failed, and a failed request counts as slower than any limit."""


@dataclass(frozen=True)
class _Measured:
    value: float
    n: int


# -- one gate --------------------------------------------------------------------------------


def judge(
    rule: GateRule, candidate: CandidateEvidence, reference: CandidateEvidence | None = None
) -> GateResult:
    """The result of one rule on one candidate.

    `reference` is the evidence of the bundle that `rule.reference` names; without it a rule
    that compares is INVALID. Never raises for what the evidence holds: every defect is a result
    with its reason.
    """
    refusal = ""
    own: _Measured | None = None
    theirs: _Measured | None = None
    try:
        refusal = _infeasible(candidate)
        own = _measure(rule, candidate, "candidate")
        if rule.reference is not None:
            theirs = _referenced(rule, candidate, reference)
        verdict, estimate, reason = _compare(rule, own.value, theirs.value if theirs else None)
    except _Unusable as unusable:
        verdict, estimate, reason = Verdict.INVALID, None, str(unusable)
    except _OverEveryLimit as over:
        verdict, estimate, reason = Verdict.FAIL, None, str(over)

    smoke = _smoke(rule, candidate, reference)
    if verdict is Verdict.PASS and smoke:
        verdict = Verdict.INCONCLUSIVE
        reason = f"measured with the smoke suite {', '.join(smoke)}, which can never pass a gate"

    few = rule.metric.startswith("accuracy.") and own is not None and own.n < rule.min_items
    if verdict is Verdict.PASS and few and own is not None:
        verdict = Verdict.INCONCLUSIVE
        reason = f"{own.n} items were scored; fewer than {rule.min_items} decide nothing"

    if refusal:
        # Accuracy may come from a reference engine; what cannot be served is not promoted.
        verdict, reason = Verdict.INFEASIBLE, refusal

    return GateResult(
        name=rule.name,
        kind=rule.kind,
        metric=rule.metric,
        tier=rule.tier,
        result=verdict,
        estimate=estimate,
        margin=rule.margin,
        candidate=own.value if own else None,
        reference=theirs.value if theirs else None,
        reference_name=rule.reference,
        ratio=own.value / theirs.value if own and theirs and theirs.value != 0 else None,
        rate=rule.rate,
        n=own.n if own else None,
        reason=reason,
    )


def judge_all(
    rules: Iterable[GateRule],
    candidate: CandidateEvidence,
    references: Mapping[str, CandidateEvidence],
) -> list[GateResult]:
    """Every rule's result, in the policy's order; `references` by the names rules use."""
    return [judge(rule, candidate, references.get(rule.reference or "")) for rule in rules]


def _compare(rule: GateRule, own: float, theirs: float | None) -> tuple[Verdict, float | None, str]:
    """Verdict, estimate on the margin's scale, and reason, from usable numbers."""
    name, margin = rule.metric, rule.margin
    if not math.isfinite(margin):
        raise _Unusable(f"margin {margin} is not a finite number")
    if rule.kind == "retention":
        if theirs is None or theirs <= 0:
            raise _Unusable(f"the {rule.reference}'s {name} is {theirs}: no ratio to it exists")
        ratio = own / theirs
        keeps = f"{ratio:.4f} of the {rule.reference}'s {name} ({own:.4g} / {theirs:.4g})"
        if ratio >= margin - ROUNDING:
            return Verdict.PASS, ratio, f"keeps {keeps}, at least {margin:g} asked"
        return Verdict.FAIL, ratio, f"keeps only {keeps}, {margin:g} asked"
    if rule.kind == "implausible":
        assert theirs is not None  # guaranteed by `_referenced`
        gain = own - theirs
        text = f"{name} is {gain:+.4g} against the {rule.reference} ({own:.4g} / {theirs:.4g})"
        if gain > margin + ROUNDING:
            return Verdict.ANOMALOUS, gain, f"{text}: better by more than {margin:g} is implausible"
        return Verdict.PASS, gain, f"{text}, within {margin:g}"
    at = f" at {rule.rate:g} requests/s" if rule.rate is not None else ""
    if rule.kind == "ceiling":
        within, limit = own <= margin + ROUNDING, "at most"
    else:
        within, limit = own >= margin - ROUNDING, "at least"
    verdict = Verdict.PASS if within else Verdict.FAIL
    return verdict, own, f"{name}{at} is {own:.6g}, {limit} {margin:g} asked"


# -- numbers, or why there are none ----------------------------------------------------------


def _measure(rule: GateRule, evidence: CandidateEvidence, who: str) -> _Measured:
    """The rule's metric in this evidence. Raises `_Unusable` or `_OverEveryLimit`."""
    kind, _, metric = rule.metric.partition(".")
    if kind == "accuracy":
        return _accuracy(metric, evidence, who)
    if kind == "latency":
        return _latency(metric, rule.rate, evidence, who)
    raise _Unusable(f"no evidence has a metric {rule.metric!r}; use accuracy.* or latency.*")


def _present(kind: str, evidence: CandidateEvidence, who: str) -> Any:
    """The evidence of one kind, after the checks that need no metric."""
    if kind in evidence.unreadable:
        raise _Unusable(f"the {who}'s {kind} evidence cannot be used: {evidence.unreadable[kind]}")
    found = getattr(evidence, kind)
    if found is None:
        raise _Unusable(f"there is no {kind} evidence of the {who}")
    if found.schema_version != SCHEMA_VERSION:
        raise _Unusable(
            f"the {who}'s {kind} evidence has schema version {found.schema_version}, "
            f"not {SCHEMA_VERSION}"
        )
    if found.bundle != evidence.bundle:
        raise _Unusable(
            f"the {who}'s {kind} evidence names bundle {str(found.bundle)[:12]}, "
            f"not {evidence.bundle[:12]}"
        )
    return found


def _accuracy(metric: str, evidence: CandidateEvidence, who: str) -> _Measured:
    found: AccuracyEvidence = _present("accuracy", evidence, who)
    if found.items_scored != found.items_asked:
        raise _Unusable(
            f"{found.items_scored} of the {who}'s {found.items_asked} items were scored"
        )
    if found.items_scored == 0:
        raise _Unusable(f"no item was asked of the {who}")
    if metric not in found.metrics:
        has = ", ".join(sorted(found.metrics)) or "none"
        raise _Unusable(f"the {who}'s evidence has no metric {metric!r} (it has: {has})")
    return _Measured(_number(found.metrics[metric], f"{who}'s {metric}"), found.items_scored)


def _latency(metric: str, rate: float | None, evidence: CandidateEvidence, who: str) -> _Measured:
    found: LatencyEvidence = _present("latency", evidence, who)
    points = [p for p in found.points if rate is not None and math.isclose(p.rate, rate)]
    if not points:
        measured = ", ".join(f"{point.rate:g}" for point in found.points) or "none"
        wanted = "no rate" if rate is None else f"rate {rate:g} requests/s"
        raise _Unusable(f"{wanted} was not measured for the {who} (measured: {measured})")
    if len(points) > 1:
        raise _Unusable(f"rate {rate:g} occurs {len(points)} times in the {who}'s evidence")
    point = points[0]
    if point.ok + point.failed != point.total:
        raise _Unusable(
            f"requests of the {who} do not add up: {point.ok} answered + {point.failed} failed "
            f"!= {point.total}"
        )
    if point.total == 0:
        raise _Unusable(f"no request was sent to the {who} at {point.rate:g} requests/s")
    failures = f"{point.failed} of {point.total} requests failed at {point.rate:g} requests/s"
    name, percent = _percentile_of(metric)
    if percent is None:
        if point.ok == 0:
            raise _OverEveryLimit(f"{failures}: nothing was answered")
        return _Measured(_number(_plain(point, metric), f"{who}'s {metric}"), point.total)
    # Whatever number stands there, this percentile lies among the failed requests.
    if math.ceil(percent / 100 * point.total) > point.ok:
        raise _OverEveryLimit(f"{failures}: the {metric} is over every limit")
    table: dict[str, float | None] = getattr(point, name)
    if f"p{percent}" not in table:
        raise _Unusable(f"p{percent} of {name} is not in the {who}'s evidence")
    return _Measured(_number(table[f"p{percent}"], f"{who}'s {metric}"), point.total)


def _percentile_of(metric: str) -> tuple[str, int | None]:
    """`e2el_p99_ms` -> (`e2el_ms`, 99); a metric that is no percentile -> (itself, None)."""
    name, _, rest = metric.partition("_p")
    percent = rest.removesuffix("_ms")
    if name in ("ttft", "tpot", "itl", "e2el") and rest.endswith("_ms") and percent.isdecimal():
        return f"{name}_ms", int(percent)
    return metric, None


def _plain(point: LoadPoint, metric: str) -> Any:
    """A figure of a load point that is no percentile."""
    if metric == "success_rate":
        return point.ok / point.total
    plain = ("achieved_rate", "output_tokens_per_s", "acceptance_length", "prefix_cache_hit_rate")
    if metric not in plain:
        raise _Unusable(f"latency evidence has no metric {metric!r}")
    return getattr(point, metric)


def _number(value: Any, what: str) -> float:
    """`value` if it is a finite number; text, booleans and null are none."""
    if value is None:
        raise _Unusable(f"the {what} has no number (null)")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unusable(f"the {what} is {value!r}, which is not a number")
    if not math.isfinite(value):
        raise _Unusable(f"the {what} is {value}, which is not a finite number")
    return float(value)


# -- may the two be compared? ----------------------------------------------------------------


def _referenced(
    rule: GateRule, candidate: CandidateEvidence, reference: CandidateEvidence | None
) -> _Measured:
    """The reference's number, after a check that both were measured alike."""
    who = rule.reference or "reference"
    if reference is None:
        raise _Unusable(f"there is no evidence of the {who}")
    theirs = _measure(rule, reference, who)
    differing = differences(rule, candidate, reference)
    if differing:
        raise _Unusable(f"not measured like the {who}: {'; '.join(differing)}")
    return theirs


def differences(
    rule: GateRule, candidate: CandidateEvidence, reference: CandidateEvidence
) -> list[str]:
    """Everything that makes the two numbers of `rule` incomparable, candidate named first.

    A teacher of another family brings its own chat template, so there it may differ.
    """
    kind = rule.metric.partition(".")[0]
    own, theirs = getattr(candidate, kind), getattr(reference, kind)
    alike = {
        "accuracy": (
            "suite", "task", "task_version", "harness", "items_digest", "items_asked", "smoke",
        ),
        "latency": ("profile", "hardware", "harness", "smoke"),
    }[kind]  # fmt: skip
    found = [
        f"{name} {_shown(getattr(own, name))} against {_shown(getattr(theirs, name))}"
        for name in alike
        if getattr(own, name) != getattr(theirs, name)
    ]
    unknown = [
        f"unknown settings of the {who}"
        for who, evidence in (("candidate", own), (rule.reference, theirs))
        if not evidence.settings
    ]
    if unknown:
        return found + unknown
    ours, other = _flat(own.settings), _flat(theirs.settings)
    for name in sorted(set(ours) | set(other)):
        if name.rpartition(".")[2] in MAY_DIFFER:
            continue
        if "chat_template" in name and rule.reference == "teacher":
            continue
        if name not in ours or name not in other or ours[name] != other[name]:
            left = _shown(ours[name]) if name in ours else "not recorded"
            right = _shown(other[name]) if name in other else "not recorded"
            found.append(f"{name} {left} against {right}")
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:12]}..."


def _smoke(
    rule: GateRule, candidate: CandidateEvidence, reference: CandidateEvidence | None
) -> list[str]:
    """Names of the smoke suites behind the rule's numbers."""
    kind = rule.metric.partition(".")[0]
    sides = [candidate] if rule.reference is None else [candidate, reference]
    found = [getattr(side, kind, None) for side in sides]
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
    serving: ServingEvidence = _present("serving", candidate, "candidate")
    if serving.feasible:
        return ""
    return f"{serving.engine} cannot serve it on this hardware: {serving.reason or 'no reason'}"


# -- many gates, many candidates -------------------------------------------------------------


def verdict_of(results: Sequence[GateResult]) -> Verdict:
    """The verdict of one candidate. Without a critical gate nothing was judged: INVALID."""
    critical = {result.result for result in results if result.decides}
    if not critical:
        return Verdict.INVALID
    return next((verdict for verdict in REFUSALS if verdict in critical), Verdict.PASS)


def reasons_of(results: Sequence[GateResult]) -> list[str]:
    """Why a candidate is not PASS: its critical refusals, those that set the verdict first."""
    critical = [result for result in results if result.decides]
    if not critical:
        return ["no critical gate was judged"]
    refused = [result for result in critical if result.result is not Verdict.PASS]
    texts = [
        result.reason
        if result.result is Verdict.INFEASIBLE
        else f"{result.name} {result.result}: {result.reason}"
        for result in sorted(refused, key=lambda result: REFUSALS.index(result.result))
    ]
    # One engine's reason stands behind every gate of a candidate that cannot be served.
    return list(dict.fromkeys(texts))


def release_verdict(verdicts: Iterable[Verdict], promoted: bool) -> Verdict:
    """The verdict of a release from its candidates' own.

    `promoted`: a candidate that passed is now the champion (or awaits approval). A release
    whose candidates all passed but of which none was promoted has decided nothing: INCONCLUSIVE.
    """
    present = set(verdicts)
    if not present:
        return Verdict.INVALID
    if Verdict.PASS in present and promoted:
        return Verdict.PASS
    return next((v for v in RELEASE_ORDER if v in present), Verdict.INCONCLUSIVE)
