"""A flow run as its log sees it: which run and which stage the lines of engines belong to.

Engines know neither. Their lines (`tasks.engines.log_following`) come from other threads, so what
they are marked with is kept here, for the whole process: it works on one stage at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from tasks.engines.log_following import ENGINE_LOG
from tasks.progress import LOG

RUN_LOG = logging.getLogger("pilotage.run")
"""For the log of the run alone: the terminal says it in another way."""


@dataclass
class Mark:
    """What is being done, by which task run, and the log files that were seen doing it."""

    doing: str = ""
    task_run: UUID | None = None
    files: list[Path] = field(default_factory=list)


_mark = Mark()
_run: list[UUID] = []


def doing(title: str) -> None:
    """From now on the lines of engines belong to this stage, and to the task run that says so."""
    global _mark
    task = TaskRunContext.get()
    _mark = Mark(title, task.task_run.id if task is not None else None)


def mark() -> Mark:
    return _mark


@contextmanager
def in_run_log(title: str) -> Iterator[None]:
    """While a flow runs, its run's log has our lines and those of the engines.

    Re-entrant: the lines inside of a flow that another one calls belong to the inner.
    """
    global _mark
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    # Whoever started this process may not have told Prefect of our loggers.
    if not any(isinstance(one, APILogHandler) for one in LOG.handlers):
        LOG.addHandler(APILogHandler())
    LOG.setLevel(min(logging.INFO, LOG.level or logging.INFO))
    before, level = _mark, ENGINE_LOG.level
    _run.append(context.flow_run.id)
    _mark = Mark(title)
    ENGINE_LOG.addFilter(_marked)
    ENGINE_LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        _run.pop()
        _mark = before
        ENGINE_LOG.setLevel(level)
        if not _run:
            ENGINE_LOG.removeFilter(_marked)


def _marked(record: logging.LogRecord) -> bool:
    """A filter that lets everything through, with run and stage."""
    file = getattr(record, "log_file", None)
    if file is not None and file not in _mark.files:
        _mark.files.append(file)
    if not hasattr(record, "flow_run_id") and _run:
        record.flow_run_id = str(_run[-1])
        record.task_run_id = str(_mark.task_run) if _mark.task_run else None
        name = f"{file.stem}: " if file is not None else ""
        record.msg, record.args = f"[{_mark.doing}] {name}{record.getMessage()}", ()
    return True
