"""Load profiles: the traffic that is sent to a served bundle, and what it must withstand."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from recipes.schema import Sampling, Written

TIME_METRICS = ("ttft", "tpot", "itl", "e2el")
_CLAUSE = re.compile(r"(ttft|tpot|itl|e2el) +p(\d+(?:\.\d+)?) +(\d+(?:\.\d+)?) *(ms|s)")


class SlaClause(Written):
    """One line of an SLA, written `e2el p99 2s` or `ttft p95 500ms`."""

    metric: Literal["ttft", "tpot", "itl", "e2el"]
    percent: float = Field(gt=0, lt=100)
    limit_ms: float = Field(gt=0)

    @model_validator(mode="before")
    @classmethod
    def _words(cls, written: Any) -> Any:
        if not isinstance(written, str):
            return written
        found = _CLAUSE.fullmatch(written.strip().lower())
        if found is None:
            raise ValueError(f"{written!r} is not METRIC PERCENTILE LIMIT, e.g. `e2el p99 2s`")
        metric, percent, number, unit = found.groups()
        limit = float(number) * (1000 if unit == "s" else 1)
        return {"metric": metric, "percent": float(percent), "limit_ms": limit}

    def __str__(self) -> str:
        return f"{self.metric} p{self.percent:g} {self.limit_ms:g}ms"


class RateSearch(Written):
    """A geometric ramp from `start`, then bisection to `tolerance` (width over middle)."""

    start: float | None = Field(
        default=None, gt=0, description="Requests/s; None: half of what the warm-up's burst got."
    )
    factor: float = Field(default=2.0, gt=1)
    tolerance: float = Field(default=0.2, gt=0.01, lt=2)
    lowest: float = Field(default=0.05, gt=0)
    highest: float = Field(default=1000.0, gt=0, le=10_000)
    minutes: float = Field(gt=0, description="The search ends after so long with what it knows.")


class Synthetic(Written):
    """Prompts of exact lengths in words, each different from every other in all of them."""

    prefix_words: int = Field(default=0, ge=0, description="Shared by all prompts.")
    input_words: int = Field(gt=0)


class LoadProfile(Written):
    """kind: load. Fixed request rates, or a search for the largest one that keeps the SLA."""

    kind: Literal["load"]
    description: str
    hardware: str = Field(description="What the limits are meant for; also in the file's name.")
    rates: list[float] = Field(default_factory=list, description="Requests per second, rising.")
    search: RateSearch | None = None
    sla: list[SlaClause] = Field(default_factory=list, description="`e2el p99 2s`, ...")
    seconds_per_rate: float = Field(
        gt=0, le=86_400, description="Sending time at each rate; with a search the least."
    )
    looks: int = Field(
        default=2, ge=1, le=5, description="Planned looks of a search at one rate; share the error."
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="One-sided.")
    cache_band: tuple[float, float] = Field(
        default=(0.0, 0.05), description="Prefix-cache hit rate that is expected of a step."
    )
    synthetic: Synthetic | None = Field(default=None, description="None: the business prompts.")
    warmup_requests: int = Field(default=4, ge=0)
    sampling: Sampling
    burstiness: float = Field(default=1.0, gt=0, description="1: Poisson arrivals.")
    request_timeout: float = Field(default=120.0, gt=0, description="Seconds.")
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

    @model_validator(mode="after")
    def _one_way(self) -> LoadProfile:
        if bool(self.rates) == (self.search is not None):
            raise ValueError("give either `rates` or a `search`")
        if self.search is not None and not self.sla:
            raise ValueError("a search needs an `sla`, e.g. [e2el p99 2s]")
        if not 0 <= self.cache_band[0] <= self.cache_band[1] <= 1:
            raise ValueError("cache_band must be two shares, the lower one first")
        return self
