"""Gates on percentiles of request times: a ceiling on P99 is about one request in a hundred."""

from __future__ import annotations

import math

from eval_suites.percentiles import Percentile, requests_for
from eval_suites.policy import GateRule
from registry.outcome import GateResult, Verdict, Waived


def judged_percentile(
    rule: GateRule, waived: Waived | None, estimate: Percentile, level: float, never: str
) -> GateResult:
    """The result at its level. `never`: why these numbers can never pass, or nothing."""
    ceiling = rule.kind == "ceiling"
    p_pass, p_fail = estimate.p_below(rule.margin), estimate.p_above(rule.margin)
    bound, opposite = estimate.upper(level), estimate.lower(level)
    if not ceiling:
        p_pass, p_fail, bound, opposite = p_fail, p_pass, opposite, bound
    verdict = Verdict.PASS if p_pass <= level else Verdict.INCONCLUSIVE
    if p_fail <= level:
        verdict = Verdict.FAIL
    over = int((estimate.times > rule.margin).sum())
    asked = f"{'at most' if ceiling else 'at least'} {_ms(rule.margin)} asked"
    reason = (
        f"{rule.metric} at {rule.rate:g} requests/s is {_ms(estimate.value)}, {over} of "
        f"{estimate.n} requests over {_ms(rule.margin)}; {_sure(verdict, bound, opposite)} with "
        f"{1 - level:.4g} confidence; {asked}"
    )
    needed = None
    if verdict is Verdict.INCONCLUSIVE and ceiling and estimate.value <= rule.margin:
        needed = max(1, requests_for(estimate.percent, level, over) - estimate.n)
        reason += f"; about {needed} more requests with none over would decide"
    if never and verdict is Verdict.PASS:
        verdict, reason = Verdict.INCONCLUSIVE, never
    return GateResult(
        name=rule.name,
        kind=rule.kind,
        metric=rule.metric,
        tier=rule.tier,
        result=verdict,
        estimate=_finite(estimate.value),
        bound=_finite(bound),
        opposite_bound=_finite(opposite),
        margin=rule.margin,
        limit=rule.margin,
        level=level,
        p_value=p_pass,
        method=estimate.method,
        candidate=_finite(estimate.value),
        rate=rule.rate,
        n=estimate.n,
        needed=None if never else needed,
        waived=waived,
        reason=reason,
    )


def _sure(verdict: Verdict, bound: float, opposite: float) -> str:
    if verdict is Verdict.FAIL:
        return f"beyond {_ms(opposite)}"
    return f"within {_ms(bound)}" if math.isfinite(bound) else "no bound from so few"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ms(value: float) -> str:
    return f"{value:.4g} ms" if math.isfinite(value) else "over every limit"
