"""The page of a release: one HTML file that needs no network, no script and no server.

Everything shown comes from the outcome and from `ReportDetails`; the page decides nothing and
recomputes nothing but quotients. Whatever a model wrote is escaped (autoescape is on for the
whole template), and long texts are cut, so that the file stays far below 3 MB.
"""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from registry.evidence import LoadPoint
from registry.outcome import (
    CandidateOutcome,
    GateResult,
    LoosenedGate,
    ReleaseOutcome,
    Verdict,
    WaiverShown,
)
from registry.settings import settings

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATE = "report.html.j2"
MOST_EXAMPLES = 16
LONGEST_TEXT = 1500
"""Characters of one prompt or response on the page."""

CURVE_METRIC = re.compile(r"latency\.e2el_(p50|p90|p95|p99)_ms")
USUAL_PERCENTILE = "p99"

GLYPHS = {
    Verdict.PASS: "✓",
    Verdict.FAIL: "✕",
    Verdict.INCONCLUSIVE: "?",
    Verdict.ANOMALOUS: "!",
    Verdict.INFEASIBLE: "⊘",
    Verdict.INVALID: "∅",
}
MEANINGS = {
    Verdict.PASS: "every critical gate passed",
    Verdict.FAIL: "measured, and not good enough",
    Verdict.INCONCLUSIVE: "not enough evidence to say",
    Verdict.ANOMALOUS: "implausible: a measurement to look into",
    Verdict.INFEASIBLE: "cannot run on this hardware",
    Verdict.INVALID: "evidence missing, incomplete or not comparable",
}


class Detail(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReferenceFigures(Detail):
    """What candidates were compared with, when it is no candidate itself (the teacher)."""

    name: str
    bundle: str = ""
    engine: str = ""
    metrics: dict[str, float | None] = Field(default_factory=dict)


class Response(Detail):
    """One model's answer to one item."""

    name: str = Field(description="teacher, or a candidate's name.")
    text: str
    right: bool | None = Field(description="Full marks in every metric; None: not scored.")


class Example(Detail):
    """One eval item with the answers of everybody who was asked."""

    item_id: str
    segment: str = ""
    prompt: str
    expected: str = Field(default="", description="The reference, as people read it.")
    responses: list[Response]


class ReportDetails(Detail):
    """What the page shows beside the outcome; every part may be empty."""

    references: list[ReferenceFigures] = Field(default_factory=list)
    student: str = Field(default="", description="Name of the candidate that is the reference.")
    segments: dict[str, dict[str, dict[str, float | None]]] = Field(
        default_factory=dict,
        description="By metric, then segment, then who: means over the segment's items.",
    )
    segment_sizes: dict[str, int] = Field(default_factory=dict, description="Items by segment.")
    examples: list[Example] = Field(default_factory=list)
    waivers: list[WaiverShown] = Field(default_factory=list)
    loosened: list[LoosenedGate] = Field(default_factory=list)
    notes: list[str] = Field(
        default_factory=list, description="Corrections made, looks, what else the gates say."
    )
    environments: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="By title, e.g. `driver`, `serve`, `hardware`."
    )


def report_path(outcome: ReleaseOutcome, folder: Path | None = None) -> Path:
    """Where the page of this release lies: the same release has the same page."""
    return (folder or settings().reports_dir) / f"{outcome.name}-{outcome.release[:12]}.html"


