"""Old flow runs, logs, artifacts and events of Prefect, removed by Prefect's own service.

A server that runs all the time does it every hour, if it is told to (`pilotage up` tells it). The
temporary server of a command does not, so there the same functions are called here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from registry.errors import InfrastructureError

EVENT_DAYS = 7
"""Events are many and only explain what has just happened."""

GRACE = timedelta(hours=2)
"""A server looks once an hour."""

REMEDY = "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED=events,flow_runs"


def forget(days: int, deadline: float) -> str:
    """What was removed, or is left to the server. Raises `InfrastructureError`.

    deadline: by `time.monotonic`; what is not removed until then is the next one's.
    """
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        left = older_than(days, GRACE)
        if left:
            raise InfrastructureError(
                f"the server keeps {left} runs that ended more than {days} days ago: start it with "
                f"{REMEDY} and PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD={days * 86_400}"
            )
        return "the server removes them itself; none is older"
    before = older_than(days)
    asyncio.run(_vacuumed(days, deadline))
    return f"{before - older_than(days)} runs with their logs and artifacts"


def older_than(days: int, grace: timedelta = timedelta(0)) -> int:
    """How many runs ended more than `days` and `grace` ago, and were not a part of another."""
    from prefect.client.orchestration import get_client

    before = datetime.now(UTC) - timedelta(days=days) - grace
    wanted = {
        "end_time": {"before_": before.isoformat()},
        "parent_task_run_id": {"is_null_": True},
    }
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/flow_runs/count", json={"flow_runs": wanted})
    return int(answer.json())


async def _vacuumed(days: int, deadline: float) -> None:
    """Raises `InfrastructureError` where the deadline cuts it short."""
    from prefect.server.database import provide_database_interface
    from prefect.server.services import db_vacuum
    from prefect.settings import (
        PREFECT_SERVER_EVENTS_RETENTION_PERIOD,
        PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD,
        temporary_settings,
    )

    steps: list[Callable[..., Awaitable[None]]] = [
        db_vacuum.vacuum_old_flow_runs,
        # Parts of the runs that are gone are runs of their own now.
        db_vacuum.vacuum_old_flow_runs,
        db_vacuum.vacuum_orphaned_logs,
        db_vacuum.vacuum_orphaned_artifacts,
        db_vacuum.vacuum_stale_artifact_collections,
        db_vacuum.vacuum_events_with_retention_overrides,
        db_vacuum.vacuum_old_events,
    ]
    database = provide_database_interface()
    with temporary_settings(
        {
            PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD: timedelta(days=days),
            PREFECT_SERVER_EVENTS_RETENTION_PERIOD: timedelta(days=min(days, EVENT_DAYS)),
        }
    ):
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                for step in steps:
                    await step(db=database)
        except TimeoutError:
            raise InfrastructureError(
                "the time was too short for all of them; the next maintenance goes on"
            ) from None
