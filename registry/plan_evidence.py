"""Times that were measured, in the row of a plan that they are of. Pure.

A row gets them where the same shape was served in the same format, with the same cache, draft and
GPUs, on the machine of the row. Times do not depend on the values of weights. Nothing is scaled:
what was measured at another rate than the row's says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from registry.evidence import LatencyEvidence, LoadPoint
from registry.plan_parts import Demand, Fit, Model
from registry.savings import replicas_of
from registry.shape_parts import ModelShape

MARK = "measured"
BATCH = ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization")
"""Arguments that the plan proposes; measured with others, the row says so."""


@dataclass(frozen=True)
class Served:
    """What was measured: a bundle under load. `here`: on this machine, as it is now.

    `one_engine`: vLLM's, on tp x pp GPUs, as each row has it; several keep more than one does.
    """

    evidence: LatencyEvidence
    source: str
    here: bool
    shape: ModelShape
    format: str
    kv_dtype: str
    draft: bool
    tp: int
    pp: int
    engine_args: Mapping[str, Any]
    one_engine: bool = True


def measured_of(
    fit: Fit, model: Model, demand: Demand, served: Sequence[Served], *, fit_is_here: bool
) -> dict[str, Any] | None:
    """The newest measurement that is of this row, as the document has it; None: there is none."""
    if not fit_is_here:
        return None
    ours = [one for one in served if one.here and _same(one, fit, model)]
    found = max(ours, key=lambda one: one.evidence.measured_at, default=None)
    return None if found is None else _document(found, fit, demand)


def _same(one: Served, fit: Fit, model: Model) -> bool:
    plain: dict[str, Any] = {"quantization": None, "dtype": ""}
    return (
        replace(one.shape, **plain) == replace(model.shape, **plain)
        and (one.format, one.kv_dtype) == (fit.format, fit.kv_dtype)
        and (one.draft, one.tp, one.pp) == (model.draft is not None, fit.tp, fit.pp)
        and one.one_engine
        and one.evidence.times_count
    )


def _document(one: Served, fit: Fit, demand: Demand) -> dict[str, Any]:
    evidence = one.evidence
    wanted = None if demand.rate is None else demand.rate / fit.replicas
    point = nearest(evidence.points, wanted)
    kept = evidence.kept_rate[0] if evidence.kept_rate else None
    document: dict[str, Any] = {
        "what": MARK,
        "source": one.source,
        "bundle": evidence.bundle,
        "measured_at": evidence.measured_at.isoformat(),
        "sla": evidence.sla,
        "kept_rate": list(evidence.kept_rate) if evidence.kept_rate else None,
        "emulated": evidence.emulated,
        "other_arguments": {
            name: one.engine_args.get(name)
            for name in BATCH
            if name in fit.engine_args and one.engine_args.get(name) != fit.engine_args[name]
        },
        "replicas": int(replicas_of((kept, None), demand.rate)[0])
        if demand.rate and kept
        else None,
        "rate": None,
    }
    if point is not None:
        document |= {
            "rate": point.rate,
            "rate_of_the_row": wanted,
            "in_flight": point.engine.get("running_max"),
            "ttft_ms": point.ttft_ms,
            "tpot_ms": point.tpot_ms,
            "e2el_ms": point.e2el_ms,
            "output_tokens_per_s": point.output_tokens_per_s,
            **peaks(evidence.points),
        }
    return document


def nearest(points: Sequence[LoadPoint], wanted: float | None) -> LoadPoint | None:
    """The lowest rate that is not below the wanted one, else the highest; void ones never.

    Without a wanted rate the highest that was not lost.
    """
    good = sorted((one for one in points if one.answer != "void"), key=lambda one: one.rate)
    if not good:
        return None
    if wanted is None:
        return next((one for one in reversed(good) if one.answer != "not kept"), good[-1])
    return next((one for one in good if one.rate >= wanted), good[-1])


def peaks(points: Sequence[LoadPoint]) -> dict[str, float | None]:
    """The most that a load test showed of each; null: not shown."""
    names = ("kv_cache_usage_max", "memory_peak_bytes", "gpu_memory_peak_bytes")
    return {
        name: max(
            (size for one in points if (size := one.engine.get(name)) is not None), default=None
        )
        for name in names
    }
