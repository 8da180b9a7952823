"""Evidence: what a measurement leaves behind, and all that a gate may look at.

A folder with `summary.json` (one of the models below) and Parquet rows: `items.parquet` for
accuracy, one row per item; `requests.parquet` for latency, one row per request. Measurements
write it and decide nothing; gates read it and measure nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from registry.engine_memory import (
    ComparedMemory,
    MeasuredMemory,
    PlannedMemory,
    compared,
    highest,
)
from registry.errors import UserError
from registry.transfer import Transfer

SUMMARY = "summary.json"
ITEMS = "items.parquet"
REQUESTS = "requests.parquet"
TIMELINE = "timeline.parquet"
PERCENTILES = (50, 90, 95, 99)

ITEM_COLUMNS = (
    "item_id",
    "segment",
    "conversation",
    "prompt_hash",
    "response",
    "finish_reason",
    "output_tokens",
    "bundle",
    "engine",
    "harness",
    "seed",
)
"""Columns of `items.parquet` beside one column per metric.

`bundle`, `engine`, `harness` and `seed` repeat the summary's, so that rows which were put beside
another summary are found out. `conversation` is null where the prompts have none.
"""

REQUEST_COLUMNS = (
    "rate",
    "request_id",
    "start_s",
    "ok",
    "error",
    "prompt_tokens",
    "output_tokens",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "e2el_ms",
    "scenario",
)
"""Columns of `requests.parquet`; `itl_ms` is a list, times of failed requests are null.

`scenario` is null where the load profile has one kind of traffic.
"""

TIMELINE_COLUMNS = (
    "step",
    "rate",
    "at_s",
    "running",
    "waiting",
    "kv_cache_usage",
    "preemptions",
    "memory_bytes",
    "gpu_memory_bytes",
)
"""Columns of `timeline.parquet`, the engine's gauges during every step.

