"""Which passing candidate is chosen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eval_suites.loader import load_policy
from recipes.schema import Promotion
from registry.bundle import Bundle, Part
from registry.evidence import LoadPoint
from registry.outcome import CandidateOutcome, Verdict
from tasks.judging import Measured, judge_candidates, selected


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
    promotion = Promotion.model_validate({"objective": objective})
    assert selected(CANDIDATES, promotion, 2.0).chosen == chosen


def test_nothing_passed() -> None:
    assert selected(CANDIDATES[:1], Promotion(), 2.0).chosen is None


def test_the_recipes_promotion_decides_and_the_champion_is_known() -> None:
    weighed = Promotion.model_validate({"weights": {"memory": 1}})
    assert selected(CANDIDATES, weighed, 2.0).chosen == "int4"
    fastest = selected(CANDIDATES, Promotion(), 2.0, incumbent="bf16")
    assert fastest.chosen == "int8"
    assert fastest.reason.startswith("int8 was chosen as the fastest of 4 that passed")


def test_weights_of_target_and_draft_are_counted(home: Path) -> None:
    for stage, size in (("quantize", 30), ("draft", 7)):
        folder = home / "store" / stage / "key" / "files"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * size)
        (folder / "config.json").write_bytes(b"{}")
    bundle = Bundle(
        name="int8-eagle3",
        target=Part(stage="quantize", key="key", digest="t"),
        draft=Part(stage="draft", key="key", digest="d"),
        engine_version="0",
    )
    measured = Measured("int8-eagle3", digest="b", bundle=bundle, draft=True)
    (outcome,) = judge_candidates(load_policy("demo"), [measured], {"student": measured})
    assert (outcome.size_bytes, outcome.draft_bytes) == (30, 7)
    (plain,) = judge_candidates(
        load_policy("demo"),
        [dataclasses.replace(measured, bundle=bundle.model_copy(update={"draft": None}))],
        {"student": measured},
    )
    assert plain.draft_bytes is None
