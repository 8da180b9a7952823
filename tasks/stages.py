"""Run a stage, or find that it has been run: the one path by which anything is made.

The store is the only memory. Prefect's own result cache is off: it knows neither the recipe nor
the parents, and still answers when the folder is gone (docs/decisions.md). A line in the run's log,
and `stages` of the outcome, say which work a night really did.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from registry.artifacts import ArtifactRef, Stage
from registry.errors import InfrastructureError, UserError
from registry.outcome import StageOutcome
from registry.provenance import provenance
from registry.settings import settings
from registry.shared_store import open_store
from registry.store import Absent, Busy, Store
from tasks import run_log, run_progress
from tasks.devices import exclusive, is_held
from tasks.progress import LOG, spell, working

TRIES = 2
"""How often a stage is tried when a process, a port or a disk fails; mistakes never are."""


def run_name(parameters: dict[str, Any]) -> str:
    """What a task run is called in Prefect's UI: the stage that it makes, else what it is about."""
    for value in parameters.values():
        if isinstance(value, Stage):
            return value.title
    context = TaskRunContext.get()
    name = context.task.name if context is not None else "task"
    about = parameters.get("reference")
    return f"{name} {about}" if isinstance(about, str) else name


TASK_OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "log_prints": False,
    "task_run_name": run_name,
}

Produce = Callable[[Path], dict[str, Any]]

_made: dict[tuple[Path, str], ArtifactRef] = {}
"""What this process has made or verified; a folder is hashed once per process, not per use."""


_run: list[StageOutcome] = []
"""The stages of the run in progress, in the order in which they were asked for."""


_planned = 0


def begin_run(planned: int, stages: Sequence[Stage] = ()) -> None:
    """Forget an earlier run of this process; `planned` stages are to come, for the progress.

    stages: the same ones; what the store has not got of them makes the estimate of what remains.
    """
    global _planned
    _planned = planned
    _run.clear()
    _made.clear()
    shelf = store()
    to_come = {
        stage.key: shelf.last_seconds(stage.name, stage.label)
        for stage in stages
        if not shelf.is_there(stage)
    }
    run_progress.plan(planned, to_come)
    for stale in shelf.remove_stale():
        LOG.info("removed %s, left by a writer that crashed", stale.name)


def leave_out(*stages: Stage) -> None:
    """These planned stages will not be made: a candidate that is not served is not measured."""
    run_progress.without([stage.key for stage in stages])


def adopt(stages: Sequence[Stage], since: datetime) -> None:
    """Take what another run of this release has made as made by it; `since` it began.

    It is not asked whether it is fresh: what was measured a moment ago is not measured again.
    """
    for stage in stages:
        try:
            ref = store().find(stage)
        except Absent:
            continue  # a candidate that is not served is not measured
        if _made.setdefault((store().root, stage.key), ref) is not ref:
            continue
        _run.append(
            StageOutcome(
                name=stage.title,
                key=stage.key,
                reused=ref.made_at < since,
                seconds=0.0,
                made_seconds=ref.seconds,
            )
        )
        run_progress.done(stage.key)


def stages_of_run() -> list[StageOutcome]:
    return list(_run)


def store() -> Store:
    return open_store(LOG.info)


class _DeviceFirst(Exception):
    """A key was locked, and nothing made, by a process that does not hold its device yet."""


def make(
    stage: Stage,
    produce: Produce,
    *,
    fresh: Callable[[ArtifactRef], bool] = lambda ref: True,
    heavy: bool = False,
) -> ArtifactRef:
    """The artifact of `stage`: found, or made by `produce(folder)`, with one retry of faults.

    What is `heavy` is made with the device held (`tasks.devices`); to find it takes none.
    """
    try:
        return _make(stage, produce, fresh, without_device=heavy and not is_held())
    except _DeviceFirst:
        with exclusive(stage.title):
            return _make(stage, produce, fresh, without_device=False)


def _make(
    stage: Stage, produce: Produce, fresh: Callable[[ArtifactRef], bool], *, without_device: bool
) -> ArtifactRef:
    shelf = store()
    known = _made.get((shelf.root, stage.key))
    if known is not None:
        return known
    started = time.monotonic()
    number, planned = len(_run) + 1, max(_planned, len(_run) + 1)
    title = f"[{number}/{planned}] {stage.title}"
    run_log.doing(stage.title)
    for attempt in range(1, TRIES + 1):
        try:
            with ExitStack() as shown:

                def announce(reason: str, shown: ExitStack = shown) -> None:
                    # The device, then the key, in every process: who held a key and waited for
                    # the device would wait for a holder who may be waiting for that key.
                    if without_device:
                        raise _DeviceFirst
                    LOG.info("%s", reason)
                    estimate = shelf.last_seconds(stage.name, stage.label)
                    run_progress.begun(
                        key=stage.key,
                        title=stage.title,
                        number=number,
                        planned=planned,
                        estimate=estimate,
                    )
                    shown.enter_context(working(title, estimate))

                try:
                    ref = shelf.make(stage, produce, provenance(), fresh=fresh, on_absent=announce)
                except OSError as error:
                    raise InfrastructureError(f"{stage.title}: {error}") from error
            break
        except InfrastructureError as error:
            # A day of waiting for another process is not waited for twice.
            if attempt == TRIES or isinstance(error, Busy):
                raise
            pause = 2.0**attempt * random.uniform(0.5, 1.5)
            LOG.warning("%s: trying again in %.0f s: %s", stage.title, pause, error)
            time.sleep(pause)
    if ref.reused:
        LOG.info("%s: reused (%s)", title, ref.key[:12])
    else:
        LOG.info("%s: done in %s (%s)", title, spell(ref.seconds), ref.key[:12])
    _made[shelf.root, stage.key] = ref
    run_progress.done(stage.key)
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
