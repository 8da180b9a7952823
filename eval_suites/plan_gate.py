"""Whether the engine has the KV cache that was planned: a gate that only shows where it has not.

Nothing of a plan is a measure of quality. But where the plan has no estimate in it (on a CPU, keys
and values in 16 bit, the cache's bytes given) the engine prints the same number, and another one
means that it does not serve what was planned: ANOMALOUS.
"""

from __future__ import annotations

from collections.abc import Sequence

from registry.candidate_memory import APART, apart
from registry.evidence_folders import CandidateEvidence
from registry.outcome import GateResult, Verdict

KV_AS_PLANNED = "kv_cache_as_planned"


def with_plan_gate(
    gates: Sequence[GateResult], candidate: CandidateEvidence | None
) -> list[GateResult]:
    """The gates of a candidate, and ANOMALOUS where planned and printed KV tokens are apart.

    A plan with an estimate in it, or none, refuses nothing (`tasks.serving.plan_finding` says it).
    """
    serving = candidate.serving if candidate is not None else None
    if serving is None or not serving.plan_exact:
        return list(gates)
    share = apart(serving.planned_kv_tokens, serving.kv_cache_tokens)
    if share is None or abs(share) <= APART:
        return list(gates)
    found = GateResult(
        name=KV_AS_PLANNED,
        kind="plan",
        metric="serving.kv_cache_tokens",
        tier="critical",
        result=Verdict.ANOMALOUS,
        estimate=None,
        margin=APART,
        candidate=float(serving.kv_cache_tokens or 0),
        reference=float(serving.planned_kv_tokens or 0),
        ratio=1 + share,
        n=None,
        method="counted, no estimate",
        reason=f"the engine has room for {serving.kv_cache_tokens} KV tokens, the plan "
        f"{(serving.plan or '')[:12]} said {serving.planned_kv_tokens} ({share:+.1%})",
    )
    return [*gates, found]
