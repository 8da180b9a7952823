"""What a topology in a serve recipe may not say, beyond the rules for engine arguments.

Read in vLLM 0.32's sources: two engines transfer only where the connector finds the same model,
types and attention on both sides (`kv_connector/v1/nixl/metadata.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.serve_rules import argument_problems
from registry.topology import ROLES, Disaggregated

ON_BOTH_SIDES = frozenset(
    {
        *("dtype", "quantization", "kv-cache-dtype", "attention-backend", "attention-config"),
        *("disable-hybrid-kv-cache-manager", "hf-overrides", "max-model-len"),
    }
)
"""Arguments in which the sides may not differ: no transfer, or a prompt that one side refuses."""

OFFLOADING = ("kv-offloading-size", "kv-offloading-backend")
"""With the first of them vLLM takes another connector, whatever it was told."""


def topology_problems(topology: Disaggregated, engine_args: Mapping[str, Any]) -> list[str]:
    """What is wrong with it beside these shared arguments: `WHERE: NAME: reason` each. Pure."""
    problems = []
    for role in ROLES:
        own = topology.own(role)
        where = f"{role}_args"
        problems += [f"{where}: {one}" for one in argument_problems(own)]
        problems += [
            f"{where}: {name}: has to be the same on both sides; write it into `engine_args`"
            for name in own
            if name in ON_BOTH_SIDES
        ]
        problems += [
            f"{where}: {name}: vLLM would move the KV cache with another connector"
            for name in OFFLOADING
            if name in own
        ]
    problems += [
        f"engine_args: {name}: vLLM would move the KV cache with another connector"
        for name in OFFLOADING
        if name in engine_args
    ]
    stages = topology.arguments("decode", engine_args).get("pipeline-parallel-size", 1)
    if stages not in (None, 1, "1"):
        problems.append(
            f"decode: pipeline-parallel-size is {stages}: vLLM 0.32 takes 1 for a decode engine "
            f"over {topology.connector}"
        )
    return problems
