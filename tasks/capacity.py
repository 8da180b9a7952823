"""`pilotage plan`: the document of a plan, from its inputs to what it says."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from registry.capacity_plan import check_length, format_name, plan
from registry.errors import EXIT_PASS, EXIT_REFUSED, UserError
from registry.kv_cache import kv_dtype_of
from registry.machines import Machine
from registry.memory_floor import Parts, floor_of, named_format
from registry.plan_evidence import Served
from registry.plan_parts import (
    HOURS_PER_MONTH,
    Demand,
    Fit,
    Limits,
    Model,
    Plan,
    RuledOut,
    Wish,
)
from registry.plan_together import together
from registry.roofline import ASSUMED, MARK, Estimate
from tasks.capacity_inputs import demand_of, limits_of, machine_of, machines_of, model_of
from tasks.plan_evidence import peak_words, served_of, with_evidence

ALL_FORMATS = ("auto", "fp8_dynamic", "w8a8_int8", "w4a16", "nvfp4")
"""What the project's quantize recipes make, one of each kind."""


def planned(
    reference: str,
    *,
    concurrency: int | None = None,
    context: int | None = None,
    format: str = "auto",
    all_formats: bool = False,
    kv_dtype: str = "auto",
    tp: int | None = None,
    pp: int = 1,
    hardware: Sequence[str] = (),
    draft: Path | None = None,
    traffic: Path | None = None,
    sla: str | None = None,
    current: str | None = None,
    evidence: Sequence[str] = (),
    utilization: float,
    max_batched_tokens: int,
) -> tuple[dict[str, Any], int]:
    """The document, and the exit status: 10 where nothing fits. Raises `UserError`.

    `evidence`: load tests, as `tasks.plan_evidence.served_of` takes them.
    """
    model = model_of(reference, draft)
    asked = demand_of(concurrency, context, traffic, model.shape.max_len)
    check_length(model, asked.demand.longest)
    limits = Limits(limits_of(sla))
    machines = machines_of(hardware)
    running = None if current is None else _current(current)
    if all_formats and model.shape.quantization is not None:
        raise UserError.at(
            "--all-formats",
            f"{reference} is quantized already ({model.shape.quantization.format.name})",
            "leave it out, or name the unquantized model",
        )
    wish = Wish(
        formats=ALL_FORMATS if all_formats else (format,),
        kv_dtype=kv_dtype,
        tp=tp,
        pp=pp,
        utilization=utilization,
        max_batched_tokens=max_batched_tokens,
        replicas=traffic is not None or sla is not None,
    )
    made = plan(model, machines, asked.demand, wish, limits)
    document = _floor_document(model, asked.demand, wish)
    rows = [(one, fit_document(one)) for one in made.fits]
    served = served_of(evidence)
    found = with_evidence(rows, model, asked.demand, served)
    document |= {
        "fits": [row for _, row in rows],
        "ruled_out": [ruled_document(one) for one in made.ruled_out],
        "demand": {**asdict(asked.demand), "source": asked.source},
        "sla_ms": dict(limits.limits),
        "estimates": {"what": MARK, "assumed": ASSUMED.document},
        "notes": [*asked.notes, *_notes(made, limits), *found],
    }
    if asked.extreme is not None:
        document["extremes"] = _extremes(model, asked.extreme, wish)
    if not made.fits:
        document["least_memory"] = _least(made, wish)
    if running is not None:
        document["current"] = _waste(model, asked.demand, wish, limits, running, made, served)
    return document, EXIT_PASS if made.fits else EXIT_REFUSED


