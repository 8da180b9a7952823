"""JSON as people's files must hold it: what Python would repair without a word is refused."""

from __future__ import annotations

import json
from typing import Any


def strict_loads(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError` and `RecursionError`.

    Python's own reader takes NaN and Infinity, which other readers of JSON refuse, and of two
    fields with one name it drops the first.
    """
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_doubles)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {doubled!r} stands twice")
    return found
