"""The prompt files of this project: JSON lines, one part each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PARTS = ("train", "calibration", "draft", "eval", "load")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file that this project wrote."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