def planned_together(
    references: Sequence[str],
    *,
    concurrency: Sequence[int],
    context: Sequence[int],
    format: str = "auto",
    kv_dtype: str = "auto",
    tp: int | None = None,
    hardware: Sequence[str] = (),
    utilization: float,
    max_batched_tokens: int,
) -> tuple[dict[str, Any], int]:
    """Several models on the same GPUs; one concurrency and context for all, or one for each."""
    models = [model_of(reference, None) for reference in references]
    each = []
    for name, values in (("concurrency", concurrency), ("context", context)):
        if len(values) not in (1, len(models)):
            raise UserError.at(
                f"--{name}",
                f"is given {len(values)} times for {len(models)} models",
                "give it once for all, or once for each",
            )
        each.append(values if len(values) > 1 else [values[0]] * len(models))
    demands = [Demand(sequences, tokens, tokens) for sequences, tokens in zip(*each, strict=True)]
    wish = Wish(
        formats=(format,),
        kv_dtype=kv_dtype,
        tp=tp,
        utilization=utilization,
        max_batched_tokens=max_batched_tokens,
    )
    found, ruled = together(models, machines_of(hardware), demands, wish)
    document = {
        "models": [
            _floor_document(model, demand, wish)
            for model, demand in zip(models, demands, strict=True)
        ],
        "fits": [
            {
                "hardware": one.machine.name,
                "tp": one.tp,
                "gpus": one.tp,
                "cost_per_month": one.cost_per_month,
                "currency": one.machine.currency,
                "memory_bytes": one.machine.memory_bytes,
                "engines": [
                    {"model": model.name, "share": share, **fit_document(fit)}
                    for model, share, fit in zip(models, one.shares, one.fits, strict=True)
                ],
            }
            for one in found
        ],
        "ruled_out": [ruled_document(one) for one in ruled],
        "notes": ["engines on one GPU take its time from each other: no times are estimated"],
    }
    return document, EXIT_PASS if found else EXIT_REFUSED


# -- what it says ----------------------------------------------------------------------------


def _floor_document(model: Model, demand: Demand, wish: Wish) -> dict[str, Any]:
    """Of one engine that holds all of the load, on as many GPUs as were asked for (or one)."""
    tp = wish.tp or 1
    shape, asked = model.shape, wish.formats[0]
    name = format_name(asked, shape)
    own = name == format_name("auto", shape)
    floor = floor_of(
        shape,
        format=asked,
        kv_dtype=wish.kv_dtype,
        concurrency=demand.concurrency,
        context=demand.context,
        tp=tp,
        pp=wish.pp,
        draft=model.draft,
        max_batched_tokens=wish.max_batched_tokens,
        checkpoint_bytes=model.checkpoint_bytes if own else None,
    )
    exact = own and model.checkpoint_bytes is not None
    return {
        "model": model.name,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "trained_length": shape.max_len,
        "weights_from": "the checkpoint's tensors" if exact else "the configuration",
        "format": name,
        "kv_dtype": kv_dtype_of(shape, wish.kv_dtype, named_format(asked, shape)),
        "tp": tp,
        "pp": wish.pp,
        "concurrency": demand.concurrency,
        "context": demand.context,
        **parts_document(floor.total),
        "per_gpu": parts_document(floor.per_gpu),
    }


def parts_document(parts: Parts) -> dict[str, int]:
    return asdict(parts)


def fit_document(fit: Fit) -> dict[str, Any]:
    return {
        "hardware": fit.machine.name,
        "format": fit.format,
        "tp": fit.tp,
        "pp": fit.pp,
        "replicas": fit.replicas,
        "gpus": fit.gpus,
        "machines": fit.machines,
        "kv_dtype": fit.kv_dtype,
        "max_concurrency": fit.max_concurrency,
        "engine_args": fit.engine_args,
        "cost_per_month": fit.cost_per_month,
        "currency": fit.machine.currency,
        "memory_bytes": fit.machine.memory_bytes,
        "per_gpu": parts_document(fit.floor.per_gpu),
        "estimate": None if fit.estimate is None else _estimate(fit.estimate),
        "notes": list(fit.notes),
    }


def _estimate(found: Estimate) -> dict[str, float | str | None]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in found.document.items()
    }


def ruled_document(one: RuledOut) -> dict[str, Any]:
    return {
        "hardware": one.machine.name,
        "format": one.format,
        "reason": one.reason,
        "needs_bytes_per_gpu": one.needs_bytes,
        "max_concurrency": one.max_concurrency,
    }


def _notes(made: Plan, limits: Limits) -> list[str]:
    notes = []
    unpriced = sorted({fit.machine.name for fit in made.fits if fit.machine.price_per_hour is None})
    if unpriced:
        notes.append(
            "no price_per_hour in the hardware files of "
            f"{', '.join(unpriced)}: cost_per_month is null, and they are ranked by GPUs times "
            "memory"
        )
    cheapest = {(one.machine.name, one.format): one for one in reversed(made.fits)}.values()
    single = sorted(
        {one.machine.name for one in cheapest if one.tp * one.pp > one.machine.accelerators > 0}
    )
    if single:
        notes.append(
            f"{', '.join(single)}: the GPUs of an engine have to be in one machine; the file has "
            "fewer, and its price is taken for each"
        )
    currencies = {fit.machine.currency for fit in made.fits if fit.machine.currency}
    if len(currencies) > 1:
        notes.append(f"prices are in {', '.join(sorted(currencies))}: their order means nothing")
    unknown: dict[str, set[str]] = {}
    for fit in made.fits:
        for name in limits.unknown(fit.estimate) if fit.estimate is not None else ():
            unknown.setdefault(name, set()).add(fit.machine.name)
    notes += [
        f"not compared with the limit of {name}, for want of a number: {', '.join(sorted(places))}"
        for name, places in unknown.items()
    ]
    return notes


