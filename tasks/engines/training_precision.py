"""In what precision a model is trained here: bfloat16 where the hardware has it, else float32.

Emulated bfloat16 is right and slow (AVX2: GPTQ on 135M parameters took minutes in bfloat16 and
seconds in float32), so it is never chosen by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from registry.errors import Problem, StageFailed

NATIVE_FROM = (8, 0)
"""CUDA compute capability from which tensor cores take bfloat16 (Ampere)."""

NATIVE_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""CPU flags, as the kernel lists them, of instructions that multiply bfloat16 (`bf16`: of ARM)."""


@dataclass(frozen=True)
class Precision:
    """`name` is `float32` or `bfloat16`; `why` is for the result."""

    name: str
    why: str


def choose(
    wanted: str, capability: tuple[int, int] | None, flags: Collection[str] = ()
) -> Precision:
    """What to train in. Pure.

    `wanted`: `auto`, `float32` or `bfloat16`. `capability`: of the weakest CUDA device that is
    used, None where the CPU trains; `flags`: of the CPU.
    """
    if wanted == "float32":
        return Precision("float32", "the recipe says so")
    if capability is not None:
        native = capability >= NATIVE_FROM
        found = f"CUDA capability {capability[0]}.{capability[1]}"
    else:
        having = [flag for flag in NATIVE_FLAGS if flag in flags]
        native = bool(having)
        found = f"CPU with {having[0]}" if having else "CPU without bfloat16 instructions"
    if wanted == "bfloat16":
        return Precision("bfloat16", "the recipe says so" + ("" if native else f"; {found}"))
    return Precision("bfloat16" if native else "float32", found)


def here(wanted: str) -> Precision:
    """`choose` for this machine. Raises `StageFailed` for a name that is none."""
    import torch

    from registry.provenance import hardware

    if wanted not in ("auto", "float32", "bfloat16"):
        raise StageFailed(Problem("precision", f"{wanted!r} is not auto, float32 or bfloat16"))
    capability = None
    if torch.cuda.is_available():
        capability = min(
            torch.cuda.get_device_capability(at) for at in range(torch.cuda.device_count())
        )
    return choose(wanted, capability, hardware()["flags"])
