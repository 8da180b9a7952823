"""What a process writes to its log file, as a few lines of this run's own log while it works.

Somebody who looks at a run wants to see that its engine is alive and what it warns of; the file has
the rest. So a long process shows fewer lines an hour than a short one, and none shows more than
`MOST` and its `LAST` ones where it failed.

The lines go to the logger `pilotage.engine`. It is off until somebody wants them.
"""

from __future__ import annotations

import contextvars
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from registry.redaction import redacted

ENGINE_LOG = logging.getLogger("pilotage.engine")
OFF = logging.CRITICAL + 1
ENGINE_LOG.setLevel(OFF)

FIRST_WINDOW = 5.0
"""Seconds after which a process is looked at; every `WINDOWS` looks the time doubles."""

WINDOWS = 4
NEWEST = 2
"""Lines of one look, beside warnings."""

WARNINGS = 3
MOST = 60
"""Lines of one process in all: eight hours are 42 looks."""

LAST = 15
"""Lines at the end of a process that failed."""

LONGEST = 300
"""Characters of a line."""

READ = 256 * 1024
"""Bytes of one look; of a process that writes more, the newest."""

_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|^Traceback |^(?:\w+\.)*\w*Error\b")
_WARNING = re.compile(r"\bWARN(?:ING)?\b|\w*Warning:")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_NUMBERS = re.compile(r"\d+")


def level_of(line: str) -> int:
    """The level that the tool itself gave a line. Pure."""
    if _ERROR.search(line):
        return logging.ERROR
    return logging.WARNING if _WARNING.search(line) else logging.INFO


def lines_of(text: str) -> list[str]:
    """The lines that say something; of a progress bar, which rewrites its line, the last. Pure."""
    last = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    plain = (_CONTROL.sub("", line).rstrip() for line in last)
    return [line if len(line) <= LONGEST else f"{line[:LONGEST]}…" for line in plain if line]


def chosen(lines: Sequence[str], seen: set[str]) -> list[str]:
    """The first new warnings and the newest other lines of one look, in their order.

    seen: what was shown before, without its numbers; the chosen ones are added.
    """
    warned: list[int] = []
    others: list[int] = []
    for place, line in enumerate(lines):
        if level_of(line) == logging.INFO:
            others.append(place)
        elif len(warned) < WARNINGS and (kind := _NUMBERS.sub("#", line)) not in seen:
            seen.add(kind)
            warned.append(place)
    return [lines[place] for place in sorted([*warned, *others[-NEWEST:]])]


class Following:
    """Reads on in a log file, in a thread of its own, until `close`."""

    def __init__(self, log: Path, start: int, environment: Mapping[str, str]) -> None:
        """start: bytes that others had written before; environment: of the process, whose secrets
        are shown nowhere."""
        self._log, self._environment = log, environment
        self._start = self._place = start
        self._limit: int | None = None
        self._seen: set[str] = set()
        self.shown = self.left_out = 0
        self._done = Event()
        # The context says whose run the lines belong to.
        run = contextvars.copy_context().run
        self._thread = Thread(target=run, args=(self._follow,), daemon=True, name=f"log {log.name}")
        self._thread.start()

    def ends_here(self) -> None:
        """What is written from now on is a process that does as it was told: it is not shown."""
        with suppress(OSError):
            self._limit = self._log.stat().st_size

    def close(self, failed: bool) -> None:
        """Show what was written since the last look; the last lines where the process failed."""
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join(timeout=2 * FIRST_WINDOW)
        if self._thread.is_alive():  # a handler that hangs must not hold up the stage
            return
        try:
            if failed:
                # Shown again, if they were: an end with holes explains nothing.
                self._place = self._start
                for line in self._new_lines(at_end=True)[-LAST:]:
                    self._emit(line, max(logging.WARNING, level_of(line)))
            else:
                self._show(self._new_lines(at_end=True))
        except OSError:
            return
        if self.left_out:
            words = "%d lines shown, %d more in %s"
            told = {"log_file": self._log}
            ENGINE_LOG.info(words, self.shown, self.left_out, self._log, extra=told)

    def _follow(self) -> None:
        window, looks = FIRST_WINDOW, 0
        while not self._done.wait(window):
            try:
                self._show(self._new_lines())
            except OSError:  # the file is gone: the process will say why
                return
            looks += 1
            if looks % WINDOWS == 0:
                window *= 2

    def _show(self, lines: Sequence[str]) -> None:
        picked = chosen(lines, self._seen)[: max(0, MOST - self.shown)]
        self.left_out += len(lines) - len(picked)
        for line in picked:
            self._emit(line, level_of(line))

    def _emit(self, line: str, level: int) -> None:
        self.shown += 1
        hidden = redacted(line, {**os.environ, **self._environment})
        ENGINE_LOG.log(level, "%s", hidden, extra={"log_file": self._log})

    def _new_lines(self, at_end: bool = False) -> list[str]:
        with self._log.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            size = size if self._limit is None else min(size, self._limit)
            handle.seek(max(self._place, size - READ))
            content = handle.read(max(0, size - handle.tell()))
            self._place = handle.tell()
        # A line that is being written is read with the next look.
        end = len(content) if at_end else content.rfind(b"\n") + 1
        if end or len(content) < READ:
            self._place -= len(content) - end
        return lines_of(content[:end].decode("utf-8", errors="replace"))
