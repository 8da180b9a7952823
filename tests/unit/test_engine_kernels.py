"""Which kernels an engine named in its log, and which are emulated. The lines are vLLM's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from registry.errors import UserError
from tasks.engines.engine_kernels import emulated_kernels, is_quantized, kernels_of
from tasks.serving import check_times_count

AMX = ["avx2", "avx512f", "amx_bf16", "amx_int8"]
AVX512 = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16"]


def log(*lines: str, platform: str = "cpu") -> str:
    """A log whose first line is vLLM's configuration, cut, and the lines after it."""
    head = (
        "(EngineCore pid=20581) INFO 11-30 10:32:12 [core.py:133] Initializing a V1 LLM engine "
        "(v0.32.0) with config: model='/m', enforce_eager=True, kv_cache_dtype=auto, "
        f"device_config={platform}, seed=0"
    )
    told = [f"(EngineCore pid=20581) INFO 11-30 10:32:13 [x.py:1] {line}" for line in lines]
    return "\n".join([head, *told])


FP8 = "Selected ChannelWiseTorchFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8"
INT4 = "Using CPUWNA16LinearKernel for mixed-precision linear"
UNPACKED = (
    "Using UnpackedLinearKernel for mixed-precision linear",
    "Using UnpackedLinearKernel for CompressedTensorsWNA16",
)


@pytest.mark.parametrize(
    ("lines", "platform", "flags", "emulated"),
    [
        ([], "cpu", AVX512, []),
        ([INT4], "cpu", AVX512, []),
        (["Selected CPUInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8"], "cpu", [], []),
        (UNPACKED, "cpu", AVX512, ["UnpackedLinearKernel"]),
        # AVX-512 alone does not help: torch._scaled_mm wants AMX.
        ([FP8], "cpu", ["avx2"], ["ChannelWiseTorchFP8ScaledMMLinearKernel"]),
        ([FP8], "cpu", AVX512, ["ChannelWiseTorchFP8ScaledMMLinearKernel"]),
        ([FP8], "cpu", AMX, []),
        (
            ["Selected CPUFp8PerTensorScaledMMLinearKernel for CompressedTensorsW8A8Fp8"],
            "cpu", AMX, [],
        ),
        # The same kernel is a real one on a GPU, whatever CPU stands beside it.
        ([FP8], "cuda", ["avx2"], []),
        # Weights are widened in registers: what production would run on such a GPU.
        (["Selected MarlinFP8ScaledMMLinearKernel for CompressedTensorsW8A16Fp8"], "cuda", [], []),
        (["Using MarlinNvFp4LinearKernel for NVFP4 GEMM"], "cuda", [], []),
        (["Using EmulationNvFp4LinearKernel for NVFP4 GEMM"], "cuda", AMX,
         ["EmulationNvFp4LinearKernel"]),
        (["Using EmulationMxfp4LinearKernel for MXFP4 GEMM"], "cuda", [],
         ["EmulationMxfp4LinearKernel"]),
        (["Using Nvfp4QuantizationEmulationTritonExperts MOE backend. This will"], "cuda", [],
         ["Nvfp4QuantizationEmulationTritonExperts"]),
        (["Using 'EMULATION' NvFp4 MoE backend out of potential backends: ['MARLIN']."], "cuda",
         [], ["EMULATION"]),
        # One emulated layer is enough.
        ([INT4, FP8], "cpu", AVX512, ["ChannelWiseTorchFP8ScaledMMLinearKernel"]),
    ],
)  # fmt: skip
def test_emulated_kernels(
    lines: list[str], platform: str, flags: list[str], emulated: list[str]
) -> None:
    assert emulated_kernels(log(*lines, platform=platform), flags, bool(lines)) == emulated


def test_kernels_are_named_once() -> None:
    assert kernels_of(log(*UNPACKED, FP8), quantized=True) == [
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
        "UnpackedLinearKernel",
    ]
    assert (
        kernels_of(log("Using CPU_ATTN attention backend", "jit_kernel warmup"), quantized=False)
        == []
    )


def test_a_log_without_information_says_nothing() -> None:
    quiet = "(EngineCore pid=1) WARNING 11-30 10:32:13 [x.py:1] Using something"
    assert kernels_of(quiet, quantized=False) is None
    assert emulated_kernels(quiet, AVX512, quantized=True) is None


def test_an_emulation_that_warns_of_itself_is_seen_in_a_log_of_warnings() -> None:
    quiet = (
        "(EngineCore pid=1) WARNING 11-30 10:32:13 [kernel.py:47] Using UnpackedLinearKernel: vLLM "
        "has no kernel for these weights on this CPU, so they were un-packed."
    )
    assert kernels_of(quiet, quantized=True) is None
    assert emulated_kernels(quiet, AVX512, quantized=True) == ["UnpackedLinearKernel"]


def test_a_quantized_model_whose_kernels_are_worded_otherwise_is_unknown() -> None:
    """Another vLLM: `[]` would read as "none is emulated"."""
    other = log("Dispatching W8A8Fp8 to torch_scaled_mm", "Linear backend: unpacked")
    assert kernels_of(other, quantized=True) is None
    assert emulated_kernels(other, AVX512, quantized=True) is None
    assert emulated_kernels(other, AVX512, quantized=False) == []


@pytest.mark.parametrize(
    ("config", "engine_args", "quantized"),
    [
        ({}, {}, False),
        ({"text_config": None, "quantization_config": None}, {"quantization": None}, False),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, {}, True),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, {}, True),
        ({"compression_config": {"format": "pack-quantized"}}, {}, True),
        ({}, {"quantization": "fp8"}, True),
    ],
)
def test_what_is_quantized(
    config: dict[str, Any], engine_args: dict[str, Any], quantized: bool
) -> None:
    assert is_quantized(config, engine_args) is quantized


@pytest.mark.parametrize(
    ("production", "quantized", "emulated", "refused"),
    [
        (True, True, None, True),
        (True, True, True, False),
        (True, True, False, False),
        (True, False, None, False),
        (False, True, None, False),
    ],
)
def test_unknown_kernels_give_no_times_to_production(
    production: bool, quantized: bool, emulated: bool | None, refused: bool
) -> None:
    """Not a silent "not emulated": a gate of production would take the times for real ones."""
    server: Any = SimpleNamespace(quantized=quantized, emulated=emulated, log=Path("vllm.log"))
    if not refused:
        check_times_count(server, production)
        return
    with pytest.raises(UserError, match="nobody knows whether its times are real"):
        check_times_count(server, production)
