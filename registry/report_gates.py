"""The gates of a candidate drawn as intervals on the page of a release.

Gates of one kind of scale (ratios, differences, times, ...) share one axis, so that they can be
compared by eye. Places are percentages of a strip's width: strips stretch with the page while lines
and letters keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from registry.outcome import GateResult
from registry.report_numbers import DIFFERENCES, RATIOS, asked, scaled, short_ms

MOST_TICKS = 5
ROOM = 0.06
"""Share of the axis that stays free at either end."""

TITLES = {
    "ratio": "ratio to the reference",
    "difference": "difference to the reference",
    "time": "time",
    "rate": "requests/s",
    "value": "the value itself",
}


@dataclass(frozen=True)
class Strip:
    """One gate. `bound` is the end that decides, `opposite` the other; None: open or not known."""

    gate: GateResult
    margin: float
    refused: tuple[float, float]
    """Where a bound would not pass: from, and how wide."""
    span: tuple[float, float] | None
    dot: float | None
    bound: float | None
    opposite: float | None
    words: str


@dataclass(frozen=True)
class Panel:
    """Gates on one axis."""

    title: str
    strips: list[Strip]
    ticks: list[tuple[float, str]]


def panels(gates: Sequence[GateResult]) -> list[Panel]:
    """One panel per kind of scale; gates without a number have no strip."""
    shown: dict[str, list[GateResult]] = {}
    for gate in gates:
        if gate.estimate is not None:
            shown.setdefault(_scale(gate), []).append(gate)
    return [_panel(scale, shown[scale]) for scale in TITLES if scale in shown]


def _scale(gate: GateResult) -> str:
    if gate.kind in (*RATIOS, "draft"):
        return "ratio"
    if gate.kind in DIFFERENCES:
        return "difference"
    if gate.metric.endswith("_ms"):
        return "time"
    return "rate" if gate.metric == "latency.kept_rate" else "value"


def _limit(gate: GateResult) -> float:
    return gate.margin if gate.limit is None else gate.limit


def _panel(scale: str, gates: Sequence[GateResult]) -> Panel:
    origin = {"ratio": 1.0, "difference": 0.0, "time": 0.0, "rate": 0.0}.get(scale)
    values = [origin] if origin is not None else []
    for gate in gates:
        numbers = (gate.estimate, gate.bound, gate.opposite_bound, _limit(gate))
        values += [value for value in numbers if value is not None]
    low, high = min(values), max(values)
    room = ROOM * ((high - low) or abs(high) or 1.0)
    low, high = low - (0.0 if scale in ("time", "rate") else room), high + room

    def place(value: float) -> float:
        return 100 * (value - low) / (high - low)

    return Panel(
        title=TITLES[scale],
        strips=[_strip(gate, place) for gate in gates],
        ticks=[(place(value), _written(value, scale)) for value in ticks(low, high)],
    )


def _strip(gate: GateResult, place: object) -> Strip:
    assert callable(place)
    assert gate.estimate is not None
    ends = [place(v) if v is not None else None for v in (gate.bound, gate.opposite_bound)]
    margin = place(_limit(gate))
    upwards = asked(gate) in ("≥ ", "")
    span = None
    if any(end is not None for end in ends):
        # The bound of a floor is the lower end; an open end reaches the edge.
        edges = (0.0, 100.0) if upwards else (100.0, 0.0)
        found = sorted(edge if end is None else end for end, edge in zip(ends, edges, strict=True))
        span = (found[0], found[1])
    words = scaled(gate.estimate, gate)
    if gate.bound is not None:
        words += f", bound {scaled(gate.bound, gate)}"
    return Strip(
        gate=gate,
        margin=margin,
        refused=(0.0, margin) if upwards else (margin, 100 - margin),
        span=span,
        dot=place(gate.estimate),
        bound=ends[0],
        opposite=ends[1],
        words=f"{words}; {asked(gate)}{scaled(_limit(gate), gate)} asked",
    )


def ticks(low: float, high: float, most: int = MOST_TICKS) -> list[float]:
    """Round numbers between the ends, at steps of 1, 2 or 5 and a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * by for by in (1, 2, 5, 10) if power * by >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _written(value: float, scale: str) -> str:
    if scale == "time":
        return short_ms(value) if value else "0"
    return f"{value:+g}" if scale == "difference" and value else f"{value:g}"
