"""Who runs of the services that `pilotage up` starts: one note each below PILOTAGE_HOME/services.

A note names a process by its id and its start: an id is given again, the pair is not. Nothing
heavy is imported: every command looks here for the server before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from registry.errors import InfrastructureError
from registry.settings import settings
from tasks.engines.subprocesses import identity

SERVER = "prefect-server"
_LOCK_WAIT = 300.0
"""Seconds that one `up`, `down` or `deploy` waits for another."""


@dataclass(frozen=True)
class Note:
    """One service as it was started. `session` is the process id of its front."""

    name: str
    pid: int
    start: int
    marker: str
    log: str
    url: str = ""

    @property
    def alive(self) -> bool:
        return identity(self.pid) == {"pid": self.pid, "start": self.start}


def services_dir() -> Path:
    return settings().home / "services"


def write_note(note: Note) -> None:
    path = _path(note.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(note)))
    partial.rename(path)


def read_note(name: str) -> Note | None:
    """The note of a service, alive or dead; None where there is none that can be read."""
    try:
        return Note(**json.loads(_path(name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remove_note(name: str) -> None:
    _path(name).unlink(missing_ok=True)


@contextmanager
def only_one(what: str) -> Iterator[None]:
    """Two commands that start and end services at once would undo each other's work."""
    services_dir().mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(services_dir() / "lock", timeout=_LOCK_WAIT):
            yield
    except Timeout:
        raise InfrastructureError(
            f"{what}: another `pilotage up`, `down` or `deploy` of this PILOTAGE_HOME has not "
            f"ended within {_LOCK_WAIT:.0f} s"
        ) from None


def _path(name: str) -> Path:
    return services_dir() / f"{name}.json"