def write_report(
    outcome: ReleaseOutcome, details: ReportDetails, folder: Path | None = None
) -> Path:
    """Write the page, whole or not at all, to `folder` (default: the settings' reports folder)."""
    path = report_path(outcome, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        incoming.write_text(render(outcome, details), encoding="utf-8")
        incoming.replace(path)
    finally:
        incoming.unlink(missing_ok=True)
    return path


def render(outcome: ReleaseOutcome, details: ReportDetails) -> str:
    """The page as text."""
    template = _environment().get_template(TEMPLATE)
    candidates = list(outcome.candidates)
    sla = sla_of(candidates)
    rate = sla.rate if sla is not None else None
    return template.render(
        outcome=outcome,
        details=details,
        promoted=next((c for c in candidates if c.name == outcome.promoted), None),
        counts=outcome.counts(),
        sla=sla,
        percentile=percentile_of(sla),
        bounded=any(gate.bound is not None for c in candidates for gate in c.gates),
        waived=[(c, gate) for c in candidates for gate in c.gates if gate.waived is not None],
        gate_names=list(dict.fromkeys(gate.name for c in candidates for gate in c.gates)),
        metrics=_metric_names(outcome, details),
        at_sla={c.name: point_at(c.latency, rate) for c in candidates},
        charts=charts(candidates, sla),
        pairs=draft_pairs(candidates),
        examples=[grouped(example) for example in details.examples[:MOST_EXAMPLES]],
        longest_stage=max((stage.seconds for stage in outcome.stages), default=0) or 1,
        glyphs=GLYPHS,
        meanings=MEANINGS,
    )


# -- what the tables need --------------------------------------------------------------------


def sla_of(candidates: Iterable[CandidateOutcome]) -> GateResult | None:
    """The ceiling on an end-to-end time: its margin is the SLA line, its rate where it counts."""
    for candidate in candidates:
        for gate in candidate.gates:
            if gate.kind == "ceiling" and CURVE_METRIC.fullmatch(gate.metric):
                return gate
    return None


def percentile_of(sla: GateResult | None) -> str:
    """`p99`, or what the SLA is about."""
    found = CURVE_METRIC.fullmatch(sla.metric) if sla is not None else None
    return found[1] if found else USUAL_PERCENTILE


def point_at(points: Sequence[LoadPoint], rate: float | None) -> LoadPoint | None:
    """The point measured at `rate`, or the fastest one where no rate is asked for."""
    if rate is None:
        return points[-1] if points else None
    return next((point for point in points if math.isclose(point.rate, rate)), None)


@dataclass(frozen=True)
class DraftPair:
    """The same weights served without and with the draft."""

    off: CandidateOutcome
    on: CandidateOutcome
    points: list[tuple[LoadPoint, LoadPoint]]


def draft_pairs(candidates: Sequence[CandidateOutcome]) -> list[DraftPair]:
    """Candidates of equal target weights, draft off beside draft on, at the rates both have."""
    off = {c.target: c for c in candidates if c.target and not c.draft and c.latency}
    pairs = []
    for on in candidates:
        if not (on.draft and on.latency and on.target in off):
            continue
        plain = off[on.target]
        both = [(p, point_at(on.latency, p.rate)) for p in plain.latency]
        pairs.append(DraftPair(plain, on, [(p, other) for p, other in both if other is not None]))
    return pairs


@dataclass(frozen=True)
class Said:
    """One answer and everybody who gave it."""

    names: list[str]
    text: str
    right: bool | None


def grouped(example: Example) -> dict[str, Any]:
    """An example with equal answers told once, in the order in which they first occur."""
    by_text: dict[tuple[str, bool | None], list[str]] = {}
    for response in example.responses:
        by_text.setdefault((response.text, response.right), []).append(response.name)
    return {
        "example": example,
        "said": [Said(names, text, right) for (text, right), names in by_text.items()],
    }


def _metric_names(outcome: ReleaseOutcome, details: ReportDetails) -> list[str]:
    """Metrics of anybody, the gated ones first."""
    gated = [
        gate.metric.removeprefix("accuracy.")
        for candidate in outcome.candidates
        for gate in candidate.gates
        if gate.metric.startswith("accuracy.")
    ]
    measured = [name for c in outcome.candidates for name in c.metrics]
    referred = [name for reference in details.references for name in reference.metrics]
    return list(dict.fromkeys(gated + measured + referred))


# -- the curves ------------------------------------------------------------------------------

WIDTH, HEIGHT = 300.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 16.0, 30.0
INSET = 22.0
"""Room for half a label between the axis and the outermost rates."""


@dataclass(frozen=True)
class Dot:
    """A measured point in the drawing; `label` is None where requests failed over the rank."""

    x: float
    y: float
    label: str | None
    over: bool


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
    shown = [candidate for candidate in candidates if candidate.latency]
    percentile = percentile_of(sla)
    values = [p for c in shown for p in (point.e2el_ms.get(percentile) for point in c.latency) if p]
    if not values:
        return []
    if sla is not None:
        values.append(sla.margin)
    rates = sorted({point.rate for candidate in shown for point in candidate.latency})
    low, high = math.log10(min(values) * 0.8), math.log10(max(values) * 1.35)

    first, last = math.log10(rates[0]), math.log10(rates[-1])

    def x(rate: float) -> float:
        share = (math.log10(rate) - first) / (last - first) if last > first else 0.5
        return LEFT + INSET + (WIDTH - LEFT - RIGHT - 2 * INSET) * share

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def line(candidate: CandidateOutcome) -> str:
        found = [(point.rate, point.e2el_ms.get(percentile)) for point in candidate.latency]
        return " ".join(f"{x(rate):.1f},{y(value):.1f}" for rate, value in found if value)

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
            dots=[_dot(point, x, y, sla) for point in candidate.latency],
            x_ticks=[(x(rate), f"{rate:g}") for rate in rates],
            y_ticks=[(y(tick), short_ms(tick)) for tick in ticks],
            sla_y=y(sla.margin) if sla is not None else None,
            sla_x=x(sla.rate) if sla is not None and sla.rate in rates else None,
        )
        for candidate in shown
    ]


