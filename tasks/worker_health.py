"""Whether a worker does its work, by what Prefect's server has heard of it.

A process that lives is no worker that works: one that hangs takes no run and says nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psutil

from tasks.progress import LOG
from tasks.service_notes import Note

SILENT_BEATS = 3
"""Heartbeats (30 s each) that Prefect's server waits for before it calls a worker offline."""

SLACK = 10.0
"""Seconds: Prefect draws each pause between heartbeats anew."""


@contextmanager
def prefect_client(api: str) -> Iterator[Any]:
    """A client of that server. Prefect must not have been asked for another one before."""
    os.environ["PREFECT_API_URL"] = api
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def has_polled(api: str, pool: str, name: str, note: Note) -> bool:
    """Whether this worker, and not one before it of the same name, has asked for work."""
    worker = _worker(api, pool, name)
    born = datetime.fromtimestamp(psutil.Process(note.pid).create_time(), UTC)
    return bool(worker and worker.last_heartbeat_time and worker.last_heartbeat_time > born)


def hangs(api: str, pool: str, name: str) -> str:
    """Since when the server has heard nothing of a worker whose process lives; empty: it works.

    Offline is what the server calls it after `SILENT_BEATS`. As long again it is waited for: the
    server may be the one that was away. A server that cannot be asked says nothing of a worker.
    """
    from prefect.settings import PREFECT_WORKER_HEARTBEAT_SECONDS

    wait = SILENT_BEATS * float(PREFECT_WORKER_HEARTBEAT_SECONDS.value()) + SLACK
    deadline = time.monotonic() + wait
    said = False
    while True:
        worker = _worker(api, pool, name)
        if worker is None or worker.status.value == "ONLINE":
            return ""
        since = f"{worker.last_heartbeat_time:%Y-%m-%d %H:%M:%S} UTC"
        if time.monotonic() > deadline:
            return since
        if not said:
            LOG.info("worker %s: no heartbeat since %s; given %.0f s", name, since, wait)
            said = True
        time.sleep(1)


def _worker(api: str, pool: str, name: str) -> Any:
    """What the server knows of it; None where it knows nothing, or cannot be asked."""
    with prefect_client(api) as client:
        import httpx
        from prefect.exceptions import ObjectNotFound

        try:
            workers = client.read_workers_for_work_pool(pool)
        except (ObjectNotFound, httpx.HTTPError):
            return None
    return next((worker for worker in workers if worker.name == name), None)
