"""`prune` in a process of its own: what hangs in it (a disk, a registry) can be ended from outside.

Started by the maintenance with the days in its job; its result says what was removed, or `failed`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from registry.errors import InfrastructureError, PilotageError
from registry.redaction import is_secret
from registry.settings import settings
from tasks.engines.subprocesses import job_main, run_job
from tasks.pruning import prune


def pruned_within(days: int, seconds: float) -> dict[str, Any]:
    """`prune(days, yes=True)`, ended after `seconds`: `removed`, `entries`, `unreadable`, `bytes`.

    Raises `InfrastructureError` for whatever kept it from ending well. What it had taken out of the
    store by then is deleted by the next one.
    """
    # Registry and ledger may be behind passwords; it is this project itself that is started.
    secrets = {name: value for name, value in os.environ.items() if is_secret(name, value)}
    result = run_job(
        __name__,
        {"days": days},
        log=settings().logs_dir / "prune.log",
        timeout=seconds,
        env=secrets,
    )
    if "failed" in result:
        raise InfrastructureError(result["failed"])
    return result


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        pruned = prune(job["days"], yes=True)
    except PilotageError as error:
        return {"failed": str(error)}
    size = sum(one.size for one in pruned.removed) + sum(size for _, size in pruned.leftovers)
    return {
        "removed": len(pruned.removed),
        "entries": len(pruned.entries),
        "unreadable": len(pruned.unreadable),
        "bytes": size,
    }


if __name__ == "__main__":
    job_main(run)
