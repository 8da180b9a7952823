"""Counted parameters are those of the models that transformers builds, to the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry.model_families import FAMILIES, Family
from registry.model_shapes import shape_of

PUBLISHED = sorted((Path(__file__).parents[1] / "data" / "model_configs").glob("*.json"))

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
DELTA_NET = {
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "shared_expert_intermediate_size": 40,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
CASES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    {"model_type": "llama", "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "head_dim": 32},
    {"model_type": "mistral", "head_dim": 24},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen2"},
    {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 40},
    {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 40, "qkv_bias": False},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    {"model_type": "qwen3_moe", **MOE, "head_dim": 24},
    {"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 2},
    {"model_type": "qwen3_moe", **MOE, "mlp_only_layers": [1]},
    {"model_type": "qwen3_next", **MOE, **DELTA_NET, "num_hidden_layers": 5},
    {"model_type": "deepseek_v2", **LATENT},
    {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None},
    {"model_type": "deepseek_v3", **LATENT},
    {"model_type": "deepseek_v3", **LATENT, "attention_bias": True, "q_lora_rank": None},
    {"model_type": "gemma"},
    {"model_type": "gemma2", "sliding_window": 32},
    {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32},
    {"model_type": "phi3"},
    {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
    },
]


def built_parameters(config: dict[str, Any]) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    written = {key: value for key, value in config.items() if key != "quantization_config"}
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.for_model(**written))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_of_published_models(file: Path) -> None:
    config = json.loads(file.read_text())
    assert shape_of(config, str(file)).parameters == built_parameters(config)


@pytest.mark.parametrize(
    ("model_type", "family"), [one for one in FAMILIES.items() if one[1].defaults]
)
def test_defaults_are_those_of_the_class(model_type: str, family: Family) -> None:
    from transformers import AutoConfig

    read = AutoConfig.for_model(model_type)
    assert {key: getattr(read, key) for key in family.defaults} == family.defaults


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values()))[:50])
def test_of_every_architecture(case: dict[str, Any]) -> None:
    config = SMALL | case
    assert shape_of(config, "config.json").parameters == built_parameters(config)


@pytest.mark.parametrize(
    "case",
    [
        {"model_type": "mistral"},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "gemma2", "sliding_window": 32},
        {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32, "num_hidden_layers": 7},
        {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2},
        {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 1},
        {
            "model_type": "qwen2",
            "sliding_window": 64,
            "max_window_layers": 1,
            "use_sliding_window": True,
        },
        {"model_type": "gpt_oss", "sliding_window": 32, "num_local_experts": 4},
        {"model_type": "phi3", "sliding_window": 32},
        {
            "model_type": "qwen3",
            "sliding_window": 32,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ],
    ids=lambda case: "-".join(map(str, case.values()))[:50],
)
def test_windows_are_those_that_transformers_reads(case: dict[str, Any]) -> None:
    from transformers import AutoConfig

    config = SMALL | {"num_experts_per_tok": 2} | case
    read = AutoConfig.for_model(**config)
    types = getattr(read, "layer_types", None)
    sliding = read.sliding_window
    expected = (
        [sliding if one == "sliding_attention" else None for one in types]
        if types
        else [sliding] * read.num_hidden_layers
    )
    assert [layer.window for layer in shape_of(config, "config.json").layers] == expected
