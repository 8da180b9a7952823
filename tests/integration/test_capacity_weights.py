"""Counted bytes of quantized weights are those of the files that the quantizer writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.quantize_presets import PRESETS
from registry.checkpoint_weights import weights_of_checkpoint
from registry.json_files import json_object
from registry.memory_floor import floor_of
from registry.model_shapes import shape_of
from registry.safetensors_headers import tensors
from tasks.engines import compressor, random_llama
from tests.integration.quantization_builders import job, simple


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_llama.make({"out": str(folder), "seed": 0})
    return folder


def test_of_plain_weights(model: Path) -> None:
    shape = shape_of(json_object(model / "config.json"), "config.json")
    counted = floor_of(shape, concurrency=1, context=16).total.weights_bytes
    assert weights_of_checkpoint(model).tensor_bytes == counted


INT4 = simple(
    ignore=["lm_head"],
    config_groups={
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
        }
    },
)


@pytest.mark.parametrize("name", ["fp8_dynamic", "w4a16", "mxfp4"])
def test_of_quantized_weights(name: str, model: Path, tmp_path: Path) -> None:
    recipe = INT4 if name == "w4a16" else PRESETS[name].recipe
    compressor.run(job(model, tmp_path, recipe))
    config = json_object(tmp_path / "config.json")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    counted = [
        floor_of(shape_of(one, "config.json"), format=form, concurrency=1, context=16)
        for one, form in ((config, "auto"), (plain, name))
    ]
    stored = weights_of_checkpoint(tmp_path).tensor_bytes
    # The engine keeps a scale of a whole channel in float32, the file has it in 16 bit.
    channels = sum(
        tensor.size
        for key, tensor in tensors(tmp_path).items()
        if key.endswith("weight_scale") and tensor.shape[-1] == 1
    )
    # By the checkpoint's own words, and by the format's name with the original configuration.
    wider = channels if name == "fp8_dynamic" else 0
    assert [one.total.weights_bytes - stored for one in counted] == [wider, wider]
