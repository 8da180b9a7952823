"""Which formats vLLM 0.32 has a kernel for on a machine, and what it then multiplies in.

Read from the capability that each scheme asks for (`get_min_capability`) and from the kernels'
`is_supported`, in the engine's own order; tests/integration/test_format_support.py asks that code.
Two facts are not in it but in the compiled part (csrc/.../scaled_mm): CUTLASS has FP8 from 8.9 on
and in blocks from 9.0 on, and no INT8 from 10.0 on, where this version takes it all the same and
fails (github.com/vllm-project/vllm/issues/54311).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from registry.machines import Machine
from registry.weight_formats import ENGINE, Quantization, WeightFormat, format_named

Unit = Literal["fp32", "fp16", "bf16", "fp8", "int8", "fp4"]

OLDEST = (7, 5)
AMPERE = (8, 0)
ADA = (8, 9)
HOPPER = (9, 0)
BLACKWELL = (10, 0)

FLASHINFER_HEADS = (64, 128, 256, 512)
"""Head sizes of vLLM's FlashInfer backend."""


@dataclass(frozen=True)
class Support:
    """`unit`: the type whose rate bounds the products; None with the `reason` why nothing does it.

    `dtype` is what the engine has to be told where it would take another one. `instead`: a format
    that does the same there.
    """

    unit: Unit | None
    kernel: str = ""
    reason: str = ""
    note: str = ""
    dtype: str | None = None
    instead: str | None = None


def support_of(format: str, machine: Machine) -> Support:
    """Of a format by its name (`format_named`) on a machine."""
    known = format_named(format)
    if known is None:
        raise KeyError(format)
    if machine.is_cpu:
        return _on_cpu(known, machine.cpu_instructions)
    if machine.capability is None:
        return Support(None, reason="its hardware file says no `compute_capability`")
    if machine.capability < OLDEST:
        return _refused(machine.capability, f"vLLM {ENGINE}", OLDEST)
    found = _on_gpu(known, machine.capability)
    if found.unit is not None and machine.capability < AMPERE and known.name != "fp32":
        # Quantized or not, the rest of the model is in 16 bit, and bf16 is missing.
        return Support(found.unit, found.kernel, note=found.note, dtype="float16")
    return found


def method_problem(quantization: Quantization | None, machine: Machine) -> str:
    """Why the engine does not load a checkpoint's own quantization there; empty where it does.

    Its configuration asks for a capability (`get_min_capability`) before any kernel is looked for.
    """
    if quantization is None or machine.capability is None:
        return ""
    if machine.capability >= quantization.oldest:
        return ""
    return _refused(machine.capability, quantization.name, quantization.oldest).reason


def kv_problem(kv_dtype: str, machine: Machine, *, mla: bool, head_dim: int) -> str:
    """Why the engine cannot keep keys and values in this type there; empty where it can.

    By the attention backend that vLLM takes by itself: below 8.9 Triton's refuses FP8, and
    FlashInfer's, which starts at 8.0, knows four sizes of heads and no latent cache (MLA).
    """
    if machine.is_cpu:
        if kv_dtype.endswith("_per_token_head") or (mla and kv_dtype.startswith("fp8")):
            return f"vLLM's CPU backend has no {kv_dtype} KV cache" + (" for MLA" if mla else "")
        return ""
    capability = machine.capability or OLDEST
    here = f"this is {words(capability)}"
    if kv_dtype == "bfloat16" and capability < AMPERE:
        return f"keys and values in bfloat16 need compute capability 8.0; {here}"
    if not kv_dtype.startswith("fp8") or capability >= ADA:
        return ""
    flashinfer = kv_dtype != "fp8_per_token_head" and not mla and head_dim in FLASHINFER_HEADS
    if flashinfer and capability >= AMPERE:
        return ""
    needs = "8.0" if flashinfer else "8.9"
    return f"an FP8 KV cache of this model needs compute capability {needs}; {here}"


def words(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _on_gpu(known: WeightFormat, capability: tuple[int, int]) -> Support:
    sixteen: Unit = "bf16" if capability >= AMPERE else "fp16"
    name = known.name
    if name == "bf16":
        if capability < AMPERE:
            found = _refused(capability, "bfloat16", AMPERE)
            reason = f"{found.reason}; the baseline there is fp16"
            return Support(None, reason=reason, instead="fp16")
        return Support("bf16", "torch")
    if name in ("fp16", "fp32"):
        return Support("fp16" if name == "fp16" else "fp32", "torch")
    if name.startswith("fp8"):
        block = name == "fp8_block"
        if capability >= (HOPPER if block else ADA):
            return Support("fp8", "DeepGEMM or CUTLASS" if block else "CUTLASS or FlashInfer")
        return Support(sixteen, "Marlin", note="FP8 weights alone; products are in 16 bit")
    if name == "w8a8_int8":
        if capability >= BLACKWELL:
            return Support(
                None,
                reason=f"vLLM {ENGINE} has INT8 products below compute capability 10.0 only; this "
                f"is {words(capability)}",
                instead="fp8_dynamic",
            )
        return Support("int8", "CUTLASS")
    if name == "mxfp8":
        if capability < AMPERE:
            return _refused(capability, "mxfp8", AMPERE)
        if capability >= BLACKWELL:
            return Support("fp8", "FlashInfer")
        return Support(sixteen, "Marlin", note="FP8 weights alone; products are in 16 bit")
    if name in ("nvfp4", "mxfp4"):
        if capability >= BLACKWELL:
            return Support("fp4", "FlashInfer or CUTLASS")
        if name == "mxfp4" and capability < AMPERE:
            return _refused(capability, "mxfp4", AMPERE)
        return Support(sixteen, "Marlin", note="FP4 weights alone; products are in 16 bit")
    if name == "nvfp4_a16":
        return Support(sixteen, "Marlin", note="FP4 weights alone; products are in 16 bit")
    # Integer weights that are widened in registers.
    return Support(sixteen, "Machete" if capability == HOPPER else "Marlin")


def _on_cpu(known: WeightFormat, instructions: frozenset[str]) -> Support:
    if not instructions:
        return Support(None, reason="its hardware file says no `cpu_instructions`")
    if known.name in ("bf16", "fp16", "fp32"):
        unit: Unit = "bf16" if known.name == "bf16" else "fp16" if known.name == "fp16" else "fp32"
        return Support(unit, "oneDNN")
    if known.name == "w8a8_int8":
        return Support("int8", "oneDNN")
    if known.name.startswith("fp8"):
        if "amx" in instructions:
            return Support("bf16", "oneDNN or AMX", note="FP8 weights are widened")
        return Support(None, reason="without AMX vLLM only emulates FP8 on a CPU")
    if known.weight_bits == 4 and not known.floating:
        if "avx512" in instructions:
            return Support("bf16", "CPUWNA16")
        return Support(None, reason="vLLM's kernel for 4-bit weights on a CPU needs AVX-512")
    return Support(None, reason=f"vLLM {ENGINE} has no {known.name} kernel for CPUs")


def _refused(capability: tuple[int, int], what: str, needs: tuple[int, int]) -> Support:
    reason = f"{what} needs compute capability {words(needs)}; this is {words(capability)}"
    return Support(None, reason=reason)
