"""Files that are there as a whole or not at all, also after a kill."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
