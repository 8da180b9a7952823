"""A disk that can be filled: a small tmpfs in place of the home. Needs the right to mount."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BALLAST = "ballast"


@contextmanager
def mounted(folder: Path, mebibytes: int) -> Iterator[None]:
    """An empty tmpfs at an empty folder. Skips the test where that is not allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "pilotage-faults", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def small_disk(home: Path, mebibytes: int) -> Iterator[None]:
    """Mount a tmpfs at `home` with what lay there; what it holds at the end lies there again."""
    aside = home.with_name("aside")
    shutil.rmtree(aside, ignore_errors=True)
    home.rename(aside)
    home.mkdir()
    try:
        with mounted(home, mebibytes):
            shutil.copytree(aside, home, symlinks=True, dirs_exist_ok=True)
            try:
                yield
            finally:
                shutil.rmtree(aside)
                shutil.copytree(home, aside, symlinks=True)
    finally:
        home.rmdir()
        aside.rename(home)


def fill(home: Path, left: int = 0) -> None:
    """Use up the disk but for `left` bytes, also while others write to it."""
    with (home / BALLAST).open("wb") as ballast:
        taken = 0
        while (wanted := (shutil.disk_usage(home).free - left) // 4096 * 4096) > 0:
            try:
                os.posix_fallocate(ballast.fileno(), taken, wanted)
            except OSError as error:
                # Somebody wrote between the question and the answer.
                if error.errno != errno.ENOSPC:
                    raise
            else:
                taken += wanted


def make_room(home: Path) -> None:
    (home / BALLAST).unlink()
