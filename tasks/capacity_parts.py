"""`pilotage plan --serve`: the plan of a serve recipe with prefill and decode apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes import loader
from recipes.schema import ServeRecipe
from registry.capacity_plan import check_length, format_name
from registry.errors import EXIT_PASS, EXIT_REFUSED, UserError
from registry.kv_cache import kv_dtype_of
from registry.memory_floor import named_format
from registry.parts_plan import PartsFit, RoleAsk, plan_in_parts, role_asks
from registry.plan_parts import Demand, Limits, Model
from registry.roofline import ASSUMED, MARK
from registry.topology import ROLES, Disaggregated, Role
from tasks.capacity import fit_document, parts_document, ruled_document
from tasks.capacity_inputs import demand_of, limits_of, machines_of, model_of


def planned_in_parts(
    reference: str,
    serve: str,
    *,
    concurrency: int | None = None,
    context: int | None = None,
    format: str = "auto",
    hardware: Sequence[str] = (),
    draft: Path | None = None,
    traffic: Path | None = None,
    sla: str | None = None,
) -> tuple[dict[str, Any], int]:
    """The document, and the exit status: 10 where nothing fits. Raises `UserError`.

    Without numbers and without a traffic profile the load is the most that the recipe takes.
    """
    recipe = loader.load(serve, "serve", ServeRecipe)
    topology = recipe.topology
    if topology is None:
        raise UserError.at(
            f"--serve {serve}",
            "is colocated: one engine does all",
            "plan it by --concurrency, --context and --tp",
        )
    model = model_of(reference, draft)
    asks = role_asks(topology, recipe.engine_args, format)
    most = asks["decode"].sequences * topology.decode
    longest = asks["decode"].context
    if traffic is None:
        concurrency = most if concurrency is None else concurrency
        context = longest if context is None else context
    asked = demand_of(concurrency, context, traffic, model.shape.max_len)
    demand, source = asked.demand, asked.source
    if traffic is None and (concurrency, context) == (most, longest):
        source = f"the most that {serve} takes"
    check_length(model, longest)
    if demand.longest > longest:
        raise UserError.at(
            "--context" if traffic is None else "--traffic",
            f"{demand.longest} tokens are more than the recipe's max-model-len, {longest}",
            "ask for less, or raise max-model-len in the recipe",
        )
    limits = Limits(limits_of(sla))
    fits, ruled = plan_in_parts(model, machines_of(hardware), topology, asks, demand, limits)
    document = {
        **_head(model, asks, demand, format, topology),
        **(_floors(fits[0]) if fits else {}),
        "fits": [_fit(one, recipe) for one in fits],
        "ruled_out": [ruled_document(one) for one in ruled],
        "demand": {**asdict(demand), "source": source},
        "sla_ms": dict(limits.limits),
        "estimates": {"what": MARK, "assumed": ASSUMED.document},
        "notes": [*asked.notes, *_notes(fits)],
    }
    return document, EXIT_PASS if fits else EXIT_REFUSED


def _head(
    model: Model,
    asks: dict[Role, RoleAsk],
    demand: Demand,
    format: str,
    topology: Disaggregated,
) -> dict[str, Any]:
    shape, wish = model.shape, asks["decode"].wish
    return {
        "model": model.name,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "trained_length": shape.max_len,
        "topology": topology.model_dump(mode="json"),
        "format": format_name(format, shape),
        "kv_dtype": kv_dtype_of(shape, wish.kv_dtype, named_format(format, shape)),
        "tp": wish.tp,
        "pp": wish.pp,
        "concurrency": demand.concurrency,
        "context": demand.context,
    }


def _floors(best: PartsFit) -> dict[str, Any]:
    """Of the first that fits: memory is the same everywhere but for the blocks of a CPU."""
    return {**parts_document(best.total), "per_gpu": parts_document(best.fullest)}


def _fit(fit: PartsFit, recipe: ServeRecipe) -> dict[str, Any]:
    """`tp` and `engine_args` are a decode engine's; `roles` has one engine of each."""
    roles = {}
    for role in ROLES:
        own = fit.topology.arguments(role, recipe.engine_args)
        roles[role] = {
            **fit_document(fit.roles[role]),
            "engines": fit.topology.engines(role),
            "engine_args": own,
        }
        # Of one engine: the price is of all of them together.
        for name in ("replicas", "machines", "cost_per_month", "currency", "estimate"):
            del roles[role][name]
    decode = roles["decode"]
    found = fit.estimate.document
    return {
        "hardware": fit.machine.name,
        "format": decode["format"],
        "tp": decode["tp"],
        "gpus": fit.gpus,
        "machines": fit.machines,
        "max_concurrency": fit.max_concurrency,
        "engine_args": decode["engine_args"],
        "cost_per_month": fit.cost_per_month,
        "currency": fit.machine.currency,
        "memory_bytes": fit.machine.memory_bytes,
        "roles": roles,
        "transfer": {
            "bytes_per_request": fit.transfer_bytes,
            "ms": None if fit.transfer_ms is None else round(fit.transfer_ms, 4),
            "link_bytes_per_s": fit.machine.link,
        },
        "estimate": {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in found.items()
        },
    }


def _notes(fits: Sequence[PartsFit]) -> list[str]:
    notes = [
        "a request's transfer is the cache of its prompt; its time is that of the link between "
        "GPUs of one machine. Between machines it is the network's, of which no hardware file "
        "says anything"
    ]
    if unpriced := sorted({one.machine.name for one in fits if one.cost_per_month is None}):
        notes.append(
            f"no price_per_hour in the hardware files of {', '.join(unpriced)}: cost_per_month is "
            "null, and they are ranked by GPUs times memory"
        )
    return notes
