"""Bytes of the methods that vLLM serves, worked out by hand for a small Llama.

Four layers of a hidden size of 256: Q and output of 256 rows, K and V of 128, gate and up of 512
rows of 256 columns, down of 256 rows of 512.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry.capacity_plan import plan
from registry.checkpoint_weights import config_of, weights_of_checkpoint
from registry.errors import UserError
from registry.machines import Machine
from registry.memory_floor import floor_of
from registry.model_shapes import shape_of
from registry.plan_parts import Demand, Limits, Model, Wish
from tasks.capacity_inputs import model_of
from tests.unit.shape_builders import small, small_config

MATRICES = 7
VALUES = 2 * 256 * 256 + 2 * 128 * 256 + 2 * 512 * 256 + 256 * 512
ROWS = 256 + 128 + 128 + 256 + 512 + 512 + 256
BLOCKS = 4 + 2 + 2 + 4 + 8 + 8 + 8
DOWN = 256 * 512
REST = 2 * (2 * 1024 * 256 + 9 * 256)
"""Table, head and nine norms, in 16 bit."""


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | more


def legacy(algorithm: str, **more: Any) -> dict[str, Any]:
    """`hf_quant_config.json`."""
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner | more}


NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
MIXED = {
    f"model.layers.{layer}.{name}": {"quant_algo": "FP8" if "down" in name else "NVFP4"}
    for layer in range(4)
    for name in NAMES
}
GPTQ = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"bits": 4, "group_size": 128, "zero_point": True}

CASES = [
    # A scale of the weights and one of the inputs.
    (modelopt("FP8"), VALUES + 8 * MATRICES),
    (modelopt("fp8_per_channel_per_token"), VALUES + 4 * ROWS),
    (modelopt("FP8_PB_WO"), VALUES + 4 * BLOCKS),
    # A byte for each 16 values; four float32 for the matrix.
    (modelopt("NVFP4", group_size=16), VALUES // 2 + VALUES // 16 + 16 * MATRICES),
    (modelopt("W4A16_NVFP4"), VALUES // 2 + VALUES // 16 + 4 * MATRICES),
    # A byte for each 32 values.
    (modelopt("MXFP8"), VALUES + VALUES // 32),
    ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, VALUES + VALUES // 32),
    (modelopt("MIXED_PRECISION", quantized_layers=MIXED),
     DOWN + 8 + (VALUES - DOWN) // 2 + (VALUES - DOWN) // 16 + 16 * 6),
    (legacy("FP8"), VALUES + 8 * MATRICES),
    # Rows have a float32 each, and the bound of the inputs' scale is one more.
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
     VALUES + 4 * ROWS + 4 * MATRICES),
    # 16 bit for each 128 values; AWQ 4 bits of zero point beside them.
    ({"quant_method": "gptq_marlin"} | GPTQ, VALUES // 2 + 2 * VALUES // 128),
    ({"quant_method": "gptq"} | GPTQ | {"bits": 8, "desc_act": True, "group_size": -1},
     VALUES + 2 * ROWS),
    ({"quant_method": "awq_marlin"} | AWQ, VALUES // 2 + 20 * VALUES // 128 // 8),
    ({"quant_method": "awq"} | AWQ | {"zero_point": False}, VALUES // 2 + 2 * VALUES // 128),
    # Layers 0 and 1 stay, of layer 2 `down` has 8 bits.
    ({"quant_method": "gptq"} | GPTQ | {"dynamic": {
        r"-:.*\.[01]\..*": {}, r"+:.*\.2\.mlp\.down.*": {"bits": 8}}},
     (2 * 2 * VALUES + 2 * (VALUES // 2 + 2 * VALUES // 128) + DOWN // 2) / 4),
    # Linear layers of a model without experts stay in 16 bit.
    ({"quant_method": "mxfp4"}, 2 * VALUES),
]  # fmt: skip


@pytest.mark.parametrize(("section", "layer"), CASES, ids=lambda one: str(one)[:40])
def test_bytes_by_hand(section: dict[str, Any], layer: float) -> None:
    shape = small(quantization_config=section)
    weights = floor_of(shape, concurrency=1, context=16).per_gpu.weights_bytes
    assert weights == 4 * layer + REST


def test_shared_experts_are_no_routed_ones() -> None:
    """vLLM quantizes to MXFP4 what a router chooses among; what every token takes it leaves."""
    moe = {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
           "decoder_sparse_step": 1}  # fmt: skip
    plain = small(**moe)
    found = small(**moe, quantization_config={"quant_method": "mxfp4"})
    sizes = [floor_of(one, concurrency=1, context=16).per_gpu.weights_bytes
             for one in (plain, found)]  # fmt: skip
    routed = 4 * 4 * 3 * 64 * 256
    assert sizes[0] - sizes[1] == 2 * routed - routed // 2 - routed // 32


def test_an_fp8_cache_comes_along() -> None:
    scheme = {"kv_cache_scheme": {"type": "float", "num_bits": 8}}
    for section in (modelopt("FP8", **scheme), legacy("FP8", kv_cache_quant_algo="FP8")):
        quantization = small(quantization_config=section).quantization
        assert quantization is not None and quantization.kv_dtype == "fp8"


def test_nvfp4_of_weights_alone_is_told_from_its_groups() -> None:
    groups = {"group_0": {"targets": ["Linear"], "input_activations": None}}
    found = small(quantization_config=modelopt("NVFP4", config_groups=groups)).quantization
    assert found is not None and found.format.name == "nvfp4_a16"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes': vLLM 0.32 does not load it"),
        ({"quant_method": "gguf"}, "'gguf': vLLM 0.32 does not load it"),
        ({"quant_method": "quark"}, "'quark': vLLM 0.32 loads it, and what it keeps"),
        (modelopt("INT4_AWQ"), "quant_algo: is 'INT4_AWQ'; known are FP8,"),
        (legacy("MXFP8"), "quantization: quant_algo: is 'MXFP8': of a file beside"),
        (modelopt("MIXED_PRECISION"), "quantized_layers: is missing"),
        ({"quant_method": "gptq"} | GPTQ | {"sym": False}, "sym: is false: vLLM 0.32"),
        ({"quant_method": "gptq"} | GPTQ | {"desc_act": True}, "desc_act: is true: vLLM 0.32"),
        ({"quant_method": "awq"} | AWQ | {"bits": 8}, "bits: is 8; vLLM 0.32 loads AWQ in 4"),
        ({"quant_method": "gptq"} | GPTQ | {"dynamic": {"-:(": {}}}, "no regular expression"),
        ({"quant_method": "gptq"} | GPTQ | {"dynamic": {"x": {"bits": 3}}}, "dynamic: bits: is 3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(section: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        small(quantization_config=section)
    assert said in str(raised.value) and "--format" in str(raised.value)


# -- on machines -----------------------------------------------------------------------------


def planned(section: dict[str, Any], capability: tuple[int, int]) -> Any:
    machine = Machine("gpu", "GPU", 16 << 30, accelerators=1, capability=capability)
    model = Model(small(quantization_config=section), "m")
    return plan(model, [machine], Demand(1, 512, 512), Wish(), Limits())


def test_what_asks_for_a_newer_gpu_is_infeasible_on_an_older_one() -> None:
    made = planned(modelopt("FP8"), (7, 5))
    assert not made.fits
    assert made.ruled_out[0].reason == (
        "INFEASIBLE on GPU: modelopt needs compute capability 8.0; this is 7.5"
    )
    assert planned(modelopt("FP8"), (8, 0)).fits
    assert planned(modelopt("NVFP4"), (7, 5)).fits


def test_a_deprecated_method_is_planned_with_the_flag_that_it_needs() -> None:
    section = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    assert planned(section, (9, 0)).fits[0].engine_args["allow-deprecated-quantization"] is True
    other = planned(modelopt("FP8"), (9, 0)).fits[0].engine_args
    assert "allow-deprecated-quantization" not in other


# -- folders ---------------------------------------------------------------------------------


def folder(place: Path, **changes: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(small_config(**changes)))
    return place


def test_modelopt_s_own_file_is_read_as_the_engine_reads_it(tmp_path: Path) -> None:
    place = folder(tmp_path)
    (place / "hf_quant_config.json").write_text(json.dumps(legacy("FP8")))
    shape = shape_of(config_of(place), "x")
    assert shape == small(quantization_config=legacy("FP8"))
    assert model_of(str(place), None).shape == shape
    # What config.json says itself goes before.
    folder(place, quantization_config=modelopt("MXFP8"))
    own = shape_of(config_of(place), "x").quantization
    assert own is not None and own.format.name == "mxfp8"


def test_a_mistake_in_it_is_told_with_its_name(tmp_path: Path) -> None:
    place = folder(tmp_path)
    (place / "hf_quant_config.json").write_text("{")
    with pytest.raises(UserError) as raised:
        model_of(str(place), None)
    assert "hf_quant_config.json" in str(raised.value)


def test_gguf_is_not_counted_as_what_its_configuration_says(tmp_path: Path) -> None:
    place = folder(tmp_path / "model")
    (place / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    for read in (lambda: weights_of_checkpoint(place), lambda: model_of(str(place), None)):
        with pytest.raises(UserError) as raised:
            read()
        assert "model-Q4_K_M.gguf: is GGUF, which vLLM 0.32 does not load" in str(raised.value)
    with pytest.raises(UserError, match="is GGUF"):
        model_of(str(place / "model-Q4_K_M.gguf"), None)
    # The configuration alone is that of the model before it was converted.
    assert model_of(str(place / "config.json"), None).shape == small()
