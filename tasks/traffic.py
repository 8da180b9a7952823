"""From a log's requests to its traffic profile. Pure: no file is read and none is written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval_suites.traffic import (
    STABLE_PEAK,
    Burstiness,
    Concurrency,
    Hour,
    Lengths,
    MainRange,
    Period,
    Rows,
    Segment,
    SharedPrefix,
    Source,
    TrafficProfile,
)
from registry.errors import UserError
from registry.traffic_hours import Arrivals, arrivals_of
from registry.traffic_levels import STEPS, Levels, levels_of, peak_rate
from registry.traffic_prefix import shared_tokens
from registry.traffic_requests import MICRO, NO_TIME, Requests
from tasks.traffic_logs import ReadLog
from tasks.traffic_scenarios import inside_of, percentile, scenarios_of
from tasks.traffic_times import zone_of

PERCENTS = (5, 50, 90, 95, 99)
MAIN = (5.0, 95.0)
MOST_STEPS = 8_000_000
"""Of all windows; 15 months at the default."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Assumed:
    """Latency of a log that has none, if a person says so."""

    ttft: float
    seconds_per_token: float


def profile_of(
    log: ReadLog, *, window_s: float = 300.0, assumed: Assumed | None = None, about: str = ""
) -> TrafficProfile:
    """The profile of what was read; `window_s` is that of the stable peak."""
    requests = log.requests
    zone = zone_of(log.zone)
    notes = list(log.notes)
    _few_enough_windows(requests, window_s)
    latency, latency_from, missing = _latency(log, assumed, notes)
    arrivals = arrivals_of(requests.arrived, zone)
    levels = levels_of(requests.arrived, latency, window_s) if latency is not None else None
    if levels is not None and arrivals.resolution_s >= 1:
        notes.append("times are whole seconds: what is in flight is known to about a second")
    first, last = int(requests.arrived.min()), int(requests.arrived.max())
    busiest = peak_rate(requests.arrived, window_s)
    if busiest is None:
        notes.append("all requests arrived within one second: there is no rate")
    prefix, shared = _prefix(requests, notes)
    main = _main(requests)
    without = int((latency == NO_TIME).sum()) if latency is not None else len(requests)

    def when(us: int) -> datetime:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).astimezone(zone)

    span = (last - first) / MICRO
    return TrafficProfile(
        kind="traffic",
        description=about or f"Traffic of {', '.join(file.path.name for file in log.files[:5])}.",
        requests=len(requests),
        prompt_tokens=lengths_of(requests.prompt),
        output_tokens=lengths_of(requests.output),
        main_range=main,
        peak_concurrency=levels.peak if levels else None,
        stable_peak_concurrency=_rounded(levels.stable.value)
        if levels and levels.stable
        else (0.0 if levels else None),
        mean_rate=_rounded(len(requests) / span) if busiest else None,
        peak_rate=_rounded(busiest.value) if busiest else None,
        peak_rate_at=when(busiest.begin) if busiest else None,
        rate_by_hour={one.hour: _rounded(one.rate) for one in arrivals.hours},
        hours=[
            Hour(hour=one.hour, days=one.days, seconds=round(one.seconds, 3),
                 requests=one.requests, rate=_rounded(one.rate),
                 dispersion=_rounded(one.dispersion))
            for one in arrivals.hours
        ],
        burstiness=_burstiness(arrivals, notes),
        concurrency=_concurrency(levels, window_s, without, len(requests), latency_from, missing,
                                 when),
        latency_s=_durations(latency),
        ttft_s=_durations(requests.ttft),
        shared_prefix=prefix,
        segments=_segments(requests),
        scenarios=scenarios_of(requests, main, shared),
        period=Period(first=when(first), last=when(last), span_s=span, timezone=log.zone,
                      timezone_from=log.zone_from, resolution_s=arrivals.resolution_s,
                      days=arrivals.days, gap_days=arrivals.gap_days),
        rows=Rows(read=log.read, kept=len(requests), left_out=log.left_out,
                  examples=log.examples, equal=log.equal),
        sources=[Source(file=str(file.path), format=file.kind, bytes=file.bytes, rows=file.rows,
                        columns=file.columns) for file in log.files],
        notes=notes,
    )  # fmt: skip


