"""Bytes of a model's weights: of the files themselves where they are here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import UserError
from registry.json_files import json_object
from registry.memory_floor import floor_of
from registry.model_shapes import shape_of
from registry.safetensors_headers import Tensor, tensors
from registry.shape_parts import ModelShape
from registry.weight_formats import ENGINE

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
_WIDE = {"F32": 4, "F64": 8}
_HALF = 2


@dataclass(frozen=True)
class CheckpointWeights:
    """`tensor_bytes` of all tensors; `exact`: read from the files, not from the configuration.

    `loaded_bytes`: what an engine keeps of them. It leaves out layers beyond the model's (a head
    for multi-token prediction), the copy of a tied head and GPTQ's zero points, and loads float32
    weights in 16 bit.
    `by_dtype`: bytes by dtype as the files spell it; empty where there are none.
    """

    tensor_bytes: int
    loaded_bytes: int
    exact: bool
    by_dtype: dict[str, int]


def weights_of_checkpoint(folder: Path) -> CheckpointWeights:
    """From the headers of a folder's safetensors files, else from its config.json.

    Raises `UserError` for files that cannot be read or that no engine here reads, and as
    `shape_of` does.
    """
    shape = shape_of(config_of(folder), str(folder / CONFIG))
    files = _files(folder)
    if not files and (other := sorted(folder.glob("*.gguf"))):
        raise gguf_error(other[0])
    found = tensors(folder, files)
    if not found:
        size = floor_of(shape, concurrency=1, context=1).total.weights_bytes
        return CheckpointWeights(size, size, exact=False, by_dtype={})
    by_dtype: dict[str, int] = {}
    for tensor in found.values():
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.size
    loaded = sum(_loaded(name, tensor, shape) for name, tensor in found.items())
    return CheckpointWeights(sum(by_dtype.values()), loaded, exact=True, by_dtype=by_dtype)


INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
OF_MODELOPT = "hf_quant_config.json"


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's config.json, with the quantization that ModelOpt wrote beside it.

    As `transformers_utils/config.py` of vLLM 0.32 reads them. Raises `UserError`.
    """
    found = json_object(folder / CONFIG)
    beside = folder / OF_MODELOPT
    if found.get("quantization_config") is None and beside.is_file():
        found = found | {"quantization_config": json_object(beside)}
    return found


def gguf_error(file: Path) -> UserError:
    return UserError.at(
        file,
        f"is GGUF, which vLLM {ENGINE} does not load",
        "convert it to safetensors, or name the model's config.json alone to plan it in 16 bit",
    )


def _files(folder: Path) -> list[Path]:
    """The files that an engine loads: those of the index, where there is one.

    Beside them may lie the same weights in another layout (`consolidated.safetensors`) or an
    adapter. Raises `UserError` where a part of the files is missing.
    """
    there = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if not index.is_file():
        adapter = [one for one in there if one.name == "adapter_model.safetensors"]
        if adapter and len(there) == 1:
            raise UserError.at(folder, "is an adapter, no model", "merge it into its base first")
        return [one for one in there if one not in adapter]
    places = json_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
        raise UserError.at(index, "has no weight_map of names", "copy it again from where it came")
    named = {folder / one for one in places.values()}
    missing = sorted(one.name for one in named - set(there))
    if len(missing) == len(named):
        return []
    if missing:
        what = f"names {len(missing)} of {len(named)} files that are not there: {missing[0]}"
        raise UserError.at(index, what, "copy them, or name the config.json alone")
    return sorted(named)


def _loaded(name: str, tensor: Tensor, shape: ModelShape) -> int:
    layer = _LAYER.search(name)
    if layer and int(layer[1]) >= len(shape.layers):
        return 0
    if shape.tied and name.endswith("lm_head.weight"):
        return 0
    own = shape.quantization
    if own is not None and own.name == "gptq" and name.endswith((".g_idx", ".qzeros")):
        return 0
    if shape.quantization is None and tensor.dtype in _WIDE:
        # In a quantized checkpoint float32 is what scales are.
        return tensor.size // _WIDE[tensor.dtype] * _HALF
    return tensor.size
