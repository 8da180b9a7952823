"""Who runs of the services that `pilotage up` starts: one note each below PILOTAGE_HOME/services.

A note names a process by its id and its start: an id is given again, the pair is not. Nothing
heavy is imported: every command looks here for the server before it begins.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from registry.whole_files import write_whole
from tasks.engines.subprocesses import identity

SERVER = "prefect-server"
MLFLOW = "mlflow"
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
    write_whole(path, json.dumps(asdict(note)))


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


# -- Prefect's SQLite file: one server, or the temporary ones of single commands ----------------

_shares: list[int] = []


def share_database() -> None:
    """For a command that will start a temporary server: until it ends, `up` starts none.

    Both on one SQLite file lose nothing, and wait for each other's locks all the time. Waits while
    `up` starts its server; then there is one to use.
    """
    _shares.append(os.open(_database_lock(), os.O_RDWR | os.O_CREAT, 0o600))
    fcntl.flock(_shares[-1], fcntl.LOCK_SH)


def leave_database() -> None:
    """For a command that found a server to use: it starts none."""
    while _shares:
        os.close(_shares.pop())


@contextmanager
def database_alone() -> Iterator[None]:
    """For `up`. Raises `UserError` naming the command that works with a temporary server."""
    path = _database_lock()
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError.at(
                path.parent,
                f"{_holders(path)} works with a temporary Prefect server on this database",
                "wait until it has ended, or end it; then `pilotage up` again",
            ) from None
        yield
    finally:
        os.close(handle)


def _database_lock() -> Path:
    folder = Path(os.environ.get("PREFECT_HOME") or settings().prefect_home)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "database.lock"


def _holders(path: Path) -> str:
    found = []
    for process in psutil.process_iter():
        try:
            opened = [one.path for one in process.open_files()]
        except psutil.Error:
            continue
        if str(path.resolve()) in opened and process.pid != os.getpid():
            found.append(f"process {process.pid} ({' '.join(process.cmdline())[:100]})")
    return " and ".join(found) or "another process"