`step` counts from 1 as the load points do, `at_s` from the step's first request; `kv_cache_usage`
is a share of 1, `preemptions` counts since the step began. Null: not shown by this engine or
machine.
"""


class Recorded(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Unusable(Exception):
    """Evidence that cannot be judged; the text is the reason. A gate makes INVALID of it."""


TRANSFER = (
    "Of a server in parts: what its engines counted meanwhile; all prompts came by transfer. Of a "
    "measurement that was stopped and went on: since then."
)


class AccuracyEvidence(Recorded):
    """One bundle, one suite: sample accounting first, then the means."""

    schema_version: Literal[2] = 2
    kind: Literal["accuracy"] = "accuracy"
    bundle: str = Field(description="Digest of the bundle that answered.")
    suite: str
    task: str
    task_version: str
    engine: str = Field(description="Name and version, e.g. `vllm 0.32.0+cpu`.")
    harness: str = Field(description="Name and version, e.g. `lm-eval 0.4.13`.")
    items_digest: str = Field(description="Digest of the eval items that were asked.")
    settings: dict[str, Any] = Field(
        description="Sampling, few-shot, digests of tokenizer, chat template and task."
    )
    items_asked: int = Field(ge=0)
    items_scored: int = Field(ge=0)
    metrics: dict[str, float | None] = Field(description="Mean over all items; null: no number.")
    smoke: bool = False
    limited: bool = Field(
        default=False, description="A limit cut the task's items; such a run never promotes."
    )
    measured_at: datetime | None
    seconds: float | None
    transfer: Transfer | None = Field(
        default=None, exclude_if=lambda transfer: transfer is None, description=TRANSFER
    )


class LoadPoint(Recorded):
    """One request rate. Times in milliseconds; failed requests count as over every limit."""

    rate: float = Field(description="Requests per second asked for.")
    achieved_rate: float | None = Field(description="Requests per second really sent.")
    total: int
    ok: int
    failed: int
    duration_s: float
    ttft_ms: dict[str, float | None] = Field(description="p50, p90, p95, p99")
    tpot_ms: dict[str, float | None]
    itl_ms: dict[str, float | None]
    e2el_ms: dict[str, float | None]
    output_tokens_per_s: float | None
    acceptance_length: float | None = Field(
        default=None, description="Mean tokens per target step with the draft; null without."
    )
    prefix_cache_hit_rate: float | None = None
    answer: Literal["kept", "not kept", "undecided", "void"] | None = Field(
        default=None, description="Of a search: what this rate showed about the SLA."
    )
    cause: str = Field(default="", description="Why it was not kept, is undecided, or void.")
    steady: bool | None = None
    cropped: int = Field(default=0, description="First requests left out as the start.")
    values: dict[str, float | None] = Field(
        default_factory=dict,
        description="The percentile in ms of each line of the SLA, steady part.",
    )
    bounds: dict[str, float | None] = Field(
        default_factory=dict,
        description="Upper confidence bound in ms of each line of the SLA; null: none yet.",
    )
    truncated: int = Field(
        default=0, description="Answers that reached `max_tokens`; over every limit if asked so."
    )
    one_token: int = Field(default=0, description="Answers of one token; they have no TPOT.")
    within_sla: int | None = Field(
        default=None, description="Requests that kept every line of the SLA, each by itself."
    )
    goodput: float | None = Field(default=None, description="`within_sla` per second of the step.")
    client_lag_ms: float | None = Field(
        default=None, description="P99 of how late the load generator's own clock ticked."
    )
    concurrency: int | None = Field(
        default=None, description="Requests in flight of a closed loop; then `rate` came of it."
    )
    expected_hit_rate: float | None = Field(
        default=None, description="Share of the prompts' blocks that stood in earlier prompts."
    )
    steady_window_s: tuple[float, float] | None = Field(
        default=None, description="Seconds after the step's first request; the judged part."
    )
    engine: dict[str, float | None] = Field(
        default_factory=dict,
        description="running_max, waiting_max, kv_cache_usage_max, preemptions, memory_peak_bytes, "
        "gpu_memory_peak_bytes during the step; null: not shown.",
    )
    cost: dict[str, float | None] = Field(
        default_factory=dict,
        description="per_request and per_million_output_tokens in the hardware file's currency.",
    )


class LatencyEvidence(Recorded):
    """One bundle under one load profile on one machine."""

    schema_version: Literal[1] = 1
    kind: Literal["latency"] = "latency"
    bundle: str
    profile: str
    hardware: str = Field(description="Fingerprint of the machine that was measured.")
    engine: str
    harness: str
    settings: dict[str, Any]
    points: list[LoadPoint]
    sla: list[str] = Field(default_factory=list, description="As in the load profile.")
    kept_rate: tuple[float | None, float | None] | None = Field(
        default=None, description="Highest rate kept, lowest not kept; of a search."
    )
    sustained: bool | None = Field(
        default=None, description="Whether longer runs kept the highest rate again; of a search."
    )
    notes: list[str] = Field(default_factory=list)
    smoke: bool = False
    emulated: bool | None = Field(
        default=None,
        description="Whether a kernel only imitated one that the hardware lacks: then no time here "
        "is the bundle's. None: not known (somebody else's server, or older evidence).",
    )
    production: bool = Field(default=True, description="As in the load profile.")
    transfer: Transfer | None = Field(
        default=None, exclude_if=lambda transfer: transfer is None, description=TRANSFER
    )
    measured_at: datetime
    seconds: float

    @property
    def times_count(self) -> bool:
        """Whether its times may decide anything: not those of an emulated kernel in production."""
        return not (self.emulated and self.production)


class ServingEvidence(Recorded):
    """Whether this hardware can run a bundle: proved by one generated token, or the reason."""

    schema_version: Literal[1] = 1
    kind: Literal["serving"] = "serving"
    bundle: str
    hardware: str
    engine: str
    feasible: bool
    reason: str = ""
    startup_seconds: float | None = None
    kv_cache_tokens: int | None = None
    plan: str | None = Field(
        default=None, description="Digest of `plan.json`, written before the engine started."
    )
    planned_kv_tokens: int | None = Field(
        default=None, description="Of the plan; null: it does not know."
    )
    plan_exact: bool = Field(
        default=False, description="The planned KV tokens are counted: they should be equal."
    )
    planned_memory: PlannedMemory | None = Field(
        default=None, description="Of the plan; null: it knows nothing."
    )
    memory: MeasuredMemory | None = Field(
        default=None, description="Of the started engine; null: not measured."
    )
    kernels: list[str] | None = Field(
        default=None, description="Of quantized layers, as the engine calls them; None: not known."
    )
    emulated: bool | None = Field(default=None, description="As in `LatencyEvidence`.")
    measured_at: datetime

    def compared_memory(self, points: Sequence[LoadPoint] = ()) -> list[ComparedMemory]:
        """Planned and measured side by side; `points` of its load test, for the peak."""
        return compared(
            self.planned_memory,
            self.memory,
            highest([point.engine.get("memory_peak_bytes") for point in points]),
            highest([point.engine.get("gpu_memory_peak_bytes") for point in points]),
        )


Evidence = AccuracyEvidence | LatencyEvidence | ServingEvidence

_KINDS: dict[str, type[Recorded]] = {
    "accuracy": AccuracyEvidence,
    "latency": LatencyEvidence,
    "serving": ServingEvidence,
}


def finite(value: float | None) -> float | None:
    """`value`, or None where it is no finite number: JSON has no NaN, and a gate reads null."""
    return value if value is not None and math.isfinite(value) else None


def percentile(values: list[float], percent: float, failed: int = 0) -> float | None:
    """The percentile of `len(values) + failed` requests, a failed one being infinitely slow.

    Between two observations by linear interpolation, as numpy and `vllm bench serve` have it (type
    7 of Hyndman and Fan 1996). None when there is no request, or when it would lie above the
    slowest that was answered.
    """
    total = len(values) + failed
    if not values:
        return None
    ordered = sorted(values)
    place = (total - 1) * percent / 100
    below = math.floor(place)
    share = place - below
    above = below + (share > 0)
    if above >= len(ordered):
        return None
    return ordered[below] + (ordered[above] - ordered[below]) * share


def percentiles(values: list[float], failed: int = 0) -> dict[str, float | None]:
    """`{"p50": ..., "p99": ...}` by `percentile`."""
    return {f"p{percent}": percentile(values, percent, failed) for percent in PERCENTILES}


def write_summary(folder: Path, evidence: Evidence) -> None:
    text = evidence.model_dump_json(indent=1)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")


def note_transfer(folder: Path, transfer: Transfer | None) -> None:
    """Add to the evidence in `folder` what was counted while it was measured; None: nothing."""
    evidence = read_summary(folder)
    if transfer is not None:
        write_summary(folder, evidence.model_copy(update={"transfer": transfer}))


def read_summary(folder: Path) -> Evidence:
    """The summary of an evidence folder. Raises `UserError` naming file, place and remedy."""
    path = folder / SUMMARY
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError:
        raise UserError.at(path, "no such evidence", "name a folder with a summary.json") from None
    except ValueError as error:
        raise UserError.at(path, f"not JSON: {error}", "measure again") from None
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in _KINDS:
        raise UserError.at(path, f"kind {kind!r} is not one of {sorted(_KINDS)}", "measure again")
    try:
        # Strict: a text "0.71" or a boolean is no number, and must not become one.
        return _KINDS[kind].model_validate_json(text, strict=True)  # type: ignore[return-value]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError.at(f"{path}: {place}", first["msg"], "measure again") from None
