"""What an engine will hold, from the parts of its memory floor. Pure."""

from __future__ import annotations

from math import ceil

from registry.engine_memory import PlannedMemory, cpu_base
from registry.machines import Machine
from registry.memory_floor import RESERVE, Parts


def planned_memory(
    parts: Parts,
    machine: Machine,
    *,
    gpus: int,
    pieces: int,
    kv_bytes: int | None,
    utilization: float,
    own_worker: bool,
    full: bool,
) -> PlannedMemory:
    """`parts` of the fullest GPU, `full` with all of its sequences; `pieces` of the vocabulary.

    `kv_bytes`: the cache, where the recipe gives it. Else a GPU's share that `utilization` names
    is filled with cache; on a CPU nothing is known then.
    """
    weights = parts.weights_bytes + parts.engine_bytes + parts.draft_weights_bytes
    moment = parts.activation_bytes + parts.graph_bytes
    base = cpu_base(pieces, own_worker=own_worker) if machine.is_cpu else 0
    start = None if kv_bytes is None else weights + kv_bytes + base
    if machine.is_cpu:
        peak = None if start is None else start + moment
    elif start is None:
        peak = int(machine.memory_bytes * utilization)
    else:
        peak = ceil((start + moment) * (1 + RESERVE))
    return PlannedMemory(
        gpus=0 if machine.is_cpu else gpus,
        weights_bytes=weights,
        activation_bytes=parts.activation_bytes,
        graph_bytes=parts.graph_bytes,
        base_bytes=base,
        start_bytes=start if machine.is_cpu else None,
        peak_bytes=peak,
        floor_bytes=parts.floor_bytes if full else None,
        hardware_bytes=machine.memory_bytes,
    )
