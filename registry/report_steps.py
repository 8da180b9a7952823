"""The table of a load test's steps on the page of a release.

A search's steps have answers and bounds, fixed rates may have them; what engines, prices and closed
loops add is a column only where a step has a number in it. Times in ms, rates in requests/s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from registry.evidence import LoadPoint
from registry.outcome import CandidateOutcome, Verdict
from registry.report_latency import LatencyFigures, clause_words
from registry.report_numbers import NONE, cost, megabytes, number, rate, share, short_ms

ANSWERS = {
    "kept": Verdict.PASS,
    "not kept": Verdict.FAIL,
    "undecided": Verdict.INCONCLUSIVE,
    "void": Verdict.ANOMALOUS,
}
"""The look of a step's answer."""

OVER_ALL = "over all"
"""A percentile among failed requests: above every time that was observed."""


@dataclass(frozen=True)
class Head:
    """A column: its lines, and whether a group begins with it."""

    lines: list[str]
    group: bool = False


@dataclass(frozen=True)
class Row:
    """A step. `answer` is empty where nothing was judged."""

    answer: str
    look: Verdict | None
    cause: str
    cells: list[str]


@dataclass(frozen=True)
class StepsTable:
    """Columns in order; the answer stands before them where any step has one."""

    answered: bool
    heads: list[Head]
    rows: list[Row]


@dataclass(frozen=True)
class _Column:
    lines: tuple[str, ...]
    write: Callable[[LoadPoint], str]
    always: bool = True
    group: str = ""


def steps_table(candidate: CandidateOutcome, figures: LatencyFigures) -> StepsTable:
    """One row per step in order of measuring. Optional columns only where a step has a number."""
    points = candidate.latency
    columns = [
        one
        for one in _columns(figures.sla, searched=candidate.kept_rate is not None)
        if one.always or any(one.write(point) != NONE for point in points)
    ]
    groups = ["", *(one.group for one in columns)]
    begins = [before != group for before, group in pairwise(groups)]
    return StepsTable(
        answered=any(point.answer for point in points),
        heads=[Head(list(one.lines), begin) for one, begin in zip(columns, begins, strict=True)],
        rows=[
            Row(
                answer=point.answer or "",
                look=ANSWERS.get(point.answer or ""),
                cause=point.cause,
                cells=[one.write(point) for one in columns],
            )
            for point in points
        ],
    )


def _columns(sla: Sequence[str], searched: bool) -> list[_Column]:
    """All columns that a step could have; percentiles of all requests only without a search."""
    load = [
        _Column(("in", "flight"), lambda p: _count(p.concurrency), always=False),
        _Column(("req/s",), lambda p: rate(p.rate)),
        _Column(("sent/s",), lambda p: number(p.achieved_rate, 2), always=not searched),
        _Column(("requests",), lambda p: str(p.total)),
        _Column(("failed",), lambda p: str(p.failed)),
        _Column(("trun-", "cated"), lambda p: _count(p.truncated or None), always=False),
        _Column(("one", "token"), lambda p: _count(p.one_token or None), always=False),
    ]
    judged = [column for text in sla for column in _judged(text)]
    if searched and not any(text.startswith("e2el p99 ") for text in sla):
        judged.append(_percentile("e2el", "p99", "all"))
    percentiles = [
        _percentile(metric, percent)
        for metric in ("ttft", "tpot", "itl", "e2el")
        for percent in ("p90", "p95", "p99")
    ]
    figures = [
        _Column(("within", "SLA/s"), lambda p: number(p.goodput, 2), False, "of it"),
        _Column(("tokens", "per s"), lambda p: number(p.output_tokens_per_s, 0), True, "of it"),
        _Column(
            ("accept.", "length"), lambda p: number(p.acceptance_length, 2), not searched, "of it"
        ),
        _Column(("cache", "hits"), lambda p: share(p.prefix_cache_hit_rate), True, "of it"),
        _Column(("cost per", "request"), lambda p: cost(p.cost.get("per_request")), False, "cost"),
        _Column(
            ("per million", "tokens"),
            lambda p: cost(p.cost.get("per_million_output_tokens")),
            False,
            "cost",
        ),
        _Column(("running", "most"), _engine("running_max", _count), False, "engine"),
        _Column(("waiting", "most"), _engine("waiting_max", _count), False, "engine"),
        _Column(("KV cache", "most"), _engine("kv_cache_usage_max", share), False, "engine"),
        _Column(("pre-", "emptions"), _engine("preemptions", _count), False, "engine"),
        _Column(("memory", "most"), _engine("memory_peak_bytes", _bytes), False, "engine"),
        _Column(("GPU", "memory"), _engine("gpu_memory_peak_bytes", _bytes), False, "engine"),
    ]
    return [*load, *judged, *([] if searched else percentiles), *figures]


def _judged(text: str) -> list[_Column]:
    """A line of the SLA: its percentile of the steady part, and the bound that is held to it."""
    words = tuple(clause_words(text, limit=False).rsplit(" ", 1))

    def write(values: dict[str, float | None]) -> str:
        if text not in values:
            return NONE
        return OVER_ALL if values[text] is None else short_ms(values[text])

    return [
        _Column(words, lambda p: write(p.values), False, text),
        _Column(("bound",), lambda p: short_ms(p.bounds.get(text)), False, text),
    ]


def _percentile(metric: str, percent: str, below: str = "") -> _Column:
    def write(point: LoadPoint) -> str:
        times: dict[str, float | None] = getattr(point, f"{metric}_ms")
        return short_ms(times.get(percent))

    lines = (metric.upper(), " ".join(filter(None, [percent.upper(), below])))
    return _Column(lines, write, True, metric)


def _engine(name: str, write: Callable[[float | None], str]) -> Callable[[LoadPoint], str]:
    return lambda point: write(point.engine.get(name))


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _bytes(value: float | None) -> str:
    return megabytes(None if value is None else round(value))
