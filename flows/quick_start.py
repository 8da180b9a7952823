"""A release from the command line: Prefect's temporary server starts while we import.

Both take seconds, one in a process of its own and one in this: together as long as the longer.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

from registry.errors import PilotageError
from registry.outcome import ReleaseOutcome
from registry.settings import settings


def run_release(
    recipe: str, overrides: Sequence[str] = (), prompts: str | None = None
) -> ReleaseOutcome:
    """The outcome, of a refusal too. Raises what the flow ended with where it failed."""
    with server_meanwhile():
        from flows.endings import outcome_of
        from flows.forms import ReleaseRequest, request_of
        from flows.release import release_model

        open_mlflow()
    request = request_of(ReleaseRequest, recipe=recipe, overrides=list(overrides), prompts=prompts)
    return outcome_of(release_model, request)


@contextmanager
def server_meanwhile() -> Iterator[None]:
    """Prefect's temporary server is up when the block has ended, if there is to be one.

    Where it does not start nothing is said here: the flow's own try has the error.
    """
    from prefect.settings import get_current_settings

    asked = get_current_settings()
    if asked.api.url or not asked.server.ephemeral.enabled:
        yield
        return
    from prefect.server.api.server import SubprocessASGIServer

    # One for the process: the flow's client finds this one.
    server = SubprocessASGIServer()
    thread = Thread(target=_start, args=(server,), daemon=True, name="prefect server")
    thread.start()
    try:
        yield
    finally:
        # Its own limit is Prefect's start-up timeout; a start of our own in it would not wait.
        thread.join()


def _start(server: object) -> None:
    # Prefect takes a failed start back, so that the next caller starts one.
    with suppress(Exception):
        server.start()  # type: ignore[attr-defined]


def open_mlflow() -> None:
    """What the first question to MLflow would import, with the store of a database.

    In a new home its tables are made too. What goes wrong there is told by who asks first.
    """
    from registry.tracking import quiet_mlflow

    quiet_mlflow()
    importlib.import_module("mlflow")
    if "://" in settings().tracking_uri and not settings().tracking_uri.startswith("http"):
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
        importlib.import_module("mlflow.store.model_registry.sqlalchemy_store")
    file = settings().tracking_file
    if file is not None and not file.exists():
        from tasks.bundles import tracker

        # Not one that is there: of a broken one MLflow asks for minutes, and is asked again.
        with suppress(PilotageError):
            _ = tracker().client
