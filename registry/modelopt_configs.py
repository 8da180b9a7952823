"""`quantization_config` of NVIDIA's ModelOpt, in both of its layouts, as vLLM 0.32 loads them.

In config.json beside `quant_method`, or in a file of its own (`hf_quant_config.json`), whose
section `quantization` has other names. Read from `layers/quantization/modelopt.py`: `resolve` and
the schemes say what is kept of a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from registry.config_values import ConfigValues
from registry.weight_formats import ENGINE, FLOAT32, FORMATS, Quantization, WeightFormat

_REMEDY = "take the file that came with the checkpoint, or plan the unquantized model with --format"

ALGORITHMS: Mapping[str, WeightFormat] = {
    # A float32 scale of the weights and one of the inputs.
    "FP8": FORMATS["fp8_static"],
    "FP8_PER_CHANNEL_PER_TOKEN": FORMATS["fp8_dynamic"],
    "FP8_PB_WO": FORMATS["fp8_block"],
    # Scales of the weights and of the inputs, the latter's inverse, and their product (`alpha`).
    "NVFP4": replace(FORMATS["nvfp4"], matrix_bytes=4 * FLOAT32),
    "W4A16_NVFP4": FORMATS["nvfp4_a16"],
    "MXFP8": FORMATS["mxfp8"],
}
"""Of linear layers (`LINEAR_ALGOS`)."""

MIXED = "MIXED_PRECISION"

_NEEDS_8_0 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8")

_OF_FILE = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
"""What `_normalize_quantization_config` knows in `hf_quant_config.json`."""

_EXPERT = re.compile(r"\.experts\.[1-9]")
"""All but the first, which stands for all of a layer; there are thousands of them."""

_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")
"""Never quantized, whatever the list of exceptions says."""


def modelopt(section: ConfigValues) -> Quantization:
    """Raises `UserError` for an algorithm that vLLM does not know."""
    inner = section.section("quantization") or section
    algorithm = inner.text("quant_algo").upper()
    ignore = (*inner.strings("exclude_modules" if inner is not section else "ignore"), *_TOWERS)
    kv_dtype = "fp8" if _fp8_cache(inner) else "auto"
    if inner is not section and section.has("producer") and algorithm not in _OF_FILE:
        what = f"is {algorithm or 'missing'!r}: of a file beside config.json vLLM {ENGINE} takes "
        raise inner.error("quant_algo", what + ", ".join(_OF_FILE), _REMEDY)
    if algorithm == MIXED:
        return _mixed(inner, ignore, kv_dtype)
    if algorithm == "NVFP4" and _weights_alone(section):
        algorithm = "W4A16_NVFP4"
    groups = ((("Linear",), _format(inner, algorithm)),)
    oldest = (8, 0) if algorithm in _NEEDS_8_0 else (7, 5)
    return Quantization("modelopt", groups, ignore, kv_dtype, oldest)


def mxfp8(section: ConfigValues) -> Quantization:
    """`quant_method: mxfp8`: the same layout, its exceptions under another name."""
    if section.has("quantization") or section.has("quant_algo"):
        return modelopt(section)
    groups = ((("Linear",), FORMATS["mxfp8"]),)
    ignore = (*section.strings("ignored_layers"), *_TOWERS)
    return Quantization("mxfp8", groups, ignore, oldest=(8, 0))


def _mixed(inner: ConfigValues, ignore: tuple[str, ...], kv_dtype: str) -> Quantization:
    """Each layer by its whole name, in `quantized_layers`; what is not there stays in 16 bit."""
    layers = inner.section("quantized_layers")
    if layers is None or not layers.values:
        raise inner.error("quantized_layers", f"is missing, and {MIXED} needs it", _REMEDY)
    named: dict[str, list[str]] = {}
    for name in layers.values:
        if _EXPERT.search(name):
            continue
        layer = layers.section(name)
        if layer is None:
            raise layers.error(name, "is null", _REMEDY)
        named.setdefault(layer.text("quant_algo").upper(), []).append(name)
    found = [(tuple(names), _format(layers, algorithm)) for algorithm, names in named.items()]
    # What most of the layers have is what the checkpoint is called by.
    found.sort(key=lambda one: -len(one[0]))
    return Quantization("modelopt", tuple(found), ignore, kv_dtype)


def _format(section: ConfigValues, algorithm: str) -> WeightFormat:
    found = ALGORITHMS.get(algorithm)
    if found is None:
        what = f"is {algorithm or 'missing'!r}; known are {', '.join((*ALGORITHMS, MIXED))}"
        raise section.error("quant_algo", what, _REMEDY)
    if found.name.startswith("nvfp4"):
        return replace(found, group=section.number("group_size", found.group))
    return found


def _fp8_cache(inner: ConfigValues) -> bool:
    if inner.text("kv_cache_quant_algo").upper() == "FP8":
        return True
    scheme = inner.section("kv_cache_scheme")
    return scheme is not None and scheme.values.get("num_bits") == 8


def _weights_alone(section: ConfigValues) -> bool:
    """NVFP4 whose groups quantize no input."""
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        return False
    each = [groups.section(name) for name in groups.values]
    return all(one is not None and not one.has("input_activations") for one in each)
