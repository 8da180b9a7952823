"""A SQLite database that another process holds."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HOLD = """
import sqlite3, sys, time
held = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
held.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextmanager
def locked(database: Path, seconds: float) -> Iterator[None]:
    """Another process holds the database exclusively, `seconds` long or until the block ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(database), str(seconds)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite3.connect(database, timeout=0.1).execute("BEGIN IMMEDIATE")
        yield
    finally:
        holder.kill()
        holder.wait(30)
