"""Load profiles: the traffic that is sent to a served bundle, and what it must withstand."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from recipes.loader import cut
from recipes.schema import Sampling, Written

TIME_METRICS = ("ttft", "tpot", "itl", "e2el")
_CLAUSE = re.compile(
    r"(?:([a-z0-9_]+) +)?(ttft|tpot|itl|e2el) +p(\d+(?:\.\d+)?) +(\d+(?:\.\d+)?) *(ms|s)"
)

MOST_IN_FLIGHT = 10_000

OUTPUT_QUANTILES = 1000
"""Lengths that a log of output lengths is brought down to: its quantiles at equal distances."""


class SlaClause(Written):
    """One line of an SLA: `e2el p99 2s`, or of one scenario: `customer_service ttft p95 500ms`."""

    scenario: str | None = None
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
            raise ValueError(f"{cut(written)} is not [SCENARIO] METRIC PERCENTILE LIMIT, e.g. "
                             "`e2el p99 2s`")  # fmt: skip
        scenario, metric, percent, number, unit = found.groups()
        limit = float(number) * (1000 if unit == "s" else 1)
        return {
            "scenario": scenario,
            "metric": metric,
            "percent": float(percent),
            "limit_ms": limit,
        }

    def __str__(self) -> str:
        whose = f"{self.scenario} " if self.scenario else ""
        return f"{whose}{self.metric} p{self.percent:g} {self.limit_ms:g}ms"


class RateSearch(Written):
    """A geometric ramp from `start`, then bisection to `tolerance` (width over middle)."""

    start: float | None = Field(
        default=None, gt=0, description="Requests/s; None: of what the warm-up's burst got."
    )
    factor: float = Field(default=2.0, gt=1)
    tolerance: float = Field(default=0.2, gt=0.01, lt=2)
    lowest: float = Field(default=0.05, gt=0)
    highest: float = Field(default=1000.0, gt=0, le=10_000)
    minutes: float = Field(gt=0, description="The search ends after so long with what it knows.")

    @model_validator(mode="after")
    def _ordered(self) -> RateSearch:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest {self.lowest:g} must be below highest {self.highest:g}")
        if self.start is not None and not self.lowest <= self.start <= self.highest:
            raise ValueError(
                f"start {self.start:g} must lie between lowest {self.lowest:g} and highest "
                f"{self.highest:g}"
            )
        return self


class OutputLog(Written):
    """Output lengths as production had them: a column of a CSV, JSONL or Parquet file."""

    file: str = Field(min_length=1)
    column: str = Field(min_length=1, description="Output tokens per request, whole numbers.")


Tokens = Annotated[int, Field(gt=0, strict=True)]


class Scenario(Written):
    """One kind of request: synthetic prompts of exact lengths, each different from every other."""

    weight: float = Field(default=1.0, gt=0, description="Its share of the requests, over the sum.")
    unit: Literal["tokens", "words"] = Field(
        default="tokens", description="Of prefix and input; words where no tokenizer is known."
    )
    prefix: int = Field(default=0, ge=0, description="Shared by all prompts of the scenario.")
    input: int = Field(gt=0, description="Of the prompt's own, after the prefix.")
    output: Tokens | list[Tokens] | OutputLog | None = Field(
        default=None,
        description="Exact output tokens: fixed, drawn from a list, or from a log of production. "
        "None: answers end where the model ends them.",
    )

    @field_validator("output")
    @classmethod
    def _some(cls, output: Any) -> Any:
        if output == []:
            raise ValueError("an empty list of output lengths")
        return output


class LoadProfile(Written):
    """kind: load. Fixed request rates, a search for the largest one, or a closed loop."""

    kind: Literal["load"]
    description: str
    hardware: str = Field(description="What the limits are meant for; also in the file's name.")
    rates: list[float] = Field(default_factory=list, description="Requests per second, rising.")
    search: RateSearch | None = None
    concurrencies: list[int] = Field(
        default_factory=list,
        description="A closed loop instead of rates: so many requests in flight, rising.",
    )
    sla: list[SlaClause] = Field(default_factory=list, description="`e2el p99 2s`, ...")
    seconds_per_rate: float = Field(
        gt=0,
        le=86_400,
        description="Sending time at each rate, with a search the least. In a closed loop so many "
        "requests per one in flight.",
    )
    sustain: float = Field(
        default=3.0, ge=1, le=100, description="The run that confirms a rate is so much longer."
    )
    repeats: int = Field(
        default=1,
        ge=1,
        le=20,
        description="Batches at each fixed rate, confirming runs of a search; on fresh prompts.",
    )
    looks: int = Field(
        default=2, ge=1, le=5, description="Planned looks of a search at one rate; share the error."
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="One-sided.")
    cache_band: tuple[float, float] = Field(
        default=(0.0, 0.05), description="Prefix-cache hit rate that is expected of a step."
    )
    scenarios: dict[str, Scenario] = Field(
        default_factory=dict, description="Synthetic traffic by name; none: the business prompts."
    )
    truncated: Literal["over", "allowed"] | None = Field(
        default=None,
        description="Whether an answer that reaches `max_tokens` counts as over every limit. None: "
        "it does where the business prompts are sent.",
    )
    warmup_requests: int = Field(default=4, ge=0)
    sampling: Sampling
    burstiness: float = Field(default=1.0, gt=0, description="1: Poisson arrivals.")
    request_timeout: float = Field(default=120.0, gt=0, description="Seconds.")
    seed: int = Field(default=0, ge=0, lt=2**31)
    smoke: bool = False
    production: bool = Field(
        default=True,
        description="Whether the limits are meant for what serves in production. Then latency from "
        "an emulated kernel decides nothing; `false` accepts it, and it is shown with a flag.",
    )

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
        ways = [bool(self.rates), self.search is not None, bool(self.concurrencies)]
        if sum(ways) != 1:
            raise ValueError("give one of `rates`, a `search` and `concurrencies`")
        if any(not 1 <= count <= MOST_IN_FLIGHT for count in self.concurrencies) or (
            self.concurrencies != sorted(set(self.concurrencies))
        ):
            raise ValueError(
                f"concurrencies must be whole numbers from 1 to {MOST_IN_FLIGHT}, rising"
            )
        if self.search is not None and not self.sla:
            raise ValueError("a search needs an `sla`, e.g. [e2el p99 2s]")
        if not 0 <= self.cache_band[0] <= self.cache_band[1] <= 1:
            raise ValueError("cache_band must be two shares, the lower one first")
        odd = [str(one) for one in self.sla if one.scenario not in {None, *self.scenarios}]
        if odd:
            raise ValueError(f"no scenario of this profile: {', '.join(odd)}")
        names = [str(one) for one in self.sla]
        if len(set(names)) < len(names):
            raise ValueError(f"an SLA line stands twice: {', '.join(names)}")
        if any(not re.fullmatch(r"[a-z0-9_]+", name) for name in self.scenarios):
            raise ValueError("names of scenarios: small letters, digits and _")
        if set(self.scenarios) & set(TIME_METRICS):
            raise ValueError(f"a scenario cannot be called {', '.join(TIME_METRICS)}")
        return self

    @property
    def truncated_is_over(self) -> bool:
        if self.truncated is None:
            return not self.scenarios
        return self.truncated == "over"

    def share_of(self, scenario: str | None) -> float:
        """Share of the requests that are of a scenario; 1 for all of them."""
        if scenario is None:
            return 1.0
        total = sum(one.weight for one in self.scenarios.values())
        return self.scenarios[scenario].weight / total
