"""What is certain about a candidate before its engine starts: refused only what cannot run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_suites.plan_gate import KV_AS_PLANNED, with_plan_gate
from eval_suites.verdicts import verdict_of
from registry.candidate_memory import MemoryPlan, apart, memory_plan
from registry.capacity_plan import plan
from registry.evidence import ServingEvidence
from registry.evidence_folders import CandidateEvidence
from registry.json_files import json_object
from registry.machines import Machine
from registry.model_shapes import ModelShape, shape_of
from registry.outcome import Verdict
from registry.plan_parts import Demand, Limits, Model, Wish
from registry.settings import CHECKOUT
from tasks.capacity_inputs import machine_of

GIB = 1 << 30
WEIGHTS = 16_060_522_496
TOKEN = 131_072
"""Llama 3.1 8B in bf16, and a token of its cache (docs/capacity.md)."""


def shape(name: str = "llama_3_1_8b", **changes: Any) -> ModelShape:
    path = CHECKOUT / "tests" / "data" / "model_configs" / f"{name}.json"
    return shape_of({**json_object(path), **changes}, path.name)


def quantized(bits: int, kind: str = "int", **changes: Any) -> ModelShape:
    weights = {"num_bits": bits, "type": kind, "strategy": "channel", **changes}
    inputs = {"num_bits": bits} if bits == 8 else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    section = {"quant_method": "compressed-tensors", "config_groups": {"0": group}}
    return shape(quantization_config={**section, "ignore": ["lm_head"]})


INT4 = {"strategy": "group", "group_size": 128}


def planned(
    one: ModelShape, machine: Machine | str, version: str = "0.32.0", **args: Any
) -> MemoryPlan:
    given = {name.replace("_", "-"): value for name, value in args.items()}
    place = machine_of(machine) if isinstance(machine, str) else machine
    return memory_plan("one", one, None, given, {}, place, version)


def test_weights_and_one_sequence_are_the_least() -> None:
    found = planned(shape(), "nvidia_t4", max_model_len=8192)
    assert found.least_bytes == WEIGHTS + TOKEN * 8192 == 17_134_264_320
    assert found.refusal == (
        "too little memory: it takes at least 15.96 GiB (14.96 GiB of weights and 1.00 GiB of KV "
        "cache for one sequence of 8192 tokens), and Tesla T4 has 15.00 GiB; 18.46 GiB would "
        "do, by the plan"
    )
    assert planned(shape(), "nvidia_a10", max_model_len=8192).refusal == ""
    assert planned(quantized(4, **INT4), "nvidia_t4", max_model_len=8192).refusal == ""


def test_a_byte_decides() -> None:
    card = replace(machine_of("nvidia_a10"), memory_bytes=17_134_264_320)
    assert planned(shape(), card, max_model_len=8192).refusal == ""
    card = replace(card, memory_bytes=card.memory_bytes - 1)
    assert "too little memory" in planned(shape(), card, max_model_len=8192).refusal


def test_each_of_four_gpus_has_a_quarter() -> None:
    # 141,107,412,992 / 4 of weights (norms are whole on each) and 327,680 / 4 a token.
    found = planned(
        shape("llama_3_1_70b"), "nvidia_a10", max_model_len=8192, tensor_parallel_size=4
    )
    assert found.least_bytes is not None
    assert 0 <= found.least_bytes - (141_107_412_992 + 327_680 * 8192) // 4 < 4 << 20
    assert "on each of 4 GPUs" in found.refusal
    wide = planned(
        shape("llama_3_1_70b"), "nvidia_h800", max_model_len=8192, tensor_parallel_size=4
    )
    assert wide.refusal == ""


@given(st.sampled_from(["nvidia_t4", "nvidia_a10", "nvidia_l20", "nvidia_h20", "cpu_2core"]),
       st.integers(1, 131_072), st.sampled_from(["llama_3_1_8b", "qwen2_5_7b", "qwen3_32b"]),
       st.integers(GIB, 100 * GIB))  # fmt: skip
def test_what_a_plan_fits_is_never_refused(
    name: str, context: int, model: str, memory: int
) -> None:
    one = shape(model)
    context = min(context, one.max_len)
    machine = replace(machine_of(name), memory_bytes=memory)
    made = plan(Model(one, "m"), [machine], Demand(1, context, context), Wish(tp=1), Limits())
    found = planned(one, machine, max_model_len=context)
    assert found.least_bytes is not None
    assert (found.refusal != "") == (found.least_bytes > memory)
    if made.fits:
        assert found.refusal == ""


def test_a_cache_below_one_sequence_is_refused_with_what_would_do() -> None:
    here = Machine("here", "here", 64 * GIB)
    least = TOKEN * 8192
    args = {"max_model_len": 8192, "kv_cache_memory_bytes": least - 1}
    found = planned(shape(), here, **args)
    would = least + 128 * TOKEN
    assert found.refusal.endswith(f"kv-cache-memory-bytes {would} would do")
    found = planned(shape(), here, **(args | {"kv_cache_memory_bytes": least}))
    assert found.refusal == ""
    # One block of 128 tokens is nobody's: this much is not enough, and the engine says so itself.
    assert found.kv_cache_tokens is None
    found = planned(shape(), here, **(args | {"kv_cache_memory_bytes": would}))
    assert (found.kv_cache_tokens, found.exact) == (8192 + 128, True)
    found = planned(shape(), here, **(args | {"kv_cache_memory_bytes": would - 1}))
    assert found.kv_cache_tokens is None


def test_the_variable_goes_before_the_argument_on_a_cpu() -> None:
    here = Machine("here", "here", 64 * GIB)
    args = {"max-model-len": 8192, "kv-cache-memory-bytes": 1}
    found = memory_plan("one", shape(), None, args, {"VLLM_CPU_KVCACHE_SPACE": "2"}, here, "0.32.0")
    assert found.kv_cache_tokens == 2 * 8192


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"cpu-offload-gb": 20}, "what cpu-offload-gb does to memory is not known here"),
        ({"quantization": "bitsandbytes"}, "what quantization does"),
        ({"max-model-len": "auto"}, "max-model-len auto is no whole number"),
        ({"max-model-len": -1}, "max-model-len -1 is no whole number"),
        ({"kv-cache-memory-bytes": "512M"}, "kv-cache-memory-bytes 512M is no whole number"),
        ({"dtype": "float32"}, "dtype float32 is not counted here"),
        ({"gpu-memory-utilization": 2}, "gpu-memory-utilization 2 is no share"),
        ({"tensor-parallel-size": 3}, "attention heads"),
    ],
)
def test_what_is_not_understood_refuses_nothing(args: dict[str, Any], why: str) -> None:
    found = memory_plan("one", shape(), None, args, {}, machine_of("nvidia_t4"), "0.32.0")
    assert why in found.unknown
    assert (found.refusal, found.kv_cache_tokens, found.least_bytes) == ("", None, None)


def test_an_unknown_variable_of_the_engine_refuses_nothing() -> None:
    env = {"VLLM_ALLOW_SOMETHING": "1", "OMP_NUM_THREADS": "2"}
    found = memory_plan("one", shape(), None, {}, env, machine_of("nvidia_t4"), "0.32.0")
    assert found.unknown == "what VLLM_ALLOW_SOMETHING does to memory is not known here"


def test_a_length_of_the_engines_choice_counts_a_token() -> None:
    """A longer context than fits is the engine's to refuse, or to shorten."""
    found = planned(shape(), "nvidia_a10")
    assert found.least_bytes is not None
    assert WEIGHTS < found.least_bytes < WEIGHTS + 4 << 20
    assert (found.refusal, found.kv_cache_tokens) == ("", None)


