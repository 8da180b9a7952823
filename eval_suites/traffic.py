"""kind: traffic. What `pilotage profile` writes, and a load profile and a plan read.

Tokens are counts, times seconds, rates requests per second, shares 0 to 1. A percentile is the
smallest value that at least so many percent of the requests stay at or below
(`eval_suites.percentiles`). `null` means that the log does not say it; `notes` say why.
"""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from eval_suites.load import Scenario
from recipes.written import Written

STABLE_PEAK = (
    "the largest time-weighted mean of requests in flight in any window of {window:g} s that "
    "begins a whole multiple of {step:g} s after the first arrival"
)

LARGEST = 1e12
ROUNDED = 1.00001
"""Six digits are written."""

Amount = Annotated[int | float, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=int(LARGEST))]
Rate = Annotated[float, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Hours = Annotated[int, Field(ge=0, le=23)]


class Lengths(Written):
    """How a quantity is distributed over the requests."""

    mean: Amount
    min: Amount
    p5: Amount
    p50: Amount
    p90: Amount
    p95: Amount
    p99: Amount
    max: Amount

    @model_validator(mode="after")
    def _rising(self) -> Self:
        names = ("min", "p5", "p50", "p90", "p95", "p99", "max")
        for low, high in itertools.pairwise(names):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} is above {high}")
        if not self.min / ROUNDED <= self.mean <= self.max * ROUNDED:
            raise ValueError("mean is not between min and max")
        return self


class Source(Written):
    """One file of the log."""

    file: str
    format: str
    bytes: int
    rows: int = Field(description="Rows read, bad ones included.")
    columns: dict[str, str] = Field(description="Which column was read as what.")


class Rows(Written):
    """read = kept + the sum of `left_out`."""

    read: int
    kept: int
    left_out: dict[str, int] = Field(description="By reason.")
    examples: list[str] = Field(description="The first of them: file, place, value.")
    equal: int = Field(
        default=0, description="Kept rows that equal another one; without ids no proof of a repeat."
    )


class Period(Written):
    """When the log's requests arrived, and whose hours are meant."""

    first: datetime
    last: datetime
    span_s: float
    timezone: str
    timezone_from: str
    resolution_s: float = Field(description="The coarsest of 1, 0.001, 1e-6 that all times keep to")
    days: int = Field(description="Calendar days with a request.")
    gap_days: int = Field(description="Days without one between the first and the last.")


class MainRange(Written):
    """The load without its extremes: requests whose two lengths lie within these percentiles."""

    percents: tuple[Annotated[float, Field(ge=0, le=100)], Annotated[float, Field(ge=0, le=100)]]
    prompt_tokens: tuple[Count, Count]
    output_tokens: tuple[Count, Count]
    share_of_requests: Share
    share_of_prompt_tokens: Share
    share_of_output_tokens: Share

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name in ("percents", "prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: {low:g} to {high:g} is no range")
        if self.prompt_tokens[1] < 1:
            raise ValueError("prompt_tokens: a prompt has at least one token")
        return self


class Hour(Written):
    """An hour of the day, over all days on which the log has a request."""

    hour: int = Field(ge=0, le=23)
    days: int = Field(description="Days on which the log covers some of this hour.")
    seconds: float = Field(description="Of this hour between the first and the last arrival.")
    requests: int
    rate: float | None = Field(description="requests / seconds; null: less than a minute of it.")
    dispersion: float | None = Field(
        description="Variance over mean of the arrivals in 10 s within a quarter; Poisson: 1."
    )


class Burstiness(Written):
    gap_cv: float | None = Field(
        description="Standard deviation over mean of the gaps between arrivals in a quarter, "
        "by requests; Poisson: 1."
    )
    dispersion: float | None = Field(description="Of `hours`, by requests.")
    load: float = Field(
        gt=0, description="For a load profile's `burstiness`: 1 / gap_cv^2, 0.01 to 100."
    )
    load_from: str


class Concurrency(Written):
    """Requests in flight: counted, and by Little's law (rate x mean latency).

    Over the whole log the two are the same by definition; over a window they differ by what is in
    flight at its edges.
    """

    definition: str
    window_s: float
    step_s: float
    requests: int = Field(description="With an end; the others are not counted.")
    without_end: int
    latency_from: str
    missing: str | None = Field(default=None, description="Why nothing was counted.")
    peak_at: datetime | None = None
    stable_peak_at: datetime | None = Field(default=None, description="Its window begins here.")
    mean: float | None = None
    littles_law: float | None = Field(default=None, description="Rate x mean latency, whole log.")
    littles_law_peak: float | None = Field(
        default=None, description="The largest rate x mean latency of the arrivals of a window."
    )


class SharedPrefix(Written):
    """What of a prompt other prompts begin with too: what a prefix cache can hold."""

    source: str
    requests: int = Field(description="Requests that were looked at.")
    share_of_requests: float = Field(description="That share something.")
    share_of_prompt_tokens: float | None
    tokens: Lengths | None = Field(description="Over all that were looked at, 0 included.")


class Segment(Written):
    name: str
    requests: int
    share: float
    prompt_tokens: Lengths
    output_tokens: Lengths


class TrafficProfile(Written):
    """kind: traffic. The traffic of a log, for load profiles and plans."""

    kind: Literal["traffic"]
    description: str
    requests: int = Field(gt=0, le=int(LARGEST))
    prompt_tokens: Lengths
    output_tokens: Lengths
    main_range: MainRange
    peak_concurrency: Count | None
    stable_peak_concurrency: Rate | None
    mean_rate: Rate | None
    peak_rate: Rate | None = Field(description="Largest over the windows of `concurrency`.")
    peak_rate_at: datetime | None
    rate_by_hour: dict[Hours, Rate | None] = Field(
        description="Requests per second by hour of the day, 0 to 23; null: not in the log."
    )
    hours: list[Hour]
    burstiness: Burstiness
    concurrency: Concurrency
    latency_s: Lengths | None
    ttft_s: Lengths | None
    shared_prefix: SharedPrefix | None
    segments: list[Segment]
    scenarios: dict[str, Scenario] = Field(
        description="The main range as a load profile's scenarios; weights are shares."
    )
    period: Period
    rows: Rows
    sources: list[Source]
    notes: list[str]

    @model_validator(mode="after")
    def _numbers_agree(self) -> Self:
        """A profile that was corrected by hand must still be one that a log can have."""
        for name in ("prompt_tokens", "output_tokens"):
            high, longest = getattr(self.main_range, name)[1], getattr(self, name).max
            if high > longest:
                raise ValueError(f"main_range.{name} ends at {high}, {name}.max is {longest:g}")
        peak, stable = self.peak_concurrency, self.stable_peak_concurrency
        if peak is not None and peak > self.requests:
            raise ValueError(f"peak_concurrency {peak} is above the {self.requests} requests")
        if peak is not None and stable is not None and stable > peak * ROUNDED:
            raise ValueError(f"stable_peak_concurrency {stable:g} is above the peak, {peak}")
        return self
