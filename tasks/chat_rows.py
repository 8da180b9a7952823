"""Chat messages and tools as people's files hold them, checked and brought into one form.

The form is that of OpenAI's chat completions. Texts stay what they are; what is absent and what
is null are one. Whatever cannot be sent as it stands is refused with its place in the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.strict_json import strict_loads

ROLES = ("system", "user", "assistant", "tool")

_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


class Malformed(Exception):
    """Why a value is no conversation, or no list of tools. `kind` is what is counted."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def messages_in(value: Any, name: str) -> list[dict[str, Any]]:
    """A conversation that waits for an answer: its last message is the user's or a tool's.

    `value` is a list of messages or its JSON text, `name` its column. Raises `Malformed`.
    """
    found = _listed(value, name, "conversation")

    def bad(at: int, what: str) -> Malformed:
        return Malformed(f"{name} is no conversation", f"{name}[{at}] {what}")

    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    unanswered: list[str] = []
    for at, one in enumerate(found):
        if not isinstance(one, Mapping):
            raise bad(at, f"is {kind_of(one)}, not an object")
        # What a tool dumped that a message has not: null, and OpenAI's `annotations: []`.
        message = {
            key: field
            for key, field in one.items()
            if field is not None and (field != [] or key in _FIELDS)
        }
        role = message.get("role")
        if role not in ROLES:
            said = f"has role {role!r}" if role is not None else "has no role"
            raise bad(at, f"{said}; known are {', '.join(ROLES)}")
        if odd := sorted(set(message) - set(_FIELDS)):
            raise bad(at, f"has a field {odd[0]!r}; known are {', '.join(_FIELDS)}")
        try:
            made = _message(message, calls)
        except ValueError as error:
            raise bad(at, str(error)) from None
        if role == "tool" and made["tool_call_id"] in unanswered:
            unanswered.remove(made["tool_call_id"])
        elif role != "tool" and unanswered:
            raise bad(at, f"comes before call {unanswered[0]!r} is answered")
        unanswered += [call["id"] for call in made.get("tool_calls", [])]
        messages.append(made)
    if not any(one["role"] == "user" for one in messages):
        raise Malformed(f"{name} is no conversation", f"{name} has no user message")
    if unanswered and messages[-1]["role"] == "tool":
        what = f"{name} ends before call {unanswered[0]!r} is answered"
        raise Malformed(f"{name} is no conversation", what)
    if messages[-1]["role"] not in ("user", "tool"):
        what = f"ends with a message of role {messages[-1]['role']!r}: nothing is asked"
        raise Malformed(f"{name} does not end with a question", f"{name} {what}")
    return messages


def tools_in(value: Any, name: str) -> list[dict[str, Any]]:
    """Functions that may be called; none for null and for an empty text. Raises `Malformed`."""
    if value is None or value == []:
        return []
    if isinstance(value, str) and value.strip() in ("", "null", "[]"):
        return []
    tools = _listed(value, name, "list of tools")
    names: set[str] = set()
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            what = "is no object of type 'function' with a `function`"
        elif not isinstance(function.get("name"), str) or not function["name"]:
            what = "names no function"
        elif function["name"] in names:
            what = f"names function {function['name']!r} again"
        elif not isinstance(function.get("parameters") or {}, Mapping):
            what = f"parameters of {function['name']!r} are no object (a JSON schema)"
        else:
            names.add(function["name"])
            continue
        raise Malformed(f"{name} is no list of tools", f"{name}[{at}] {what}")
    return [dict(tool) for tool in tools]


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from texts_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one)


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return "missing" if value is None else names.get(type(value), f"a {type(value).__name__}")


# -- parts -----------------------------------------------------------------------------------


def _listed(value: Any, name: str, what: str) -> list[Any]:
    """The value as a list that holds something; a text is read as JSON."""
    kind = f"{name} is no {what}"
    if isinstance(value, str):
        if not value.strip():
            raise Malformed(f"{name} is empty", f"{name} is empty")
        try:
            value = strict_loads(value)
        except (ValueError, RecursionError) as error:
            raise Malformed(kind, f"{name} is a text, but not JSON: {error}") from None
    if not isinstance(value, list):
        raise Malformed(kind, f"{name} is {kind_of(value)}, not a list")
    if not value:
        raise Malformed(f"{name} is empty", f"{name} is empty")
    return value


def _message(message: Mapping[str, Any], calls: set[str]) -> dict[str, Any]:
    """One message, its keys in a fixed order. Raises `ValueError`; adds the ids of its calls."""
    role = message["role"]
    made: dict[str, Any] = {"role": role}
    content = _text(message["content"]) if "content" in message else None
    asks = role == "assistant" and message.get("tool_calls")
    if content is None and not asks:
        raise ValueError("has no content")
    if role != "tool" and not asks and not (content or "").strip():
        raise ValueError("has an empty content")
    made["content"] = content
    for key in ("name", "reasoning_content"):
        if key in message:
            if not isinstance(message[key], str):
                raise ValueError(f"{key} is {kind_of(message[key])}, not a text")
            made[key] = message[key]
    if role == "tool":
        answers = message.get("tool_call_id")
        if not isinstance(answers, str) or answers not in calls:
            raise ValueError(f"answers call {answers!r}, which no message before it makes")
        made["tool_call_id"] = answers
    elif "tool_call_id" in message:
        raise ValueError("has a tool_call_id, but is no tool's")
    if "tool_calls" in message:
        if role != "assistant":
            raise ValueError("has tool_calls, but is not the assistant's")
        if not isinstance(message["tool_calls"], list):
            raise ValueError(f"tool_calls is {kind_of(message['tool_calls'])}, not a list")
        if message["tool_calls"]:
            made["tool_calls"] = [_call(call) for call in message["tool_calls"]]
            calls.update(call["id"] for call in made["tool_calls"])
    return made


def _text(content: Any) -> str:
    """The text of a content; parts are joined as vLLM joins them for most chat templates."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is {kind_of(content)}, not a text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content holds a part of type {kind!r}; only text is asked")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise ValueError("a tool call is no object with a `function`")
    if not isinstance(call.get("id"), str) or not call["id"]:
        raise ValueError("a tool call has no id")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("a tool call names no function")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(dict(arguments), ensure_ascii=False)
    try:
        good = isinstance(strict_loads(arguments or "{}"), dict)
    except (TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise ValueError(f"arguments of {function['name']!r} are no JSON object")
    made = {"name": function["name"], "arguments": arguments or "{}"}
    return {"id": call["id"], "type": "function", "function": made}
