"""Quantization on CUDA: presets with their checks on the GPU, and vLLM's answer from the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from recipes.quantize_presets import PRESETS
from recipes.schema import Sampling
from registry.errors import Infeasible
from registry.provenance import hardware
from tasks.engines import compressor
from tasks.engines.openai_chat import ChatRequest, Endpoint, generate
from tasks.engines.vllm_server import VllmServer
from tests.integration.quantization_builders import conversations, job, tiny, write_texts

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not hardware()["gpus"], reason="no NVIDIA GPU here"),
]

ENGINE = {"max-model-len": 256, "gpu-memory-utilization": 0.3, "enforce-eager": True}
ANYWHERE = {"w8a8_int8", "w4a16_gptq", "w4a16_awq"}
"""Presets that every GPU with tensor cores for int8 serves; the others need newer ones."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention kernels want heads of 64.
    return tiny(tmp_path_factory.mktemp("model"), hidden_size=256, head_dim=64)


def test_a_model_larger_than_the_gpu_is_judged_layer_by_layer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    texts = str(write_texts(tmp_path / "c.jsonl", conversations()))
    held_out = str(write_texts(tmp_path / "h.jsonl", conversations(4, first=100)))
    found = []
    for name in ("whole", "parts"):
        changes = {"calibration_file": texts, "held_out_file": held_out}
        recipe = PRESETS["fp8_static"].recipe
        found.append(compressor.run(job(model, tmp_path / name, recipe, **changes)))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, 0))
    for key in ("perplexity", "mean_error", "found"):
        assert found[0][key] == found[1][key], key


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_made_judged_and_served_on_the_gpu(
    name: str, model: Path, tmp_path: Path
) -> None:
    import torch

    texts = write_texts(tmp_path / "c.jsonl", conversations())
    held_out = write_texts(tmp_path / "h.jsonl", conversations(4, first=100))
    out = tmp_path / name
    torch.cuda.reset_peak_memory_stats()
    result = compressor.run(
        job(
            model,
            out,
            PRESETS[name].recipe,
            calibration_file=str(texts),
            held_out_file=str(held_out),
            max_size_ratio=PRESETS[name].max_size_ratio,
        )
    )
    assert torch.cuda.max_memory_allocated() > 0
    assert result["layers"] == 14
    assert 0.9 < result["perplexity"]["ratio"] < 1.1
    torch.cuda.empty_cache()
    question = json.loads(held_out.read_text().splitlines()[0])["messages"][:1]
    request = ChatRequest(id="0", messages=question, sampling=Sampling(max_tokens=4, seed=0))
    try:
        with VllmServer(out, log=tmp_path / "v.log", served_name="m", engine_args=ENGINE) as server:
            endpoint = Endpoint(url=server.url, model="m", api_key=SecretStr(server.api_key))
            (answer,) = generate(
                [request], endpoint, concurrency=1, max_retry_wait=5.0,
                request_timeout=120.0, max_attempts=2,
            )  # fmt: skip
    except Infeasible as reason:
        assert name not in ANYWHERE, reason
        pytest.skip(f"vLLM has no kernel for {name} on this GPU: {reason}")
    assert answer.state == "done"
