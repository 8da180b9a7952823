"""One at a time in this home: what two of would undo or repeat each other's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from registry.errors import InfrastructureError
from registry.settings import settings


@contextmanager
def only_in_this_home(name: str) -> Iterator[None]:
    """Raises `InfrastructureError` where another process holds it; nobody waits."""
    locks = settings().home / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{name}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InfrastructureError(f"another {name} is running in this home") from None
    try:
        yield
    finally:
        lock.release()
