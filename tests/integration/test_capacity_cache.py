"""KV tokens of published models against vLLM's own code, which runs here without an engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from registry.kv_cache import kv_tokens, pool_of, stage_of_layers
from registry.model_shapes import ModelShape
from registry.settings import settings
from tests.unit.shape_builders import draft, published, small

GIB = 1 << 30

GPT_OSS = small(
    model_type="gpt_oss", num_hidden_layers=24, head_dim=32, sliding_window=128,
    num_local_experts=2, num_experts_per_tok=1,
)  # fmt: skip
WINDOWS = small(model_type="mistral", sliding_window=64)

CASES: dict[str, dict[str, Any]] = {
    "llama 8b": {"shape": published("llama_3_1_8b"), "budget": 9 * GIB + 12345, "max_len": 32_000},
    "llama 70b, tp 16, pp 2": {
        "shape": published("llama_3_1_70b"), "budget": 5 * GIB, "max_len": 8192, "tp": 16, "pp": 2
    },
    "qwen2.5 7b, tp 4": {"shape": published("qwen2_5_7b"), "budget": GIB, "max_len": 1000, "tp": 4},
    "qwen3 32b": {"shape": published("qwen3_32b"), "budget": 20 * GIB, "max_len": 40_960},
    "mixtral, too little": {
        "shape": published("mixtral_8x7b"), "budget": 4 * GIB, "max_len": 32_768
    },
    "deepseek": {"shape": published("deepseek_v3"), "budget": 30 * GIB, "max_len": 163_840},
    "deepseek, pp 4": {
        "shape": published("deepseek_v3"), "budget": 3 * GIB, "max_len": 8192, "pp": 4
    },
    "gemma 3 27b": {"shape": published("gemma_3_27b"), "budget": 20 * GIB, "max_len": 8192},
    "gemma 3 27b, pp 4": {
        "shape": published("gemma_3_27b"), "budget": 20 * GIB, "max_len": 131_072, "pp": 4
    },
    "gemma 3 27b, short": {"shape": published("gemma_3_27b"), "budget": GIB, "max_len": 512},
    "qwen3 next": {
        "shape": published("qwen3_next_80b"), "budget": 20 * GIB, "max_len": 32_768, "block": 544
    },
    "qwen3 next, tp 2, pp 2": {
        "shape": published("qwen3_next_80b"),
        "budget": 2 * GIB, "max_len": 262_144, "tp": 2, "pp": 2, "block": 544,
    },
    "alternating": {"shape": GPT_OSS, "budget": GIB, "max_len": 4096},
    "alternating, draft": {"shape": GPT_OSS, "budget": GIB, "max_len": 4096, "draft": draft()},
    "windows alone": {"shape": WINDOWS, "budget": GIB, "max_len": 4096},
    "windows, draft": {"shape": WINDOWS, "budget": GIB, "max_len": 4096, "draft": draft()},
    "windows, draft with half the heads": {
        "shape": WINDOWS, "budget": GIB, "max_len": 4096, "draft": draft(num_key_value_heads=2)
    },
    "windows, draft with other heads": {
        "shape": WINDOWS,
        "budget": GIB,
        "max_len": 4096,
        "draft": draft(num_key_value_heads=6, num_attention_heads=12, hidden_size=384),
    },
    "draft with other heads": {
        "shape": small(), "budget": GIB, "max_len": 4096, "draft": draft(num_key_value_heads=8)
    },
    "deepseek, draft": {
        "shape": published("deepseek_v3"), "budget": 30 * GIB, "max_len": 4096, "draft": draft()
    },
}  # fmt: skip
IN_FLIGHT = 2048


def asked(case: dict[str, Any]) -> dict[str, Any]:
    """A case as the probe reads it."""
    shape: ModelShape = case["shape"]
    tp, pp = case.get("tp", 1), case.get("pp", 1)
    stages: list[list[dict[str, Any]]] = [[] for _ in range(pp)]
    layers = list(zip(stage_of_layers(len(shape.layers), pp), shape.layers, strict=True))
    if "draft" in case:
        layers += [(pp - 1, layer) for layer in case["draft"].layers]
    for index, (stage, layer) in enumerate(layers):
        mla = layer.attention == "mla"
        heads = 1 if mla else max(1, layer.kv_heads // tp)
        described = {
            "index": index,
            "mla": mla,
            "heads": heads,
            "head": layer.head_dim,
            "window": layer.window,
            # Two KV heads of 256: what a page of attention takes.
            "state": layer.state // tp + layer.state_matrix // tp,
            "page": case.get("block", 16) * max(1, 2 // tp) * 2 * 256 * 2,
        }
        stages[stage].append(described)
    return {
        "stages": stages,
        "tp": tp,
        "block": case.get("block", 16),
        "max_len": case["max_len"],
        "in_flight": IN_FLIGHT,
        "budget": case["budget"],
    }


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    done = subprocess.run(
        [str(settings().serve_python), str(Path(__file__).with_name("vllm_cache_probe.py"))],
        input=json.dumps([asked(case) for case in CASES.values()]),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_groups_and_tokens_are_vllm_s(name: str, answers: dict[str, Any]) -> None:
    case, answer = CASES[name], answers[name]
    common = {"tp": case.get("tp", 1), "pp": case.get("pp", 1), "draft": case.get("draft")}
    tokens = kv_tokens(
        case["shape"],
        case["budget"],
        max_len=case["max_len"],
        max_batched_tokens=IN_FLIGHT,
        **common,
    )
    if "refused" in answer:
        assert "To serve at least one request" in answer["refused"]
        assert tokens == 0
        return
    pool = pool_of(case["shape"], "bfloat16", **common)
    assert sorted(len(group.layers) for group in pool.groups) == answer["groups"]
    assert tokens == answer["tokens"]
