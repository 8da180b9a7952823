"""The commands of the night: `nightly`, and `maintain`, which cleans up after it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from flows.console import Json, show


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
    from flows.forms import NightlyRequest, request_of
    from flows.prefect_home import prepare_prefect
    from tasks.engines.subprocesses import own_children

    prepare_prefect()
    asked = {
        "night": night,
        "timezone": timezone,
        "attempt": attempt,
        "hours": hours,
        **({"recipes": recipes} if recipes else {}),
    }

    request = request_of(NightlyRequest, **asked)
    own_children()
    from flows.endings import outcome_of
    from flows.nightly import night_of, run_nightly
    from tasks.night_digest import digest_table, exit_status

    title = night_of(request).title
    rows = outcome_of(run_nightly, request)
    document = [{**asdict(row), "passed": row.passed} for row in rows]
    show(document if as_json else digest_table(rows, title), as_json)
    raise typer.Exit(exit_status(rows))


def maintain(
    days: Annotated[
        int, typer.Option(min=1, max=36_500, help="What is younger than this stays.")
    ] = 30,
    minutes: Annotated[float, typer.Option(min=0.1, max=600, help="Limit in all.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Remove what nothing refers to any more; exit 4 where a step failed."""
    from flows.forms import MaintainRequest, request_of
    from flows.prefect_home import prepare_prefect

    prepare_prefect()
    from flows.endings import outcome_of
    from flows.maintenance import maintain as clean_up
    from registry.errors import EXIT_INFRASTRUCTURE
    from tasks.engines.subprocesses import own_children
    from tasks.maintaining import table

    own_children()
    steps = outcome_of(clean_up, request_of(MaintainRequest, days=days, minutes=minutes))
    show([asdict(step) for step in steps] if as_json else table(steps, days), as_json)
    if any(step.failed for step in steps):
        raise typer.Exit(EXIT_INFRASTRUCTURE)