@pytest.mark.parametrize(
    ("one", "machine", "args", "refusal"),
    [
        (quantized(8), "nvidia_b200", {}, "no kernel on NVIDIA B200: vLLM 0.32 has INT8 products "),
        (quantized(8), "nvidia_h20", {}, ""),
        (quantized(8, "float"), "nvidia_a10", {}, ""),
        (quantized(4, "float", group_size=32), "nvidia_t4", {}, "no kernel on Tesla T4: mxfp4 "),
        (quantized(4, "float", group_size=32), "nvidia_a10", {}, ""),
        (quantized(8), "nvidia_a10", {"kv_cache_dtype": "fp8"}, ""),
        (quantized(4, **INT4), "nvidia_t4", {"kv_cache_dtype": "fp8"}, "no kernel on Tesla T4: an"),
        # On a CPU the engine emulates it, and its log says so.
        (quantized(8, "float"), "cpu_2core", {}, ""),
        (quantized(4, "float", group_size=32), "cpu_2core", {}, ""),
    ],
)
def test_formats_without_a_kernel(
    one: ModelShape, machine: str, args: dict[str, Any], refusal: str
) -> None:
    large = replace(machine_of(machine), memory_bytes=640 * GIB)
    found = planned(one, large, max_model_len=512, **args)
    assert found.refusal.startswith(refusal)
    assert bool(found.refusal) == bool(refusal)


