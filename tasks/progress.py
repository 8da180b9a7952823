"""What a person sees while long work runs: one line when a stage begins, one when it ends.

With a terminal a spinner shows the stage, its elapsed time and the estimate in between; without
one (CI, a log file) the same facts come as plain lines. Everything goes to standard error, so
that standard output belongs to the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console
from rich.status import Status

from registry.redaction import redact_logs

# Here, because everything that runs in a flow logs through this module, by whomever it is started.
redact_logs()

LOG = logging.getLogger("pilotage")
_console = Console(stderr=True, highlight=False, markup=False, emoji=False)


def configure_logging() -> None:
    """Send our lines to standard error, plain and with the time of day."""
    if not LOG.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
        # What `pilotage.engine` and `pilotage.run` say is for the log of a Prefect run alone.
        handler.addFilter(lambda record: record.name == LOG.name)
        LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


@contextmanager
def working(title: str, estimate: float | None) -> Iterator[None]:
    """Announce `title` with its estimate in seconds (None: never made before) while it runs."""
    about = f"about {spell(estimate)}" if estimate else "no estimate yet"
    LOG.info("%s: making (%s)", title, about)
    if not _console.is_terminal:
        yield
        return
    done = Event()
    started = time.monotonic()
    with _console.status(title) as status:
        Thread(target=_tick, args=(status, title, about, started, done), daemon=True).start()
        try:
            yield
        finally:
            done.set()


def spell(seconds: float) -> str:
    """`75` as `1 min 15 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _tick(status: Status, title: str, about: str, started: float, done: Event) -> None:
    while not done.wait(1.0):
        status.update(f"{title}  {spell(time.monotonic() - started)}, {about}")
