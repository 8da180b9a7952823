"""Distillation on CUDA: bfloat16 by itself, four bits under the adapter, packed rows, logits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from registry.provenance import hardware
from tasks.engines import lora, merge_check
from tests.integration.distill_builders import job, questions, student, write

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not hardware()["gpus"], reason="no NVIDIA GPU here"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return student(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "train.jsonl", questions())


def trained(base: Path, rows: Path, out: Path, **changes: Any) -> dict[str, Any]:
    result = lora.run(job(base, rows, out, **{"precision": "auto", "epochs": 12, **changes}))
    assert result["held_out_loss_after"] < result["held_out_loss_before"]
    assert result["merge"]["float32"]["max_relative"] < merge_check.MAX_FLOAT32
    assert result["peak_gpu_memory_gib"] > 0
    return result


def test_the_gpu_trains_in_what_it_has(base: Path, rows: Path, tmp_path: Path) -> None:
    import torch

    result = trained(base, rows, tmp_path / "out")
    native = torch.cuda.get_device_capability() >= (8, 0)
    assert result["compute_dtype"] == ("bfloat16" if native else "float32")


def test_dora_trains_on_the_gpu(base: Path, rows: Path, tmp_path: Path) -> None:
    adapter = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "use_dora": True}
    trained(base, rows, tmp_path / "out", lora=adapter)


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
def test_an_adapter_over_four_bits_is_merged_into_the_unquantized_base(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open

    adapter = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    result = trained(base, rows, tmp_path / "out", lora=adapter, quantize_base="nf4")
    assert result["quantize_base"] == "nf4"
    with safe_open(tmp_path / "out" / "merged" / "model.safetensors", "pt") as weights:
        kinds = {str(weights.get_tensor(name).dtype) for name in weights.keys()}  # noqa: SIM118
    assert kinds == {"torch.bfloat16"}


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_packed_rows_stay_apart(base: Path, rows: Path, tmp_path: Path, attention: str) -> None:
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    changes = {"packing": True, "batch_size": 2, "attention": attention}
    result = trained(base, rows, tmp_path / "out", **changes)
    assert result["packing_difference"] < 0.1


def test_logits_are_learned_on_the_gpu(base: Path, rows: Path, tmp_path: Path) -> None:
    gkd = {"lmbda": 0.5, "beta": 0.5, "temperature": 0.9, "seq_kd": False, "max_new_tokens": 8}
    teacher = student(tmp_path / "teacher", seed=1)
    out = tmp_path / "out"
    result = lora.run(
        job(base, rows, out, method="logits", gkd=gkd, teacher=str(teacher), precision="auto")
    )
    assert result["chosen"]["held_out_kl"] < result["looks"][0]["held_out_kl"]
