"""Evidence in memory, as a measurement would leave it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval_suites.gates import judge_all
from eval_suites.policy import GateRule, Policy
from registry.evidence import (
    AccuracyEvidence,
    LatencyEvidence,
    LoadPoint,
    ServingEvidence,
    percentiles,
)
from registry.evidence_folders import CandidateEvidence
from registry.items import Items
from registry.outcome import GateResult

NOW = datetime(2030, 1, 2, tzinfo=UTC)
SETTINGS = {
    "sampling": {"temperature": 0.0},
    "few_shot": 0,
    "chat_template": True,
    "chat_template_digest": "t1",
    "batch_size": 8,
}


def scores(right: int, wrong: int) -> list[float]:
    """0/1 scores, the right ones first."""
    return [1.0] * right + [0.0] * wrong


def items(where: str = "items.csv", /, **columns: Sequence[Any]) -> Items:
    """Rows with ids 0000, 0001, ... and the given columns."""
    n = len(next(iter(columns.values())))
    frame = pd.DataFrame({"item_id": [f"{i:04d}" for i in range(n)], **columns})
    return Items(where, frame.set_index(pd.Index(range(2, n + 2))))


def table(**columns: Sequence[Any]) -> CandidateEvidence:
    """What a bare `items.csv` is read as."""
    return CandidateEvidence("", items=items(**columns), source="table")


def accuracy(bundle: str, /, **changes: Any) -> AccuracyEvidence:
    """A summary without validation: gates must stand what a reader let through."""
    fields: dict[str, Any] = {
        "schema_version": 2,
        "kind": "accuracy",
        "bundle": bundle,
        "suite": "freight",
        "task": "freight.yaml",
        "task_version": "1",
        "engine": "vllm 0.32.0",
        "harness": "lm-eval 0.4.13",
        "items_digest": "items",
        "settings": SETTINGS,
        "items_asked": 400,
        "items_scored": 400,
        "metrics": {},
        "smoke": False,
        "limited": False,
        "measured_at": NOW,
        "seconds": 1.0,
    }
    return AccuracyEvidence.model_construct(**{**fields, **changes})


def measured(
    bundle: str, hit_rate: Sequence[float], /, rows: dict[str, Any] | None = None, **changes: Any
) -> CandidateEvidence:
    """Summary and rows that belong together."""
    n = len(hit_rate)
    counts = {
        "items_asked": n,
        "items_scored": n,
        "metrics": {"hit_rate": float(np.mean(hit_rate))},
    }
    return CandidateEvidence(
        bundle,
        accuracy=accuracy(bundle, **{**counts, **changes}),
        items=items(hit_rate=hit_rate, **(rows or {})),
    )


def point(rate: float = 2.0, times: list[float] | None = None, failed: int = 0) -> LoadPoint:
    answered = [100.0] * 40 if times is None else times
    by_percent = percentiles(answered, failed)
    return LoadPoint(
        rate=rate,
        achieved_rate=rate,
        total=len(answered) + failed,
        ok=len(answered),
        failed=failed,
        duration_s=20.0,
        ttft_ms=by_percent,
        tpot_ms=by_percent,
        itl_ms=by_percent,
        e2el_ms=by_percent,
        output_tokens_per_s=100.0,
    )


def latency(bundle: str, /, *points: LoadPoint, **changes: Any) -> LatencyEvidence:
    fields: dict[str, Any] = {
        "bundle": bundle,
        "profile": "cpu",
        "hardware": "h",
        "engine": "vllm",
        "harness": "vllm bench",
        "settings": {"sampling": {"temperature": 0.0}},
        "points": list(points),
        "measured_at": NOW,
        "seconds": 1.0,
    }
    return LatencyEvidence.model_validate({**fields, **changes})


def loaded(
    folder: Path,
    bundle: str,
    times: Sequence[float],
    failed: int = 0,
    rate: float = 2.0,
    **changes: Any,
) -> CandidateEvidence:
    """Latency evidence with its rows: E2EL in ms of the answered requests, and failed ones."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = ("ttft_ms", "tpot_ms", "e2el_ms")
    rows = [{"ok": True, **dict.fromkeys(columns, float(time))} for time in times]
    rows += [{"ok": False, **dict.fromkeys(columns)} for _ in range(failed)]
    for place, row in enumerate(rows):
        row |= {"rate": rate, "start_s": place / rate}
    pd.DataFrame(rows).to_parquet(folder / "requests.parquet")
    evidence = latency(bundle, point(rate, [float(time) for time in times], failed), **changes)
    return CandidateEvidence(bundle, latency=evidence, requests=folder / "requests.parquet")


def serving(bundle: str, feasible: bool, reason: str = "") -> ServingEvidence:
    return ServingEvidence(
        bundle=bundle,
        hardware="h",
        engine="vllm",
        feasible=feasible,
        reason=reason,
        measured_at=NOW,
    )


def rule(**changes: Any) -> GateRule:
    """Retention of 0.90 of the teacher's hit rate, unless changed."""
    kind = changes.get("kind", "retention")
    fields: dict[str, Any] = {"name": "g", "kind": kind}
    if kind != "length":
        fields["metric"] = "hit_rate"
    if kind not in ("floor", "ceiling"):
        fields["reference"] = "champion" if kind == "regression" else "teacher"
    return GateRule.model_validate({**fields, **changes})


def policy(*rules: GateRule, **changes: Any) -> Policy:
    fields: dict[str, Any] = {"kind": "policy", "description": "for a test", "gates": list(rules)}
    return Policy.model_validate({**fields, **changes})


def judge(
    one: GateRule,
    candidate: CandidateEvidence,
    reference: CandidateEvidence | None = None,
    **options: Any,
) -> GateResult:
    """The result of one rule on one candidate; policy settings and judge options by name."""
    settings = {key: options.pop(key) for key in tuple(options) if key in Policy.model_fields}
    references = {one.reference: reference} if one.reference and reference is not None else {}
    judged = Policy.model_construct(
        **{**policy(rule(name="other", kind="floor", margin=0.0)).__dict__, "gates": [one]}
    ).model_copy(update={key: policy(one, **settings).__dict__[key] for key in settings})
    (results,) = judge_all(judged, {"c": candidate}, references, **options).values()
    (result,) = results
    return result
