"""What is sent to an OpenAI-compatible endpoint and what comes back, as data.

The reading of answers and headers: no network, no clock, no retries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeGuard

import httpx
from pydantic import BaseModel, ConfigDict, Field

from recipes.schema import Sampling

SHOWN = 100
"""Bytes that are shown of what is no answer."""


class ChatRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    messages: list[dict[str, Any]]
    sampling: Sampling
    tools: list[dict[str, Any]] = Field(default=[], description="Sent where there are any.")


class ChatResult(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    state: Literal["done", "rejected", "pending"]
    text: str = ""
    reasoning: str = Field(default="", description="What it thought, apart from the answer.")
    refusal: str = Field(default="", description="What OpenAI sends instead of a content.")
    tool_calls: list[dict[str, Any]] = Field(default=[], description="As sent.")
    finish_reason: str | None = Field(default=None, description="As sent; None stays None.")
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reason: str = Field(default="", description="Why it is not done, in the server's words.")
    attempts: int = Field(default=0, ge=0, description="Requests that were sent.")


class Unanswered(Exception):
    """This try brought no answer; the next one may.

    `asked` is the server's Retry-After header; `overload` whether fewer requests at once may help;
    `again` whether it makes sense to ask this server once more.
    """

    def __init__(
        self,
        reason: str,
        asked: str | None = None,
        *,
        overload: bool = False,
        again: bool = True,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.asked = asked
        self.overload = overload
        self.again = again


class Rejected(Exception):
    """The server refuses this request for what it is."""


def answer_in(request_id: str, response: httpx.Response, attempts: int) -> ChatResult:
    """The answer in a 200; raises `Unanswered` when there is none in it.

    No content is an answer too where something else was said: a tool call, a refusal, reasoning
    that used up the tokens, or a finish reason which tells why there is none.
    """
    try:
        content = json_of(response)
    except ValueError:
        begin = response.content[:SHOWN].decode("utf-8", "replace").strip()
        raise Unanswered(f"HTTP 200, but the answer is not JSON: {begin!r}") from None
    choices = content.get("choices") if isinstance(content, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        # Gateways put what went wrong behind them into a 200.
        raise Unanswered(f"HTTP 200, but the answer has no choices: {error_in(response)}")
    message = choices[0].get("message")
    said = _said_in(message if isinstance(message, Mapping) else {})
    finish_reason = choices[0].get("finish_reason")
    if said["text"] is None:
        if not any(said.values()) and finish_reason not in ("length", "content_filter"):
            raise Unanswered("HTTP 200, but the answer has no content")
        said["text"] = ""
    if not _is_unicode(json.dumps(said, ensure_ascii=False)):
        raise Rejected("HTTP 200, but the answer holds half of a surrogate pair")
    usage = content.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    return ChatResult(
        id=request_id,
        state="done",
        **said,
        finish_reason=finish_reason if _is_unicode(finish_reason) else None,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        attempts=attempts,
    )


def json_of(response: httpx.Response) -> Any:
    """What a response holds. Raises `ValueError` where that is no JSON, or nested too deeply."""
    try:
        return response.json()
    except RecursionError:
        raise ValueError("nested too deeply") from None


def error_in(response: httpx.Response) -> str:
    """The server's own message, from whichever field it uses."""
    message: Any = response.text
    try:
        content = json_of(response)
    except ValueError:
        content = None
    if isinstance(content, Mapping):
        error = content.get("error", content)
        if isinstance(error, Mapping):
            error = error.get("message") or error.get("detail")
        message = error or message
    text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
    return text.strip()


def _said_in(message: Mapping[str, Any]) -> dict[str, Any]:
    """`text` (None where there is no content), `reasoning`, `refusal` and `tool_calls`."""

    def text_of(*names: str) -> str:
        found = (message.get(name) for name in names)
        return next((text for text in found if isinstance(text, str)), "")

    content, calls = message.get("content"), message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    thought = ""
    if isinstance(content, list):
        # Mistral sends the answer of a reasoning model in parts.
        thought = _text_in(content, "thinking")
        content = _text_in(content, "text") or None
    return {
        "text": content if isinstance(content, str) else None,
        # vLLM 0.32 calls it `reasoning`; older servers and others `reasoning_content`.
        "reasoning": text_of("reasoning", "reasoning_content") or thought,
        "refusal": text_of("refusal"),
        "tool_calls": [call for call in calls if isinstance(call, dict)],
    }


def _text_in(parts: list[Any], kind: str) -> str:
    """The text of all parts of one kind; a part's text may be a list of parts itself."""
    found = (part.get(kind) for part in parts if isinstance(part, Mapping))
    return "".join(
        _text_in(text, "text") if isinstance(text, list) else text
        for text in found
        if isinstance(text, str | list)
    )


def _is_unicode(text: object) -> TypeGuard[str]:
    """Whether it is a text that can be written down; JSON lets half a surrogate pair pass."""
    if not isinstance(text, str):
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value


def seconds_asked(header: str | None, now: datetime) -> float | None:
    """What a Retry-After header asks for, in seconds from `now`; both legal forms.

    None when there is no header, when it cannot be read, and when it asks for no wait at all:
    then the client waits as long as it finds right itself. Never raises.
    """
    if header is None:
        return None
    header = header.strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", header):
        seconds = float(header)
    else:
        try:
            date = parsedate_to_datetime(header)
        except (TypeError, ValueError, OverflowError, IndexError):
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        seconds = (date - now).total_seconds()
    return seconds if seconds > 0 else None
