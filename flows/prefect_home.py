"""Prefect for this checkout: where it keeps its database, and what it shows on a terminal."""

from __future__ import annotations

import os

from registry.settings import settings
from tasks.progress import LOG, configure_logging
from tasks.service_notes import SERVER, leave_database, read_note, share_database


def prepare_prefect(*, runs: bool = True) -> None:
    """Configure Prefect for this checkout, before it is imported for the first time.

    `runs`: the command will run flows, and without a server Prefect starts a temporary one for it.
    """
    configure_logging()
    home = settings().prefect_home
    home.mkdir(parents=True, exist_ok=True)
    defaults = {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The first start migrates the database; 20 s, the default, was missed on two cores.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "pilotage",
        # On the terminal our own lines say what happens; the UI still gets every line.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("PREFECT_API_URL"):
        # Terminal, schedule and form share one server; an address of the user's own wins.
        if runs:
            share_database()  # waits while `up` starts a server: it does not answer yet
        url = running_server()
        if url:
            leave_database()
            os.environ["PREFECT_API_URL"] = f"{url}/api"
    # Prompts and keys for a server on this machine are nobody else's business.
    for name in ("NO_PROXY", "no_proxy"):
        local = "127.0.0.1,localhost"
        os.environ[name] = f"{os.environ[name]},{local}" if os.environ.get(name) else local


def running_server() -> str:
    """Address of the Prefect server of `pilotage up`; empty where none runs for this home."""
    note = read_note(SERVER)
    if note is not None and not note.alive and note.pid not in _told:
        _told.add(note.pid)
        LOG.warning(
            "the Prefect server that `pilotage up` started (process %d) has died: not used; "
            "`pilotage up` starts it again",
            note.pid,
        )
    return note.url if note is not None and note.alive else ""


_told: set[int] = set()
