"""The commands of the night: `nightly`, and `maintain`, which cleans up after it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.console import Json, show

if TYPE_CHECKING:
    from tasks.night_digest import Row


def nightly(
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE", help="The matrix, by name or path.")
    ] = None,
    night: Annotated[
        str | None, typer.Option(help="YYYY-MM-DD; without, today in the time zone.")
    ] = None,
    timezone: Annotated[str, typer.Option(help="Whose date it is.")] = "Asia/Shanghai",
    attempt: Annotated[int, typer.Option(min=1, max=100, help="Run a night once more.")] = 1,
    hours: Annotated[float, typer.Option(min=0.01, max=48, help="Limit of one release.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Release every recipe of the matrix, each by itself; exit 0 only if all of them passed."""
    from pydantic import ValidationError

    from flows.forms import NightlyRequest
    from flows.prefect_home import prepare_prefect
    from registry.errors import UserError
    from tasks.engines.subprocesses import own_children

    prepare_prefect()
    asked = {
        "night": night,
        "timezone": timezone,
        "attempt": attempt,
        "hours": hours,
        **({"recipes": recipes} if recipes else {}),
    }

    try:
        request = NightlyRequest.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError.at(f"--{first['loc'][0]} {first['input']!r}", first["msg"]) from None
    own_children()
    from flows.nightly import night_of, run_nightly
    from tasks.night_digest import digest_table, exit_status

    title = night_of(request).title
    rows = rows_of(run_nightly(request, return_state=True))
    document = [{**asdict(row), "passed": row.passed} for row in rows]
    show(document if as_json else digest_table(rows, title), as_json)
    raise typer.Exit(exit_status(rows))


def rows_of(state: Any) -> list[Row]:
    """The rows that a nightly ended with; raises what it ended with instead."""
    rows: list[Row] | BaseException = state.result(raise_on_failure=False)
    if isinstance(rows, BaseException):
        raise rows
    return rows
