"""Which kernels an engine named in its log, and which are emulated. The lines are vLLM's own."""

from __future__ import annotations

import pytest

from tasks.engines.engine_kernels import emulated_kernels, kernels_of

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
        # One emulated layer is enough.
        ([INT4, FP8], "cpu", AVX512, ["ChannelWiseTorchFP8ScaledMMLinearKernel"]),
    ],
)  # fmt: skip
def test_emulated_kernels(
    lines: list[str], platform: str, flags: list[str], emulated: list[str]
) -> None:
    assert emulated_kernels(log(*lines, platform=platform), flags) == emulated


def test_kernels_are_named_once() -> None:
    assert kernels_of(log(*UNPACKED, FP8)) == [
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
        "UnpackedLinearKernel",
    ]
    assert kernels_of(log("Using CPU_ATTN attention backend", "jit_kernel warmup")) == []


def test_a_log_without_information_says_nothing() -> None:
    quiet = "(EngineCore pid=1) WARNING 11-30 10:32:13 [x.py:1] Using something"
    assert kernels_of(quiet) is None
    assert emulated_kernels(quiet, AVX512) is None
