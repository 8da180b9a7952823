"""One malformed input of the corpus, and running the command line on it in this process."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from flows.cli import main
from registry.settings import CHECKOUT

TINY = str(CHECKOUT / "tests" / "recipes" / "release_tiny.yaml")


@dataclass(frozen=True)
class Case:
    """`words` makes the input in a folder and gives the words of the command line.

    `says`: what the message must hold (`{}` stands for the folder): file, place, value. `remedy`:
    whether it must say how to repair it (a gate's reasons say it in their own words).
    """

    kind: str
    name: str
    words: Callable[[Path], Sequence[object]]
    says: Sequence[str]
    status: int = 2
    remedy: bool = True

    @property
    def id(self) -> str:
        return f"{self.kind}: {self.name}"


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str


def run(words: Sequence[object]) -> Said:
    """`pilotage WORDS` in this process, its exit status and both streams."""
    out, err = io.StringIO(), io.StringIO()
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    status: object = 0
    try:
        with (
            patch.object(sys, "argv", ["pilotage", *map(str, words)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as ended:
        status = ended.code
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return Said(status if isinstance(status, int) else 0, out.getvalue(), err.getvalue())


def files_of(folder: Path) -> dict[str, int]:
    """Everything below a folder with its size: a refusal writes nothing."""
    return {
        str(path.relative_to(folder)): path.lstat().st_size
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def written(name: str, content: str | bytes) -> Callable[[Path], Path]:
    """A function that writes a file into the case's folder."""

    def write(folder: Path) -> Path:
        path = folder / name
        raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        path.write_bytes(raw)
        return path

    return write


def odd_files() -> Iterator[tuple[str, Callable[[Path], None], str]]:
    """Things that stand where a file should: a name, how it is made, what is said of it."""
    import os

    yield "a folder", lambda path: path.mkdir(), ""
    yield "a pipe that nobody writes to", lambda path: os.mkfifo(path), ""
    yield "a broken link", lambda path: path.symlink_to(path.with_name("gone")), ""
    yield "a link to itself", lambda path: path.symlink_to(path), ""
    yield "a device", lambda path: path.symlink_to("/dev/zero"), ""
