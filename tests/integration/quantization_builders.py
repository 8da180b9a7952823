"""Jobs, recipes, texts and tiny models for the tests of the quantizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def job(model: Path, out: Path, recipe: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "out_dir": str(out),
        "recipe": recipe,
        "calibration_file": None,
        "samples": 8,
        "max_length": 64,
        "max_size_ratio": 0.55,
        "threads": 1,
        "seed": 0,
        **changes,
    }


def simple(modifier: str = "QuantizationModifier", **args: Any) -> dict[str, Any]:
    return stage(**{modifier: args})


def stage(**modifiers: Any) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": modifiers}}


def conversations(count: int = 8, first: int = 4711) -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": f"Where is order {number}? 运费多少？"},
            {"role": "assistant", "content": f"Order {number} is on its way."},
        ]
        for number in range(first, first + count)
    ]


def write_texts(path: Path, rows: list[list[dict[str, str]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def tiny(folder: Path, kind: str = "Llama", **changes: Any) -> Path:
    """A model of two layers with random weights, of any architecture whose config has these."""
    import torch
    import transformers
    from transformers import AutoTokenizer

    from tasks.engines import random_llama

    random_llama.make({"out": str(folder), "seed": 0})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    settings = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **changes,
    }
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
