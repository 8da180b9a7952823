"""What the page of a release says about load: kept rates and drafts.

Nothing is judged here. Times in ms, rates in requests/s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from registry.evidence import LoadPoint
from registry.measured_steps import clause_of
from registry.outcome import CandidateOutcome, GateResult
from registry.report_numbers import NONE, cost, rate, short_ms

CURVE_METRIC = re.compile(r"latency\.e2el_(p50|p90|p95|p99)_ms")
USUAL_PERCENTILE = "p99"


class Detail(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Picture(Detail):
    """A PNG that the page carries in itself."""

    title: str
    png: bytes = Field(repr=False)


class LatencyFigures(Detail):
    """What a candidate's load test says beside its load points."""

    sla: list[str] = Field(default_factory=list, description="As in the evidence.")
    sustained: bool | None = Field(default=None, description="Kept again by the longer run.")
    notes: list[str] = Field(default_factory=list)
    pictures: list[Picture] = Field(default_factory=list)


# -- the limit -------------------------------------------------------------------------------


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


def clause_words(text: str, limit: bool = True) -> str:
    """`e2el p99 2000ms` -> `E2EL P99 ≤ 2 s`, or `E2EL P99` without the limit."""
    clause = clause_of(text)
    if clause is None:
        return text
    what = f"{clause.whose}{clause.metric.upper()} P{clause.percent:g}"
    return f"{what} ≤ {short_ms(clause.limit_ms)}" if limit else what


def flagged(text: str, candidate: CandidateOutcome) -> str:
    """A time or a rate as it is shown: one of an emulated kernel never without saying so."""
    return f"{text} (emulated)" if candidate.emulated and text not in ("", NONE) else text


# -- points and rates ------------------------------------------------------------------------


def point_at(points: Sequence[LoadPoint], at: float | None) -> LoadPoint | None:
    """The point measured at that rate, or the last one where no rate is asked for."""
    if at is None:
        return points[-1] if points else None
    return next((point for point in points if math.isclose(point.rate, at)), None)


def kept_point(candidate: CandidateOutcome) -> LoadPoint | None:
    """Of a search, the last step at the highest rate kept: the longer run where there was one."""
    low = (candidate.kept_rate or (None, None))[0]
    found = [p for p in candidate.latency if p.answer == "kept" and p.rate == low]
    return found[-1] if found else None


def shown_point(candidate: CandidateOutcome, at: float | None) -> LoadPoint | None:
    """What stands for a candidate: the step at its kept rate, or the point at the SLA's rate."""
    if candidate.kept_rate is not None and at is None:
        return kept_point(candidate)
    return point_at(candidate.latency, at)


def kept_words(kept_rate: tuple[float | None, float | None] | None) -> str:
    """`5.66, not 6.73`; nothing where no rate was searched for."""
    if kept_rate is None:
        return ""
    low, high = kept_rate
    if low is None:
        return f"none, not {rate(high)}" if high is not None else "unknown"
    return f"{rate(low)}, not {rate(high)}" if high is not None else f"{rate(low)}, none lost"


@dataclass(frozen=True)
class Searched:
    """A candidate whose load test was a search."""

    candidate: CandidateOutcome
    point: LoadPoint | None
    sla: str
    confirmed: str
    requests: int
    per_request: str


def searches(
    candidates: Sequence[CandidateOutcome], figures: Mapping[str, LatencyFigures]
) -> list[Searched]:
    found = []
    for one in candidates:
        if one.kept_rate is None:
            continue
        known = figures.get(one.name, LatencyFigures())
        sustained = {True: "yes", False: "no", None: "not recorded"}[known.sustained]
        point = kept_point(one)
        found.append(
            Searched(
                candidate=one,
                point=point,
                sla="; ".join(clause_words(text) for text in known.sla),
                confirmed=sustained if one.kept_rate[0] is not None else NONE,
                requests=sum(point.total for point in one.latency),
                per_request=cost(point.cost.get("per_request") if point else None),
            )
        )
    return found


# -- draft off and on ------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftPair:
    """The same weights served without and with the draft; of searches no points are paired."""

    off: CandidateOutcome
    on: CandidateOutcome
    points: list[tuple[LoadPoint, LoadPoint]]

    @property
    def searched(self) -> bool:
        return self.off.kept_rate is not None and self.on.kept_rate is not None


def draft_pairs(candidates: Sequence[CandidateOutcome]) -> list[DraftPair]:
    """Candidates of equal target weights and topology, draft off beside draft on.

    At the rates both have.
    """
    off = {(c.target, c.topology): c for c in candidates if c.target and not c.draft and c.latency}
    pairs = []
    for on in candidates:
        plain = off.get((on.target, on.topology))
        if plain is None or not (on.draft and on.latency):
            continue
        both = [(p, point_at(on.latency, p.rate)) for p in plain.latency]
        points = [(p, other) for p, other in both if other is not None]
        pair = DraftPair(plain, on, points)
        if pair.searched:
            # Equal rates are chance there, and may be void or of different lengths.
            pair = DraftPair(plain, on, [])
        if pair.searched or pair.points:
            pairs.append(pair)
    return pairs
