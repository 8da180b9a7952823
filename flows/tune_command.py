"""`pilotage bench --tune`: the batch arguments of a bundle, tried one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.console import as_encodable, say
from registry.errors import UserError


def tune_bundle(
    bundle: str | None,
    load: str,
    axes: Sequence[str],
    others: Mapping[str, object],
    *,
    prompts: Path | None,
    out: Path | None,
    generator: str,
    as_json: bool,
) -> int:
    """The exit status. `others`: options of `bench` that say nothing about tuning."""
    from registry.gate_report import strict_line
    from tasks.tuning import document, tune

    odd = ", ".join(name for name, given in others.items() if given is not None)
    if bundle is None or odd:
        raise UserError.at(
            "--tune",
            f"is for a bundle{f', not with {odd}' if odd else ''}",
            "give --bundle: its arguments are part of it, so each point is one of its own",
        )
    done = tune(bundle, load, axes, prompts=prompts, out=out, generator=generator)
    found = document(done)
    say(as_encodable(strict_line(found)) if as_json else tune_text(found))
    return done.verdict.exit_status


def tune_text(document: Mapping[str, Any]) -> str:
    """A table of the points, the choice, and the lines to paste."""
    from rich.table import Table

    from registry.gate_report import drawn

    table = Table(title=f"{document['load']}: {document['verdict']}")
    for column in ("", "kept", "not kept", "TPOT P50 (95 %)", "bundle", "why not"):
        table.add_column(column, overflow="fold")
    for point in document["points"]:
        low, high = point["kept_rate"]
        table.add_row(
            _words(point["args"]),
            _rate(low),
            _rate(high),
            "\n".join(_tpot(one) for one in point["tpot_p50"]),
            "" if point["dropped"] else point["bundle"][:12],
            point["dropped"] or point["void"],
        )
    lines = [drawn(table), document["reason"]]
    if document["chosen"] is not None:
        there = _words(document["current"])
        lines += [
            f"in the bundle: {there}" if there else "in the bundle: the engine's own choice",
            "for the serve recipe, which is left as it is:",
            document["yaml"],
        ]
    return "\n".join([*lines, *(f"note: {note}" for note in document["notes"])])


def _words(args: Mapping[str, int]) -> str:
    return "\n".join(f"{name} {value}" for name, value in args.items())


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}/s"


def _tpot(one: Mapping[str, float]) -> str:
    return f"{one['value']:.3g} ms ({one['low']:.3g} to {one['high']:.3g}) at {one['rate']:.4g}/s"
