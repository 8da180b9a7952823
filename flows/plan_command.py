"""The command `plan`: how much memory a model needs, and which machines serve it at what cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from flows.console import Json, as_encodable, say
from registry.errors import Problem, UserError
from registry.plan_parts import MAX_BATCHED_TOKENS, UTILIZATION


def plan(
    model: Annotated[
        list[str],
        typer.Option(
            help="A model's folder, its config.json, or a bundle (MODEL@ALIAS). Several: on the "
            "same GPUs, each in an engine of its own."
        ),
    ],
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, max=100_000, help="Sequences in flight at once; for each model."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=100_000_000,
            help="Tokens of a sequence, prompt and answer together; for each model.",
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            help="Of the weights, as fp8_dynamic or w4a16_g64; auto: the configuration's."
        ),
    ] = "auto",
    all_formats: Annotated[
        bool, typer.Option("--all-formats", help="The formats that quantize recipes make, too.")
    ] = False,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="Of the KV cache; auto: the configuration's.")
    ] = "auto",
    tp: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="GPUs of one engine; without, the fewest that do."),
    ] = None,
    pp: Annotated[int, typer.Option(min=1, max=64, help="Stages of a pipeline.")] = 1,
    hardware: Annotated[
        list[str] | None,
        typer.Option(help="A hardware file, by name or path. Several may be given; none: all."),
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Folder or config.json of an EAGLE3 draft.")
    ] = None,
    traffic: Annotated[
        Path | None, typer.Option(help="What `pilotage profile` wrote, instead of the numbers.")
    ] = None,
    sla: Annotated[
        str | None,
        typer.Option(help="Limits: a load profile, a policy, or 'ttft p95 500ms, tpot p95 50ms'."),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(help="A serve recipe with prefill and decode apart: both roles, their sum."),
    ] = None,
    current: Annotated[
        str | None, typer.Option(help="What runs now: 'HARDWARE x REPLICAS'.")
    ] = None,
    evidence: Annotated[
        list[str] | None,
        typer.Option(
            help="A load test's folder, or a bundle that was measured here: its times instead of "
            "estimates. Several may be given."
        ),
    ] = None,
    utilization: Annotated[
        float,
        typer.Option("--gpu-memory-utilization", min=0.5, max=0.95, help="Of a GPU's memory."),
    ] = UTILIZATION,
    max_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=16, max=1_000_000)
    ] = MAX_BATCHED_TOKENS,
    as_json: Json = False,
) -> None:
    """Say how much memory a model needs, and which machines serve it; nothing is started."""
    from flows.plan_rendering import parts_text, plan_text, together_text
    from registry.gate_report import strict_line
    from tasks.capacity import planned, planned_together
    from tasks.capacity_parts import planned_in_parts

    if len(model) > 1:
        alone = {
            "--all-formats": all_formats,
            "--pp": pp > 1,
            "--draft": draft,
            "--traffic": traffic,
            "--sla": sla,
            "--serve": serve,
            "--current": current,
            "--evidence": evidence,
        }
        _refuse(alone, f"cannot be planned for {len(model)} models on the same GPUs")
        _complete(concurrency, context)
        document, status = planned_together(
            model,
            concurrency=concurrency or [],
            context=context or [],
            format=format,
            kv_dtype=kv_dtype,
            tp=tp,
            hardware=hardware or [],
            utilization=utilization,
            max_batched_tokens=max_batched_tokens,
        )
        say(as_encodable(strict_line(document)) if as_json else together_text(document))
        raise typer.Exit(status)
    if serve is not None:
        own = {
            "--all-formats": all_formats,
            "--kv-dtype": kv_dtype != "auto",
            "--tp": tp,
            "--pp": pp > 1,
            "--current": current,
            "--evidence": evidence,
            "--gpu-memory-utilization": utilization != UTILIZATION,
            "--max-num-batched-tokens": max_batched_tokens != MAX_BATCHED_TOKENS,
        }
        _refuse(own, "is in the serve recipe, or cannot be planned with it")
        document, status = planned_in_parts(
            model[0],
            serve,
            concurrency=_one("concurrency", concurrency),
            context=_one("context", context),
            format=format,
            hardware=hardware or [],
            draft=draft,
            traffic=traffic,
            sla=sla,
        )
        say(as_encodable(strict_line(document)) if as_json else parts_text(document))
        raise typer.Exit(status)
    document, status = planned(
        model[0],
        concurrency=_one("concurrency", concurrency),
        context=_one("context", context),
        format=format,
        all_formats=all_formats,
        kv_dtype=kv_dtype,
        tp=tp,
        pp=pp,
        hardware=hardware or [],
        draft=draft,
        traffic=traffic,
        sla=sla,
        current=current,
        evidence=evidence or [],
        utilization=utilization,
        max_batched_tokens=max_batched_tokens,
    )
    say(as_encodable(strict_line(document)) if as_json else plan_text(document))
    raise typer.Exit(status)


def _one(name: str, values: list[int] | None) -> int | None:
    if values is not None and len(values) > 1:
        raise UserError.at(f"--{name}", "is given several times for one model", "give it once")
    return values[0] if values else None


def _complete(concurrency: list[int] | None, context: list[int] | None) -> None:
    missing = [
        Problem(f"--{name}", "is missing", "give it once for all models, or once for each")
        for name, values in (("concurrency", concurrency), ("context", context))
        if not values
    ]
    if missing:
        raise UserError(missing)


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise `UserError` for the options that were given."""
    problems = [
        Problem(name, why, "leave it out, or plan each alone")
        for name, given in options.items()
        if given
    ]
    if problems:
        raise UserError(problems)
