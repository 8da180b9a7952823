"""Memory of a started engine: of its processes, of the GPUs, and what it says of it itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from registry.engine_memory import MeasuredMemory
from tasks.engines.engine_watch import gpu_handles, gpu_memory

_GIB = 1 << 30

_LOADED = re.compile(r"Model loading took ([\d.]+) GiB memory")
_CACHE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
_TAKEN = re.compile(r"([\d.]+)\s+GiB for peak activation, and ([\d.]+)\s+GiB for CUDAGraph memory")
"""What vLLM 0.32's workers on GPUs print, to a hundredth of a GiB. On a CPU they print none."""


def measured_memory(pids: Sequence[int], log: str) -> MeasuredMemory:
    """Of the processes `pids` and all their children, now; of the GPUs, and of the log's words."""
    gpus = gpu_memory(gpu_handles())
    return MeasuredMemory.model_validate(
        {**_resident(_family(pids)), "gpu_bytes": gpus, **engine_words(log)}
    )


def engine_words(log: str) -> dict[str, int | None]:
    """What the engine printed of one GPU, the most of any worker; null: it did not. Pure."""
    taken = _TAKEN.findall(log)
    return {
        "loaded_bytes": _most(_LOADED.findall(log)),
        "activation_bytes": _most(activation for activation, _ in taken),
        "graph_bytes": _most(graphs for _, graphs in taken),
        "cache_bytes": _most(_CACHE.findall(log)),
    }


def _most(sizes: Iterable[str]) -> int | None:
    return max((round(float(size) * _GIB) for size in sizes), default=None)


def _family(pids: Sequence[int]) -> list[int]:
    found = set(pids)
    for pid in pids:
        try:
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:
            continue
    return sorted(found)


def _resident(pids: Sequence[int]) -> dict[str, int | None]:
    """Sums over the processes of `smaps_rollup`; null where the kernel does not show it.

    Making it walks all pages: 23 ms for a process of 1.3 GB, so once, and not during a load.
    """
    pages: list[dict[str, int]] = []
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        pages.append({name: int(size) << 10 for name, size in _LINE.findall(text)})
    names = {
        "resident_bytes": "Rss",
        "proportional_bytes": "Pss",
        "private_bytes": "Pss_Anon",
    }
    return {
        ours: sum(one.get(theirs, 0) for one in pages) if pages else None
        for ours, theirs in names.items()
    }


_LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
