"""The plan of a candidate with prefill and decode apart, before its engines start."""

from __future__ import annotations

from typing import Any

import pytest

from registry.candidate_memory import MemoryPlan, memory_plan
from registry.machines import Machine
from registry.role_plans import served_plan
from registry.topology import Disaggregated
from tasks.capacity_inputs import machine_of
from tests.unit.shape_builders import published

GIB = 2**30
SHAPE = published("qwen2_5_32b")
H20 = machine_of("nvidia_h20")
SHARED: dict[str, Any] = {"max-model-len": 4096, "gpu-memory-utilization": 0.9}
TOPOLOGY = Disaggregated(
    prefill_args={"max-num-seqs": 8},
    decode_args={"max-num-seqs": 64, "tensor-parallel-size": 2},
)


def plan(
    topology: Disaggregated | None = TOPOLOGY,
    machine: Machine = H20,
    args: dict[str, Any] = SHARED,
    model: str = "qwen2_5_32b",
) -> MemoryPlan:
    shape = published(model)
    return served_plan("c", shape, None, args, {}, topology, machine, "0.32.0")


def test_each_role_has_the_plan_of_an_engine_with_its_arguments() -> None:
    made = plan()
    assert set(made.roles) == {"prefill", "decode"}
    for role in ("prefill", "decode"):
        args = TOPOLOGY.arguments(role, SHARED)
        alone = memory_plan(f"c, {role}", SHAPE, None, args, {}, H20, "0.32.0")
        assert made.roles[role] == alone
    assert [made.roles[role].tensor_parallel_size for role in made.roles] == [1, 2]
    # What stands on top is a decode engine: it is whose KV cache the server tells.
    assert made.kv_cache_tokens == made.roles["decode"].kv_cache_tokens
    assert made.topology == TOPOLOGY.words and made.refusal == made.unknown == ""
    assert MemoryPlan.model_validate_json(made.model_dump_json()) == made


def test_a_role_that_cannot_run_refuses_the_candidate_by_its_name() -> None:
    a10 = machine_of("nvidia_a10")
    made = plan(machine=a10)
    assert made.refusal.startswith("prefill: too little memory: it takes at least 62.03 GiB")
    wide = TOPOLOGY.model_copy(update={"prefill_args": {"tensor-parallel-size": 8}})
    assert plan(topology=wide, machine=a10).refusal.startswith("decode: too little memory")


def test_what_is_not_understood_of_a_role_is_said_with_its_name() -> None:
    odd = TOPOLOGY.model_copy(update={"decode_args": {"swap-space": 4}})
    made = plan(topology=odd)
    assert made.unknown == "decode: what swap-space does to memory is not known here"
    assert made.refusal == ""


@pytest.mark.parametrize(("engines", "refused"), [(1, False), (2, True)])
def test_on_a_cpu_all_engines_lie_in_one_memory(engines: int, refused: bool) -> None:
    # Qwen2.5-7B in 16 bit: 14.19 GiB of weights, and 128 tokens' cache; two fit into 30 GiB.
    machine = Machine("cpu", "this CPU", 30 * GIB)
    made = plan(
        topology=Disaggregated(decode=engines),
        machine=machine,
        args={"max-model-len": 128, "kv-cache-memory-bytes": GIB},
        model="qwen2_5_7b",
    )
    assert bool(made.refusal) == refused
    if refused:
        assert made.refusal.startswith("too little memory: disaggregated, 1 prefill + 2 decode")
    assert made.roles["decode"].refusal == ""


def test_a_colocated_plan_is_what_it_was() -> None:
    made = plan(topology=None)
    assert made == memory_plan("c", SHAPE, None, SHARED, {}, H20, "0.32.0")
    assert not {"topology", "roles"} & set(made.model_dump())
