"""SQLite files give their free pages back to the disk."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from threading import Timer

from registry.errors import InfrastructureError

LOCK_WAIT = 10.0
"""Seconds to wait for whoever writes now."""

FREE_SHARE = 0.2
"""Share of free pages from which a file is written anew: free pages are used again anyway."""


def compact(file: Path, deadline: float) -> int:
    """Write the log back, and the file anew where much of it is free; the bytes that were freed.

    Others may use the database meanwhile; they wait while it is written. Stopped at `deadline`
    (`time.monotonic`), with the file as it was. Raises `InfrastructureError`.
    """
    before = _size(file)
    try:
        with closing(sqlite3.connect(file, timeout=LOCK_WAIT, isolation_level=None)) as database:
            stop = Timer(max(0.0, deadline - time.monotonic()), database.interrupt)
            stop.start()
            try:
                pages = int(database.execute("PRAGMA page_count").fetchone()[0])
                free = int(database.execute("PRAGMA freelist_count").fetchone()[0])
                if pages and free / pages >= FREE_SHARE:
                    database.execute("VACUUM")
                # What was written stands in the log until here; a reader may keep some of it.
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                stop.cancel()
    except sqlite3.Error as error:
        raise InfrastructureError(f"{file.name} was left as it is: {error}") from None
    return max(0, before - _size(file))


def _size(file: Path) -> int:
    log = file.with_name(f"{file.name}-wal")
    return file.stat().st_size + (log.stat().st_size if log.exists() else 0)
