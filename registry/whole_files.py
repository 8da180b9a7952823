"""Files that are there as a whole or not at all, also after a kill."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Of two that write one file at once, the later one's counts."""
    partial = _partial(path)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def unwritable(path: Path) -> str:
    """Why `write_whole` could not write a file, its folders made first; empty where it could.

    By doing it: rights, a disk that is read only, and names that are too long say no in their own
    way. Leaves nothing behind.
    """
    try:
        there = path.parent
        while not there.exists() and there != there.parent:
            there = there.parent
        trial = _partial(there / path.name)
        trial.touch(exist_ok=False)
        trial.unlink()
    except (OSError, ValueError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""


def _partial(path: Path) -> Path:
    return path.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
