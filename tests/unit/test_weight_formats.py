"""Bytes by format, and what checkpoints say of their own."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.quantize_presets import PRESETS
from registry.errors import UserError
from registry.format_support import support_of
from registry.machines import Machine
from registry.memory_floor import floor_of, named_format
from registry.quantization_configs import format_of
from registry.weight_formats import FORMATS
from tests.unit.shape_builders import published, small

GPU = Machine("gpu", "GPU", 1, accelerators=1, capability=(8, 9))


def compressed(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    if "input_activations" in more:
        group["input_activations"] = more.pop("input_activations")
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}} | more


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}


def test_every_preset_of_the_project_has_its_format() -> None:
    assert set(PRESETS) <= set(FORMATS)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        # 256 rows of 512 columns.
        ("fp8_dynamic", 256 * 512 + 4 * 256),
        ("fp8_static", 256 * 512 + 4 + 4),
        ("fp8_block", 256 * 512 + 4 * 2 * 4),
        ("w8a8_int8", 256 * 512 + 4 * 256),
        ("w4a16", 128 * 512 + 2 * 256 * 4 + 16),
        # 4 bits of zero point for each scale; of GPTQ's, all alike, none is kept.
        ("awq", 128 * 512 + 256 * 4 * 20 // 8),
        ("gptq", 128 * 512 + 256 * 4 * 2),
        ("nvfp4", 128 * 512 + 256 * 32 + 8),
        ("nvfp4_a16", 128 * 512 + 256 * 32 + 4),
        ("mxfp4", 128 * 512 + 256 * 16),
        ("mxfp8", 256 * 512 + 256 * 16),
    ],
)
def test_bytes_of_a_matrix(name: str, size: int) -> None:
    assert FORMATS[name].matrix(256, 512) == size


def test_the_group_is_the_largest_that_divides() -> None:
    assert named_format("int4", published("llama_3_1_8b")).group == 128  # type: ignore[union-attr]
    narrow = small(hidden_size=192, num_attention_heads=6, num_key_value_heads=2)
    assert named_format("int4", narrow).group == 64  # type: ignore[union-attr]


def test_a_group_by_name() -> None:
    found = named_format("W4A16_GPTQ_g64", published("llama_3_1_8b"))
    assert found is not None and (found.name, found.group) == ("w4a16_gptq_g64", 64)
    # A matrix of 256 x 512 in groups of 64: 8 scales a row.
    assert found.matrix(256, 512) == 128 * 512 + 2 * 256 * 8 + 16
    known, own = (support_of(name, GPU) for name in ("w4a16_gptq_g64", "w4a16_gptq"))
    assert known == own and own.unit == "bf16"
    sizes = [
        floor_of(published("qwen2_5_7b"), format=name, concurrency=1, context=16).total
        for name in ("w4a16", "w4a16_g64")
    ]
    linear = sum(one.parameters for one in published("qwen2_5_7b").weights if one.kind == "linear")
    assert sizes[1].weights_bytes - sizes[0].weights_bytes == 2 * linear // 128
    narrow = small(hidden_size=192, num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(UserError, match="w4a16_g128: 128 columns do not divide a matrix of 192"):
        named_format("w4a16_g128", narrow)
    for odd in ("w4a16_g48", "fp8_g64", "nvfp4_g16", "_g64"):
        with pytest.raises(UserError, match="is not known"):
            named_format(odd, narrow)


def test_a_checkpoint_s_own_groups_and_what_it_leaves() -> None:
    shape = small(
        quantization_config=compressed(
            INT4, ignore=["lm_head", "re:.*layers.0.*", "model.layers.1.mlp.down_proj"]
        )
    )
    own = shape.quantization
    assert own is not None and (own.format.group, own.format.weight_bits) == (64, 4)
    assert format_of(own, ("model.layers.2.mlp.up_proj",)) == own.format
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"):
        assert format_of(own, (name,)) is None
    # Bytes follow: layer 0 and one matrix of layer 1 stay in 16 bit.
    whole = small(quantization_config=compressed(INT4, ignore=["lm_head"]))
    kept = sum(weight.parameters for weight in shape.layers[0].weights if weight.kind == "linear")
    kept += 256 * 512
    more = [
        floor_of(one, concurrency=1, context=16).per_gpu.weights_bytes for one in (whole, shape)
    ]
    matrices = 8
    assert more[1] - more[0] == 2 * kept - (kept // 2 + kept // 64 * 2 + matrices * 16)


@pytest.mark.parametrize(
    ("config", "bits", "activation", "scales"),
    [
        (compressed({"num_bits": 8, "type": "float", "strategy": "channel"},
                    input_activations={"num_bits": 8}), 8, 8, "channel"),
        (compressed({"num_bits": 8, "type": "float", "strategy": "tensor"},
                    input_activations={"num_bits": 8, "dynamic": False}), 8, 8, "tensor"),
        (compressed({"num_bits": 8, "type": "float", "strategy": "block",
                     "block_structure": [128, 128]}, input_activations={"num_bits": 8}),
         8, 8, "block"),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel"},
                    input_activations={"num_bits": 8}), 8, 8, "channel"),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}), 8, 16, "channel"),
        (compressed(INT4 | {"symmetric": False}), 4, 16, "group"),
        (compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group",
                     "group_size": 16}, input_activations={"num_bits": 4}), 4, 4, "group"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
         4, 16, "group"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4, 16, "group"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4, 16, "channel"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8, 8, "tensor"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, 8, "block"),
    ],
)  # fmt: skip
def test_what_checkpoints_say(
    config: dict[str, Any], bits: int, activation: int, scales: str
) -> None:
    own = small(quantization_config=config).quantization
    assert own is not None
    found = own.format
    assert (found.weight_bits, found.activation_bits, found.scales) == (bits, activation, scales)


def test_gpt_oss_has_its_experts_alone_in_four_bits() -> None:
    shape = small(
        model_type="gpt_oss", head_dim=32, sliding_window=64, num_local_experts=4,
        num_experts_per_tok=2,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ]},
    )  # fmt: skip
    experts = sum(
        weight.parameters
        for weight in shape.weights
        if "experts" in weight.name and weight.kind == "linear"
    )
    found = floor_of(shape, concurrency=1, context=16).per_gpu.weights_bytes
    assert found == 2 * (shape.parameters - experts) + experts // 2 + experts // 32


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "exl2"}, "quant_method: is 'exl2'"),
        ({}, "quant_method: is 'missing'"),
        ({"quant_method": "compressed-tensors"}, "config_groups: is missing"),
        (compressed({"num_bits": 3, "type": "int", "strategy": "channel"}), "num_bits: is 3"),
        (compressed({"num_bits": 8, "strategy": "odd"}), "strategy: is 'odd'"),
        (compressed(INT4 | {"group_size": None}), "group_size: is 0"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size: is [64, 64]"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits: is 3"),
        (compressed(INT4, ignore=["re:("]), "no regular expression"),
        ({"quant_method": "awq", "bits": 4}, "q_group_size: is missing"),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        small(quantization_config=config)
    assert said in str(raised.value)
    assert str(raised.value).startswith("small/config.json: quantization_config")