def test_bfloat16_where_it_is_missing_falls_back_unless_it_is_asked_for() -> None:
    card = replace(machine_of("nvidia_t4"), memory_bytes=80 * GIB)
    assert planned(shape(), card, max_model_len=512).refusal == ""
    assert planned(shape(), card, max_model_len=512, dtype="half").refusal == ""
    found = planned(shape(), card, max_model_len=512, dtype="bfloat16")
    assert found.refusal.startswith("no kernel on Tesla T4: bfloat16 needs compute capability 8.0")


def test_kernels_of_another_engine_are_not_known() -> None:
    assert planned(quantized(8), "nvidia_b200", "0.33.1", max_model_len=512).refusal == ""


def test_tokens_of_a_gpu_are_an_estimate() -> None:
    found = planned(shape(), "nvidia_h20", max_model_len=8192, max_num_seqs=32)
    assert found.kv_cache_tokens is not None
    assert found.exact is False
    # 92 % of 95.57 GiB less weights, over the token's bytes; activations and graphs are below 2 %.
    most = (0.92 * machine_of("nvidia_h20").memory_bytes - WEIGHTS) / TOKEN
    assert 0.98 * most < found.kv_cache_tokens < most


def test_the_digest_is_of_all_of_it() -> None:
    one = planned(shape(), "nvidia_h20", max_model_len=8192)
    assert one.digest == planned(shape(), "nvidia_h20", max_model_len=8192).digest
    assert one.digest != planned(shape(), "nvidia_h20", max_model_len=8191).digest
    # As it is written and read again.
    assert MemoryPlan.model_validate_json(one.model_dump_json()).digest == one.digest


# -- against what the engine printed ---------------------------------------------------------


def evidence(printed: int | None, said: int | None, exact: bool = True) -> CandidateEvidence:
    serving = ServingEvidence(
        bundle="b" * 64, hardware="h", engine="vllm 0.32.0", feasible=True, plan="a" * 64,
        kv_cache_tokens=printed, planned_kv_tokens=said, plan_exact=exact,
        measured_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    return CandidateEvidence("b" * 64, serving=serving)


def test_apart_by_more_than_a_twentieth_is_anomalous() -> None:
    assert apart(10_000, 9_400) == pytest.approx(-0.06)
    [gate] = with_plan_gate([], evidence(9_400, 10_000))
    assert (gate.name, gate.result, gate.decides) == (KV_AS_PLANNED, Verdict.ANOMALOUS, True)
    assert gate.reason == (
        "the engine has room for 9400 KV tokens, the plan aaaaaaaaaaaa said 10000 (-6.0%)"
    )
    assert verdict_of([gate]) is Verdict.ANOMALOUS


@pytest.mark.parametrize(
    ("printed", "said", "exact"),
    [(9_500, 10_000, True), (10_000, 10_000, True), (100, 10_000, False), (None, 10_000, True),
     (100, None, True)],
)  # fmt: skip
def test_nothing_else_is(printed: int | None, said: int | None, exact: bool) -> None:
    assert with_plan_gate([], evidence(printed, said, exact)) == []


def test_a_candidate_without_serving_evidence_has_no_such_gate() -> None:
    assert with_plan_gate([], None) == []
    assert with_plan_gate([], CandidateEvidence("b" * 64)) == []


@pytest.mark.parametrize("model", ["llama_3_1_8b", "qwen2_5_7b", "gemma_3_27b"])
def test_what_would_do_does(model: str) -> None:
    """The memory that a refusal names is enough for the plan of `pilotage plan`."""
    one, card = shape(model), replace(machine_of("nvidia_a10"), memory_bytes=4 * GIB)
    refusal = planned(one, card, max_model_len=8192).refusal
    said = float(refusal.rsplit("; ", 1)[1].split(" ")[0])
    enough = replace(card, memory_bytes=round((said + 0.01) * GIB))
    made = plan(Model(one, "m"), [enough], Demand(1, 8192, 8192), Wish(tp=1, utilization=0.92),
                Limits())  # fmt: skip
    assert made.fits
    less = replace(card, memory_bytes=round((said - 0.02) * GIB))
    made = plan(Model(one, "m"), [less], Demand(1, 8192, 8192), Wish(tp=1, utilization=0.92),
                Limits())  # fmt: skip
    assert not made.fits
