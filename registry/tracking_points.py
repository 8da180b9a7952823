"""Which metrics MLflow gets, and under which names.

A load point's number is the step, from 1 in order of measuring, and `latency.rate` says its rate
at that step. On the run of the stage `latency` the names are as below; on the release's run and on
the LoggedModels the candidate's name stands before them: `bf16.latency.e2el_p99_ms`.

    latency.rate, .achieved_rate, .concurrency           requests/s asked for and sent; in flight
    latency.requests, .failed, .truncated, .one_token    requests
    latency.ttft_p50_ms ... .e2el_p99_ms                 ttft, tpot, itl, e2el by p50, p90, p95, p99
    latency.goodput, .output_tokens_per_s                per second
    latency.acceptance_length, .prefix_cache_hit_rate    tokens per target step; a share of 1
    latency.kept, .void                                  1 or 0; `kept` only where it was decided
    latency.running_max, .waiting_max, .kv_cache_usage_max, .preemptions, .memory_peak_bytes,
    latency.gpu_memory_peak_bytes                        the engine during the step
    latency.cost_per_request, .cost_per_million_output_tokens
    latency.client_lag_ms                                P99 of the generator's own clock
    latency.kept_rate_low, .kept_rate_high               of a search, once, at step 0
    latency.emulated                                     1: times of an emulated kernel; once

What is null is not logged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from registry.evidence import LoadPoint

if TYPE_CHECKING:
    from mlflow.entities import Metric

KeptRate = tuple[float | None, float | None] | None


def clean_name(name: str) -> str:
    """A name that MLflow takes: lm-eval's commas, `@` and the like become `_`."""
    return re.sub(r"[^\w./ -]", "_", name).strip("/. ")[:250]


def scalar_metrics(
    values: Mapping[str, float | None], at: int, model_id: str | None = None, step: int = 0
) -> list[Metric]:
    """Metrics of one moment (`at`: ms since the epoch). What is no finite number is left out."""
    from mlflow.entities import Metric

    return [
        Metric(clean_name(name), float(value), at, step, model_id=model_id)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    ]


def point_metrics(
    points: Sequence[LoadPoint], at: int, model_id: str | None = None
) -> list[Metric]:
    """Latency by load point: the point's number is the step."""
    return [
        metric
        for step, point in enumerate(points, start=1)
        for metric in scalar_metrics(
            {f"latency.{name}": value for name, value in figures(point).items()},
            at,
            model_id,
            step,
        )
    ]


def kept_rate_metrics(kept_rate: KeptRate, at: int, model_id: str | None = None) -> list[Metric]:
    """Both ends of a search's interval; an end that was not found is not logged."""
    low, high = kept_rate or (None, None)
    values = {"latency.kept_rate_low": low, "latency.kept_rate_high": high}
    return scalar_metrics(values, at, model_id)


def figures(point: LoadPoint) -> dict[str, float | None]:
    """A load point's numbers by their name without `latency.`; null: not known."""
    judged = {"kept": 1.0, "not kept": 0.0}
    found: dict[str, float | None] = {
        "rate": point.rate,
        "achieved_rate": point.achieved_rate,
        "concurrency": point.concurrency,
        "requests": point.total,
        "failed": point.failed,
        "truncated": point.truncated,
        "one_token": point.one_token,
        "goodput": point.goodput,
        "output_tokens_per_s": point.output_tokens_per_s,
        "acceptance_length": point.acceptance_length,
        "prefix_cache_hit_rate": point.prefix_cache_hit_rate,
        "kept": judged.get(point.answer or ""),
        "void": None if point.answer is None else float(point.answer == "void"),
        "client_lag_ms": point.client_lag_ms,
        **point.engine,
        **{f"cost_{name}": value for name, value in point.cost.items()},
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        table: dict[str, float | None] = getattr(point, f"{name}_ms")
        found |= {f"{name}_{percent}_ms": value for percent, value in table.items()}
    return found
