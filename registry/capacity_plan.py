"""Which machines serve a model at a load, in which format and with how many GPUs. Pure.

The memory decides first (`registry.memory_floor`), then the engine's kernels
(`registry.format_support`), then, where limits of time are given, an estimate
(`registry.roofline`). What is left is ranked by what it costs a month.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from registry.errors import UserError
from registry.format_support import Support, kv_problem, method_problem, support_of
from registry.kv_cache import block_size, kv_dtype_of
from registry.machines import GIB, Machine
from registry.memory_floor import MemoryFloor, floor_of, largest_concurrency, named_format
from registry.plan_parts import Demand, Fit, Limits, Model, Plan, RuledOut, Wish
from registry.roofline import Estimate, Load, Work, estimate
from registry.shape_parts import ModelShape

PARALLEL = (1, 2, 4, 8)
"""GPUs of one engine that are tried; more than 8 is more than one host has."""


def plan(
    model: Model, machines: Sequence[Machine], demand: Demand, wish: Wish, limits: Limits
) -> Plan:
    """Every machine in every format, ranked. Raises `UserError` for what no machine could serve."""
    check_length(model, demand.longest)
    fits: list[Fit] = []
    ruled: list[RuledOut] = []
    for machine in machines:
        for asked in wish.formats:
            name = format_name(asked, model.shape)
            support = support_of(name, machine)
            if support.unit is None:
                reason = f"INFEASIBLE on {machine.title}: {support.reason}"
                ruled.append(RuledOut(machine, name, reason))
                if asked != "auto" or support.instead is None or model.shape.quantization:
                    continue
                # Where bfloat16 is missing, the same weights in float16 are the baseline.
                asked = name = support.instead
                support = support_of(name, machine)
            own = model.shape.quantization if asked == "auto" else None
            problem = method_problem(own, machine) or _kv_problem(model.shape, wish, asked, machine)
            if problem:
                ruled.append(RuledOut(machine, name, f"INFEASIBLE on {machine.title}: {problem}"))
                continue
            found = list(_fits(model, machine, asked, name, support, demand, wish, limits))
            good = [one for one in found if isinstance(one, Fit)]
            fits += good if limits.limits else good[:1]
            if not good:
                out = [one for one in found if isinstance(one, RuledOut)]
                # Most GPUs, least memory on each; what does not divide says less than the others.
                ruled += [one for one in out if one.tp is not None][-1:] or out[-1:]
    return Plan(tuple(sorted(fits, key=lambda one: one.rank)), tuple(ruled))


def check_length(model: Model, longest: int) -> None:
    """vLLM refuses a `max-model-len` above what the model was trained for."""
    trained = model.shape.max_len
    if longest > trained:
        raise UserError.at(
            "--context",
            f"{longest} tokens are more than the {trained} that {model.name} was trained for",
            f"ask for at most {trained}, or take a model with a longer context",
        )


def format_name(asked: str, shape: ModelShape) -> str:
    """A format by its own name. Raises `UserError` for one that is not known."""
    found = named_format(asked, shape)
    if found is not None:
        return found.name
    return shape.quantization.format.name if shape.quantization else shape.dtype


def _kv_problem(shape: ModelShape, wish: Wish, asked: str, machine: Machine) -> str:
    kv_dtype = kv_dtype_of(shape, wish.kv_dtype, named_format(asked, shape))
    if wish.kv_dtype == "auto" and not kv_dtype.startswith("fp8"):
        # A cache of 16 bit has the model's own kind, and changes along with it.
        return ""
    widest = max(layer.head_dim for layer in shape.layers)
    return kv_problem(kv_dtype, machine, mla=shape.latent, head_dim=widest)


def _fits(
    model: Model,
    machine: Machine,
    asked: str,
    name: str,
    support: Support,
    demand: Demand,
    wish: Wish,
    limits: Limits,
) -> Iterator[Fit | RuledOut]:
    """With each number of GPUs, the fewest first."""
    for tp in _parallel(machine, wish):
        if not _has(machine, tp * wish.pp):
            has = "a CPU is one" if machine.is_cpu else f"the machine has {machine.accelerators}"
            yield RuledOut(machine, name, f"{tp * wish.pp} GPUs are asked for; {has}")
            continue
        try:
            yield _one(model, machine, asked, name, support, demand, wish, limits, tp)
        except UserError as error:
            # Heads that do not divide: this many GPUs is none that the engine takes.
            if wish.tp is not None:
                raise
            yield RuledOut(machine, name, f"tensor-parallel-size {tp}: {error.problems[0].what}")


def _parallel(machine: Machine, wish: Wish) -> tuple[int, ...]:
    if wish.tp is not None:
        return (wish.tp,)
    return tuple(tp for tp in PARALLEL if _has(machine, tp * wish.pp)) or (1,)


def _has(machine: Machine, gpus: int) -> bool:
    """A file of one GPU says nothing about how many can be had in a machine."""
    return (
        gpus == 1 if machine.is_cpu else machine.accelerators == 1 or gpus <= machine.accelerators
    )


def _one(
    model: Model,
    machine: Machine,
    asked: str,
    name: str,
    support: Support,
    demand: Demand,
    wish: Wish,
    limits: Limits,
    tp: int,
) -> Fit | RuledOut:
    shape = model.shape
    own = asked == "auto" or name == format_name("auto", shape)
    how: dict[str, Any] = {
        "format": asked,
        "kv_dtype": wish.kv_dtype,
        "tp": tp,
        "pp": wish.pp,
        "draft": model.draft,
        "block": block_size(shape, cpu=machine.is_cpu),
        "max_batched_tokens": wish.max_batched_tokens,
        "eager": machine.is_cpu,
        "checkpoint_bytes": model.checkpoint_bytes if own else None,
    }
    budget = math.floor(machine.memory_bytes * wish.utilization)
    most = largest_concurrency(shape, budget, context=demand.context, **how)
    alone = floor_of(shape, concurrency=1, context=demand.longest, **how)
    wanted = 1 if wish.replicas else demand.concurrency
    if most < wanted or alone.per_gpu.floor_bytes > budget:
        floor = floor_of(shape, concurrency=wanted, context=demand.context, **how)
        needs = max(floor.per_gpu.floor_bytes, alone.per_gpu.floor_bytes)
        return RuledOut(
            machine, name, _too_small(machine, needs, budget, tp, wish), needs, tp, most
        )
    chosen = _replicas(model, machine, support, demand, wish, limits, tp, how, most)
    if isinstance(chosen, str):
        return RuledOut(machine, name, chosen, tp=tp)
    replicas, found = chosen
    share = math.ceil(demand.concurrency / replicas)
    floor = floor_of(shape, concurrency=share, context=demand.context, **how)
    kv_dtype = kv_dtype_of(shape, wish.kv_dtype, named_format(asked, shape))
    if wish.kv_dtype == "auto" and support.dtype is not None and kv_dtype == "bfloat16":
        kv_dtype = support.dtype
    peak = math.ceil((demand.peak or demand.concurrency) / replicas)
    sequences = max(share, min(most, peak))
    notes = [support.note] if support.note else []
    args = engine_args(machine, support, demand, wish, tp, sequences, floor, kv_dtype, name)
    if asked == "auto" and shape.quantization is not None and shape.quantization.deprecated:
        args["allow-deprecated-quantization"] = True
    if not own and name not in ("bf16", "fp16", "fp32"):
        notes.append(f"needs a checkpoint in {name}, which this one is not")
    return Fit(
        machine=machine,
        format=name,
        tp=tp,
        pp=wish.pp,
        kv_dtype=kv_dtype,
        floor=floor,
        max_concurrency=most,
        engine_args=args,
        replicas=replicas,
        machines=_machines(machine, tp * wish.pp, replicas),
        estimate=found,
        notes=tuple(notes),
    )


def _too_small(machine: Machine, needs: int, budget: int, tp: int, wish: Wish) -> str:
    gpus = tp * wish.pp
    each = "" if gpus == 1 else f" on each of {gpus} GPUs"
    return (
        f"too little memory: the floor is {needs / GIB:.2f} GiB{each}, and {wish.utilization:.0%} "
        f"of {machine.memory_gib:.2f} GiB are {budget / GIB:.2f}"
    )


def _replicas(
    model: Model,
    machine: Machine,
    support: Support,
    demand: Demand,
    wish: Wish,
    limits: Limits,
    tp: int,
    how: Mapping[str, Any],
    most: int,
) -> tuple[int, Estimate | None] | str:
    """The fewest engines that hold the load, and hold the limits by the estimate; or why none."""
    fewest = math.ceil(demand.concurrency / most) if wish.replicas else 1
    last = demand.concurrency if wish.replicas else fewest
    # Weights and a token's cache, which is all that an estimate takes, are those of any load.
    parts = floor_of(model.shape, concurrency=1, context=demand.context, **how).per_gpu
    rate = machine.compute.get(support.unit or "bf16")
    work = Work(model.shape, machine, parts, rate, tp, wish.pp)

    def found(replicas: int) -> Estimate:
        load = Load(
            sequences=math.ceil(demand.concurrency / replicas),
            context=demand.mean_context,
            prompt=demand.prompt or demand.context,
            output=demand.output,
            mean_prompt=demand.mean_prompt or demand.prompt or demand.context,
            rate=None if demand.rate is None else demand.rate / replicas,
        )
        return estimate(work, load, wish.max_batched_tokens)

    def broken(one: Estimate) -> list[str]:
        if one.prefill_share is not None and one.prefill_share >= 1:
            return ["more prompts arrive than it can compute"]
        return limits.broken(one)

    most_told = broken(found(last))
    if most_told:
        what = "; ".join(most_told)
        return f"estimate, not measured: with {last} replicas of {tp * wish.pp} GPUs {what}"
    # One more replica never makes a time longer.
    low, high = fewest, last
    while low < high:
        middle = (low + high) // 2
        if broken(found(middle)):
            low = middle + 1
        else:
            high = middle
    return low, found(low)


def _machines(machine: Machine, gpus: int, replicas: int) -> int:
    """Machines that so many engines of `gpus` GPUs take; their number is what costs.

    A file of one GPU is taken as many times as an engine needs GPUs.
    """
    if machine.is_cpu:
        return replicas
    if machine.accelerators >= gpus:
        return math.ceil(replicas / (machine.accelerators // gpus))
    return replicas * math.ceil(gpus / machine.accelerators)


def engine_args(
    machine: Machine,
    support: Support,
    demand: Demand,
    wish: Wish,
    tp: int,
    sequences: int,
    floor: MemoryFloor,
    kv_dtype: str,
    format: str,
) -> dict[str, int | float | str]:
    """`vllm serve`'s own names, as a serve recipe has them.

    No `quantization`: vLLM reads it from the checkpoint. A CPU has no share of memory to take, but
    bytes of its cache.
    """
    args: dict[str, int | float | str] = {
        "max-model-len": demand.longest,
        "max-num-seqs": sequences,
        "max-num-batched-tokens": max(wish.max_batched_tokens, sequences),
    }
    if machine.is_cpu:
        parts = floor.per_gpu
        args["kv-cache-memory-bytes"] = parts.kv_bytes + parts.draft_kv_bytes + parts.kv_slack_bytes
    else:
        args["gpu-memory-utilization"] = wish.utilization
        args["tensor-parallel-size"] = tp
        if wish.pp > 1:
            args["pipeline-parallel-size"] = wish.pp
    if support.dtype is not None or format in ("fp16", "fp32"):
        args["dtype"] = support.dtype or {"fp16": "float16", "fp32": "float32"}[format]
    if wish.kv_dtype != "auto":
        args["kv-cache-dtype"] = kv_dtype
    return args
