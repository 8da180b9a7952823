"""A prompt as chat messages.

A row of a prompts file holds `prompt`, the text of its last user message, by which it is found and
compared. Where that is not the whole conversation it also holds `messages`, everything that is
sent, and `tools`, the functions that may be called, both as OpenAI's chat completions take them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is sent to a model for this row: system prompt and earlier turns included."""
    return row.get("messages") or [{"role": "user", "content": row["prompt"]}]


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return row.get("tools") or []


def has_conversation(row: Mapping[str, Any]) -> bool:
    return bool(row.get("messages") or tools_of(row))


def chat_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """`{"messages"[, "tools"]}` of a row, as the body of a request holds them."""
    return {"messages": messages_of(row)} | ({"tools": tools_of(row)} if tools_of(row) else {})


def with_messages(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row with this conversation, its `prompt` set to the last user message.

    `messages` are left out where they say no more than `prompt`. There must be a user message.
    """
    last = next(one["content"] for one in reversed(messages) if one["role"] == "user")
    changed: dict[str, Any] = {key: row[key] for key in row if key not in ("messages", "tools")}
    changed["prompt"] = last
    if list(messages) != [{"role": "user", "content": last}]:
        changed["messages"] = [dict(one) for one in messages]
    if tools_of(row):
        changed["tools"] = tools_of(row)
    return changed


def with_prompt(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The row with another text in its last user message."""
    messages = [dict(one) for one in messages_of(row)]
    last = max(at for at, one in enumerate(messages) if one["role"] == "user")
    messages[last]["content"] = text
    return with_messages(row, messages)


def with_system(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The row with a system prompt; one that it has stands after it, a blank line between."""
    return with_messages(row, system_first(messages_of(row), text))


def system_first(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """`messages` with a system prompt first, in one message with the one they have, before it.

    Most chat templates know one system message only, and refuse or drop a second.
    """
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    own = first["content"]
    both = (
        f"{text}\n\n{own}"
        if isinstance(own, str)
        else [{"type": "text", "text": f"{text}\n\n"}, *own]
    )
    return [{**first, "content": both}, *messages[1:]]


def texts_of_people(row: Mapping[str, Any]) -> Iterator[str]:
    """What users wrote and tools found in this row; system prompts and answers name nobody."""
    for message in messages_of(row):
        if message["role"] in ("user", "tool"):
            yield message["content"]


def user_text(row: Mapping[str, Any]) -> str:
    """All that the user says in this row, by which rows are compared with each other."""
    said = (one["content"] for one in messages_of(row) if one["role"] == "user")
    return "\n".join(said)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them, and as vLLM hands them to one.

    A request holds the arguments of a call as a JSON text, a template expects the object: given
    the text, most would write it with its quotes escaped (vLLM 0.32, `_postprocess_messages`).
    """
    found = []
    for message in messages:
        made = dict(message)
        made["content"] = message.get("content") or ""
        if message.get("tool_calls"):
            made["tool_calls"] = [
                {**call, "function": _parsed(call["function"])} for call in message["tool_calls"]
            ]
        found.append(made)
    return found


def _parsed(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    return {**function, "arguments": arguments or {}}
