"""The command `ledger`: which alias was moved when, by whom, why; and whether that is all true."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.console import Json, as_encodable, say
from registry.errors import EXIT_REFUSED, PilotageError, UserError
from registry.settings import settings

if TYPE_CHECKING:
    from registry.ledger import Entry, Head, Ledger, Move
    from registry.ledger_text import Checked


def ledger(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A registered model.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="With --verify: an export.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check the database, or FILE; name the first bad line."),
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the lines to FILE, one JSON each.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which alias of a model was moved when, by whom and why; or check that record."""
    from registry.gate_report import strict_line

    if file is not None and not verify:
        raise UserError.at(file, "a file is checked, not shown", f"--verify {file}")
    if export is not None and verify:
        raise UserError.at("--export", "does not go with --verify", "first --verify, then --export")
    if verify:
        document = _verified(model, file)
        say(as_encodable(strict_line(document) if as_json else _verified_text(document)))
        raise typer.Exit(0 if document["broken"] is None else EXIT_REFUSED)
    from registry.ledger_text import documents
    from registry.ledger_text import export as write

    lines = _ledger().entries(_text(model))
    if not lines:
        _check_that_there_are_none(model)
    if export is not None:
        write(export, lines)
    if as_json:
        say(as_encodable(strict_line(documents(lines))))
    elif export is not None:
        say(as_encodable(f"{export}: {len(lines)} lines of {model}"))
    else:
        say(as_encodable(_table(model, lines)))


def _check_that_there_are_none(model: str) -> None:
    """No line is an answer only where MLflow's anchor does not say that there are some."""
    from registry.ledger import anchor_of, verify

    tags = _tags(model)
    if tags is None:
        raise _no_such(model)
    broken = verify([], anchor_of(tags, model))
    if broken is not None:
        from registry.ledger import LedgerDamaged

        raise LedgerDamaged(f"ledger of {model}", broken)


# -- checking --------------------------------------------------------------------------------


def _verified(model: str, file: Path | None) -> dict[str, Any]:
    """`{model, file, lines, whole, broken, anchor, notes}` of the database or of an export."""
    anchor: Head | None = None
    if file is None:
        checked, anchor = _stored_check(_text(model))
    else:
        checked, anchor = _file_check(_text(model), file)
    broken = checked.broken
    return {
        "model": model,
        "file": str(file) if file is not None else None,
        "lines": checked.lines,
        "whole": broken is None,
        "broken": None if broken is None else {"line": broken.sequence, "what": broken.what},
        "anchor": None if anchor is None else anchor._asdict(),
        "notes": checked.notes,
    }


def _stored_check(model: str) -> tuple[Checked, Head | None]:
    from registry.ledger import Broken, anchor_of, left_behind
    from registry.ledger_text import Checked, anchor_notes

    store = _ledger()
    lines = store.head(model).length
    broken = store.check(model, None)
    anchor = None
    if broken is None:
        # A chain that is broken in itself needs no anchor to be called so.
        tags = _tags(model)
        if tags is None and lines:
            raise UserError.at(
                f"models:/{model}",
                f"no such model, and {lines} lines about it: nothing says that they are all",
                "check an export: `--verify FILE`",
            )
        if tags is None:
            raise _no_such(model)
        try:
            anchor = anchor_of(tags, model)
        except UserError as error:
            broken = Broken(lines, f"cannot be compared: {error.problems[0].what}")
        else:
            broken = store.check(model, anchor) or left_behind(lines, anchor)
    return Checked(lines, broken, [] if broken else anchor_notes(anchor, lines)), anchor


def _file_check(model: str, file: Path) -> tuple[Checked, Head | None]:
    """An export is checked with whatever else can be asked; it may be all that is left."""
    from registry.ledger import anchor_of
    from registry.ledger_text import verify_file

    anchor, stored, notes = None, None, []
    try:
        tags = _tags(model)
        anchor = anchor_of(tags or {}, model)
        store = _ledger()
        # Asked once here: a database that is away is no reason to fail later.
        store.head(model)
        stored = partial(store.hash_of, model)
        if tags is None:
            notes.append(f"MLflow has no model {model!r}")
    except PilotageError as error:
        notes.append(f"the registry could not be asked: {error}")
    checked = verify_file(file, model, anchor, stored)
    checked.notes[:0] = notes
    return checked, anchor


def _ledger() -> Ledger:
    from registry.ledger import Ledger

    return Ledger(settings().ledger_uri)


def _tags(model: str) -> dict[str, str] | None:
    """Tags of the registered model, the anchor among them; None where there is no such model."""
    home = settings()
    if not home.mlflow_uri and not (home.home / "mlflow.db").exists():
        return None
    from mlflow.exceptions import MlflowException

    from registry.tracking import asking_mlflow
    from tasks.bundles import tracker

    client = tracker().client
    with asking_mlflow(f"read the tags of {model}"):
        try:
            return dict(client.get_registered_model(model).tags)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise


def _no_such(model: str) -> UserError:
    return UserError.at(
        f"models:/{model}", "no such model, and no line about it", "run `pilotage release` first"
    )


def _text(model: str) -> str:
    try:
        model.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError.at(ascii(model), "is not UTF-8, as a model's name is") from None
    return model


# -- text ------------------------------------------------------------------------------------


def _table(model: str, lines: list[Entry]) -> str:
    from rich.table import Table

    from registry.gate_report import drawn

    if not lines:
        return f"{model}: no line yet; no alias was moved"
    table = Table(title=_plain(f"{model}: {len(lines)} lines (not checked; --verify does)"))
    table.add_column("", justify="right")
    for column in ("time (UTC)", "what", "aliases", "by", "reason", "hash"):
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(
            str(line.sequence),
            f"{line.at:%Y-%m-%d %H:%M:%S}",
            line.action,
            _plain("\n".join(_moved(alias, move) for alias, move in sorted(line.moves.items()))),
            _plain(_by(line)),
            _plain(line.reason),
            line.hash[:12],
        )
    return drawn(table)


def _by(line: Entry) -> str:
    """Who did it and, where a person was asked, who said so."""
    answered, said = line.details.get("answered_by"), line.details.get("answer")
    if not answered or answered == line.actor:
        return line.actor
    return f"{line.actor}\n{answered} said {said}"


def _moved(alias: str, move: Move) -> str:
    before, after = (str(one) if one is not None else "–" for one in (move.before, move.after))
    return f"{alias} {before} → {after}"


def _verified_text(document: dict[str, Any]) -> str:
    what = document["file"] or f"ledger of {document['model']}"
    broken = document["broken"]
    if broken is not None:
        lines = [f"{what}: line {broken['line']} {broken['what']}"]
    else:
        anchored = ", as anchored in MLflow" if not document["notes"] else ""
        lines = [f"{what}: {document['lines']} lines, the chain is whole{anchored}"]
    return "\n".join([*lines, *(f"note: {note}" for note in document["notes"])])


def _plain(text: str) -> Any:
    """A cell without markup and without what a terminal obeys."""
    from rich.text import Text

    shown = (one if one.isprintable() or one == "\n" else "\ufffd" for one in text)
    return Text("".join(shown))
