"""Latency at the fixed rates of a profile, or at fixed numbers of requests in flight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eval_suites.load import LoadProfile
from eval_suites.load_steps import Around, StepResult, judge_step
from registry.errors import InfrastructureError
from registry.evidence import REQUESTS, TIMELINE, LatencyEvidence, write_summary
from tasks.engines.load_evidence import load_point, write_requests, write_timeline
from tasks.engines.load_generator import Batch
from tasks.engines.load_prompts import Prompts
from tasks.engines.load_run import LoadRun, Seen

Say = Callable[[str], None]


@dataclass(frozen=True)
class Measuring:
    """What the evidence says of the bundle, beside the numbers."""

    bundle: str
    profile: str
    hardware: str
    engine: str
    price_per_hour: float | None = None
    emulated: bool | None = None


def request_count(rate: float, seconds: float) -> int:
    """Requests at `rate` per second during `seconds`; 0.1 * 30 is 3, not 4 by rounding."""
    return max(1, math.ceil(round(rate * seconds, 6)))


def requests_of(profile: LoadProfile) -> int:
    """Prompts that a profile without a search sends, its warm-up included."""
    loads = [*profile.rates, *map(float, profile.concurrencies)]
    each = sum(request_count(load, profile.seconds_per_rate) for load in loads)
    return profile.warmup_requests + profile.repeats * each


def measure_rates(
    profile: LoadProfile,
    run: LoadRun,
    prompts: Prompts,
    folder: Path,
    of: Measuring,
    say: Say = lambda line: None,
) -> LatencyEvidence:
    """Warm up, send every rate, write the evidence into `folder`.

    Raises `UserError` for too few prompts, `InfrastructureError` when the generator fails or no
    warm-up request is answered. Requests that fail under load are evidence, no error.
    """
    started = time.monotonic()
    prompts.require(requests_of(profile))
    warm_up(run, prompts, profile)
    loads: list[tuple[float | None, int | None]] = [
        *((rate, None) for rate in profile.rates),
        *((None, count) for count in profile.concurrencies),
    ]
    points, rows, timeline = [], [], []
    for step, (rate, concurrency) in enumerate(loads, start=1):
        seen = Seen()
        load = rate if rate is not None else float(concurrency or 0)
        for repeat in range(profile.repeats):
            taken = prompts.take(request_count(load, profile.seconds_per_rate))
            seed = profile.seed + (step - 1) * profile.repeats + repeat
            batch = Batch(taken, seed, rate, concurrency)
            run.send(seen, step, batch, prompts.expected_hits)
        result = judged(profile, rate, seen)
        point = load_point(profile, result, seen, of.price_per_hour)
        points.append(point.model_copy(update={"concurrency": concurrency}))
        rows += [row | {"rate": result.rate} for row in seen.rows]
        timeline.append((step, result.rate, seen.samples))
        why = f" ({result.cause})" if result.cause else ""
        say(
            f"{result.rate:.4g} requests/s: {point.answer or 'measured'}, {point.total} requests, "
            f"{point.failed} failed{why}"
        )
    evidence = LatencyEvidence(
        bundle=of.bundle,
        profile=of.profile,
        hardware=of.hardware,
        engine=of.engine,
        harness=run.generator.version,
        settings=settings_of(profile, prompts),
        points=points,
        sla=[str(clause) for clause in profile.sla],
        smoke=profile.smoke,
        emulated=of.emulated,
        production=profile.production,
        measured_at=datetime.now(UTC),
        seconds=round(time.monotonic() - started, 3),
    )
    write_requests(folder / REQUESTS, rows)
    write_timeline(folder / TIMELINE, timeline)
    write_summary(folder, evidence)
    return evidence


def judged(profile: LoadProfile, rate: float | None, seen: Seen) -> StepResult:
    """The answer of a step whose batches are repeats; of a closed loop at the rate it reached."""
    around = Around(seen.growth, seen.expected_hits, seen.client_lag_ms)
    if rate is None:
        answered = sum(row["ok"] for row in seen.rows)
        rate = answered / seen.duration if seen.duration > 0 else 0.0
        around = Around(seen.growth, seen.expected_hits)
    return judge_step(profile, rate, seen.batches, around, looks=1)


def warm_up(run: LoadRun, prompts: Prompts, profile: LoadProfile, count: int | None = None) -> Seen:
    """Send prompts all at once, unmeasured. Raises `InfrastructureError` if none is answered."""
    count = profile.warmup_requests if count is None else count
    seen = Seen()
    if count:
        run.send(seen, 0, Batch(prompts.take(count), profile.seed), prompts.expected_hits)
        if not any(row["ok"] for row in seen.rows):
            why = seen.rows[0]["error"]
            raise InfrastructureError(f"no warm-up request was answered: {why}")
    return seen


def settings_of(profile: LoadProfile, prompts: Prompts) -> dict[str, Any]:
    """How load was sent: what two measurements must have in common to be compared."""
    kept = {
        *("sampling", "seconds_per_rate", "warmup_requests", "burstiness", "seed"),
        *("request_timeout", "confidence", "looks", "repeats", "scenarios", "cache_band"),
        "truncated",
    }
    return {
        "endpoint": "/v1/chat/completions",
        **profile.model_dump(mode="json", include=kept),
        "prompts_digest": prompts.digest,
    }
