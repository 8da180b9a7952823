"""Which attention backend vLLM 0.32 takes by itself on a generation of GPUs.

For a decoder with 16-bit attention, an unquantized KV cache and heads of 64 or 128, as vLLM's
`platforms/cuda.py` and `v1/attention/backends/fa_utils.py` decide it. A test asks that code.
"""

from __future__ import annotations

from dataclasses import dataclass

from registry.deployment import Deployment, one_line

ENGINE = "0.32"


@dataclass(frozen=True)
class Attention:
    """A backend by vLLM's name, and the FlashAttention version where it is that one."""

    backend: str
    flash_attn_version: int | None = None

    @property
    def words(self) -> str:
        """The engine arguments that demand exactly this."""
        if self.flash_attn_version is None:
            return f"--attention-backend {self.backend}"
        return (
            f"--attention-config.backend {self.backend} "
            f"--attention-config.flash_attn_version {self.flash_attn_version}"
        )


GENERATIONS = (
    ("Turing", "7.5", "T4, RTX 20"),
    ("Ampere", "8.0, 8.6", "A100, A10, RTX 30"),
    ("Ada", "8.9", "L4, L40S, RTX 40"),
    ("Hopper", "9.0", "H100, H200"),
    ("Blackwell, data centre", "10.0, 10.3", "B200, B300"),
    ("Blackwell, desktop", "12.0", "RTX 50, RTX PRO 6000"),
)


def attention_backend(compute_capability: tuple[int, int]) -> Attention:
    """What vLLM 0.32 takes by itself. Raises `ValueError` below 7.5, for which it has no kernels.

    On data-centre Blackwell it is FlashInfer; where FlashInfer does not go (heads of 80 or 96,
    the package is missing), FlashAttention 4.
    """
    major, _ = compute_capability
    if compute_capability < (7, 5):
        raise ValueError(f"compute capability {compute_capability} is older than Turing (7.5)")
    if major < 8:
        return Attention("TRITON_ATTN")  # FlashAttention needs 8.0, FlashInfer is broken on 7.5
    if major == 10:
        return Attention("FLASHINFER")
    return Attention("FLASH_ATTN", 3 if major == 9 else 2)


def attention_page(deployment: Deployment) -> str:
    """`attention-backends.md`: per generation what vLLM takes, how to force it, what was gated."""
    rows = []
    for generation, capabilities, cards in GENERATIONS:
        major, _, minor = capabilities.split(",")[0].partition(".")
        taken = attention_backend((int(major), int(minor)))
        version = f" {taken.flash_attn_version}" if taken.flash_attn_version else ""
        rows.append(
            f"| {generation} ({capabilities}) | {cards} | {taken.backend}{version} "
            f"| `{taken.words}` | rendered, not run |"
        )
    forced = sorted(name for name in deployment.bundle.engine_args if "attention" in name)
    gated = (
        f"sets it by {', '.join(one_line(name) for name in forced)}"
        if forced
        else "has no argument for it: vLLM chooses"
    )
    where = (
        f"It was gated on {one_line(deployment.gated_on)}."
        if deployment.gpus
        else "It was gated on a CPU: nothing below was run for it."
    )
    return "\n".join(
        [
            "# Attention backends",
            "",
            f"rendered, not run. The gated bundle {gated}. {where}",
            f"The table is vLLM {ENGINE}'s own choice for a decoder with 16-bit attention and "
            "heads of 64 or 128.",
            "An argument added here makes another bundle, which has to be gated.",
            "",
            "| generation (compute capability) | cards | vLLM takes | to force it | |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            "Turing: FlashAttention needs compute capability 8.0, and this vLLM leaves FlashInfer "
            "out there; no bfloat16 either.",
            "Blackwell, data centre: FlashAttention 4 where FlashInfer does not go; FlashAttention "
            "3 runs on Hopper only.",
            "",
        ]
    )
