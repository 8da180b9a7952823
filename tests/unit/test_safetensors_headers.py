"""Headers of safetensors files, and the bytes of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry.checkpoint_weights import weights_of_checkpoint
from registry.errors import Problem, UserError
from registry.memory_floor import floor_of
from registry.model_shapes import shape_of
from registry.safetensors_headers import read_header, tensors
from tests.unit.shape_builders import small_config


def written(path: Path, header: Any, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], first: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


TWO = {
    "__metadata__": {"format": "pt"},
    "a": entry("BF16", [2, 3], 0, 12),
    "b": entry("F32", [2], 12, 20),
}


def test_where_tensors_lie(tmp_path: Path) -> None:
    file = written(tmp_path / "model.safetensors", TWO, bytes(range(20)))
    found = tensors(tmp_path)
    assert {name: (one.dtype, one.shape, one.size) for name, one in found.items()} == {
        "a": ("BF16", (2, 3), 12),
        "b": ("F32", (2,), 8),
    }
    one = found["b"]
    assert file.read_bytes()[one.start : one.start + one.size] == bytes(range(12, 20))


def test_the_same_tensor_in_another_file_is_equal(tmp_path: Path) -> None:
    for name, header in (("a", TWO), ("b", {"b": entry("F32", [2], 0, 8)})):
        (tmp_path / name).mkdir()
        size = max(one["data_offsets"][1] for one in header.values() if "data_offsets" in one)
        written(tmp_path / name / "model.safetensors", header, bytes(size))
    assert tensors(tmp_path / "a")["b"] == tensors(tmp_path / "b")["b"]
    assert tensors(tmp_path / "a")["a"] != tensors(tmp_path / "b")["b"]


def test_a_folder_without_files_has_no_tensors(tmp_path: Path) -> None:
    assert tensors(tmp_path) == {}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (TWO, bytes(19), "is cut or has something added"),
        ({"a": entry("BF16", [2, 3], 0, 13)}, bytes(13), "takes 12 bytes, the file has 13"),
        ({"a": entry("BF16", [1], 4, 6)}, bytes(6), "begins at byte 4"),
        ({"a": {"dtype": "BF16"}}, b"", "is no tensor's entry"),
        ([], b"", "is no JSON object"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, header: Any, data: bytes, said: str) -> None:
    file = written(tmp_path / "model.safetensors", header, data)
    problem = read_header(file)
    assert isinstance(problem, Problem) and said in problem.what
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        tensors(tmp_path)


def test_bytes_of_a_checkpoint_are_those_of_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    written(tmp_path / "model-1.safetensors", TWO, bytes(20))
    written(tmp_path / "model-2.safetensors", {"c": entry("BF16", [4], 0, 8)}, bytes(8))
    found = weights_of_checkpoint(tmp_path)
    assert (found.tensor_bytes, found.exact) == (28, True)
    assert found.by_dtype == {"BF16": 20, "F32": 8}
    # Two values of float32 are loaded in 16 bit.
    assert found.loaded_bytes == 24


def test_what_an_engine_leaves_out_of_a_checkpoint(tmp_path: Path) -> None:
    """Layers beyond the model's four (for several tokens at once), the copy of a tied head."""
    (tmp_path / "config.json").write_text(json.dumps(small_config(tie_word_embeddings=True)))
    header = {
        "model.layers.3.mlp.up_proj.weight": entry("BF16", [2], 0, 4),
        "model.layers.4.mlp.up_proj.weight": entry("BF16", [2], 4, 8),
        "lm_head.weight": entry("BF16", [2], 8, 12),
    }
    written(tmp_path / "model.safetensors", header, bytes(12))
    found = weights_of_checkpoint(tmp_path)
    assert (found.tensor_bytes, found.loaded_bytes) == (12, 4)


def test_a_model_that_is_not_here_is_counted_from_its_configuration(tmp_path: Path) -> None:
    config = small_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = weights_of_checkpoint(tmp_path)
    shape = shape_of(config, "config.json")
    assert (found.tensor_bytes, found.exact) == (2 * shape.parameters, False)
    assert found.tensor_bytes == floor_of(shape, concurrency=1, context=1).total.weights_bytes


def test_only_files_that_an_engine_loads_are_counted(tmp_path: Path) -> None:
    """Mistral's folders hold the same weights twice, trained ones an adapter beside the model."""
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    index = tmp_path / "model.safetensors.index.json"
    names = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    assert not weights_of_checkpoint(tmp_path).exact
    written(tmp_path / "model-1.safetensors", TWO, bytes(20))
    with pytest.raises(UserError, match=r"1 of 2 files that are not there: model-2\.safetensors"):
        weights_of_checkpoint(tmp_path)
    written(tmp_path / "model-2.safetensors", {"c": entry("BF16", [4], 0, 8)}, bytes(8))
    written(tmp_path / "consolidated.safetensors", {"x": entry("BF16", [9], 0, 18)}, bytes(18))
    assert weights_of_checkpoint(tmp_path).tensor_bytes == 28
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(UserError, match="has no weight_map"):
        weights_of_checkpoint(tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    written(tmp_path / "adapter_model.safetensors", {"x": entry("BF16", [9], 0, 18)}, bytes(18))
    with pytest.raises(UserError, match="is an adapter, no model"):
        weights_of_checkpoint(tmp_path)
    written(tmp_path / "model.safetensors", TWO, bytes(20))
    assert weights_of_checkpoint(tmp_path).tensor_bytes == 20
