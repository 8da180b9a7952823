"""Measured times in the rows of a plan that they are of, and in no other."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flows.plan_rendering import plan_text
from registry.bundle import Bundle, Part
from registry.capacity_plan import plan
from registry.digests import digest_of
from registry.errors import UserError
from registry.evidence import LatencyEvidence, LoadPoint, write_summary
from registry.json_files import json_object
from registry.model_shapes import shape_of
from registry.plan_evidence import Served, measured_of, nearest
from registry.plan_parts import Demand, Fit, Limits, Model, Wish
from registry.provenance import hardware_fingerprint
from registry.settings import CHECKOUT
from registry.topology import Disaggregated
from tasks import plan_evidence
from tasks.bundles import remember
from tasks.capacity import planned
from tasks.capacity_inputs import machine_of
from tasks.plan_evidence import served_of

CONFIG = CHECKOUT / "tests" / "data" / "model_configs" / "llama_3_1_8b.json"
SHAPE = shape_of(json_object(CONFIG), CONFIG.name)
MODEL = Model(SHAPE, "llama")
DEMAND = Demand(8, 2048, 2048, rate=10.0, output=100)
GIB = 1 << 30


def point(rate: float, answer: str | None = "kept", tpot: float = 20.0, **engine: Any) -> LoadPoint:
    return LoadPoint.model_validate(
        {
            "rate": rate, "achieved_rate": rate, "total": 9, "ok": 9, "failed": 0,
            "duration_s": 1.0, "ttft_ms": {"p95": 300.0}, "tpot_ms": {"p50": tpot}, "itl_ms": {},
            "e2el_ms": {"p95": 2300.0}, "output_tokens_per_s": 800.0, "answer": answer,
            "engine": engine,
        }
    )  # fmt: skip


def evidence(*points: LoadPoint, **changes: Any) -> LatencyEvidence:
    known: dict[str, Any] = {
        "bundle": "b" * 64, "profile": "p", "hardware": hardware_fingerprint(),
        "engine": "vllm 0.32.0", "harness": "h", "settings": {}, "points": list(points),
        "kept_rate": (4.0, 8.0), "measured_at": datetime(2026, 1, 1, tzinfo=UTC), "seconds": 1.0,
    }  # fmt: skip
    return LatencyEvidence(**(known | changes))


def served(**changes: Any) -> Served:
    known: dict[str, Any] = {
        "evidence": evidence(point(2, tpot=10.0), point(4, running_max=7.0), point(8, "not kept")),
        "source": "here", "here": True, "shape": SHAPE, "format": "bf16", "kv_dtype": "bfloat16",
        "draft": False, "tp": 1, "pp": 1,
        "engine_args": {"max-model-len": 2048, "max-num-seqs": 16, "max-num-batched-tokens": 2048},
    }  # fmt: skip
    return Served(**(known | changes))


def fit(**wish: Any) -> Fit:
    how = Wish(replicas=True, **wish)
    return plan(MODEL, [machine_of("nvidia_l20")], DEMAND, how, Limits()).fits[0]


def measured(*ones: Served, here: bool = True, model: Model = MODEL) -> dict[str, Any] | None:
    return measured_of(fit(), model, DEMAND, ones, fit_is_here=here)


def test_a_row_has_the_times_of_the_rate_that_it_is_for() -> None:
    found = measured(served())
    assert found is not None
    # Five replicas by the estimate: each has 2 of the 10 requests/s.
    assert (found["rate_of_the_row"], found["rate"]) == (2.0, 2.0)
    assert found["tpot_ms"] == {"p50": 10.0}
    assert found["kept_rate"] == [4.0, 8.0]
    assert found["replicas"] == 3  # 10 / 4
    assert found["other_arguments"] == {"max-num-seqs": 16, "gpu-memory-utilization": None}
    assert found["output_tokens_per_s"] == 800.0


@pytest.mark.parametrize(
    "changes",
    [{"here": False}, {"format": "fp8_dynamic"}, {"kv_dtype": "fp8"}, {"draft": True}, {"tp": 2},
     {"pp": 2}, {"one_engine": False}, {"shape": replace(SHAPE, hidden=1)},
     {"evidence": evidence(point(4), emulated=True)}],
)  # fmt: skip
def test_what_is_of_another_row_stays_out_of_this(changes: dict[str, Any]) -> None:
    assert measured(served(**changes)) is None


def test_another_machines_row_has_none() -> None:
    assert measured(served(), here=False) is None


def test_replicas_are_counted_in_decimals() -> None:
    """1.1 / 0.1 are 11, and 12 in binary fractions."""
    one = served(evidence=evidence(point(0.1), kept_rate=(0.1, 0.2)))
    found = measured_of(fit(), MODEL, replace(DEMAND, rate=1.1), [one], fit_is_here=True)
    assert found is not None
    assert found["replicas"] == 11


def test_the_newest_measurement_counts() -> None:
    later = evidence(point(4, tpot=30.0), measured_at=datetime(2026, 2, 1, tzinfo=UTC))
    found = measured(served(evidence=later, source="later"), served())
    assert found is not None
    assert found["source"] == "later"


def test_the_nearest_point() -> None:
    points = [point(8, "not kept"), point(2), point(4), point(3, "void")]
    rates = {
        wanted: found.rate if (found := nearest(points, wanted)) else None
        for wanted in (1.0, 3.0, 9.0, None)
    }
    assert rates == {1.0: 2.0, 3.0: 4.0, 9.0: 8.0, None: 4.0}
    assert nearest([point(1, "void")], None) is None


# -- from files ------------------------------------------------------------------------------


def known_bundle(home: Path) -> Bundle:
    one = Bundle(
        name="bf16", target=Part(stage="distill", key="a" * 64, digest="b" * 64), draft=None,
        num_speculative_tokens=None, engine_version="0.32.0",
        engine_args={"max-model-len": 2048}, env={},
    )  # fmt: skip
    one.target.path.mkdir(parents=True)
    (one.target.path / "config.json").write_text(CONFIG.read_text())
    remember(one)
    return one


@pytest.mark.parametrize(
    ("args", "topology", "alone"),
    [
        ({"tensor-parallel-size": 2}, None, True),
        ({"data-parallel-size": 2}, None, False),
        (
            {"tensor-parallel-size": 2},
            Disaggregated(
                prefill_args={"tensor-parallel-size": 1}, decode_args={"tensor-parallel-size": 1}
            ),
            False,
        ),
    ],
)
def test_several_engines_are_no_row(
    home: Path, args: dict[str, Any], topology: Disaggregated | None, alone: bool
) -> None:
    one = known_bundle(home).model_copy(update={"engine_args": args, "topology": topology})
    remember(one)
    folder = home / "bench" / "load-1"
    folder.mkdir(parents=True)
    write_summary(folder, evidence(point(4), bundle=one.digest))
    [found] = served_of([str(folder)])
    assert found.one_engine is alone


def test_memory_of_all_gpus_is_held_against_all(monkeypatch: pytest.MonkeyPatch) -> None:
    card = machine_of("nvidia_l20")
    monkeypatch.setattr(plan_evidence, "this_machine", lambda: replace(card, accelerators=4))
    one = served(evidence=evidence(point(2, gpu_memory_peak_bytes=160 * GIB)))
    assert plan_evidence.peak_words(measured(one), card) == (
        "; measured: 160.00 GiB of 179.92 GiB were taken on 4 GPUs"
    )


def test_a_plan_takes_a_folder_or_a_bundle(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = known_bundle(home)
    folder = home / "bench" / "load-1"
    folder.mkdir(parents=True)
    points = [point(4, kv_cache_usage_max=0.125, gpu_memory_peak_bytes=20 * GIB)]
    write_summary(folder, evidence(*points, bundle=one.digest))
    card = machine_of("nvidia_l20")
    monkeypatch.setattr(plan_evidence, "this_machine", lambda: replace(card, name="here"))
    for name in (str(folder), one.digest[:12]):
        document, status = planned(
            str(CONFIG), concurrency=8, context=2048, hardware=["nvidia_l20", "nvidia_h20"],
            current="nvidia_l20 x 2", evidence=[name], utilization=0.9, max_batched_tokens=2048,
        )  # fmt: skip
        assert status == 0
        rows = {row["hardware"]: row["measured"] for row in document["fits"]}
        assert rows["nvidia_h20"] is None
        assert rows["nvidia_l20"]["tpot_ms"] == {"p50": 20.0}
        assert rows["nvidia_l20"]["source"] == str(folder)
        assert document["current"]["says"].endswith(
            "; measured: the KV cache was at most 12.5% full, 20.00 GiB of 44.98 GiB were taken"
        )
        text = plan_text(document)
        assert "     300     20.0      2300" in text
        assert "TTFT, TPOT and E2EL of the other rows: estimate, not measured" in text
        assert "nvidia_l20 bf16: measured 2026-01-01 at 4 requests/s" in text


def test_without_evidence_nothing_says_measured() -> None:
    document, _ = planned(
        str(CONFIG), concurrency=8, context=2048, hardware=["nvidia_l20"], utilization=0.9,
        max_batched_tokens=2048,
    )  # fmt: skip
    assert document["fits"][0]["measured"] is None
    assert "TTFT, TPOT and E2EL: estimate, not measured" in plan_text(document)


def test_evidence_of_elsewhere_is_said(home: Path) -> None:
    one = known_bundle(home)
    folder = home / "bench" / "load-1"
    folder.mkdir(parents=True)
    write_summary(folder, evidence(point(4), bundle=one.digest, hardware=digest_of("x")[:12]))
    document, _ = planned(
        str(CONFIG), concurrency=8, context=2048, hardware=["nvidia_l20"], evidence=[str(folder)],
        utilization=0.9, max_batched_tokens=2048,
    )  # fmt: skip
    assert document["fits"][0]["measured"] is None
    assert any("measured on another machine" in note for note in document["notes"])


def test_what_is_no_load_test_is_refused(home: Path, tmp_path: Path) -> None:
    one = known_bundle(home)
    with pytest.raises(UserError, match="has no load test in this home"):
        served_of([one.digest])
    write_summary(tmp_path, evidence(point(4), bundle="c" * 64))
    with pytest.raises(UserError, match="which this home does not know"):
        served_of([str(tmp_path)])
