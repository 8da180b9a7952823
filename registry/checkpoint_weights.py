"""Bytes of a model's weights: of the files themselves where they are here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from registry.json_files import json_object
from registry.memory_floor import floor_of
from registry.model_shapes import shape_of
from registry.safetensors_headers import tensors


@dataclass(frozen=True)
class CheckpointWeights:
    """`tensor_bytes` of all tensors; `exact`: read from the files, not from the configuration.

    `by_dtype`: bytes by dtype as the files spell it; empty where there are none.
    """

    tensor_bytes: int
    exact: bool
    by_dtype: dict[str, int]


def weights_of_checkpoint(folder: Path) -> CheckpointWeights:
    """From the headers of a folder's safetensors files, else from its config.json.

    All that the files hold is counted, also what an engine leaves out (a head for multi-token
    prediction) or loads in another width (float32 weights, as bfloat16). Raises `UserError` for
    files that cannot be read.
    """
    found = tensors(folder)
    if not found:
        config = folder / "config.json"
        shape = shape_of(json_object(config), str(config))
        floor = floor_of(shape, concurrency=1, context=1)
        return CheckpointWeights(floor.total.weights_bytes, exact=False, by_dtype={})
    by_dtype: dict[str, int] = {}
    for tensor in found.values():
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.size
    return CheckpointWeights(sum(by_dtype.values()), exact=True, by_dtype=by_dtype)
