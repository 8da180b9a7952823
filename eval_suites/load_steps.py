"""One step of a load test: was the SLA kept at this rate, was it not, or can nobody say?

First whether the step measured what it should (the cache, the generator), then whether the server
was in a steady state, then the percentiles with their bounds. Pure: rows in, answer out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from eval_suites.load import LoadProfile, SlaClause
from eval_suites.percentiles import Percentile, requests_for
from eval_suites.rate_search import Answer
from eval_suites.steady_state import START_SHARE, Array, Trend, in_flight, trend

Row = Mapping[str, Any]

SLOWEST_SENDING = 0.9
"""Below this share of the asked rate the generator, not the server, is what was measured."""

FASTEST_SENDING = 1.25
"""Above this share it stood still and then caught up, with a burst that nobody asked for."""

FEW = 40
"""Of fewer requests than this the rate is not held against the upper bound."""

LARGEST_LAG = 0.1
"""A generator's clock that ticks later than this share of the tightest limit measures itself."""

UNEXPECTED_HITS = 0.05
"""More cache hits than the prompts' own blocks explain, by this share: something was cached."""

FIRST_LOOK = 0.4
"""Share of the requests at the first of several looks: enough to see that a rate is far off."""

NOT_STARTED = "the start is not over"
"""What gets faster over a step shows nothing that was lost, and no steady state either."""

SPARE = 1.2
"""A step has so many times the requests that would do with none over: a tenth is cropped."""


