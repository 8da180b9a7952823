"""Rows of requests and a step's summary: what every measurement of latency leaves behind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from eval_suites.costs import cost_of
from eval_suites.load import LoadProfile
from eval_suites.load_steps import StepResult, within_sla
from registry.evidence import LoadPoint, percentiles
from tasks.engines.load_generator import Row
from tasks.engines.load_run import Seen


def load_point(
    profile: LoadProfile, result: StepResult, seen: Seen, price_per_hour: float | None = None
) -> LoadPoint:
    """The step's summary: percentiles over all its requests, values and bounds over the steady.

    `price_per_hour` is of the hardware that served, in its file's currency.
    """
    rows = seen.rows
    answered = [row for row in rows if row["ok"]]
    failed = len(rows) - len(answered)
    intervals = [interval for row in answered for interval in row["itl_ms"]]
    # A failed request has no intervals to count; it weighs as many as an answered one has.
    lost = math.ceil(failed * len(intervals) / len(answered)) if answered else failed
    tokens = sum(row["output_tokens"] for row in answered)
    drafts = seen.growth.get("vllm:spec_decode_num_drafts_total", 0.0)
    accepted = seen.growth.get("vllm:spec_decode_num_accepted_tokens_total", 0.0)
    within = sum(within_sla(profile, row) for row in rows) if profile.sla else None
    speed = tokens / seen.duration if seen.duration > 0 else None
    answer = None if not profile.sla else result.answer
    done_rate = len(answered) / seen.duration if seen.duration > 0 else 0.0
    return LoadPoint(
        rate=result.rate,
        achieved_rate=result.achieved_rate,
        total=len(rows),
        ok=len(answered),
        failed=failed,
        duration_s=seen.duration,
        ttft_ms=percentiles([row["ttft_ms"] for row in answered], failed),
        tpot_ms=percentiles(
            [row["tpot_ms"] for row in answered if row["tpot_ms"] is not None], failed
        ),
        itl_ms=percentiles(intervals, lost),
        e2el_ms=percentiles([row["e2el_ms"] for row in answered], failed),
        output_tokens_per_s=speed,
        # The same as vLLM's own `spec_decode_acceptance_length`: each draft is one target step
        # that yields its accepted tokens and one of its own.
        acceptance_length=1 + accepted / drafts if drafts else None,
        prefix_cache_hit_rate=result.hit_rate,
        expected_hit_rate=seen.expected_hits,
        answer="void" if result.void else answer,
        cause=result.cause,
        steady=result.steady,
        cropped=result.cropped,
        values={str(one.clause): one.value for one in result.clauses},
        bounds={str(one.clause): one.bound for one in result.clauses},
        truncated=result.truncated,
        one_token=sum(row["output_tokens"] == 1 for row in answered),
        within_sla=within,
        goodput=within / seen.duration if within is not None and seen.duration > 0 else None,
        client_lag_ms=seen.client_lag_ms,
        steady_window_s=result.steady_window_s,
        engine=seen.engine,
        cost=cost_of(price_per_hour, done_rate, speed),
    )


def write_requests(path: Path, rows: Sequence[Row]) -> None:
    """`requests.parquet`: rows of `REQUEST_COLUMNS`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("rate", pa.float64()),
            ("request_id", pa.string()),
            ("start_s", pa.float64()),
            ("ok", pa.bool_()),
            ("error", pa.string()),
            ("prompt_tokens", pa.int64()),
            ("output_tokens", pa.int64()),
            ("ttft_ms", pa.float64()),
            ("tpot_ms", pa.float64()),
            ("itl_ms", pa.list_(pa.float64())),
            ("e2el_ms", pa.float64()),
            ("scenario", pa.string()),
        ]
    )
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)


def write_timeline(
    path: Path, steps: Iterable[tuple[int, float, Sequence[Mapping[str, object]]]]
) -> None:
    """`timeline.parquet`: rows of `TIMELINE_COLUMNS` from (step, rate, samples)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("step", pa.int64()),
            ("rate", pa.float64()),
            ("at_s", pa.float64()),
            ("running", pa.float64()),
            ("waiting", pa.float64()),
            ("kv_cache_usage", pa.float64()),
            ("preemptions", pa.float64()),
            ("memory_bytes", pa.int64()),
            ("gpu_memory_bytes", pa.int64()),
        ]
    )
    rows = [
        {"step": step, "rate": rate, **sample}
        for step, rate, samples in steps
        for sample in samples
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