def _least(made: Plan, wish: Wish) -> dict[str, Any] | None:
    """The least memory of one GPU that would do, over what was tried."""
    tried = [one for one in made.ruled_out if one.needs_bytes is not None]
    if not tried:
        return None
    best = min(tried, key=lambda one: one.needs_bytes or 0)
    needs = best.needs_bytes or 0
    return {
        "floor_bytes_per_gpu": needs,
        "gpu_memory_bytes": math.ceil(needs / wish.utilization),
        "format": best.format,
        "tp": best.tp,
    }


def _extremes(model: Model, extreme: Demand, wish: Wish) -> dict[str, Any]:
    """What sizing by every peak at once would ask for."""
    return {
        "concurrency": extreme.concurrency,
        "context": extreme.context,
        "floor_bytes": _floor_document(model, extreme, wish)["floor_bytes"],
    }


# -- what runs now ---------------------------------------------------------------------------


def _current(words: str) -> tuple[str, int]:
    """`NAME x REPLICAS`."""
    found = re.fullmatch(r"\s*(\S+)\s*[x*×]\s*(\d{1,6})\s*", words)
    if found is None or int(found[2]) < 1:
        raise UserError.at("--current", f"{words!r} is not HARDWARE x REPLICAS", "'nvidia_a10 x 4'")
    return found[1], int(found[2])


def _waste(
    model: Model,
    demand: Demand,
    wish: Wish,
    limits: Limits,
    running: tuple[str, int],
    made: Plan,
    served: Sequence[Served],
) -> dict[str, Any]:
    """What the current setup has beyond what the same load needs, there and at the best place.

    Where it was measured, also how much of its memory and cache the load took at most.
    """
    name, replicas = running
    machine = machine_of(name)
    # What runs now has the format that was asked for, not the best one.
    here = plan(model, [machine], demand, replace(wish, formats=wish.formats[:1]), limits)
    price = machine.price_per_hour
    cost = None if price is None else price * HOURS_PER_MONTH * replicas
    found: dict[str, Any] = {
        "hardware": machine.name,
        "replicas": replicas,
        "cost_per_month": cost,
        "currency": machine.currency,
    }
    if not here.fits:
        reason = here.ruled_out[-1].reason
        return found | {
            "needed": None,
            "says": f"by this plan it does not serve the load: {reason}",
        }
    fit = here.fits[0]
    most = fit.max_concurrency * _engines_on(machine, fit.tp * fit.pp, replicas)
    spare = replicas - fit.machines
    found |= {
        "needed": fit.machines,
        "unneeded": max(0, spare),
        "max_concurrency": most,
        "used_share": round(demand.concurrency / most, 4) if most else None,
    }
    says = (
        f"{fit.machines} of {replicas} would do"
        if spare > 0
        else f"{fit.machines} are needed, {replicas} are there"
    )
    best = made.fits[0] if made.fits else None
    less = None if best is None else best.cost_per_month
    same = best is not None and best.machine.currency == machine.currency
    if best is not None and same and cost is not None and less is not None and cost > less:
        found |= {
            "saving_per_month": cost - less,
            "saving_share": round((cost - less) / cost, 4),
        }
        says += (
            f"; {best.machine.name} would cost {cost - less:.0f} {machine.currency} less a month"
        )
    if served:
        row: dict[str, Any] = {}
        with_evidence([(fit, row)], model, demand, served)
        found["measured"] = row["measured"]
        says += peak_words(row["measured"], machine)
    return found | {"says": says}


def _engines_on(machine: Machine, gpus: int, machines: int) -> int:
    """Engines of so many GPUs that so many machines have room for."""
    if machine.is_cpu:
        return machines
    if machine.accelerators >= gpus:
        return machines * (machine.accelerators // gpus)
    return machines // math.ceil(gpus / machine.accelerators)


__all__ = ["ALL_FORMATS", "planned", "planned_together"]
