"""Run a stage, or find that it has been run: the one path by which anything is made.

The store is the only memory. Prefect's own result cache is off: it knows neither the recipe nor
the parents, and still answers when the folder is gone (docs/decisions.md). A line in the run's log,
and `stages` of the outcome, say which work a night really did.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prefect.cache_policies import NO_CACHE

from registry.artifacts import ArtifactRef, Stage
from registry.errors import InfrastructureError, UserError
from registry.outcome import StageOutcome
from registry.provenance import provenance
from registry.settings import settings
from registry.store import Absent, Store
from tasks.progress import LOG, spell, working

TRIES = 2
"""How often a stage is tried when a process, a port or a disk fails; mistakes never are."""

TASK_OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "log_prints": False,
}

Produce = Callable[[Path], dict[str, Any]]

_made: dict[tuple[Path, str], ArtifactRef] = {}
"""What this process has made or verified; a folder is hashed once per process, not per use."""


_run: list[StageOutcome] = []
"""The stages of the run in progress, in the order in which they were asked for."""


_planned = 0


def begin_run(planned: int) -> None:
    """Forget an earlier run of this process; `planned` stages are to come, for the progress."""
    global _planned
    _planned = planned
    _run.clear()
    _made.clear()
    for stale in store().remove_stale():
        LOG.info("removed %s, left by a writer that crashed", stale.name)


def stages_of_run() -> list[StageOutcome]:
    return list(_run)


def store() -> Store:
    return Store(settings().store_dir)


def make(
    stage: Stage, produce: Produce, *, fresh: Callable[[ArtifactRef], bool] = lambda ref: True
) -> ArtifactRef:
    """The artifact of `stage`: found, or made by `produce(folder)`, with one retry of faults."""
    shelf = store()
    known = _made.get((shelf.root, stage.key))
    if known is not None:
        return known
    started = time.monotonic()
    title = f"[{len(_run) + 1}/{max(_planned, len(_run) + 1)}] {stage.title}"
    estimate = shelf.last_seconds(stage.name, stage.label)
    for attempt in range(1, TRIES + 1):
        try:
            with ExitStack() as shown:

                def announce(reason: str, shown: ExitStack = shown) -> None:
                    LOG.info("%s", reason)
                    shown.enter_context(working(title, estimate))

                try:
                    ref = shelf.make(stage, produce, provenance(), fresh=fresh, on_absent=announce)
                except OSError as error:
                    raise InfrastructureError(f"{stage.title}: {error}") from error
            break
        except InfrastructureError as error:
            if attempt == TRIES:
                raise
            pause = 2.0**attempt * random.uniform(0.5, 1.5)
            LOG.warning("%s: %s; trying again in %.0f s", stage.title, error, pause)
            time.sleep(pause)
    if ref.reused:
        LOG.info("%s: reused (%s)", title, ref.key[:12])
    else:
        LOG.info("%s: done in %s (%s)", title, spell(ref.seconds), ref.key[:12])
    _made[shelf.root, stage.key] = ref
    _run.append(
        StageOutcome(
            name=stage.title,
            key=stage.key,
            reused=ref.reused,
            seconds=round(time.monotonic() - started, 3),
            made_seconds=ref.seconds,
        )
    )
    return ref


def folder_of(stage: Stage) -> Path:
    """The verified files of a stage that ran before this one."""
    return artifact_of(stage).path


def artifact_of(stage: Stage) -> ArtifactRef:
    """The artifact of a stage that ran before this one. A missing one is a bug of the flow."""
    known = _made.get((store().root, stage.key))
    if known is not None:
        return known
    try:
        return store().find(stage)
    except Absent as absent:
        raise UserError.at(stage.title, str(absent), "run the release again") from None


def log_file(stage: Stage, suffix: str = "") -> Path:
    """Where the process of a stage writes its log; kept, one file per stage key."""
    # A label may come from a file name that a person chose.
    label = re.sub(r"[^A-Za-z0-9_.-]+", "_", stage.label)
    name = "-".join(filter(None, [stage.name, label, stage.key[:12], suffix]))
    folder = settings().logs_dir
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"
