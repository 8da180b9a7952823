"""A prompt as chat messages.

A row of a prompts file holds `prompt`, the text of its last user message, by which it is found and
compared. Where that is not the whole conversation it also holds `messages`, everything that is
sent, and `tools`, the functions that may be called, both as OpenAI's chat completions take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is sent to a model for this row: system prompt and earlier turns included."""
    return row.get("messages") or [{"role": "user", "content": row["prompt"]}]


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return row.get("tools") or []
