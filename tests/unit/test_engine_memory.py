"""Memory that a plan gives an engine beside what the engine took."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from eval_suites.plan_gate import WEIGHTS_AS_PLANNED, WITHIN_HARDWARE, with_plan_gate
from registry.candidate_memory import MemoryPlan, memory_plan
from registry.engine_memory import (
    CPU_BASE,
    CPU_BASE_OF_PIECE,
    CPU_BASE_OF_WORKER,
    ComparedMemory,
    MeasuredMemory,
    PlannedMemory,
    compared,
)
from registry.evidence import LoadPoint, ServingEvidence
from registry.evidence_folders import CandidateEvidence
from registry.json_files import json_object
from registry.model_shapes import ModelShape, shape_of
from registry.outcome import Verdict
from registry.settings import CHECKOUT
from tasks.capacity_inputs import machine_of
from tasks.engines.engine_memory import engine_words, measured_memory
from tasks.release_capacity import with_files
from tasks.serving import plan_findings

GIB, MIB = 1 << 30, 1 << 20
CONFIG = CHECKOUT / "tests" / "data" / "model_configs" / "llama_3_1_8b.json"
SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
# Table, head and last norm; of a layer q, k, v, o, gate, up, down and two norms.
SMALL_WEIGHTS = 2 * (
    2 * 512 * 128 + 128 + 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256 + 2 * 128)
)
UNI = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def shape(**changes: Any) -> ModelShape:
    return shape_of({**json_object(CONFIG), **changes}, CONFIG.name)


def planned(one: ModelShape, machine: str, env: dict[str, str] | None = None, **args: Any) -> Any:
    given = {name.replace("_", "-"): value for name, value in args.items()}
    made = memory_plan("one", one, None, given, env or {}, machine_of(machine), "0.32.0")
    assert made.memory is not None
    return made.memory


def test_a_cpu_holds_weights_cache_and_its_processes() -> None:
    found = planned(
        shape(**SMALL), "cpu_2core", UNI, kv_cache_memory_bytes=512 * MIB, max_model_len=500,
        max_num_batched_tokens=256,
    )  # fmt: skip
    base = CPU_BASE + 512 * CPU_BASE_OF_PIECE
    assert (found.gpus, found.weights_bytes, found.base_bytes) == (0, SMALL_WEIGHTS, base)
    assert found.start_bytes == SMALL_WEIGHTS + 512 * MIB + base
    # A prefill of 256 tokens: hidden state and residual; gate, up and their product.
    assert found.activation_bytes == 2 * 256 * (2 * 128 + 768)
    assert found.peak_bytes == found.start_bytes + found.activation_bytes
    assert found.floor_bytes is None


def test_a_worker_of_its_own_holds_its_libraries() -> None:
    found = planned(shape(**SMALL), "cpu_2core", kv_cache_memory_bytes=512 * MIB, max_model_len=500)
    assert found.base_bytes == CPU_BASE_OF_WORKER + 512 * CPU_BASE_OF_PIECE


def test_a_cpu_that_sizes_its_own_cache_is_not_known() -> None:
    found = planned(shape(**SMALL), "cpu_2core", UNI, max_model_len=500)
    assert (found.start_bytes, found.peak_bytes) == (None, None)


def test_a_gpu_is_filled_to_its_share() -> None:
    card = machine_of("nvidia_a10").memory_bytes
    found = planned(shape(), "nvidia_a10", max_model_len=2048, gpu_memory_utilization=0.9)
    assert (found.gpus, found.start_bytes, found.peak_bytes) == (1, None, int(card * 0.9))
    assert (found.weights_bytes, found.hardware_bytes) == (16_060_522_496, card)


def test_a_gpu_that_is_told_its_cache_holds_no_more() -> None:
    found = planned(
        shape(), "nvidia_a10", max_model_len=2048, max_num_seqs=8, kv_cache_memory_bytes=2 * GIB
    )
    moment = found.activation_bytes + found.graph_bytes
    assert found.graph_bytes > 0
    assert found.peak_bytes == pytest.approx(1.05 * (16_060_522_496 + 2 * GIB + moment), abs=1)
    assert found.floor_bytes is not None


# -- the files -------------------------------------------------------------------------------


def folder(path: Path, size: int) -> Path:
    """A model folder with one tensor of `size` bytes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**json_object(CONFIG), **SMALL}))
    head = json.dumps(
        {"x": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    ).encode()
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(size))
    return path


def with_these_files(path: Path) -> MemoryPlan:
    one = shape(**SMALL)
    args = {"kv-cache-memory-bytes": MIB, "max-model-len": 100}
    made = memory_plan("one", one, None, args, UNI, machine_of("cpu_2core"), "0.32.0")
    return with_files(made, path, one)


def test_files_stand_beside_what_the_configuration_says(tmp_path: Path) -> None:
    found = with_these_files(folder(tmp_path / "m", SMALL_WEIGHTS)).memory
    assert found is not None
    assert (found.files_counted_bytes, found.files_bytes) == (SMALL_WEIGHTS, SMALL_WEIGHTS)
    assert compared(found, None)[0].share == 0


def test_a_shard_too_few_is_anomalous(tmp_path: Path) -> None:
    half = SMALL_WEIGHTS // 4 * 2
    made = with_these_files(folder(tmp_path / "m", half))
    one = proof(planned_memory=made.memory)
    [gate] = with_plan_gate([], CandidateEvidence("b" * 64, serving=one))
    assert (gate.name, gate.result) == (WEIGHTS_AS_PLANNED, Verdict.ANOMALOUS)
    assert gate.decides
    assert (gate.candidate, gate.reference) == (half, SMALL_WEIGHTS)
    assert gate.reason == (
        "the target's files hold 0.41 MiB of weights, its configuration says 0.81 MiB (-50.0%)"
    )


