"""Memory that a plan gives an engine, what the engine took, and how far apart they are. Pure.

A plan is written before the engine starts; the rest is read from its processes, from NVML and from
its own log afterwards. Bytes throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

APART = 0.05
"""More than this share is said of what is counted."""

ESTIMATE_APART = 0.25
"""More than this share is said of what is an estimate."""

_MIB = 1 << 20
CPU_BASE = 1259 * _MIB
CPU_BASE_OF_WORKER = 1849 * _MIB
CPU_BASE_OF_PIECE = 7465
"""Resident memory of vLLM 0.32's processes on a CPU without weights and cache: Python and its
libraries, and what each piece of the vocabulary adds (tokenizers in two processes, the head's
packed copy). Measured here with vocabularies of 1,792 and of 49,152 pieces; `OF_WORKER`: with the
worker in a process of its own, which is the engine's default."""


class _Recorded(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlannedMemory(_Recorded):
    """Of the fullest GPU; on a CPU resident memory of all of the engine's processes."""

    gpus: int = Field(description="0: a CPU.")
    weights_bytes: int = Field(
        description="Target, draft, and what the engine adds to them: counted."
    )
    activation_bytes: int = Field(description="Estimate.")
    graph_bytes: int = Field(description="Estimate.")
    base_bytes: int = Field(
        default=0, description="Of a CPU: the processes without weights and cache; an estimate."
    )
    start_bytes: int | None = Field(
        default=None, description="Of a CPU, when it has started: weights, all of its cache, base."
    )
    peak_bytes: int | None = Field(
        default=None,
        description="The most: with activations, or the share of the machine that it is given. "
        "Null: not known.",
    )
    floor_bytes: int | None = Field(
        default=None,
        description="The least, for max-num-seqs sequences of max-model-len; of a CPU without the "
        "base. Null: the recipe leaves one of them to the engine.",
    )
    hardware_bytes: int | None = Field(
        default=None, description="Of one GPU, or the CPU, that the release is for."
    )
    files_counted_bytes: int | None = Field(
        default=None, description="Of the target's tensors, as its configuration says."
    )
    files_bytes: int | None = Field(
        default=None, description="Of the same, as its files hold them. Null: there are none."
    )

    @property
    def floor_of_all(self) -> int | None:
        """The least on all GPUs together, or the CPU; None: not known."""
        return None if self.floor_bytes is None else self.floor_bytes * max(1, self.gpus)


class MeasuredMemory(_Recorded):
    """Of a started engine, before any load. Null: not shown by this engine or machine."""

    resident_bytes: int | None = Field(
        default=None,
        description="RSS of all its processes; pages that they share count in each of them.",
    )
    proportional_bytes: int | None = Field(
        default=None, description="PSS: each shared page divided by those who share it."
    )
    private_bytes: int | None = Field(
        default=None,
        description="Anonymous part of PSS: weights, cache and heap, without files and libraries.",
    )
    gpu_bytes: int | None = Field(
        default=None, description="In use on all GPUs that NVML shows, whoever uses it."
    )
    loaded_bytes: int | None = Field(
        default=None, description="Of one GPU, that loading the model took; the engine's words."
    )
    activation_bytes: int | None = Field(default=None, description="Peak; the engine's words.")
    graph_bytes: int | None = Field(default=None, description="CUDA graphs; the engine's words.")
    cache_bytes: int | None = Field(default=None, description="KV cache; the engine's words.")


class ComparedMemory(_Recorded):
    """A figure of the plan beside what was measured."""

    what: str
    planned_bytes: int
    measured_bytes: int
    counted: bool = Field(description="False: the plan's figure is an estimate.")
    how: str = Field(description="How it was measured.")

    @property
    def share(self) -> float:
        """Measured above planned, as a share of planned."""
        return (self.measured_bytes - self.planned_bytes) / self.planned_bytes

    @property
    def apart(self) -> bool:
        """Whether the difference is worth saying."""
        return abs(self.share) > (APART if self.counted else ESTIMATE_APART)

    @property
    def words(self) -> str:
        kind = "counted" if self.counted else "an estimate"
        return (
            f"{self.what}: {size_words(self.measured_bytes)} measured, "
            f"{size_words(self.planned_bytes)} planned ({self.share:+.1%}, {kind}; {self.how})"
        )


def cpu_base(pieces: int, *, own_worker: bool) -> int:
    """Resident memory of the processes without weights and cache. `pieces`: of the vocabulary."""
    return (CPU_BASE_OF_WORKER if own_worker else CPU_BASE) + CPU_BASE_OF_PIECE * pieces


FILES = "weights in the files"
START = "engine at its start"
LOADED = "model on a GPU"
ACTIVATIONS = "activations of a GPU"
GRAPHS = "CUDA graphs of a GPU"
PEAK = "peak under load"

_RESIDENT = "resident memory of all its processes"
_WORDS = "the engine's words"


def compared(
    planned: PlannedMemory | None,
    measured: MeasuredMemory | None,
    peak_bytes: float | None = None,
    gpu_peak_bytes: float | None = None,
) -> list[ComparedMemory]:
    """Each figure that both sides have. The peaks are the highest of a load test."""
    if planned is None:
        return []
    found = [_one(FILES, planned.files_counted_bytes, planned.files_bytes, "their headers", True)]
    if planned.gpus == 0:
        start = measured.resident_bytes if measured else None
        found.append(_one(START, planned.start_bytes, start, _RESIDENT))
        found.append(_one(PEAK, planned.peak_bytes, peak_bytes, _RESIDENT))
    else:
        if measured is not None:
            found += [
                # What a kernel packs or pads is counted nowhere, and no GPU was here.
                _one(LOADED, planned.weights_bytes, measured.loaded_bytes, _WORDS),
                _one(ACTIVATIONS, planned.activation_bytes, measured.activation_bytes, _WORDS),
                _one(GRAPHS, planned.graph_bytes, measured.graph_bytes, _WORDS),
            ]
        peak = planned.peak_bytes * planned.gpus if planned.peak_bytes is not None else None
        found.append(_one(PEAK, peak, gpu_peak_bytes, "in use on all GPUs"))
    return [one for one in found if one is not None]


def _one(
    what: str, planned: int | None, measured: float | None, how: str, counted: bool = False
) -> ComparedMemory | None:
    if not planned or measured is None:
        return None
    return ComparedMemory(
        what=what,
        planned_bytes=planned,
        measured_bytes=round(measured),
        counted=counted,
        how=how,
    )


def highest(values: Sequence[float | None]) -> float | None:
    return max((one for one in values if one is not None), default=None)


def size_words(size: float) -> str:
    """`1.25 GiB`, `20.31 MiB`."""
    gib = 1 << 30
    return f"{size / _MIB:.2f} MiB" if size < gib / 10 else f"{size / gib:.2f} GiB"
