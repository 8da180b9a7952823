"""A temporary folder for a command, and what commands that were killed left behind.

A folder's owner holds a lock (`flock`) on it for as long as it lives; the kernel gives it up when
the process ends, however it ends. Another process may have the same number one day, a lock is
never anybody else's. So who gets the lock of a folder may remove it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.errors import InfrastructureError

PREFIX = "pilotage-traffic-"
log = logging.getLogger(__name__)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in the system's temporary one, which is gone at the end.

    Removes those whose owner is gone before. Raises `InfrastructureError` where none can be made.
    """
    place = Path(tempfile.gettempdir())
    _sweep(place)
    try:
        folder, lock = _made(place)
    except OSError as error:
        raise InfrastructureError(
            f"{place}: no temporary folder ({error.strerror}); make room there, or name another "
            "place with TMPDIR"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made(place: Path) -> tuple[Path, int]:
    """A new folder and its lock. One that another command swept in between is made again."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_still(folder, lock):
            return folder, lock
        os.close(lock)


def _is_still(folder: Path, lock: int) -> bool:
    try:
        return os.path.samestat(folder.lstat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def _sweep(place: Path) -> None:
    """Remove this person's folders that nobody holds."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid != os.getuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(folder, lock):
                shutil.rmtree(folder, ignore_errors=True)
                log.info("removed %s, which a command that was ended had left", folder)
        except OSError:
            # Somebody holds it, or there are no locks there.
            continue
        finally:
            os.close(lock)
