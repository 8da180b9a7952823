"""The nightly flow: one release per recipe of the matrix, and a table of what came of each.

recipe ─► release run ─┐
recipe ─► release run ─┼─► state of each ─► table ─► Completed if all passed, else Failed
recipe ─► release run ─┘

Each release is a run of its own (PILOTAGE_RELEASE_DEPLOYMENT), or, where that is not set, follows
the one before in this process. A failure, a refusal, a crash, a cancel or a time limit of one never
hides or stops another. A night that was run is found again by its date: nothing is started twice.
"""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from prefect import flow
from prefect.runtime import flow_run
from pydantic import ValidationError

from flows.endings import FAILED, PASSED, Ended, told
from flows.forms import NightlyRequest
from flows.night_runs import Night, run_deployed, run_inline
from flows.pages import show_page
from registry.errors import UserError
from registry.settings import settings
from tasks.night_digest import Row, digest_table, summary
from tasks.run_slots import outlive_lost_slot


def run_name() -> str:
    """The date of the night; the form may leave it out, so no template knows it."""
    try:
        request = NightlyRequest.model_validate(flow_run.parameters["request"])
        return f"nightly-{night_of(request).date}"
    except (ValidationError, UserError):
        # What is wrong is the flow's to say.
        return "nightly"


outlive_lost_slot()


@flow(name="nightly", flow_run_name=run_name, validate_parameters=True)
@told
def run_nightly(request: NightlyRequest) -> Ended[list[Row]]:
    """Release every recipe of the matrix; the rows of the table."""
    night = night_of(request)
    recipes = list(dict.fromkeys(request.recipes))
    deployment = settings().release_deployment
    rows = run_deployed(night, recipes, deployment) if deployment else run_inline(night, recipes)
    show_page("nightly-digest", digest_table(rows, night.title), night.title)
    line = summary(rows)
    if all(row.passed for row in rows):
        return Ended(rows, PASSED, line)
    return Ended(rows, FAILED, line, refused=True)


def night_of(request: NightlyRequest) -> Night:
    """Of the date that is asked for, else of the day for which this run was planned.

    Raises `UserError` for a zone that is none.
    """
    try:
        zone = ZoneInfo(request.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UserError.at(
            f"timezone {request.timezone!r}", "is no time zone", "e.g. Asia/Shanghai or UTC"
        ) from None
    # Of a run that a worker takes a day late, its own night: not the one that comes next.
    planned = flow_run.scheduled_start_time or datetime.now(zone)
    date = request.night or planned.astimezone(zone).date()
    return Night(date.isoformat(), request.attempt, request.hours)