def test_a_folder_without_files_or_with_broken_ones_says_nothing(tmp_path: Path) -> None:
    one = folder(tmp_path / "m", 8)
    (one / "model.safetensors").write_bytes(b"broken")
    for path in (one, tmp_path):
        found = with_these_files(path).memory
        assert found is not None
        assert (found.files_bytes, compared(found, None)) == (None, [])


# -- measured --------------------------------------------------------------------------------


def proof(**facts: Any) -> ServingEvidence:
    return ServingEvidence(
        bundle="b" * 64, hardware="h", engine="vllm 0.32.0", feasible=True,
        measured_at=datetime(2026, 1, 1, tzinfo=UTC), **facts,
    )  # fmt: skip


def point(**engine: float | None) -> LoadPoint:
    none: dict[str, float | None] = {}
    return LoadPoint(
        rate=1.0, achieved_rate=1.0, total=1, ok=1, failed=0, duration_s=1.0, ttft_ms=none,
        tpot_ms=none, itl_ms=none, e2el_ms=none, output_tokens_per_s=1.0, engine=engine,
    )  # fmt: skip


def on_a_cpu(**changes: Any) -> PlannedMemory:
    return PlannedMemory(
        gpus=0, weights_bytes=GIB, activation_bytes=0, graph_bytes=0, start_bytes=2 * GIB,
        peak_bytes=3 * GIB, **changes,
    )  # fmt: skip


def test_start_and_peak_of_a_cpu_are_compared() -> None:
    one = proof(planned_memory=on_a_cpu(), memory=MeasuredMemory(resident_bytes=GIB))
    points = [point(memory_peak_bytes=None), point(memory_peak_bytes=3 * GIB), point()]
    start, peak = one.compared_memory(points)
    assert (start.what, start.share, start.apart) == ("engine at its start", -0.5, True)
    assert (peak.what, peak.share, peak.apart) == ("peak under load", 0.0, False)
    assert plan_findings("one", one, points) == [
        "one: engine at its start: 1.00 GiB measured, 2.00 GiB planned (-50.0%, an estimate; "
        "resident memory of all its processes)"
    ]
    assert with_plan_gate([], CandidateEvidence("b" * 64, serving=one)) == []


def test_what_was_not_measured_is_not_compared() -> None:
    assert compared(None, MeasuredMemory(resident_bytes=GIB)) == []
    assert compared(on_a_cpu(), None) == []
    assert proof().compared_memory([point(memory_peak_bytes=1.0)]) == []


@pytest.mark.parametrize(
    ("counted", "measured", "apart"),
    [(True, 105, False), (True, 106, True), (False, 125, False), (False, 126, True),
     (False, 74, True)],
)  # fmt: skip
def test_an_estimate_may_be_further_off(counted: bool, measured: int, apart: bool) -> None:
    one = ComparedMemory(
        what="w", planned_bytes=100, measured_bytes=measured, counted=counted, how=""
    )
    assert one.apart is apart


# The lines of vLLM 0.32's source (gpu_model_runner.py, gpu_worker.py), filled in; no GPU was here.
LOG = """\
(Worker_TP0 pid=1) INFO Model loading took 15.27 GiB memory and 3.100000 seconds
(Worker_TP1 pid=2) INFO Model loading took 15.25 GiB memory and 3.200000 seconds
(Worker_TP0 pid=1) INFO Available KV cache memory: 4.06 GiB
(EngineCore pid=3) INFO Free memory on device (22.1/22.48 GiB) on startup. Desired GPU memory \
utilization is (0.9, 20.23 GiB). Actual usage is 15.6 GiB for consumed memory (weights + \
non-torch), 0.54 GiB for peak activation, and 0.21 GiB for CUDAGraph memory. Replace
"""


def test_words_of_an_engine_on_gpus() -> None:
    assert engine_words(LOG) == {
        "loaded_bytes": round(15.27 * GIB),
        "activation_bytes": round(0.54 * GIB),
        "graph_bytes": round(0.21 * GIB),
        "cache_bytes": round(4.06 * GIB),
    }
    assert set(engine_words("nothing of it").values()) == {None}


def test_gpus_are_compared_by_the_engines_words_and_nvml() -> None:
    plan = PlannedMemory(
        gpus=2, weights_bytes=15 * GIB, activation_bytes=GIB // 2, graph_bytes=GIB // 4,
        peak_bytes=20 * GIB, hardware_bytes=15 * GIB,
    )  # fmt: skip
    one = proof(planned_memory=plan, memory=MeasuredMemory.model_validate(engine_words(LOG)))
    found = one.compared_memory([point(gpu_memory_peak_bytes=41 * GIB)])
    assert [(line.what, round(line.share, 3)) for line in found] == [
        ("model on a GPU", 0.018), ("activations of a GPU", 0.08), ("CUDA graphs of a GPU", -0.16),
        ("peak under load", 0.025),
    ]  # fmt: skip
    [gate] = with_plan_gate([], CandidateEvidence("b" * 64, serving=one))
    assert (gate.name, gate.result) == (WITHIN_HARDWARE, Verdict.ANOMALOUS)


def test_memory_of_this_process() -> None:
    found = measured_memory([os.getpid()], "")
    assert found.resident_bytes is not None
    assert found.proportional_bytes is not None
    assert found.private_bytes is not None
    assert found.resident_bytes >= found.proportional_bytes > found.private_bytes > 10 * MIB
    assert found.loaded_bytes is None
    # Nobody has this number.
    assert measured_memory([2**22 + 1], "").resident_bytes is None
