"""What is certain about a candidate with prefill and decode apart, before its engines start. Pure.

Each role has the plan that one engine with its arguments would have (`registry.candidate_memory`),
and one role that cannot run refuses the candidate. On a CPU all engines lie in one memory, so their
least is summed; by GPUs each has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.candidate_memory import MemoryPlan, memory_plan
from registry.machines import GIB, Machine
from registry.shape_parts import ModelShape
from registry.topology import ROLES, Disaggregated


def served_plan(
    candidate: str,
    shape: ModelShape,
    draft: ModelShape | None,
    args: Mapping[str, Any],
    env: Mapping[str, str],
    topology: Disaggregated | None,
    machine: Machine,
    engine_version: str,
) -> MemoryPlan:
    """The plan of one engine, or of both roles; what is not understood is in `unknown`."""
    if topology is None:
        return memory_plan(candidate, shape, draft, args, env, machine, engine_version)
    roles = {
        role: memory_plan(
            f"{candidate}, {role}",
            shape,
            draft,
            topology.arguments(role, args),
            env,
            machine,
            engine_version,
        )
        for role in ROLES
    }
    # A decode engine's KV cache is what the server says that it has. What is measured of memory is
    # of all engines together, what is planned here of one.
    return roles["decode"].model_copy(
        update={
            "candidate": candidate,
            "memory": None,
            "refusal": _first(roles, "refusal") or _together(roles, topology, machine),
            "unknown": _first(roles, "unknown"),
            "topology": topology.words,
            "roles": dict(roles),
        }
    )


def _first(roles: Mapping[Any, MemoryPlan], field: str) -> str:
    """`prefill: why`, of the first role that has something to say."""
    return next((f"{role}: {said}" for role in ROLES if (said := getattr(roles[role], field))), "")


def _together(roles: Mapping[Any, MemoryPlan], topology: Disaggregated, machine: Machine) -> str:
    if not machine.is_cpu:
        return ""
    least = sum(topology.engines(role) * (roles[role].least_bytes or 0) for role in ROLES)
    if least <= machine.memory_bytes:
        return ""
    return (
        f"too little memory: {topology.words} take at least {least / GIB:.2f} GiB together, and "
        f"{machine.title} has {machine.memory_bytes / GIB:.2f} GiB"
    )
