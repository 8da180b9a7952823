"""The maintenance flow: what nothing refers to any more goes, and the databases stay small.

crashed runs ─► store ─► Prefect ─► MLflow ─► databases ─► table of what was freed
"""

from __future__ import annotations

from prefect import flow

from flows.endings import FAILED, PASSED, Ended, told
from flows.forms import MaintainRequest
from flows.pages import show_page
from tasks.maintaining import Step, done, jobs, summary, table
from tasks.run_slots import outlive_lost_slot

outlive_lost_slot()


@flow(name="maintenance", flow_run_name="maintenance-{request.days}-days", validate_parameters=True)
@told
def maintain(request: MaintainRequest) -> Ended[list[Step]]:
    """Clean up step by step; Failed where a step was, with what it said."""
    steps: list[Step] = done(jobs(), request.days, request.minutes)
    show_page("maintenance", table(steps, request.days), "what was freed")
    if any(step.failed for step in steps):
        return Ended(steps, FAILED, summary(steps), refused=True)
    return Ended(steps, PASSED, summary(steps))
