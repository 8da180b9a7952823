"""Which machines serve a model with prefill and decode apart, and what a request moves. Pure.

Each role is planned as an engine of its own (`registry.capacity_plan`): a prefill engine holds the
weights and the cache of the prompts that it has in flight, from their first token until a decode
engine has fetched them; a decode engine the weights and the cache of its sequences, prompt and
answer. Both hold all of the weights, so two roles never take less memory than one engine. A
request's transfer is the cache of its prompt, in whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from registry.capacity_plan import plan
from registry.errors import Problem, UserError
from registry.format_support import support_of
from registry.kv_cache import block_size, kv_dtype_of, token_bytes
from registry.machines import Machine
from registry.memory_floor import Parts, named_format
from registry.plan_parts import (
    HOURS_PER_MONTH,
    MAX_BATCHED_TOKENS,
    UTILIZATION,
    Demand,
    Fit,
    Limits,
    Model,
    RuledOut,
    Wish,
)
from registry.roofline import Estimate, Load, Work, estimate_apart, transfer_seconds
from registry.topology import ROLES, Disaggregated, Role


@dataclass(frozen=True)
class RoleAsk:
    """What the engine arguments of a role ask for: sequences and tokens of one engine."""

    sequences: int
    context: int
    wish: Wish


@dataclass(frozen=True)
class PartsFit:
    """All engines of both roles on one kind of machine. `roles`: of one engine each."""

    machine: Machine
    topology: Disaggregated
    roles: Mapping[Role, Fit]
    machines: int
    transfer_bytes: int
    transfer_ms: float | None
    estimate: Estimate

    @property
    def gpus(self) -> int:
        return sum(self.topology.engines(role) * self.roles[role].gpus for role in ROLES)

    @property
    def cost_per_month(self) -> float | None:
        price = self.machine.price_per_hour
        return None if price is None else price * HOURS_PER_MONTH * self.machines

    @property
    def max_concurrency(self) -> int:
        """Sequences that all decode engines have room for."""
        return self.topology.decode * self.roles["decode"].max_concurrency

    @property
    def total(self) -> Parts:
        """Summed over all GPUs of all engines; a token's bytes are those of a decode engine."""
        each = [self.roles[role].floor.total * self.topology.engines(role) for role in ROLES]
        found = reduce(add, each)
        one = self.roles["decode"].floor.total
        return Parts(
            **{
                **found.__dict__,
                "kv_bytes_per_token": one.kv_bytes_per_token,
                "draft_kv_bytes_per_token": one.draft_kv_bytes_per_token,
            }
        )

    @property
    def fullest(self) -> Parts:
        """Of the GPU that holds most."""
        return max(
            (self.roles[role].floor.per_gpu for role in ROLES), key=lambda one: one.floor_bytes
        )

    @property
    def rank(self) -> tuple[bool, float, float, str]:
        """As `Fit.rank`."""
        cost = self.cost_per_month
        size = max(1, self.gpus) * self.machine.memory_bytes
        return cost is None, cost or 0.0, size, self.machine.name


def role_asks(
    topology: Disaggregated, engine_args: Mapping[str, Any], format: str
) -> dict[Role, RoleAsk]:
    """From a serve recipe. Raises `UserError` for numbers that it does not say."""
    asks: dict[Role, RoleAsk] = {}
    problems = []
    for role in ROLES:
        args = topology.arguments(role, engine_args)
        numbers = {name: _whole(args.get(name)) for name in ("max-num-seqs", "max-model-len")}
        problems += [
            Problem(
                f"serve recipe: {role}: {name}",
                f"is {args.get(name)!r}, and a plan needs a number",
                f"write it into `engine_args`, or into `topology.{role}_args`",
            )
            for name, number in numbers.items()
            if number is None
        ]
        wish = Wish(
            formats=(format,),
            kv_dtype=str(args.get("kv-cache-dtype", "auto")),
            tp=_whole(args.get("tensor-parallel-size")) or 1,
            pp=_whole(args.get("pipeline-parallel-size")) or 1,
            utilization=float(args.get("gpu-memory-utilization", UTILIZATION)),
            max_batched_tokens=_whole(args.get("max-num-batched-tokens")) or MAX_BATCHED_TOKENS,
        )
        asks[role] = RoleAsk(numbers["max-num-seqs"] or 1, numbers["max-model-len"] or 1, wish)
    if problems:
        raise UserError(problems)
    return asks


