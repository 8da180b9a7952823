"""How far a release is, as one progress artifact of its Prefect run.

Stage k of n, what is being made, and what remains by what the stages took last time. One thread
asks the server, so that a server that is slow or gone holds up nobody; nothing here fails a run.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any
from uuid import UUID

from tasks.progress import spell

QUIET = logging.getLogger(__name__)
"""Of no interest to who watches a release; Prefect's own log has what a server said."""

EVERY = 15.0
"""Seconds between two updates while nothing ends."""

BETWEEN = 2.0
"""Seconds between two updates at least: a night that reuses everything passes in few of them."""

LAST_UPDATE = 5.0
"""Seconds that the end of a run waits for its last update."""

MOST = 99.0
"""Percent, until the run has ended."""


@dataclass(frozen=True)
class Current:
    """What is being made. `estimate`, `since`: seconds, the latter of the monotonic clock."""

    key: str
    title: str
    number: int
    planned: int
    estimate: float | None
    since: float


@dataclass(frozen=True)
class Progress:
    """`to_come`: what each stage that the store lacks took last time, by key; None: never made."""

    planned: int = 0
    to_come: Mapping[str, float | None] = field(default_factory=dict)
    ended: int = 0
    spent: float = 0.0
    current: Current | None = None

    def begun(self, current: Current) -> Progress:
        rest = {key: known for key, known in self.to_come.items() if key != current.key}
        return replace(self, to_come=rest, current=current)

    def done(self, key: str, now: float) -> Progress:
        rest = {one: known for one, known in self.to_come.items() if one != key}
        made = self.current if self.current is not None and self.current.key == key else None
        spent = self.spent + (now - made.since if made is not None else 0.0)
        current = None if made is not None else self.current
        return replace(self, to_come=rest, ended=self.ended + 1, spent=spent, current=current)

    def without(self, keys: Iterable[str]) -> Progress:
        gone = set(keys)
        rest = {key: known for key, known in self.to_come.items() if key not in gone}
        return replace(self, to_come=rest)


def remaining(progress: Progress, now: float) -> tuple[float, int]:
    """Seconds that what is known of will take, and how many stages nothing is known of. Pure."""
    seconds = sum(known for known in progress.to_come.values() if known is not None)
    unknown = sum(known is None for known in progress.to_come.values())
    current = progress.current
    if current is not None:
        if current.estimate is None:
            unknown += 1
        else:
            seconds += max(0.0, current.estimate - (now - current.since))
    return seconds, unknown


def percent(progress: Progress, now: float) -> float:
    """Of the time where all of it is known, else of the stages; below 100 before the end. Pure."""
    seconds, unknown = remaining(progress, now)
    current = progress.current
    spent = progress.spent + (now - current.since if current is not None else 0.0)
    if unknown or spent + seconds <= 0:
        share = progress.ended / max(progress.planned, progress.ended + 1)
    else:
        share = spent / (spent + seconds)
    return round(min(100.0 * share, MOST), 1)


def words(progress: Progress, now: float) -> str:
    """One line for people. Pure."""
    current = progress.current
    if current is None:
        doing = f"{progress.ended} of {progress.planned} stages are there"
    else:
        doing = f"stage {current.number} of {current.planned}: {current.title}"
        doing += f", for {spell(now - current.since)}"
        if current.estimate is not None:
            doing += f" (last time {spell(current.estimate)})"
    return f"{doing}; {_rest(*remaining(progress, now))}"


def _rest(seconds: float, unknown: int) -> str:
    if unknown and seconds < 1:
        return "no estimate yet: what remains was never made here"
    about = f"about {spell(seconds)} to go"
    if not unknown:
        return about
    never = "a stage that was" if unknown == 1 else f"{unknown} stages that were"
    return f"no estimate yet of the whole: {about}, and {never} never made here"


class Shown:
    """The artifact of one run, once that has a plan. Every method returns at once, but `close`."""

    def __init__(self, key: str) -> None:
        """key: of the artifact, `[a-z0-9-]`. The caller is inside of a flow run."""
        self._key = key
        self._progress = Progress()
        self._changed, self._done = Event(), Event()
        self._end, self._whole = "", False
        self._artifact: UUID | None = None
        self._thread: Thread | None = None

    def plan(self, planned: int, to_come: Mapping[str, float | None]) -> None:
        self._set(Progress(planned=planned, to_come=dict(to_come)))
        if self._thread is None:
            # The context says whose run the artifact belongs to.
            run = contextvars.copy_context().run
            self._thread = Thread(target=run, args=(self._update,), daemon=True, name="progress")
            self._thread.start()

    def begun(self, **current: Any) -> None:
        self._set(self._progress.begun(Current(since=time.monotonic(), **current)))

    def done(self, key: str) -> None:
        self._set(self._progress.done(key, time.monotonic()))

    def without(self, keys: Iterable[str]) -> None:
        self._set(self._progress.without(keys))

    def close(self, end: str, whole: bool) -> None:
        """The last words. whole: the run came to its end, whatever its verdict."""
        self._end, self._whole = end, whole
        self._done.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(LAST_UPDATE)

    def _set(self, progress: Progress) -> None:
        self._progress = progress
        self._changed.set()

    def _update(self) -> None:
        while not self._done.is_set():
            self._changed.wait(EVERY)
            self._changed.clear()
            if not self._done.is_set():
                now = time.monotonic()
                self._send(percent(self._progress, now), words(self._progress, now))
                self._done.wait(BETWEEN)
        now = time.monotonic()
        share = 100.0 if self._whole else percent(self._progress, now)
        self._send(share, self._end)

    def _send(self, share: float, text: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        try:
            if self._artifact is None:
                made = create_progress_artifact(share, key=self._key, description=text)
                assert isinstance(made, UUID)
                self._artifact = made
            else:
                update_progress_artifact(self._artifact, share, description=text)
        except Exception as error:
            # A run is not worse for what nobody could look at.
            QUIET.debug("the progress is not shown: %s", error)


_shown: list[Shown] = []
"""Of the run in progress; nothing is shown outside of one."""


@contextmanager
def shown(key: str) -> Iterator[Callable[[str, bool], None]]:
    """While a flow runs, its progress is an artifact; in a flow that another calls, the other's.

    Yields what takes the last words, and whether the run came to its end, whatever its verdict;
    a run without last words was stopped.
    """
    if _shown:
        yield lambda text, whole: None
        return
    one = Shown(key)
    last = ["stopped before its end", False]

    def ends(text: str, whole: bool) -> None:
        last[:] = [text, whole]

    _shown.append(one)
    try:
        yield ends
    finally:
        _shown.clear()
        one.close(str(last[0]), bool(last[1]))


def plan(planned: int, to_come: Mapping[str, float | None]) -> None:
    for one in _shown:
        one.plan(planned, to_come)


def begun(**current: Any) -> None:
    """As the fields of `Current`, without `since`."""
    for one in _shown:
        one.begun(**current)


def done(key: str) -> None:
    for one in _shown:
        one.done(key)


def without(keys: Iterable[str]) -> None:
    for one in _shown:
        one.without(keys)
