"""What has ended, for tests that end processes."""

from __future__ import annotations

import psutil


def gone(process: psutil.Process) -> bool:
    """Ended; an orphan that has may still wait for process 1 to take note of it."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
