"""The commands `why` and `impact`: from an alias down to the prompts, and from a prompt up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.console import Json, as_encodable, say
from registry.errors import EXIT_REFUSED, InfrastructureError, UserError

if TYPE_CHECKING:
    from registry.lineage import Lineage

Picture = Annotated[
    Path | None, typer.Option(metavar="FILE.svg", help="Draw the chain into this file.")
]


def why(
    reference: Annotated[
        str, typer.Argument(metavar="MODEL@ALIAS", help="MODEL@ALIAS or MODEL@VERSION.")
    ],
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Say why a version is where it is: verdict, evidence, and all it was made of."""
    from flows.lineage_rendering import why_text
    from tasks.why import why as explain

    answer = explain(reference)
    _answer(answer.document, why_text, as_json)
    if picture is not None:
        _draw(answer.pictured, picture, reference)
    if not answer.explained:
        raise typer.Exit(EXIT_REFUSED)


def impact(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT_ID|FILE...", help="Ids, or files of ids.")
    ],
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """List every data set, adapter, draft, version and alias that a prompt reached."""
    from flows.lineage_rendering import impact_text
    from tasks.impact import impact as follow

    answer = follow(prompts)
    _answer(answer.document, impact_text, as_json)
    if picture is not None:
        _draw(answer.lineage, picture, "what the prompts reached")


def _answer(document: dict[str, Any], text: Any, as_json: bool) -> None:
    from registry.gate_report import strict_line

    say(as_encodable(strict_line(document) if as_json else text(document)))


def _draw(lineage: Lineage, file: Path, title: str) -> None:
    from registry.lineage_picture import svg
    from registry.whole_files import write_whole

    try:
        drawn = svg(lineage, title=title)
    except Exception as error:  # whatever Graphviz, its library or its absence raises
        raise InfrastructureError(f"{file}: could not be drawn: {error}") from error
    try:
        write_whole(file, drawn + "\n")
    except OSError as error:
        raise UserError.at(file, f"cannot be written: {error.strerror}", "name a file") from None