@dataclass(frozen=True)
class Around:
    """What was seen beside the requests: growth of the engine's counters, and the generator.

    `expected_hits` is the share of the prompts' blocks that earlier prompts had, `client_lag_ms`
    the P99 of how late the generator's own clock ticked. None: not known.
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    expected_hits: float | None = None
    client_lag_ms: float | None = None


@dataclass(frozen=True)
class ClauseResult:
    """One line of the SLA at one rate. Times in milliseconds; None: above every observed time."""

    clause: SlaClause
    answer: Answer
    value: float | None
    bound: float | None
    over: int
    n: int = 0
    """Times that it was judged on."""


@dataclass(frozen=True)
class StepResult:
    """What one rate showed. `void`: why the step did not measure what it should."""

    rate: float
    answer: Answer
    cause: str = ""
    void: Literal["", "cache", "generator"] = ""
    n: int = 0
    failed: int = 0
    truncated: int = 0
    cropped: int = 0
    steady: bool = True
    steady_window_s: tuple[float, float] | None = None
    hit_rate: float | None = None
    achieved_rate: float | None = None
    clauses: tuple[ClauseResult, ...] = field(default_factory=tuple)


def requests_at(profile: LoadProfile, rate: float, longer: float = 1.0) -> list[int]:
    """Requests of each planned look at a rate; together enough to show every clause of the SLA.

    `longer` multiplies the sending time, never the least number.
    """
    alpha = (1 - profile.confidence) / profile.looks
    least = max(
        requests_for(clause.percent, alpha) / profile.share_of(clause.scenario)
        for clause in profile.sla
    )
    total = max(math.ceil(SPARE * least), round(rate * longer * profile.seconds_per_rate))
    if profile.looks == 1:
        return [total]
    first = round(FIRST_LOOK * total)
    rest, looks = total - first, profile.looks - 1
    return [first, *(rest // looks + (i < rest % looks) for i in range(looks))]


def judge_step(
    profile: LoadProfile,
    rate: float,
    batches: Sequence[Sequence[Row]],
    around: Around,
    looks: int | None = None,
) -> StepResult:
    """The answer after the looks so far, of `looks` planned ones (None: the profile's).

    `batches` are rows of `registry.evidence.REQUEST_COLUMNS`, one list per look, each in the
    order of sending. A look's share of the error is the same for all looks. Without an SLA the
    answer is `undecided`, and only what voids the step is found.
    """
    looks = looks or profile.looks
    rows = [row for batch in batches for row in batch]
    hit_rate = _hit_rate(around.counters)
    achieved = min((rate_sent(batch) for batch in batches if len(batch) > 1), default=None)
    known: dict[str, Any] = {
        "rate": rate,
        "n": len(rows),
        "failed": sum(not row["ok"] for row in rows),
        "truncated": sum(is_truncated(profile, row) for row in rows),
        "hit_rate": hit_rate,
        "achieved_rate": achieved,
    }
    fastest = max((rate_sent(one) for one in batches if len(one) >= FEW), default=None)
    void, cause = _void(profile, rate, achieved, fastest, hit_rate, around)
    if void:
        return StepResult(answer="undecided", cause=cause, void=void, **known)
    crops = [crop_of(batch) for batch in batches]
    # A queue near its capacity wanders: one batch in ten drifts at nine tenths of it. One that
    # drifts in every batch does not wander.
    drifts = [drift_of(batch) for batch in batches]
    unsteady = drifts[-1] if all(drifts) else ""
    improves = unsteady.startswith(NOT_STARTED)
    preempted = around.counters.get("vllm:num_preemptions_total", 0.0)
    if unsteady and preempted:
        unsteady += f", the KV cache was full: {preempted:.0f} preemptions"
    judged = [
        row
        for batch, crop in zip(batches, crops, strict=True)
        # What failed in the start has failed all the same.
        for index, row in enumerate(batch)
        if index >= crop or not row["ok"]
    ]
    alpha = (1 - profile.confidence) / looks
    late = _late(profile, around.client_lag_ms)
    if late and not _lost_anyway(profile, judged, alpha, around.client_lag_ms or 0.0):
        return StepResult(answer="undecided", cause=late, void="generator", **known)
    clauses = tuple(_clause(profile, clause, judged, alpha) for clause in profile.sla)
    known |= {
        "cropped": len(rows) - len(judged),
        "steady": not unsteady,
        "steady_window_s": _window(batches, crops),
        "clauses": clauses,
    }
    lost = [one for one in clauses if one.answer == "not kept"]
    if lost:
        cause = "; ".join(
            filter(None, [*(f"{one.clause}: {one.over} over" for one in lost), unsteady])
        )
        return StepResult(answer="not kept", cause=cause, **known)
    if unsteady and len(batches) >= looks and not improves:
        return StepResult(answer="not kept", cause=f"no steady state: {unsteady}", **known)
    if unsteady:
        return StepResult(answer="undecided", cause=f"perhaps no steady state: {unsteady}", **known)
    open_ones = [one for one in clauses if one.answer == "undecided"]
    if open_ones:
        cause = "; ".join(f"{one.clause}: {one.over} of {one.n} over" for one in open_ones)
        return StepResult(answer="undecided", cause=cause, **known)
    return StepResult(answer="kept" if clauses else "undecided", **known)


def _void(
    profile: LoadProfile,
    rate: float,
    achieved: float | None,
    fastest: float | None,
    hit_rate: float | None,
    around: Around,
) -> tuple[Literal["", "cache", "generator"], str]:
    """Whether something else was measured than the server under this load, and why."""
    low, high = profile.cache_band
    expected = around.expected_hits
    if hit_rate is not None and not low <= hit_rate <= high:
        likely = "no prefix is shared"
        if hit_rate > high:
            likely = "prompts repeat what was asked before"
            if expected is not None and expected > high:
                likely = f"{expected:.0%} of the prompts' blocks stand in earlier ones"
        return (
            "cache",
            f"prefix-cache hit rate {hit_rate:.2f} outside {low:g} to {high:g}: {likely}",
        )
    if hit_rate is not None and expected is not None and hit_rate > expected + UNEXPECTED_HITS:
        return "cache", (
            f"prefix-cache hit rate {hit_rate:.2f}, and the prompts of this measurement explain "
            f"{expected:.2f}: they were asked before"
        )
    if achieved is not None and achieved < SLOWEST_SENDING * rate:
        return "generator", f"the generator sent {achieved:.3g} of {rate:.3g} requests/s"
    if fastest is not None and fastest > FASTEST_SENDING * rate:
        return "generator", (
            f"the generator sent {fastest:.3g} requests/s where {rate:.3g} were asked: it stood "
            "still and caught up"
        )
    return "", ""


def _late(profile: LoadProfile, lag: float | None) -> str:
    """Why the generator's own lateness may be what was measured; empty where it is not."""
    # TPOT is a mean over many intervals: a late clock moves only its two ends.
    limits = [clause.limit_ms for clause in profile.sla if clause.metric != "tpot"]
    tightest = min(limits, default=math.inf)
    if lag is None or lag <= LARGEST_LAG * tightest:
        return ""
    return (
        f"the generator's own clock was {lag:.0f} ms late (P99), over {LARGEST_LAG:.0%} of "
        "the tightest limit"
    )


def _lost_anyway(profile: LoadProfile, rows: Sequence[Row], alpha: float, lag: float) -> bool:
    """Whether a line of the SLA is lost even where its limit is raised by the generator's lag."""
    raised = [
        clause.model_copy(update={"limit_ms": clause.limit_ms + lag})
        for clause in profile.sla
        if clause.metric != "tpot"
    ]
    return any(_clause(profile, one, rows, alpha).answer == "not kept" for one in raised)


def _window(batches: Sequence[Sequence[Row]], crops: Sequence[int]) -> tuple[float, float] | None:
    """From the first judged request's start to the last one's, in seconds of the step."""
    starts = [
        row["start_s"] for batch, crop in zip(batches, crops, strict=True) for row in batch[crop:]
    ]
    return (min(starts), max(starts)) if starts else None


def is_truncated(profile: LoadProfile, row: Row) -> bool:
    """Whether an answer reached `max_tokens`. What no length was asked of may be a whole answer."""
    return bool(row["ok"] and row["output_tokens"] >= profile.sampling.max_tokens)


def within_sla(profile: LoadProfile, row: Row) -> bool:
    """Whether one request keeps every line of the SLA that is about it."""
    if _is_over(profile, row):
        return False
    for clause in profile.sla:
        value = row[f"{clause.metric}_ms"]
        if clause.metric == "itl":
            value = max(value, default=None)
        if _about(clause, row) and value is not None and value > clause.limit_ms:
            return False
    return True


def _is_over(profile: LoadProfile, row: Row) -> bool:
    return not row["ok"] or (profile.truncated_is_over and is_truncated(profile, row))


def _about(clause: SlaClause, row: Row) -> bool:
    return clause.scenario is None or row.get("scenario") in (None, clause.scenario)


def times_of(rows: Sequence[Row], metric: str, profile: LoadProfile | None = None) -> Array:
    """Times in ms in order of sending; failed requests are infinite, one-token TPOTs left out.

    With a profile, so are the answers that it calls truncated.
    """
    column = f"{metric}_ms"
    lost = [not row["ok"] or (profile is not None and _is_over(profile, row)) for row in rows]
    weight = 1
    if metric == "itl":
        # A failed request has no intervals to count; it weighs as many as an answered one has.
        counts = [len(row[column]) for row, gone in zip(rows, lost, strict=True) if not gone]
        weight = max(1, math.ceil(sum(counts) / len(counts))) if counts else 1
    found: list[float] = []
    for row, gone in zip(rows, lost, strict=True):
        if gone:
            found += [np.inf] * weight
        elif metric == "itl":
            found += row[column]
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
    series = {
        "requests in flight": in_flight(starts, ends),
        "TTFT": times_of(answered, "ttft"),
        "TPOT": times_of(answered, "tpot"),
    }
    drifting = {name: found for name, values in series.items() if (found := trend(values)).drifts}
    if not drifting:
        return ""
    changes = ", ".join(f"{name} {found.change:+.0%}" for name, found in drifting.items())
    return f"{_likely(drifting)} ({changes} over the step)"


def _likely(drifting: Mapping[str, Trend]) -> str:
    if not any(found.change > 0 for found in drifting.values()):
        return NOT_STARTED
    slower = "TPOT" in drifting and drifting["TPOT"].change > 0
    if slower and len(drifting) > 1:
        # A larger batch makes each token slower, and slower tokens make the batch larger.
        return "requests pile up and each token takes longer"
    return "the service slows" if slower else "the queue grows"


def _clause(
    profile: LoadProfile, clause: SlaClause, rows: Sequence[Row], alpha: float
) -> ClauseResult:
    mine = [row for row in rows if _about(clause, row)]
    times = times_of(mine, clause.metric, profile)
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
        len(times),
    )


def _hit_rate(counters: Mapping[str, float]) -> float | None:
    queries = counters.get("vllm:prefix_cache_queries_total", 0.0)
    return counters.get("vllm:prefix_cache_hits_total", 0.0) / queries if queries else None
