"""The steps of a load test as their evidence folder holds them: load points, requests, queue."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from registry.errors import UserError
from registry.evidence import REQUESTS, TIMELINE, LatencyEvidence, LoadPoint, read_summary

ALL_STEPS = 4
"""Up to so many steps, each is looked at; of more, those that decided."""

_CLAUSE = re.compile(
    r"(?:(\w+) )?(ttft|tpot|itl|e2el) p(\d+(?:\.\d+)?) (\d+(?:\.\d+)?(?:e[+-]?\d+)?)ms"
)


@dataclass(frozen=True)
class Clause:
    """One line of an SLA; `text` is its key in a load point's values and bounds."""

    metric: str
    percent: float
    limit_ms: float
    text: str
    scenario: str = ""

    @property
    def whose(self) -> str:
        """The scenario that it is about, in front of other words."""
        return f"{self.scenario} " if self.scenario else ""


@dataclass(frozen=True)
class Step:
    """One load point with its requests; times are NaN where there are none."""

    number: int
    point: LoadPoint
    start_s: NDArray[np.float64]
    ok: NDArray[np.bool_]
    ttft_ms: NDArray[np.float64]
    e2el_ms: NDArray[np.float64]
    waiting: Sequence[tuple[float, float]] = ()
    """Seconds after the step's first request, and the engine's queue then (NaN: not shown)."""


def clauses_of(evidence: LatencyEvidence) -> list[Clause]:
    found = (clause_of(text) for text in evidence.sla)
    return [clause for clause in found if clause is not None]


def clause_of(text: str) -> Clause | None:
    """From `[SCENARIO] METRIC pPERCENT LIMITms`, as evidence has it; None where it is none."""
    found = _CLAUSE.fullmatch(text)
    if found is None:
        return None
    scenario, metric, percent, limit_ms = found.groups()
    return Clause(metric, float(percent), float(limit_ms), text, scenario or "")


def read_steps(folder: Path, evidence: LatencyEvidence) -> list[Step]:
    """The requests of each load point; empty without `requests.parquet`.

    Rows lie in the order of the points. Where they do not add up to them, all requests of a rate
    are taken for each of its points. Raises `UserError` for a file that cannot be read.
    """
    import pyarrow.parquet as pq

    path = folder / REQUESTS
    if not path.exists():
        return []
    columns = ["rate", "start_s", "ok", "ttft_ms", "e2el_ms"]
    try:
        table = pq.read_table(path, columns=columns)
        rate, start, ok, ttft, e2el = (table[name].to_numpy() for name in columns)
        queue = _waiting(folder / TIMELINE)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError.at(path, f"cannot be read: {error}", "measure again") from None
    ends = np.cumsum([point.total for point in evidence.points])
    steps = []
    for index, point in enumerate(evidence.points):
        rows = np.arange(ends[index] - point.total, ends[index])
        if ends[-1] != len(rate) or not np.allclose(rate[rows], point.rate):
            rows = np.flatnonzero(np.isclose(rate, point.rate))
        steps.append(
            Step(
                index + 1,
                point,
                _one_after_the_other(start[rows].astype(float), e2el[rows].astype(float)),
                ok[rows].astype(bool),
                ttft[rows].astype(float),
                e2el[rows].astype(float),
                queue.get(index + 1, ()),
            )
        )
    return steps


def deciding(evidence: LatencyEvidence, steps: Sequence[Step]) -> list[Step]:
    """All steps if they are few, else those that `decisive` names."""
    if len(steps) <= ALL_STEPS:
        return list(steps)
    return [steps[number - 1] for number in decisive(evidence)]


def decisive(evidence: LatencyEvidence) -> list[int]:
    """Numbers of the last steps at the highest rate kept and at the lowest not kept.

    Without a search, of the slowest and the fastest; empty without steps.
    """
    points = list(enumerate(evidence.points, start=1))
    low, high = evidence.kept_rate or (None, None)
    chosen = [
        [number for number, point in points if (point.answer, point.rate) == wanted][-1:]
        for wanted in (("kept", low), ("not kept", high))
    ]
    found = [number for part in chosen for number in part]
    if not found and points:
        ordered = sorted(points, key=lambda one: one[1].rate)
        found = list(dict.fromkeys((ordered[0][0], ordered[-1][0])))
    return found


def read_latency(folder: Path) -> LatencyEvidence:
    evidence = read_summary(folder)
    if not isinstance(evidence, LatencyEvidence):
        raise UserError.at(folder, f"holds {evidence.kind} evidence", "name a load test's folder")
    return evidence


def _waiting(path: Path) -> dict[int, list[tuple[float, float]]]:
    """By step, from a timeline that may be missing; NaN at moments without a number."""
    import pyarrow.parquet as pq

    found: dict[int, list[tuple[float, float]]] = {}
    if path.exists():
        for row in pq.read_table(path, columns=["step", "at_s", "waiting"]).to_pylist():
            count = math.nan if row["waiting"] is None else row["waiting"]
            found.setdefault(row["step"], []).append((row["at_s"], count))
    # An engine that shows none has no line.
    return {
        step: moments
        for step, moments in found.items()
        if not all(math.isnan(count) for _, count in moments)
    }


def _one_after_the_other(
    start_s: NDArray[np.float64], e2el_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Starts of a step's batches on one clock.

    Evidence of version 0.1 counts each batch from its own first request, at exactly 0.
    """
    found = start_s.copy()
    for index in np.flatnonzero((start_s[1:] == 0) & (start_s[:-1] > 0)) + 1:
        ends = found[:index] + np.nan_to_num(e2el_ms[:index]) / 1000
        found[index:] = start_s[index:] + ends.max()
    return found
