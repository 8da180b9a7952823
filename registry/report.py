"""The page of a release: one HTML file that needs no network, no script and no server.

Everything shown comes from the outcome and from `ReportDetails`; the page decides nothing and
recomputes nothing but quotients. Whatever a model wrote is escaped (autoescape is on for the
whole template), and long texts are cut, so that the file stays far below 3 MB.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from registry import report_charts as drawings
from registry import report_numbers as numbers
from registry import report_pareto as pareto
from registry import report_savings as saved
from registry.engine_memory import size_words
from registry.outcome import LoosenedGate, ReleaseOutcome, Verdict, WaiverShown
from registry.report_flips import FlipTexts, compared
from registry.report_gates import panels
from registry.report_latency import (
    Detail,
    LatencyFigures,
    Picture,
    draft_pairs,
    kept_point,
    kept_words,
    percentile_of,
    searches,
    shown_point,
    sla_of,
)
from registry.report_steps import steps_table
from registry.report_topology import TopologyTable
from registry.settings import settings
from registry.stage_pages import StagePage

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATE = "report.html.j2"
MOST_EXAMPLES = 16
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
    latency: dict[str, LatencyFigures] = Field(
        default_factory=dict, description="Of each candidate with a load test."
    )
    compared: list[Picture] = Field(
        default_factory=list, description="All candidates' load over each other."
    )
    examples: list[Example] = Field(default_factory=list)
    flips: list[FlipTexts] = Field(
        default_factory=list, description="Of each candidate and reference, where there are any."
    )
    lineage_svg: str = Field(
        default="", repr=False, description="A picture as SVG text, made by us; not escaped."
    )
    ledger: list[str] = Field(default_factory=list, description="Alias moves, one line each.")
    topologies: list[TopologyTable] = Field(
        default_factory=list, description="Of weights that are served colocated and disaggregated."
    )
    stage_pages: list[StagePage] = Field(
        default_factory=list, description="What stages say of themselves, in their order."
    )
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
    figures = {one.name: details.latency.get(one.name, LatencyFigures()) for one in candidates}
    searched = searches(candidates, figures)
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
        selection=outcome.selection,
        savings=outcome.savings,
        scatter=pareto.scatter(outcome.selection) if outcome.selection else None,
        ranking=pareto.table(outcome.selection) if outcome.selection else [],
        panels={c.name: panels(c.gates) for c in candidates},
        flips={c.name: [f for f in details.flips if f.candidate == c.name] for c in candidates},
        accepted=any(p.acceptance_length is not None for c in candidates for p in c.latency),
        lineage=_svg_alone(details.lineage_svg),
        at_sla={c.name: shown_point(c, rate) for c in candidates},
        charts=drawings.charts([one for one in candidates if one.kept_rate is None], sla),
        searched=searched,
        clauses=list(dict.fromkeys(one.sla for one in searched if one.sla)),
        figures=figures,
        priced=any(
            value is not None for c in candidates for p in c.latency for value in p.cost.values()
        ),
        pictured_names=[name for name, one in figures.items() if one.pictures],
        steps={one.name: steps_table(one, figures[one.name]) for one in candidates},
        pairs=draft_pairs(candidates),
        examples=[grouped(example) for example in details.examples[:MOST_EXAMPLES]],
        longest_stage=max((stage.seconds for stage in outcome.stages), default=0) or 1,
        glyphs=GLYPHS,
        meanings=MEANINGS,
    )


# -- what the tables need --------------------------------------------------------------------


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


def _svg_alone(text: str) -> str:
    """Without the XML head that has no place inside a page; nothing where it is no SVG."""
    start = text.find("<svg")
    return text[start:] if start >= 0 else ""


def data_uri(picture: Picture) -> str:
    """The picture itself as an address, so that the page needs no other file."""
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"


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
        "ms": numbers.short_ms,
        "number": numbers.number,
        "duration": numbers.duration,
        "megabytes": numbers.megabytes,
        "size": size_words,
        "cut": numbers.cut,
        "rate": numbers.rate,
        "share": numbers.share,
        "cost": numbers.cost,
        "data_uri": data_uri,
    }
    made.filters.update(filters)
    made.globals.update(quotient=numbers.quotient, gate_value=numbers.gate_value)
    made.globals.update(scaled=numbers.scaled, asked=numbers.asked)
    made.globals.update(kept_words=kept_words, kept_point=kept_point, compared=compared)
    made.globals.update(pareto=pareto, saved=saved)
    made.globals.update(left=drawings.LEFT, right=drawings.RIGHT, width=drawings.WIDTH)
    made.globals.update(top=drawings.TOP, bottom=drawings.BOTTOM, height=drawings.HEIGHT)
    return made
