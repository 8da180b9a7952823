"""The small drawings of fixed rates on the page of a release: P99 E2EL against the request rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from registry.evidence import LoadPoint
from registry.outcome import CandidateOutcome, GateResult
from registry.report_latency import percentile_of
from registry.report_numbers import short_ms

WIDTH, HEIGHT = 300.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 16.0, 30.0
INSET = 22.0
"""Room for half a label between the axis and the outermost rates."""
TICK = 20.0
"""Least distance between two rates that are both written."""


@dataclass(frozen=True)
class Dot:
    """A measured point in the drawing; `label` is None where requests failed over the rank."""

    x: float
    y: float
    label: str | None
    over: bool
    void: bool = False


@dataclass(frozen=True)
class Chart:
    """P99 E2EL against the rate for one candidate, the others behind it in grey."""

    candidate: CandidateOutcome
    line: str
    others: list[str]
    dots: list[Dot]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    sla_y: float | None
    sla_x: float | None


def charts(candidates: Sequence[CandidateOutcome], sla: GateResult | None) -> list[Chart]:
    """One chart per candidate with latency, all on the same logarithmic axes."""
    found = {one.name: _drawable(one.latency) for one in candidates}
    shown = [candidate for candidate in candidates if found[candidate.name]]
    percentile = percentile_of(sla)
    values = [
        p for points in found.values() for p in (one.e2el_ms.get(percentile) for one in points) if p
    ]
    if not values:
        return []
    if sla is not None:
        values.append(sla.margin)
    rates = sorted({point.rate for points in found.values() for point in points})
    low, high = math.log10(min(values) * 0.8), math.log10(max(values) * 1.35)

    first, last = math.log10(rates[0]), math.log10(rates[-1])

    def x(rate: float) -> float:
        share = (math.log10(rate) - first) / (last - first) if last > first else 0.5
        return LEFT + INSET + (WIDTH - LEFT - RIGHT - 2 * INSET) * share

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def line(candidate: CandidateOutcome) -> str:
        drawn = [
            (point.rate, point.e2el_ms.get(percentile))
            for point in found[candidate.name]
            if point.answer != "void"
        ]
        return " ".join(f"{x(rate):.1f},{y(value):.1f}" for rate, value in drawn if value)

    ticks = [
        step * 10**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for step in (1, 2, 5)
        if low <= math.log10(step * 10**power) <= high
    ]
    while len(ticks) > 6:
        ticks = ticks[::2]
    return [
        Chart(
            candidate=candidate,
            line=line(candidate),
            others=[line(other) for other in shown if other is not candidate],
            dots=[_dot(point, x, y, sla) for point in found[candidate.name]],
            x_ticks=_apart([(x(rate), f"{rate:.4g}") for rate in rates]),
            y_ticks=[(y(tick), short_ms(tick)) for tick in ticks],
            sla_y=y(sla.margin) if sla is not None else None,
            sla_x=x(sla.rate) if sla is not None and sla.rate in rates else None,
        )
        for candidate in shown
    ]


def _drawable(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """In the order of a logarithmic axis; a closed loop that answered nothing has no rate."""
    return sorted((point for point in points if point.rate > 0), key=lambda point: point.rate)


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Without those whose text would lie on the one before."""
    found: list[tuple[float, str]] = []
    for place, text in ticks:
        if not found or place - found[-1][0] >= TICK:
            found.append((place, text))
    return found


def _dot(point: LoadPoint, x: Any, y: Any, sla: GateResult | None) -> Dot:
    value, void = point.e2el_ms.get(percentile_of(sla)), point.answer == "void"
    if not value:
        return Dot(x(point.rate), TOP, None, over=True, void=void)
    over = sla is not None and value > sla.margin
    return Dot(x(point.rate), y(value), short_ms(value), over, void)
