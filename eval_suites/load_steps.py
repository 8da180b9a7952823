"""One step of a load test: was the SLA kept at this rate, was it not, or can nobody say?

First whether the step measured what it should (the cache, the generator), then whether the server
was in a steady state, then the percentiles with their bounds. Pure: rows in, answer out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eval_suites.load import LoadProfile, SlaClause
from eval_suites.percentiles import Percentile, requests_for
from eval_suites.rate_search import Answer
from eval_suites.steady_state import START_SHARE, Array, in_flight, trend

Row = Mapping[str, Any]

SLOWEST_SENDING = 0.9
"""Below this share of the asked rate the generator, not the server, is what was measured."""

FIRST_LOOK = 0.4
"""Share of the requests at the first of several looks: enough to see that a rate is far off."""


@dataclass(frozen=True)
class ClauseResult:
    """One line of the SLA at one rate. Times in milliseconds; None: above every observed time."""

    clause: SlaClause
    answer: Answer
    value: float | None
    bound: float | None
    over: int


@dataclass(frozen=True)
class StepResult:
    """What one rate showed. `void`: the step did not measure what it should."""

    rate: float
    answer: Answer
    cause: str = ""
    void: bool = False
    n: int = 0
    failed: int = 0
    cropped: int = 0
    steady: bool = True
    hit_rate: float | None = None
    achieved_rate: float | None = None
    clauses: tuple[ClauseResult, ...] = field(default_factory=tuple)


def requests_at(profile: LoadProfile, rate: float) -> list[int]:
    """Requests of each planned look at a rate; together enough to show every clause of the SLA.

    With none over, half as many again would do: some requests are cropped, some will be over.
    """
    alpha = (1 - profile.confidence) / profile.looks
    least = max(requests_for(clause.percent, alpha) for clause in profile.sla)
    total = max(round(1.5 * least), round(rate * profile.seconds_per_rate))
    if profile.looks == 1:
        return [total]
    first = round(FIRST_LOOK * total)
    rest, looks = total - first, profile.looks - 1
    return [first, *(rest // looks + (i < rest % looks) for i in range(looks))]


def judge_step(
    profile: LoadProfile,
    rate: float,
    batches: Sequence[Sequence[Row]],
    counters: Mapping[str, float],
) -> StepResult:
    """The answer after the looks so far.

    `batches` are rows of `registry.evidence.REQUEST_COLUMNS`, one list per look, each in the
    order of sending; `counters` what the engine's counters grew by. A look's share of the error
    is the same for all looks.
    """
    rows = [row for batch in batches for row in batch]
    failed = sum(not row["ok"] for row in rows)
    hit_rate = _hit_rate(counters)
    achieved = min((rate_sent(batch) for batch in batches if len(batch) > 1), default=None)
    known: dict[str, Any] = {
        "rate": rate,
        "n": len(rows),
        "failed": failed,
        "hit_rate": hit_rate,
        "achieved_rate": achieved,
    }
    low, high = profile.cache_band
    if hit_rate is not None and not low <= hit_rate <= high:
        likely = (
            "prompts repeat what was asked before" if hit_rate > high else "no prefix is shared"
        )
        cause = f"prefix-cache hit rate {hit_rate:.2f} outside {low:g} to {high:g}: {likely}"
        return StepResult(answer="undecided", cause=cause, void=True, **known)
    if achieved is not None and achieved < SLOWEST_SENDING * rate:
        cause = f"the generator sent {achieved:.3g} of {rate:.3g} requests/s"
        return StepResult(answer="undecided", cause=cause, void=True, **known)
    crops = [crop_of(batch) for batch in batches]
    # A queue near its capacity wanders: one batch in ten drifts at nine tenths of it. One that
    # drifts in every batch does not wander.
    drifts = [drift_of(batch) for batch in batches]
    unsteady = drifts[-1] if all(drifts) else ""
    kept_rows = [row for batch, crop in zip(batches, crops, strict=True) for row in batch[crop:]]
    alpha = (1 - profile.confidence) / profile.looks
    clauses = tuple(_clause(clause, kept_rows, alpha) for clause in profile.sla)
    known |= {"cropped": sum(crops), "steady": not unsteady, "clauses": clauses}
    lost = [one for one in clauses if one.answer == "not kept"]
    if lost:
        cause = "; ".join(
            filter(None, [*(f"{one.clause}: {one.over} over" for one in lost), unsteady])
        )
        return StepResult(answer="not kept", cause=cause, **known)
    if unsteady and len(batches) == profile.looks:
        return StepResult(answer="not kept", cause=f"no steady state: {unsteady}", **known)
    if unsteady:
        return StepResult(answer="undecided", cause=f"perhaps no steady state: {unsteady}", **known)
    open_ones = [one for one in clauses if one.answer == "undecided"]
    if open_ones:
        cause = "; ".join(f"{one.clause}: {one.over} of {len(kept_rows)} over" for one in open_ones)
        return StepResult(answer="undecided", cause=cause, **known)
    return StepResult(answer="kept", **known)


def times_of(rows: Sequence[Row], metric: str) -> Array:
    """Times in ms in order of sending; failed requests are infinite, one-token TPOTs left out."""
    column = f"{metric}_ms"
    found = []
    for row in rows:
        if not row["ok"]:
            found.append(np.inf)
        elif metric == "itl":
            found.extend(row[column])
        elif row[column] is not None:
            found.append(row[column])
    return np.array(found, float)


def rate_sent(rows: Sequence[Row]) -> float:
    starts = sorted(row["start_s"] for row in rows)
    spread = starts[-1] - starts[0]
    return (len(starts) - 1) / spread if spread > 0 else float("inf")


def crop_of(rows: Sequence[Row]) -> int:
    """First requests of a batch that belong to its start."""
    return round(START_SHARE * len(rows))


def drift_of(rows: Sequence[Row]) -> str:
    """What drifts over a batch after its start, in words; empty when nothing does."""
    rest = rows[crop_of(rows) :]
    answered = [row for row in rest if row["ok"]]
    # A failed request has no end: it would count as in flight for ever.
    starts = [row["start_s"] for row in answered]
    ends = [row["start_s"] + row["e2el_ms"] / 1000 for row in answered]
    for name, series in (
        ("requests in flight", in_flight(starts, ends)),
        ("TTFT", times_of(answered, "ttft")),
        ("TPOT", times_of(answered, "tpot")),
    ):
        found = trend(series)
        if found.drifts:
            likely = _likely(name, found.change > 0)
            return f"{likely} ({name} {found.change:+.0%} over the step)"
    return ""


def _likely(series: str, rises: bool) -> str:
    if not rises:
        return "the start is not over"
    return "the service slows" if series == "TPOT" else "the queue grows"


def _clause(clause: SlaClause, rows: Sequence[Row], alpha: float) -> ClauseResult:
    times = times_of(rows, clause.metric)
    if not len(times):
        return ClauseResult(clause, "undecided", None, None, 0)
    percentile = Percentile(times, clause.percent)
    answer: Answer = "undecided"
    if percentile.p_below(clause.limit_ms) <= alpha:
        answer = "kept"
    elif percentile.p_above(clause.limit_ms) <= alpha:
        answer = "not kept"
    value, bound = percentile.value, percentile.upper(alpha)
    return ClauseResult(
        clause,
        answer,
        value if np.isfinite(value) else None,
        bound if np.isfinite(bound) else None,
        int((times > clause.limit_ms).sum()),
    )


def _hit_rate(counters: Mapping[str, float]) -> float | None:
    queries = counters.get("vllm:prefix_cache_queries_total", 0.0)
    return counters.get("vllm:prefix_cache_hits_total", 0.0) / queries if queries else None
