"""When its owner is killed, a tree of processes ends too, and keeps its locks until it has.

A run that is killed cannot end its engines. Beside each tree a shell (a megabyte) waits at a pipe
whose other end only the owner holds; when the pipe breaks it becomes a Python that ends the tree
by its note. The shell is nobody's child, in a session of its own, and has none of our markers: no
signal to the tree, to its owner's group or to a worker's processes reaches it. PR_SET_PDEATHSIG
would not do: it reaches only the front of a tree, and it fires when the thread ends that started
the front.

What the tree's log holds of the keys that it was handed the guard blots out as its owner would
have. It finds those words in a second pipe, where they wait in the kernel: in no file, on no
command line, in no environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from registry.redaction import without_secrets
from registry.settings import CHECKOUT, settings

_kept_open: set[int] = set()


@contextmanager
def kept_open(descriptor: int) -> Iterator[None]:
    """Trees that are started inside keep an open file open until they have ended.

    That is a lock: when its owner is killed, it stays locked as long as an engine of it runs.
    """
    _kept_open.add(descriptor)
    try:
        yield
    finally:
        _kept_open.discard(descriptor)


def open_files() -> tuple[int, ...]:
    return tuple(_kept_open)


class Guard:
    """Ends the tree of a note when `owner` (see `subprocesses.identity`) has gone undismissed."""

    SCRIPT = """
trap '' TERM INT HUP QUIT
exec 3<&0
( read -r word <&3 && exit 0; exec "$@" ) &
"""

    def __init__(
        self,
        note: Path,
        owner: Mapping[str, float] | None,
        without: str,
        words: Sequence[str] = (),
    ) -> None:
        """`without`: the variable that would make the guard one of those it guards. `words`: what
        is to be blotted out of the tree's log."""
        reading, self._pipe = os.pipe()
        told = _waiting(words)
        environment = without_secrets(os.environ)
        environment.pop(without, None)
        try:
            subprocess.run(
                ["/bin/sh", "-c", self.SCRIPT, "pilotage-guard", sys.executable, "-m", __name__,
                 str(note), json.dumps(owner), str(told)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd=CHECKOUT,
                start_new_session=True,
                pass_fds=(*open_files(), told),
                check=True,
            )  # fmt: skip
        except BaseException:
            self.dismiss()
            raise
        finally:
            os.close(reading)
            os.close(told)

    def dismiss(self) -> None:
        """There is nothing to end any more. Safe to call twice."""
        if self._pipe < 0:
            return
        pipe, self._pipe = self._pipe, -1
        with suppress(BrokenPipeError):  # somebody killed it
            os.write(pipe, b"done\n")
        os.close(pipe)


def _waiting(words: Sequence[str]) -> int:
    """A pipe to read the words from, as many of them as the kernel keeps: 64 KiB."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb", buffering=0) as pipe:
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            pipe.write("\0".join(words).encode(errors="surrogateescape"))
    return reading


def _words(reading: int) -> list[str]:
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="surrogateescape")
    return [word for word in said.split("\0") if word]


SHORTEST_GRACE = 0.5
"""Seconds: what does not refuse the polite signal mostly ends within it."""

_stop_began: float | None = None


def grace() -> float:
    """Seconds until the hard signal: `PILOTAGE_STOP_GRACE`, or what is left of it.

    A run that is being stopped has several trees to end, one after the other, and one grace for
    all: a person waits, and Prefect kills a run that has not ended within 30 s.
    """
    global _stop_began
    error, whole = sys.exception(), settings().stop_grace
    if error is None or isinstance(error, Exception):
        return whole
    if _stop_began is None:
        _stop_began = time.monotonic()
    return max(min(whole, SHORTEST_GRACE), _stop_began + whole - time.monotonic())


def main() -> None:
    """The end of a wait: `python -m tasks.engines.guards NOTE OWNER PIPE`."""
    from tasks.engines.subprocesses import end_noted, identity, wait_until

    note, owner = Path(sys.argv[1]), json.loads(sys.argv[2])
    # The pipe breaks a moment before the kernel is done with its owner.
    if wait_until(lambda: identity(owner["pid"]) != owner, 10.0, every=0.05):
        end_noted([note], _words(int(sys.argv[3])))


if __name__ == "__main__":
    main()
