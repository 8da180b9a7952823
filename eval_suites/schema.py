"""What may stand in a suite: an accuracy suite, a load profile, or a policy (policy.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from eval_suites.policy import Policy
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


KINDS: dict[str, type[Written]] = {
    "accuracy": AccuracySuite,
    "load": LoadProfile,
    "policy": Policy,
}
