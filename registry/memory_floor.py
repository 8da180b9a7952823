"""The least memory that serves a model at a concurrency and a context, and the way back."""

from __future__ import annotations

from dataclasses import dataclass

from registry.model_shapes import ModelShape
from registry.weight_formats import FORMATS

__all__ = ["FORMATS", "MemoryFloor", "Parts", "floor_of", "largest_concurrency"]

RESERVE = 0.05


@dataclass(frozen=True)
class Parts:
    """Bytes. Every field stands beside the others; `floor_bytes` is their sum.

    The target's are `weights_bytes` and `kv_bytes`, a draft's stand beside them, never within.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    draft_weights_bytes: int
    draft_kv_bytes_per_token: int
    draft_kv_bytes: int
    activation_bytes: int
    graph_bytes: int
    reserve_bytes: int
    floor_bytes: int


@dataclass(frozen=True)
class MemoryFloor:
    per_gpu: Parts
    """Of the fullest GPU."""
    total: Parts
    """Summed over all GPUs."""


def floor_of(
    shape: ModelShape,
    *,
    format: str = "auto",
    kv_dtype: str = "auto",
    concurrency: int,
    context: int,
    tp: int = 1,
    pp: int = 1,
    draft: ModelShape | None = None,
    block: int = 16,
    max_batched_tokens: int | None = None,
    eager: bool = False,
) -> MemoryFloor:
    """`auto`: the format and KV dtype that the configuration says."""
    raise NotImplementedError


def largest_concurrency(
    shape: ModelShape,
    gpu_bytes: int,
    *,
    format: str = "auto",
    kv_dtype: str = "auto",
    context: int,
    tp: int = 1,
    pp: int = 1,
    draft: ModelShape | None = None,
    block: int = 16,
    max_batched_tokens: int | None = None,
    eager: bool = False,
) -> int:
    """Most sequences of `context` tokens whose floor fits into `gpu_bytes` a GPU; 0: none."""
    raise NotImplementedError
