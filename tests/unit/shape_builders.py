"""Configurations of models for tests of shapes and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from registry.model_shapes import ModelShape, shape_of

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def published(name: str, **changes: Any) -> ModelShape:
    return shape_of(config(name) | changes, f"{name}/config.json")


def small(**changes: Any) -> ModelShape:
    return shape_of(small_config(**changes), "small/config.json")


def small_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    } | changes


def draft(**changes: Any) -> ModelShape:
    """An EAGLE3 draft in speculators' layout, of a target with a hidden size of 256."""
    inner = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    } | changes
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 320,
        "transformer_layer_config": inner,
    }
    return shape_of(written, "draft/config.json")
