"""The maintenance flow: what nothing refers to any more goes, and the databases stay small.

crashed runs ─► store ─► Prefect ─► MLflow ─► databases ─► table of what was freed
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.forms import MaintainRequest
from flows.pages import show_page
from tasks.maintaining import Step, done, jobs, summary, table
from tasks.run_slots import outlive_lost_slot

outlive_lost_slot()


@flow(name="maintenance", flow_run_name="maintenance-{request.days}-days", validate_parameters=True)
def maintain(request: MaintainRequest) -> State[Any]:
    """Clean up step by step; Failed where a step was, with what it said."""
    steps: list[Step] = done(jobs(), request.days, request.minutes)
    show_page("maintenance", table(steps, request.days), "what was freed")
    if any(step.failed for step in steps):
        return Failed(message=summary(steps), data=steps)
    return Completed(message=summary(steps), data=steps)
