"""kind: traffic. What `pilotage profile` writes, and a load profile and a plan read.

Tokens are counts, times seconds, rates requests per second, shares 0 to 1. A percentile is the
smallest value that at least so many percent of the requests stay at or below
(`eval_suites.percentiles`). `null` means that the log does not say it; `notes` say why.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from eval_suites.load import Scenario
from recipes.written import Written

STABLE_PEAK = (
    "the largest time-weighted mean of requests in flight in any window of {window:g} s that "
    "begins a whole multiple of {step:g} s after the first arrival"
)


class Lengths(Written):
    """How a quantity is distributed over the requests."""

    mean: float
    min: int | float
    p5: int | float
    p50: int | float
    p90: int | float
    p95: int | float
    p99: int | float
    max: int | float


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

    percents: tuple[float, float]
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    share_of_requests: float
    share_of_prompt_tokens: float
    share_of_output_tokens: float


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
    requests: int = Field(gt=0)
    prompt_tokens: Lengths
    output_tokens: Lengths
    main_range: MainRange
    peak_concurrency: int | None
    stable_peak_concurrency: float | None
    mean_rate: float | None
    peak_rate: float | None = Field(description="Largest over the windows of `concurrency`.")
    peak_rate_at: datetime | None
    rate_by_hour: dict[int, float | None] = Field(
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
