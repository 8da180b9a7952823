"""Files that are there as a whole or not at all, also after a kill."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Of two that write one file at once, the later one's counts."""
    partial = path.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
