"""Which passing candidate is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from registry.evidence import LoadPoint
from registry.outcome import CandidateOutcome, Verdict
from tasks.judging import select


def candidate(name: str, verdict: Verdict, p99: float | None, hit: float, size: int) -> Any:
    times = {"p50": 1.0, "p90": 1.0, "p95": 1.0, "p99": p99}
    point = LoadPoint(
        rate=2.0,
        achieved_rate=2.0,
        total=10,
        ok=10,
        failed=0,
        duration_s=5,
        ttft_ms=times,
        tpot_ms=times,
        itl_ms=times,
        e2el_ms=times,
        output_tokens_per_s=1.0,
    )
    return CandidateOutcome(
        name=name,
        bundle=name,
        verdict=verdict,
        reasons=[],
        metrics={"hit_rate": hit},
        latency=[point],
        size_bytes=size,
    )


CANDIDATES = [
    candidate("failed", Verdict.FAIL, 1.0, 1.0, 1),
    candidate("bf16", Verdict.PASS, 900.0, 0.92, 100),
    candidate("int8", Verdict.PASS, 700.0, 0.91, 60),
    candidate("int4", Verdict.PASS, 800.0, 0.90, 40),
    candidate("none", Verdict.PASS, None, 0.10, 90),
]


@pytest.mark.parametrize(
    ("objective", "chosen"), [("fastest", "int8"), ("most_accurate", "bf16"), ("smallest", "int4")]
)
def test_the_objective_picks_among_those_that_passed(objective: str, chosen: str) -> None:
    assert select(CANDIDATES, objective, 2.0) == chosen


def test_nothing_passed() -> None:
    assert select(CANDIDATES[:1], "fastest", 2.0) is None
