"""Quantization by name: each preset is a plain llmcompressor recipe that anybody could write.

Two values are words where the right one depends on the model, and are replaced before llmcompressor
sees the recipe (`tasks/engines/quantization_recipe.py`): `group_size: auto` is the largest of 128,
64, 32 and 16 that divides the input width of every layer, `ignore: auto` the head and the MoE
routers. The recipe as it was run is in the stage's manifest and report.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

AUTO = "auto"


@dataclass(frozen=True)
class Preset:
    """A recipe, and what is true of it."""

    modifiers: dict[str, dict[str, Any]]
    max_size_ratio: float
    """Bytes of the quantized layers over their bytes in 16 bit, scales included, small models too:
    8 bits 0.50 plus scales; 4 bits in groups of 16 with 16-bit scales 0.31."""
    calibrated: bool
    """Whether it looks at texts."""
    hardware: str
    """Where it is worth serving."""

    @property
    def recipe(self) -> dict[str, Any]:
        return {"quant_stage": {"quant_modifiers": deepcopy(self.modifiers)}}


def _scheme(modifier: str, scheme: str, **more: Any) -> dict[str, dict[str, Any]]:
    return {modifier: {"targets": ["Linear"], "ignore": AUTO, "scheme": scheme, **more}}


def _int4(modifier: str) -> dict[str, dict[str, Any]]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": AUTO,
        "symmetric": True,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {modifier: {"ignore": AUTO, "config_groups": groups}}


KV_CACHE_FP8 = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}

PRESETS = {
    "fp8_dynamic": Preset(
        _scheme("QuantizationModifier", "FP8_DYNAMIC"),
        max_size_ratio=0.55,
        calibrated=False,
        hardware="GPUs from Ada and Hopper on",
    ),
    "fp8_static": Preset(
        _scheme("QuantizationModifier", "FP8"),
        max_size_ratio=0.55,
        calibrated=True,
        hardware="GPUs from Ada and Hopper on",
    ),
    "fp8_block": Preset(
        _scheme("QuantizationModifier", "FP8_BLOCK"),
        max_size_ratio=0.55,
        calibrated=False,
        hardware="GPUs from Hopper on",
    ),
    "w8a8_int8": Preset(
        _scheme("GPTQModifier", "W8A8"),
        max_size_ratio=0.55,
        calibrated=True,
        hardware="GPUs from Turing on, and any x86 CPU",
    ),
    "w4a16_gptq": Preset(
        _int4("GPTQModifier"),
        max_size_ratio=0.35,
        calibrated=True,
        hardware="GPUs from Ampere on, and x86 CPUs with AVX-512",
    ),
    "w4a16_awq": Preset(
        {"AWQModifier": {"duo_scaling": True}, **_int4("QuantizationModifier")},
        max_size_ratio=0.35,
        calibrated=True,
        hardware="GPUs from Ampere on, and x86 CPUs with AVX-512",
    ),
    "nvfp4": Preset(
        _scheme("QuantizationModifier", "NVFP4"),
        max_size_ratio=0.35,
        calibrated=True,
        hardware="Blackwell GPUs; older ones use the weights alone",
    ),
    "mxfp4": Preset(
        _scheme("QuantizationModifier", "MXFP4"),
        max_size_ratio=0.35,
        calibrated=False,
        hardware="Blackwell GPUs",
    ),
    "fp8_kv_cache": Preset(
        _scheme("QuantizationModifier", "FP8_DYNAMIC", kv_cache_scheme=KV_CACHE_FP8),
        max_size_ratio=0.55,
        calibrated=True,
        hardware="GPUs from Ada and Hopper on",
    ),
}
