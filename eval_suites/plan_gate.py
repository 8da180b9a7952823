"""Whether the engine has what was planned: gates that only show where it has not.

Nothing of a plan is a measure of quality. But what is counted and not estimated has to be so, and
where it is not, something else is served than what was planned: ANOMALOUS. Of the KV cache that is
on a CPU, keys and values in 16 bit, the cache's bytes given; of weights the bundle's own files.
"""

from __future__ import annotations

from collections.abc import Sequence

from registry.candidate_memory import APART, apart
from registry.engine_memory import FILES, size_words
from registry.evidence import ServingEvidence
from registry.evidence_folders import CandidateEvidence
from registry.outcome import GateResult, Verdict

KV_AS_PLANNED = "kv_cache_as_planned"
WEIGHTS_AS_PLANNED = "weights_as_planned"
WITHIN_HARDWARE = "weights_within_hardware"


def with_plan_gate(
    gates: Sequence[GateResult], candidate: CandidateEvidence | None
) -> list[GateResult]:
    """The gates of a candidate, and ANOMALOUS where what is counted is apart from what was found.

    A plan with an estimate in it, or none, refuses nothing (`tasks.serving.plan_findings` says it).
    """
    serving = candidate.serving if candidate is not None else None
    if serving is None:
        return list(gates)
    found = (_kv_cache(serving), _files(serving), _within(serving))
    return [*gates, *(one for one in found if one is not None)]


def _kv_cache(serving: ServingEvidence) -> GateResult | None:
    share = apart(serving.planned_kv_tokens, serving.kv_cache_tokens)
    if not serving.plan_exact or share is None or abs(share) <= APART:
        return None
    return _anomalous(
        KV_AS_PLANNED,
        "serving.kv_cache_tokens",
        serving.kv_cache_tokens or 0,
        serving.planned_kv_tokens or 0,
        f"the engine has room for {serving.kv_cache_tokens} KV tokens, the plan "
        f"{(serving.plan or '')[:12]} said {serving.planned_kv_tokens} ({share:+.1%})",
    )


def _files(serving: ServingEvidence) -> GateResult | None:
    """The bundle's files against its own configuration: shards that are missing, or another's."""
    for one in serving.compared_memory():
        if one.what == FILES and one.apart:
            return _anomalous(
                WEIGHTS_AS_PLANNED,
                "serving.weights_bytes",
                one.measured_bytes,
                one.planned_bytes,
                f"the target's files hold {size_words(one.measured_bytes)} of weights, its "
                f"configuration says {size_words(one.planned_bytes)} ({one.share:+.1%})",
            )
    return None


def _within(serving: ServingEvidence) -> GateResult | None:
    """A larger GPU than the release is for loads what the other cannot hold."""
    loaded = serving.memory.loaded_bytes if serving.memory is not None else None
    has = serving.planned_memory.hardware_bytes if serving.planned_memory is not None else None
    if not loaded or not has or loaded <= has:
        return None
    return _anomalous(
        WITHIN_HARDWARE,
        "serving.loaded_bytes",
        loaded,
        has,
        f"the engine loaded {size_words(loaded)} into a GPU, and one that the release is for has "
        f"{size_words(has)}",
    )


def _anomalous(name: str, metric: str, found: int, said: int, reason: str) -> GateResult:
    return GateResult(
        name=name,
        kind="plan",
        metric=metric,
        tier="critical",
        result=Verdict.ANOMALOUS,
        estimate=None,
        margin=APART,
        candidate=float(found),
        reference=float(said),
        ratio=found / said,
        n=None,
        method="counted, no estimate",
        reason=reason,
    )
