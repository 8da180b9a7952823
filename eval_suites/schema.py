"""What may stand in a suite: an accuracy suite, a load profile, or a policy."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from recipes.schema import Sampling, Written


class AccuracySuite(Written):
    """kind: accuracy. An lm-eval task over the eval part, scored item by item."""

    kind: Literal["accuracy"]
    description: str
    task: str = Field(
        pattern=r"^[a-z0-9_]+/[a-z0-9_]+\.yaml$",
        description="lm-eval task file below `eval_suites/tasks/`.",
    )
    items: int = Field(gt=0, description="Items asked; fewer scored is INVALID.")
    metrics: list[str] = Field(min_length=1)
    sampling: Sampling
    concurrency: int = Field(default=8, gt=0)
    smoke: bool = Field(default=False, description="A smoke suite can never promote.")


class LoadProfile(Written):
    """kind: load. Traffic sent to a served bundle, at rising request rates."""

    kind: Literal["load"]
    description: str
    hardware: str = Field(description="What the limits are meant for; also in the file's name.")
    rates: list[float] = Field(min_length=1, description="Requests per second, rising.")
    seconds_per_rate: float = Field(
        gt=0, le=86_400, description="Planned sending time at each rate."
    )
    warmup_requests: int = Field(default=4, ge=0)
    sampling: Sampling
    burstiness: float = Field(default=1.0, gt=0, description="1: Poisson arrivals.")
    seed: int = 0
    smoke: bool = False

    @field_validator("rates")
    @classmethod
    def _rising(cls, rates: list[float]) -> list[float]:
        if any(not 0 < rate <= 10_000 for rate in rates):
            raise ValueError("rates must be above 0 and at most 10000 requests/s")
        if rates != sorted(set(rates)):
            raise ValueError("rates must rise")
        return rates


class GateRule(Written):
    """One gate of a policy.

    `retention`: candidate / reference >= margin, for `accuracy.<metric>`.
    `ceiling` / `floor`: the candidate's own value against an absolute limit.
    `implausible`: candidate - reference above the margin is ANOMALOUS.
    """

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    metric: str = Field(description="`accuracy.hit_rate`, `latency.e2el_p99_ms`, ...")
    kind: Literal["retention", "floor", "ceiling", "implausible"]
    reference: Literal["teacher", "student"] | None = None
    margin: float
    rate: float | None = Field(
        default=None, gt=0, description="Request rate of a latency metric, in requests/s."
    )
    tier: Literal["critical", "supporting", "advisory"] = "critical"
    min_items: int = Field(
        default=100, ge=1, description="Fewer scored items than this can never pass."
    )

    @model_validator(mode="after")
    def _sound(self) -> GateRule:
        if not math.isfinite(self.margin):
            raise ValueError("margin must be a finite number")
        relative = self.kind in ("retention", "implausible")
        if relative != (self.reference is not None):
            raise ValueError(
                f"{self.kind} {'needs' if relative else 'takes no'} reference"
                + (" (teacher or student)" if relative else "")
            )
        if self.kind == "retention" and not 0 < self.margin <= 1:
            raise ValueError("margin of a retention must be above 0 and at most 1")
        if self.kind == "implausible" and self.margin < 0:
            raise ValueError("margin of an implausible gate must not be negative")
        if self.metric.startswith("latency.") != (self.rate is not None):
            raise ValueError("`rate` belongs to latency metrics, and they need it")
        return self


class Policy(Written):
    """kind: policy. The gates that a candidate must pass; all critical ones, always."""

    kind: Literal["policy"]
    description: str
    gates: list[GateRule] = Field(min_length=1)
    max_age_days: float = Field(
        default=30.0, gt=0, description="Older latency evidence is measured again."
    )

    @model_validator(mode="after")
    def _usable(self) -> Policy:
        names = [gate.name for gate in self.gates]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"gate names occur twice: {', '.join(doubled)}")
        if not any(gate.tier == "critical" for gate in self.gates):
            raise ValueError("a policy needs at least one critical gate")
        return self


KINDS: dict[str, type[Written]] = {
    "accuracy": AccuracySuite,
    "load": LoadProfile,
    "policy": Policy,
}