def _few_enough_windows(requests: Requests, window_s: float) -> None:
    """A request of another century would make a table of billions of steps."""
    first, last = int(requests.arrived.min()), int(requests.arrived.max())
    steps = (last - first) / MICRO / window_s * STEPS
    if steps > MOST_STEPS:
        days = (datetime(1970, 1, 1) + timedelta(microseconds=one) for one in (first, last))
        begin, end = (f"{day:%Y-%m-%d}" for day in days)
        raise UserError.at(
            f"--window {window_s:g}",
            f"is too short for a log from {begin} to {end}",
            f"correct a time that is wrong, or take {math.ceil(window_s * steps / MOST_STEPS)} s "
            "or more",
        )


# -- lengths ---------------------------------------------------------------------------------


def lengths_of(values: Array) -> Lengths:
    ordered = np.sort(values)
    known = {f"p{percent}": _rounded(percentile(ordered, percent)) for percent in PERCENTS}
    return Lengths(mean=_rounded(float(ordered.mean(dtype=np.float64))),
                   min=_rounded(ordered[0].item()), max=_rounded(ordered[-1].item()),
                   **known)  # fmt: skip


def _durations(micro: Array | None) -> Lengths | None:
    known = micro[micro != NO_TIME] if micro is not None else np.array([])
    return lengths_of(known / MICRO) if len(known) else None


def _rounded(value: Any) -> Any:
    """Six digits: a sum's last bits depend on the order of what was summed."""
    return None if value is None else float(f"{value:.6g}") if isinstance(value, float) else value


def _main(requests: Requests) -> MainRange:
    ranges = []
    for values in (requests.prompt, requests.output):
        ordered = np.sort(values)
        ranges.append((percentile(ordered, MAIN[0]), percentile(ordered, MAIN[1])))
    inside = inside_of(requests, *ranges)
    return MainRange(
        percents=MAIN,
        prompt_tokens=ranges[0],
        output_tokens=ranges[1],
        share_of_requests=_rounded(float(inside.mean())),
        share_of_prompt_tokens=_share(requests.prompt, inside),
        share_of_output_tokens=_share(requests.output, inside),
    )


def _share(tokens: Array, inside: NDArray[np.bool_]) -> float:
    total = int(tokens.sum(dtype=np.int64))
    share: float = _rounded(int(tokens[inside].sum(dtype=np.int64)) / total) if total else 0.0
    return share


# -- in flight, arrivals -----------------------------------------------------------------------


def latency_of(requests: Requests, assumed: Assumed | None) -> Array | None:
    """Microseconds: the log's where it has any, else what a person assumed, else None."""
    if _has_latency(requests):
        return requests.latency
    if assumed is None:
        return None
    seconds = assumed.ttft + assumed.seconds_per_token * requests.output
    return np.round(seconds * MICRO).astype(np.int64)


def _has_latency(requests: Requests) -> bool:
    return requests.latency is not None and bool((requests.latency != NO_TIME).any())


def _latency(
    log: ReadLog, assumed: Assumed | None, notes: list[str]
) -> tuple[Array | None, str, str | None]:
    """(microseconds, where they are from, why there are none)."""
    found = latency_of(log.requests, assumed)
    if found is not None and _has_latency(log.requests):
        without = int((found == NO_TIME).sum())
        if without:
            notes.append(f"{without} requests have no end: they are not counted in flight")
        return found, "the log", None
    if assumed is not None:
        words = f"{assumed.ttft:g} s + {assumed.seconds_per_token:g} s per output token"
        notes.append(f"in flight: by assumption, not by measurement ({words})")
        return found, f"ASSUMED: {words}", None
    why = (
        "the log has no latency and no end time: name a column (--columns latency=COLUMN), or "
        "assume times with --ttft and --seconds-per-token"
    )
    notes.append(f"in flight: not counted, {why}")
    return None, "none", why


