"""What a night leaves behind, removed step by step; each step by itself, and bounded in time.

leftovers of crashed runs ─► half-written store folders ─► store ─► runs in Prefect ─► runs in
MLflow ─► the databases' free pages

Nothing that a version, a ledger line or a recent run needs is touched: the store is pruned by the
rules of `tasks.pruning`, and MLflow's rubbish is only what a person deleted there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from registry.errors import InfrastructureError
from registry.redaction import redacted
from registry.settings import settings
from registry.store import Store, size_on_disk
from tasks.database_files import compact
from tasks.engines.subprocesses import TimeLimit, end_leftovers
from tasks.mlflow_rubbish import collect
from tasks.night_digest import plain
from tasks.prefect_history import forget
from tasks.progress import LOG, spell
from tasks.pruning_job import pruned_within

PRUNE_SHARE = 0.5
"""Of the time that is left when the store's turn comes: the databases come after it."""


@dataclass(frozen=True)
class Freed:
    """What a step did, and the bytes that it freed."""

    what: str
    size: int = 0


@dataclass(frozen=True)
class Step:
    """A step of the table. `failed`: why it did not do what it should; empty where it did."""

    name: str
    what: str
    size: int
    seconds: float
    failed: str = ""


@dataclass(frozen=True)
class Job:
    """A step to be done, given the days and the moment (`time.monotonic`) it must end by."""

    name: str
    run: Callable[[int, float], Freed]


def done(jobs: Sequence[Job], days: int, minutes: float) -> list[Step]:
    """Every step in its turn; one that fails is told and stops no other.

    What could not begin in time is left to the next maintenance, which is no failure of the step,
    but is told as one: a table that is green must mean that everything was done.
    """
    deadline = time.monotonic() + minutes * 60
    steps = []
    for job in jobs:
        began = time.monotonic()
        if began >= deadline:
            steps.append(Step(job.name, "", 0, 0.0, failed="no time was left"))
            continue
        try:
            freed = job.run(days, deadline)
        except Exception as error:
            LOG.exception("%s failed", job.name)
            why = " ".join(redacted(str(error)).split()) or type(error).__name__
            steps.append(Step(job.name, "", 0, time.monotonic() - began, failed=why))
            continue
        LOG.info("%s: %s", job.name, freed.what)
        steps.append(Step(job.name, freed.what, freed.size, time.monotonic() - began))
    return steps


def table(steps: Sequence[Step], days: int) -> str:
    """What was freed, as Markdown."""
    lines = [
        f"# Maintenance: what is older than {days} days",
        "",
        plain(summary(steps)),
        "",
        "| step | done | freed | took |",
        "|---|---|---:|---:|",
    ]
    for step in steps:
        said = f"**failed**: {plain(step.failed)}" if step.failed else plain(step.what)
        cells = (plain(step.name), said, f"{step.size / 2**20:.1f} MiB", spell(step.seconds))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary(steps: Sequence[Step]) -> str:
    """One line: what was freed in all, and which steps failed."""
    line = f"{sum(step.size for step in steps) / 2**20:.1f} MiB freed"
    failed = [f"{step.name} failed: {step.failed}" for step in steps if step.failed]
    return "; ".join([line, *failed])


# -- the steps ---------------------------------------------------------------------------------


def jobs() -> list[Job]:
    """The steps in their order: the databases last, so that their free pages are given back."""
    return [
        Job("leftovers of crashed runs", _leftovers),
        Job("half-written store folders", _stale),
        Job("store", _store),
        Job("runs in Prefect", _prefect),
        Job("deleted runs in MLflow", _mlflow),
        Job("databases", _databases),
    ]


def _leftovers(days: int, deadline: float) -> Freed:
    return Freed(f"{len(end_leftovers())} processes ended")


def _stale(days: int, deadline: float) -> Freed:
    folder = settings().store_dir / ".incoming"
    before = size_on_disk(folder)
    removed = Store(settings().store_dir).remove_stale()
    return Freed(f"{len(removed)} folders", max(0, before - size_on_disk(folder)))


def _store(days: int, deadline: float) -> Freed:
    if not settings().store_dir.exists():
        return Freed("nothing was made yet")
    seconds = max(1.0, (deadline - time.monotonic()) * PRUNE_SHARE)
    try:
        pruned = pruned_within(days, seconds)
    except TimeLimit:
        raise InfrastructureError(
            f"prune was ended after {spell(seconds)}, half of what was left of the maintenance's "
            f"`minutes`: see what it hangs at with `pilotage prune --days {days} --yes`, which has "
            "no limit, or give the maintenance more minutes; its locks are free"
        ) from None
    left = f", {pruned['unreadable']} that cannot be read left" if pruned["unreadable"] else ""
    return Freed(f"{pruned['removed']} of {pruned['entries']} entries{left}", pruned["bytes"])


def _prefect(days: int, deadline: float) -> Freed:
    return Freed(forget(days, deadline))


def _mlflow(days: int, deadline: float) -> Freed:
    before = size_on_disk(settings().mlartifacts_dir)
    what = collect(days, deadline)
    return Freed(what, max(0, before - size_on_disk(settings().mlartifacts_dir)))


def _databases(days: int, deadline: float) -> Freed:
    files = [settings().prefect_home / "prefect.db", settings().tracking_file]
    found = [file for file in files if file is not None and file.exists()]
    freed = {file.name: compact(file, deadline) for file in found}
    sizes = ", ".join(f"{file.name} {file.stat().st_size / 2**20:.1f} MiB" for file in found)
    return Freed(sizes or "none is a file of this home", sum(freed.values()))
