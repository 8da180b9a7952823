"""`bench --tune` with a measurement that is played: what is started, what is found again, said."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from eval_suites.tuning import Interval, Tried
from flows.tune_command import tune_bundle, tune_text
from registry.bundle import Bundle, Part
from registry.candidate_memory import MemoryPlan
from registry.errors import Infeasible, UserError
from registry.evidence import LatencyEvidence, LoadPoint, write_summary
from registry.provenance import hardware_fingerprint
from tasks import tuning
from tasks.bundles import bundle_named, remember
from tasks.tuning import document, tune

LOAD = {
    "kind": "load", "description": "d", "production": False, "sla": ["e2el p90 3s"],
    "scenarios": {"one": {"input": 8, "output": 8}}, "search": {"highest": 100, "minutes": 1},
    "hardware": "cpu_2core",
    "seconds_per_rate": 1, "sampling": {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8,
    "seed": 0}, "seed": 1,
}  # fmt: skip
KEPT = {16: (4.0, 5.0), 32: (8.0, 10.0), 64: (7.0, 9.0)}


@pytest.fixture
def load(tmp_path: Path) -> str:
    path = tmp_path / "load.yaml"
    path.write_text(yaml.safe_dump(LOAD))
    return str(path)


@pytest.fixture
def started(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Points in the order in which they were measured."""
    seen: list[int] = []

    def bench(target: Any, identity: str, load: str, *, out: Path, **more: Any) -> Any:
        sequences = bundle_named(identity).engine_args["max-num-seqs"]
        seen.append(sequences)
        if sequences == 128:
            raise Infeasible("out of memory")
        found = LatencyEvidence(
            bundle=identity, profile="p", hardware=hardware_fingerprint(), engine="vllm 0.32.0",
            harness="h", settings={}, points=[point()], kept_rate=KEPT[sequences],
            measured_at=datetime(2026, 1, 1, tzinfo=UTC), seconds=1.0,
        )  # fmt: skip
        out.mkdir(parents=True)
        write_summary(out, found)
        return SimpleNamespace(evidence=found, folder=out)

    def plan(bundle: Bundle, hardware: str) -> MemoryPlan:
        return MemoryPlan(
            candidate=bundle.name, hardware="h", kv_cache_tokens=200_000, max_model_len=1000
        )

    monkeypatch.setattr(tuning, "bench", bench)
    monkeypatch.setattr(tuning, "plan_of_bundle", plan)
    monkeypatch.setattr(tuning, "as_served_here", lambda bundle, reference: bundle)
    return seen


def point() -> LoadPoint:
    none: dict[str, float | None] = {}
    return LoadPoint(
        rate=1.0, achieved_rate=1.0, total=1, ok=1, failed=0, duration_s=1.0, ttft_ms=none,
        tpot_ms=none, itl_ms=none, e2el_ms=none, output_tokens_per_s=1.0, answer="kept",
    )  # fmt: skip


def bundle(**args: Any) -> str:
    one = Bundle(
        name="bf16", target=Part(stage="distill", key="a" * 64, digest="b" * 64), draft=None,
        num_speculative_tokens=None, engine_version="0.32.0", engine_args=args, env={},
    )  # fmt: skip
    remember(one)
    return one.digest


def test_every_point_is_a_bundle_and_none_is_measured_twice(started: list[int], load: str) -> None:
    reference = bundle(**{"max-model-len": 1000})
    found = document(tune(reference, load, ["max-num-seqs=16,32,201,128"]))
    assert started == [16, 32, 128]
    rows = {row["args"]["max-num-seqs"]: row for row in found["points"]}
    assert rows[201]["dropped"].startswith("by the plan the KV cache holds 200 sequences")
    assert rows[128]["dropped"] == "out of memory"
    assert len({row["bundle"] for row in rows.values()} | {reference}) == 5
    assert (found["chosen"], found["verdict"]) == ({"max-num-seqs": 32}, "PASS")
    assert found["yaml"] == "engine_args:\n  max-num-seqs: 32"
    # Another point joins those that are there.
    again = document(tune(reference, load, ["max-num-seqs=32,64"]))
    assert started == [16, 32, 128, 64]
    assert again["verdict"] == "INCONCLUSIVE"
    assert again["not_distinguishable"] == [{"max-num-seqs": 32}]
    text = tune_text(again)
    assert "not distinguishable from max-num-seqs 32" in text
    assert "engine_args:\n  max-num-seqs: 64" in text
    assert bundle_named(reference).engine_args == {"max-model-len": 1000}


def test_what_is_served_now_stays_among_equals(started: list[int], load: str) -> None:
    reference = bundle(**{"max-model-len": 1000, "max-num-seqs": 64})
    found = document(tune(reference, load, ["max-num-seqs=32,64"]))
    assert (found["current"], found["chosen"]) == ({"max-num-seqs": 64}, {"max-num-seqs": 64})


def test_only_a_bundle_is_tuned(home: Path) -> None:
    more: dict[str, Any] = {"prompts": None, "out": None, "generator": "vllm", "as_json": False}
    with pytest.raises(UserError, match="is for a bundle, not with --url"):
        tune_bundle("b" * 64, "l", ["max-num-seqs=1"], {"--url": "http://h"}, **more)
    with pytest.raises(UserError, match="give --bundle"):
        tune_bundle(None, "l", ["max-num-seqs=1"], {}, **more)


def measured(*points: LoadPoint, **changes: Any) -> LatencyEvidence:
    known: dict[str, Any] = {
        "bundle": "b", "profile": "p", "hardware": "h", "engine": "vllm", "harness": "h",
        "settings": {}, "points": list(points), "seconds": 1.0,
        "measured_at": datetime(2026, 1, 1, tzinfo=UTC),
    }  # fmt: skip
    return LatencyEvidence(**(known | changes))


def test_times_of_a_void_rate_are_not_compared() -> None:
    void = point().model_copy(update={"rate": 2.0, "answer": "void"})
    times = {1.0: Interval(5, 4, 6), 2.0: Interval(1, 1, 1)}
    assert tuning._counted(measured(point(), void), times) == {1.0: times[1.0]}


def test_a_rate_that_no_longer_run_confirmed_is_said() -> None:
    args = {"max-num-seqs": 16}
    for sustained, told in ((False, 1), (True, 0), (None, 0)):
        one = tuning.Point(
            args,
            "b",
            evidence=measured(point(), sustained=sustained),
            tried=Tried(args, (4.0, 5.0)),
        )
        said = [note for note in tuning._notes([one]) if "not confirmed" in note]
        assert said == ["max-num-seqs 16: the rate was not confirmed by the longer run"] * told
