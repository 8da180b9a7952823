"""Commands that measure bundles in turn on this machine: `compare` and `prove-draft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.console import Json, as_encodable, say

BUNDLE = "MODEL@ALIAS, MODEL@VERSION or a digest."

Prompts = Annotated[Path | None, typer.Option(help="JSONL with `id` and `prompt` or `messages`.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder of the evidence; what was stopped goes on in it.")
]


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=BUNDLE)],
    b: Annotated[str, typer.Argument(metavar="B", help="The bundle that is compared with A.")],
    load: Annotated[str, typer.Option(help="A load profile, by name or path.")],
    rate: Annotated[float, typer.Option(min=0.001, max=10_000, help="Requests/s of every turn.")],
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Turns of each bundle.")] = 5,
    prompts: Prompts = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure two bundles in turn (A B A B ...): ratios of their times with intervals."""
    from flows.bench_rendering import compare_text
    from tasks.comparing import compare as measure

    begin()
    done = measure(a, b, load, rate, repeats, prompts=prompts, out=out)
    _end(done.document, compare_text, as_json)
    raise typer.Exit(done.exit_status)


def prove_draft(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help=BUNDLE)],
    load: Annotated[str, typer.Option(help="A load profile with a search, by name or path.")],
    tokens: Annotated[str, typer.Option(help="Numbers of speculative tokens to try.")] = "1,2,3",
    repeats: Annotated[int, typer.Option(min=2, max=100, help="Turns of each side.")] = 5,
    prompts: Prompts = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Say whether the draft of a bundle pays: kept rate, times and answers with and without it."""
    from flows.bench_rendering import proof_text
    from tasks.draft_measuring import prove

    begin()
    done = prove(bundle, load, tokens, repeats, prompts=prompts, out=out)
    _end(done.document, proof_text, as_json)
    raise typer.Exit(done.verdict.exit_status)


def begin() -> None:
    """Before anything is measured: say what is logged, end what a kill left behind."""
    from tasks.engines.subprocesses import end_leftovers, own_children
    from tasks.progress import LOG, configure_logging

    configure_logging()
    for pid in end_leftovers():
        # A server that a kill left behind would share the machine with every turn.
        LOG.warning("ended process %d, left behind by a run that crashed", pid)
    own_children()


def _end(document: dict[str, Any], text: Any, as_json: bool) -> None:
    from registry.gate_report import strict_line

    say(as_encodable(strict_line(document)) if as_json else text(document))
