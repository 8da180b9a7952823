"""Read a JSON file of somebody else's making."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from registry.errors import UserError


def json_object(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises `UserError` naming the file for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError.at(path, f"cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError.at(path, "is not a JSON object")
    return content