def _concurrency(
    levels: Levels | None,
    window_s: float,
    without: int,
    total: int,
    latency_from: str,
    missing: str | None,
    when: Any,
) -> Concurrency:
    used = levels.window_s if levels else window_s
    definition = STABLE_PEAK.format(window=used, step=used / STEPS)
    if levels and used < window_s:
        definition = f"the log is shorter than {window_s:g} s: its time-weighted mean in flight"
    return Concurrency(
        definition=definition,
        window_s=used,
        step_s=used / STEPS,
        requests=total - without,
        without_end=without,
        latency_from=latency_from,
        missing=missing,
        peak_at=when(levels.peak_at) if levels else None,
        stable_peak_at=when(levels.stable.begin) if levels and levels.stable else None,
        mean=_rounded(levels.mean) if levels else None,
        littles_law=_rounded(levels.mean) if levels else None,
        littles_law_peak=_rounded(levels.little_peak.value)
        if levels and levels.little_peak
        else None,
    )


def _burstiness(arrivals: Arrivals, notes: list[str]) -> Burstiness:
    cv, dispersion = arrivals.gap_cv, arrivals.dispersion
    if cv is not None:
        load, source = 1 / max(cv**2, 0.01), "gap_cv"
    elif dispersion is not None:
        load, source = 1 / max(dispersion, 0.01), "dispersion"
        notes.append("gaps between arrivals: too few, or times too coarse to tell their lengths")
    else:
        load, source = 1.0, "nothing: the log is too short, Poisson arrivals are assumed"
        notes.append(f"burstiness: {source}")
    return Burstiness(gap_cv=_rounded(cv), dispersion=_rounded(dispersion),
                      load=_rounded(max(load, 0.01)), load_from=source)  # fmt: skip


# -- prefixes, segments ------------------------------------------------------------------------


def _prefix(requests: Requests, notes: list[str]) -> tuple[SharedPrefix | None, Any]:
    """The profile's part, and `shared(inside, low, high)`: mean shared tokens of some requests.

    They are those of the mask `inside` with prompts of `low` to `high` tokens.
    """
    if requests.prefix_tokens is not None:
        tokens = requests.prefix_tokens
        part = SharedPrefix(
            source="a column with their number",
            requests=len(requests),
            share_of_requests=_rounded(float((tokens > 0).mean())),
            share_of_prompt_tokens=_rounded(
                int(tokens.sum(dtype=np.int64)) / int(requests.prompt.sum(dtype=np.int64))
            ),
            tokens=lengths_of(tokens),
        )
        return part, lambda inside, low, high: float(tokens[inside].mean())
    if requests.texts:
        return _of_texts(requests)
    if requests.prefix_id is not None:
        _, at, counts = np.unique(requests.prefix_id, return_inverse=True, return_counts=True)
        shares = (counts[at] > 1) & (requests.prefix_id != 0)
        notes.append("shared prefixes: their ids say who shares one, not how long it is")
        part = SharedPrefix(source="ids", requests=len(requests),
                            share_of_requests=_rounded(float(shares.mean())),
                            share_of_prompt_tokens=None, tokens=None)  # fmt: skip
        return part, _none_shared
    notes.append("shared prefixes: the log has neither prompts nor ids or numbers of them")
    return None, _none_shared


def _of_texts(requests: Requests) -> tuple[SharedPrefix, Any]:
    found = np.array(shared_tokens(requests.texts))
    total = np.array([text.tokens for text in requests.texts])
    part = SharedPrefix(
        source=f"the beginnings of {len(found)} prompts, characters taken as tokens by each one's "
        "own ratio",
        requests=len(found),
        share_of_requests=_rounded(float((found >= 1).mean())),
        share_of_prompt_tokens=_rounded(float(found.sum() / total.sum())),
        tokens=lengths_of(np.round(found, 1)),
    )

    def shared(inside: Array, low: int, high: int) -> float:
        among = (total >= low) & (total <= high)
        return float(found[among].mean()) if among.any() else 0.0

    return part, shared


def _none_shared(inside: Array, low: int, high: int) -> float:
    return 0.0


def _segments(requests: Requests) -> list[Segment]:
    """Largest first."""
    if requests.segment is None:
        return []
    counts = np.bincount(requests.segment, minlength=len(requests.segments))
    order = sorted(range(len(counts)), key=lambda at: (-counts[at], requests.segments[at]))
    found = []
    for at in order:
        if counts[at]:
            inside = requests.segment == at
            found.append(
                Segment(
                    name=requests.segments[at],
                    requests=int(counts[at]),
                    share=_rounded(float(counts[at] / len(requests))),
                    prompt_tokens=lengths_of(requests.prompt[inside]),
                    output_tokens=lengths_of(requests.output[inside]),
                )
            )
    return found