def _dot(point: LoadPoint, x: Any, y: Any, sla: GateResult | None) -> Dot:
    value = point.e2el_ms.get(percentile_of(sla))
    if not value:
        return Dot(x(point.rate), TOP, None, over=True)
    over = sla is not None and value > sla.margin
    return Dot(x(point.rate), y(value), short_ms(value), over)


# -- how numbers are written -----------------------------------------------------------------


def short_ms(value: float | None) -> str:
    """1234.5 -> `1.23 s`, 87.2 -> `87 ms`."""
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1000:.1f} s".replace(".0 s", " s")
    if value >= 1000:
        return f"{value / 1000:.2f} s".replace(".00 s", " s")
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def number(value: float | None, digits: int = 3) -> str:
    """A plain number with fixed digits; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def gate_value(value: float | None, metric: str) -> str:
    """A gate's number in its own unit."""
    return short_ms(value) if metric.endswith("_ms") else number(value, 4)


RATIOS = ("retention", "length", "ratio")
DIFFERENCES = ("non_inferiority", "regression", "slice", "implausible")


def scaled(value: float | None, gate: GateResult) -> str:
    """An estimate, a bound or an effect on the scale of the gate's margin."""
    if value is None:
        return "–"
    sign = "+" if gate.kind in DIFFERENCES and value >= 0 else "-" if value < 0 else ""
    own_unit = gate.metric.endswith("_ms") and gate.kind not in RATIOS
    return sign + (short_ms(abs(value)) if own_unit else number(abs(value), 4))


ASKED = {
    "retention": "≥ ",
    "floor": "≥ ",
    "ceiling": "≤ ",
    "length": "≤ ",
    "ratio": "≥ ",
    "implausible": "gain ≤ ",
}
"""What a margin asks for, by kind, where every gate of the kind asks for the same side."""


def asked(gate: GateResult) -> str:
    """The side of the margin on which a gate passes, for writing before it."""
    known = ASKED.get(gate.kind)
    if known is not None or gate.bound is None or gate.opposite_bound is None:
        return known or ""
    return "≥ " if gate.bound <= gate.opposite_bound else "≤ "


def duration(seconds: float | None) -> str:
    """Seconds as people say them: `0.4 s`, `48 s`, `3 min 12 s`, `2 h 05 min`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def megabytes(size: int | None) -> str:
    """Bytes in MB (10^6)."""
    return "–" if size is None else f"{size / 1e6:,.1f} MB"


def cut(text: str, length: int = LONGEST_TEXT) -> str:
    """At most `length` characters, saying how many are left out."""
    left = len(text) - length
    return text if left <= 0 else f"{text[:length]} … ({left} more characters)"


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(os.fspath(Path(__file__).parent)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: Mapping[str, Any] = {
        "ms": short_ms,
        "number": number,
        "duration": duration,
        "megabytes": megabytes,
        "cut": cut,
    }
    made.filters.update(filters)
    made.globals.update(quotient=quotient, gate_value=gate_value, scaled=scaled, asked=asked)
    made.globals.update(left=LEFT, right=RIGHT, top=TOP, bottom=BOTTOM)
    made.globals.update(width=WIDTH, height=HEIGHT)
    return made
