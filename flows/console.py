"""What every command writes to standard output with."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document as the last line.")]


def show(content: Any, as_json: bool) -> None:
    """A text, or a document as one line of JSON."""
    say(as_encodable(json.dumps(content, ensure_ascii=False)) if as_json else content)


def say(text: str) -> None:
    """Print; a reader that has gone (`| head -1`) changes nothing of how the command ends."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        # Python flushes once more at its end, and would fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_encodable(text: str) -> str:
    """A JSON text as standard output can hold it, whatever its encoding."""
    from registry.gate_report import encodable

    # There is no standard output where somebody closed it.
    return encodable(text, getattr(sys.stdout, "encoding", None))
