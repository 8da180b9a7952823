"""The KV tokens that a plan gives are the ones that vLLM prints, started here on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from registry.json_files import json_object
from registry.kv_cache import kv_tokens
from registry.model_shapes import ModelShape, shape_of
from registry.provenance import hardware
from registry.settings import settings
from tasks.engines import random_llama
from tasks.engines.vllm_server import VllmServer

pytestmark = pytest.mark.alone

BUDGET, MAX_LEN, BATCHED = 64 << 20, 500, 256
ARGUMENTS = {
    "enforce-eager": True,
    "dtype": "bfloat16",
    "max-model-len": MAX_LEN,
    "max-num-batched-tokens": BATCHED,
    "async-scheduling": False,
    "kv-cache-memory-bytes": BUDGET,
    "distributed-executor-backend": "uni",
}
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
CPU_BLOCK, CPU_LATENT_BLOCK = 128, 16
"""Tokens of a block that vLLM's CPU platform takes."""

CPU_STATE_WIDTH = 4 if "avx512_bf16" in hardware()["flags"] else None
"""It keeps the matrices of linear attention in float32 where this makes them fast."""

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # What vLLM asks before it loads the correction of the router; transformers writes none.
    "topk_method": "noaux_tc",
}


DELTA_NET = {
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield
    settings.cache_clear()


def model(folder: Path, kind: str = "Llama", **changes: Any) -> Path:
    """A model of a few layers with random weights, beside the tokenizer of `random_llama`."""
    import torch
    import transformers

    random_llama.make({"out": str(folder), "seed": 0})
    if kind != "Llama" or changes:
        config = json_object(folder / "config.json")
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "num_key_value_heads", "head_dim",
                 "max_position_embeddings", "bos_token_id", "eos_token_id",
                 "pad_token_id")  # fmt: skip
        written = {name: config[name] for name in names} | changes
        if kind.startswith("Deepseek"):
            del written["head_dim"]
        settings_of = "Gemma3Text" if kind == "Gemma3" else kind
        made = getattr(transformers, f"{kind}ForCausalLM")(
            getattr(transformers, f"{settings_of}Config")(**written)
        )
        made.to(torch.bfloat16).save_pretrained(folder)
    return folder


def draft(folder: Path, target: Path, **changes: Any) -> Path:
    """An EAGLE3 draft with random weights, as its authors publish theirs."""
    import torch
    from safetensors.torch import save_file

    theirs = shape_of(json_object(target / "config.json"), str(target))
    hidden, heads, head = theirs.hidden, 4, 32
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": theirs.vocab,
        "draft_vocab_size": theirs.vocab,
        "hidden_size": hidden,
        "intermediate_size": 256,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    } | changes
    kv = int(config["num_key_value_heads"])
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (theirs.vocab, hidden),
        "midlayer.self_attn.q_proj.weight": (heads * head, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv * head, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv * head, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head),
        "midlayer.mlp.gate_proj.weight": (256, hidden),
        "midlayer.mlp.up_proj.weight": (256, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 256),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
    }
    torch.manual_seed(1)
    weights = {
        name: torch.randn(shape, dtype=torch.float32).mul(0.02).bfloat16()
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def read(folder: Path) -> ModelShape:
    return shape_of(json_object(folder / "config.json"), str(folder / "config.json"))


def check(target: Path, own: Path | None, log: Path, block: int = CPU_BLOCK) -> None:
    """Start the engine and compare what it prints with what the configuration gives."""
    planned = kv_tokens(
        read(target),
        BUDGET,
        max_len=MAX_LEN,
        block=block,
        draft=read(own) if own else None,
        max_batched_tokens=BATCHED,
        state_width=CPU_STATE_WIDTH,
    )
    assert planned > MAX_LEN
    with VllmServer(
        target,
        log=log,
        served_name="m",
        engine_args=ARGUMENTS,
        env=ENV,
        draft=own,
        num_speculative_tokens=2 if own else 0,
    ) as server:
        assert server.kv_cache_tokens == planned


def test_a_small_llama(tmp_path: Path) -> None:
    check(model(tmp_path / "model"), None, tmp_path / "server.log")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "changes", "drafted"),
    [
        ("Llama", {"num_key_value_heads": 4}, None),
        ("Llama", {"num_key_value_heads": 1, "num_hidden_layers": 3}, None),
        ("Llama", {"head_dim": 64}, None),
        ("Llama", {}, {}),
        ("Llama", {"num_key_value_heads": 1}, {"num_key_value_heads": 4}),
        ("Qwen3", {"head_dim": 64}, None),
        ("Mistral", {"sliding_window": 128}, None),
        ("Gemma2", {"sliding_window": 128, "num_hidden_layers": 4}, None),
        ("Gemma3", {"sliding_window": 128, "num_hidden_layers": 7}, None),
    ],
    ids=["mha", "mqa", "wide heads", "gqa, draft", "mqa, draft", "qwen3", "windows", "alternating",
         "one in six"],
)  # fmt: skip
def test_every_head_shape(
    kind: str, changes: dict[str, Any], drafted: dict[str, Any] | None, tmp_path: Path
) -> None:
    target = model(tmp_path / "model", kind, **changes)
    own = None if drafted is None else draft(tmp_path / "draft", target, **drafted)
    check(target, own, tmp_path / "server.log")


@pytest.mark.fault
def test_states_beside_a_cache(tmp_path: Path) -> None:
    target = model(tmp_path / "model", "Qwen3Next", **DELTA_NET)
    check(target, None, tmp_path / "server.log")


@pytest.mark.fault
def test_a_latent_cache(tmp_path: Path) -> None:
    target = model(tmp_path / "model", "DeepseekV3", **LATENT)
    check(target, None, tmp_path / "server.log", CPU_LATENT_BLOCK)