def _whole(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() and int(text) > 0 else None


def plan_in_parts(
    model: Model,
    machines: Sequence[Machine],
    topology: Disaggregated,
    asks: Mapping[Role, RoleAsk],
    demand: Demand,
    limits: Limits,
) -> tuple[tuple[PartsFit, ...], tuple[RuledOut, ...]]:
    """Every machine, ranked; a role that does not fit rules it out. Raises `UserError` as `plan`.

    `demand` is of all decode engines together, and what a limit is meant for.
    """
    fits, ruled = [], []
    each = math.ceil(demand.concurrency / topology.decode)
    for machine in machines:
        roles: dict[Role, Fit] = {}
        for role in ROLES:
            ask = asks[role]
            # The cache of a prompt may be as long as a request's; there is no answer in it.
            wanted = each if role == "decode" else ask.sequences
            longest = min(demand.longest, ask.context)
            context = min(demand.context, ask.context)
            found = plan(model, [machine], Demand(wanted, context, longest), ask.wish, Limits())
            if not found.fits:
                out = found.ruled_out[-1]
                ruled.append(
                    RuledOut(machine, out.format, f"{role}: {out.reason}", out.needs_bytes, out.tp)
                )
                break
            roles[role] = found.fits[0]
        if len(roles) < len(ROLES):
            continue
        if each > asks["decode"].sequences:
            why = f"decode: {each} sequences on each engine, and max-num-seqs is "
            why += str(asks["decode"].sequences)
            ruled.append(RuledOut(machine, roles["decode"].format, why))
            continue
        one = _fit(model, machine, topology, asks, roles, demand)
        told = limits.broken(one.estimate)
        if one.estimate.prefill_share is not None and one.estimate.prefill_share >= 1:
            told = ["more prompts arrive than the prefill engines can compute"]
        if told:
            what = f"estimate, not measured: {'; '.join(told)}"
            ruled.append(RuledOut(machine, roles["decode"].format, what))
            continue
        fits.append(one)
    return tuple(sorted(fits, key=lambda fit: fit.rank)), tuple(ruled)


def _fit(
    model: Model,
    machine: Machine,
    topology: Disaggregated,
    asks: Mapping[Role, RoleAsk],
    roles: Mapping[Role, Fit],
    demand: Demand,
) -> PartsFit:
    prompt = demand.prompt or demand.context
    wish = asks["decode"].wish
    size = request_bytes(model, wish, math.ceil(prompt), cpu=machine.is_cpu)
    pairs = min(roles[role].tp for role in ROLES)
    seconds = None if machine.is_cpu else transfer_seconds(size, machine, pairs)
    works = {role: _work(model, machine, roles[role]) for role in ROLES}
    load = Load(
        sequences=math.ceil(demand.concurrency / topology.decode),
        context=demand.mean_context,
        prompt=prompt,
        output=demand.output,
        mean_prompt=demand.mean_prompt or prompt,
        rate=demand.rate,
    )
    sizes = [
        roles[role].tp * roles[role].pp for role in ROLES for _ in range(topology.engines(role))
    ]
    return PartsFit(
        machine=machine,
        topology=topology,
        roles=roles,
        machines=machines_for(sizes, machine),
        transfer_bytes=size,
        transfer_ms=None if seconds is None else seconds * 1000,
        estimate=estimate_apart(
            works["prefill"],
            works["decode"],
            load,
            topology.prefill,
            asks["prefill"].wish.max_batched_tokens,
            seconds,
        ),
    )


def request_bytes(model: Model, wish: Wish, prompt: int, *, cpu: bool) -> int:
    """Bytes of the cache of one prompt, draft's included: what a request moves.

    Whole blocks; of a sliding window one block more than it has (vLLM 0.32's
    `nixl/base_scheduler.py`), of linear attention its state, two bytes a value.
    """
    shape = model.shape
    size = block_size(shape, cpu=cpu)
    blocks = math.ceil(prompt / size)
    kv_dtype = kv_dtype_of(shape, wish.kv_dtype, named_format(wish.formats[0], shape))
    found = 0
    for layer in [*shape.layers, *(model.draft.layers if model.draft else ())]:
        most = blocks if layer.window is None else math.ceil(layer.window / size) + 1
        found += min(blocks, most) * size * token_bytes(layer, kv_dtype) + 2 * layer.state
    return found


def _work(model: Model, machine: Machine, fit: Fit) -> Work:
    unit = support_of(fit.format, machine).unit
    rate = machine.compute.get(unit or "bf16")
    return Work(model.shape, machine, fit.floor.per_gpu, rate, fit.tp, fit.pp)


def machines_for(sizes: Sequence[int], machine: Machine) -> int:
    """Machines for engines of so many GPUs; an engine is in one machine. Largest first.

    A file of one GPU is taken as many times as there are GPUs; on CPUs each engine has its own.
    """
    if machine.is_cpu:
        return len(sizes)
    if machine.accelerators == 1:
        return sum(sizes)
    free: list[int] = []
    for size in sorted(sizes, reverse=True):
        if size > machine.accelerators:
            free += [0] * math.ceil(size / machine.accelerators)
            continue
        place = next((at for at, left in enumerate(free) if left >= size), None)
        if place is None:
            free.append(machine.accelerators)
            place = len(free) - 1
        free[place] -= size
    return len(free)
