"""What the page of a release says about load: kept rates, drafts, and why one was chosen.

Nothing is judged here. Times in ms, rates in requests/s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from registry.evidence import LoadPoint
from registry.measured_steps import clause_of
from registry.outcome import CandidateOutcome, GateResult, Verdict
from registry.report_numbers import NONE, cost, megabytes, number, rate, short_ms

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
    """Candidates of equal target weights, draft off beside draft on, at the rates both have."""
    off = {c.target: c for c in candidates if c.target and not c.draft and c.latency}
    pairs = []
    for on in candidates:
        if not (on.draft and on.latency and on.target in off):
            continue
        plain = off[on.target]
        both = [(p, point_at(on.latency, p.rate)) for p in plain.latency]
        points = [(p, other) for p, other in both if other is not None]
        pair = DraftPair(plain, on, points)
        if pair.searched:
            # Equal rates are chance there, and may be void or of different lengths.
            pair = DraftPair(plain, on, [])
        if pair.searched or pair.points:
            pairs.append(pair)
    return pairs


# -- why this one ----------------------------------------------------------------------------


def selection(
    candidates: Sequence[CandidateOutcome],
    promoted: str | None,
    objective: str,
    at: float | None = None,
) -> str:
    """One sentence: by which number the promoted candidate was chosen among those that passed.

    `at` is the request rate at which fixed rates are compared. Empty where none was promoted.
    """
    passed = [one for one in candidates if one.verdict is Verdict.PASS]
    chosen = next((one for one in passed if one.name == promoted), None)
    if chosen is None or not objective:
        return ""
    if len(passed) == 1:
        return "Chosen because no other candidate passed."
    what, merit, write = _merit(objective, chosen, at)
    merits = {one.name: merit(one) for one in passed}
    best, own = max(merits.values()), merits[chosen.name]
    named = objective.replace("_", " ")
    if own < best or math.isinf(own):
        return f"Chosen among {len(passed)} that passed, by the objective {named}."
    said = f"Chosen as the {named} of {len(passed)} that passed: {what}, {write(own)}"
    others = [one for one in passed if one is not chosen]
    equal = [one.name for one in others if merits[one.name] == own]
    if equal:
        return f"{said}. {', '.join(equal)} has the same; the first in the recipe was taken."
    following = max(others, key=lambda one: merits[one.name])
    said += f" (next: {following.name}, {write(merits[following.name])})."
    near = _overlapping(chosen, others) if objective == "fastest" else []
    if near:
        said += f" The interval of {', '.join(near)} reaches into its own: they may be equal."
    return said


Merit = Callable[[CandidateOutcome], float]


def _merit(
    objective: str, chosen: CandidateOutcome, at: float | None
) -> tuple[str, Merit, Callable[[float], str]]:
    """What an objective looks at, in words; the number, more being better; how it is written."""

    def accuracy(one: CandidateOutcome) -> float:
        known = [value for value in one.metrics.values() if value is not None]
        return sum(known) / len(known) if known else -math.inf

    def slowness(one: CandidateOutcome) -> float:
        times = [point.e2el_ms.get("p99") for point in one.latency if point.rate == at]
        return -times[0] if times and times[0] is not None else -math.inf

    def known(write: Callable[[float | None], str]) -> Callable[[float], str]:
        return lambda value: write(abs(value)) if math.isfinite(value) else "unknown"

    if objective == "most_accurate":
        return "the highest mean of its accuracy metrics", accuracy, known(number)
    if objective == "smallest":
        return (
            "the fewest bytes of weights",
            lambda one: -float(one.size_bytes or math.inf),
            known(lambda value: megabytes(None if value is None else round(value))),
        )
    if chosen.kept_rate is not None:
        return (
            "the highest request rate at which the SLA was kept",
            lambda one: (one.kept_rate or (None,))[0] or 0.0,
            lambda value: f"{rate(value)} requests/s" if value else "none",
        )
    where = f" at {rate(at)} requests/s" if at is not None else ""
    return f"the lowest P99 E2EL{where}", slowness, known(short_ms)


def _overlapping(chosen: CandidateOutcome, others: Sequence[CandidateOutcome]) -> list[str]:
    """Searched candidates whose rate may be as high, by their own interval."""
    low = (chosen.kept_rate or (None, None))[0]
    if low is None:
        return []
    return [
        one.name
        for one in others
        if one.kept_rate is not None and (one.kept_rate[1] is None or one.kept_rate[1] > low)
    ]
