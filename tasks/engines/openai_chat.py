"""Ask OpenAI-compatible endpoints many chat requests, politely and without losing any.

Every request ends in one of three states:

* `done`: answered.
* `rejected`: the server said that this request is wrong; asking again would not help.
* `pending`: not answered and not wrong (rate limit, outage, unreadable answer). A later run asks
  again. A pending request is never an empty answer.

Nothing is raised for what a server does; the reason stands in the result. Sampling is sent with
every request: a server's own defaults are never relied on.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeGuard

import httpx
from pydantic import BaseModel, ConfigDict, Field

from recipes.schema import Sampling
from tasks.engines.endpoints import Endpoint, Replica, Replicas

MAX_ATTEMPTS = 8
"""Requests sent for one row at most; after that it is left pending."""

FIRST_WAIT = 1.0
LONGEST_OWN_WAIT = 60.0
"""Seconds. Our own waits double from the first to the longest, each up to a quarter longer."""

WAITING = 64
"""Rows that may wait between two of their requests while `concurrency` others are open. When so
many wait, no new row is begun: a server in trouble gets no new load."""

LONGEST_REASON = 500
"""Characters of a server's message that are kept."""


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


def generate(
    requests: Sequence[ChatRequest],
    endpoint: Endpoint,
    *,
    on_done: Callable[[ChatResult], None] = lambda result: None,
    **options: Any,
) -> list[ChatResult]:
    """Ask all of `requests` and return their results in the same order.

    For a few: every result is held in memory. `options` are those of `ask_each`. Ids are unique.
    """
    results: dict[str, ChatResult] = {}

    def keep(result: ChatResult) -> None:
        results[result.id] = result
        on_done(result)

    ask_each(requests, [endpoint], keep, **options)
    return [results[request.id] for request in requests]


def ask_each(
    requests: Iterable[ChatRequest],
    endpoints: Sequence[Endpoint],
    on_done: Callable[[ChatResult], None],
    *,
    concurrency: int,
    max_retry_wait: float,
    request_timeout: float,
    max_attempts: int = MAX_ATTEMPTS,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    transport: httpx.AsyncBaseTransport | None = None,
    rng: random.Random | None = None,
) -> None:
    """Ask `requests`, each taken when it can be sent, and hand every result to `on_done`.

    `concurrency` requests are open at once; a row that waits holds none of them. `on_done` is
    called in this thread as soon as a row has its final state, and nothing is held after it, so
    a million rows need no more memory than those in flight. What `on_done` or the iterable
    raises ends the whole call. An iterable that ends early leaves the rest unasked; what is open
    is waited for.

    Of several endpoints the least loaded one is asked (`endpoints.py`), and a row that one of them
    did not answer may be answered by another.

    `max_retry_wait` (seconds) is the longest Retry-After that is obeyed: a server that asks for
    more leaves its row pending without another request. `request_timeout` (seconds) is the
    deadline of one request as a whole, however slowly its bytes come. The clock (aware, UTC),
    the sleep and the transport are for tests.
    """
    asker = _Asker(
        endpoints,
        concurrency=concurrency,
        max_retry_wait=max_retry_wait,
        request_timeout=request_timeout,
        max_attempts=max_attempts,
        clock=clock,
        sleep=sleep,
        transport=transport,
        rng=rng or random.Random(),
    )
    asyncio.run(asker.ask_all(requests, on_done))


class _Retry(Exception):
    """This try brought no answer; the next one may. `asked` is the server's Retry-After header."""

    def __init__(self, reason: str, asked: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.asked = asked


class _Rejected(Exception):
    """The server refuses this request for what it is."""


class _Asker:
    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        concurrency: int,
        max_retry_wait: float,
        request_timeout: float,
        max_attempts: int,
        clock: Callable[[], datetime],
        sleep: Callable[[float], Awaitable[None]],
        transport: httpx.AsyncBaseTransport | None,
        rng: random.Random,
    ) -> None:
        self._replicas = Replicas(endpoints, clock)
        self._concurrency = concurrency
        self._max_retry_wait = max_retry_wait
        self._timeout = request_timeout
        self._max_attempts = max_attempts
        self._clock = clock
        self._sleep = sleep
        self._transport = transport
        self._rng = rng

    async def ask_all(
        self, requests: Iterable[ChatRequest], on_done: Callable[[ChatResult], None]
    ) -> None:
        slots = asyncio.Semaphore(self._concurrency)
        rest = iter(requests)
        trusted = httpx.create_ssl_context()
        async with AsyncExitStack() as opened:
            # A client for each slot: httpx looks through all connections of a client for every
            # request, which with 64 of them takes four times as long as the request itself.
            clients = [
                await opened.enter_async_context(
                    # The deadline is kept in `_try`; httpx's own limits are of single reads.
                    httpx.AsyncClient(transport=self._transport, verify=trusted, timeout=None)
                )
                for _ in range(self._concurrency)
            ]

            async def work() -> None:
                while True:
                    await slots.acquire()
                    request = next(rest, None)
                    if request is None:
                        slots.release()
                        return
                    on_done(await self._ask(clients, slots, request))

            tasks = [asyncio.create_task(work()) for _ in range(self._concurrency + WAITING)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _ask(
        self, clients: list[httpx.AsyncClient], slots: asyncio.Semaphore, request: ChatRequest
    ) -> ChatResult:
        """The row's final state. One of `slots` is held when this begins, none when it ends.

        `clients` are those that no slot uses.
        """
        attempt = 0
        while True:
            attempt += 1
            replica, client = self._replicas.take(), clients.pop()
            try:
                answer = await self._try(client, replica, request, attempt)
            except _Rejected as rejected:
                self._replicas.answered(replica)
                return ChatResult(
                    id=request.id, state="rejected", reason=str(rejected), attempts=attempt
                )
            except _Retry as failed:
                refused = failed
            else:
                self._replicas.answered(replica)
                return answer
            finally:
                clients.append(client)
                slots.release()
            pending = ChatResult(
                id=request.id, state="pending", reason=refused.reason, attempts=attempt
            )
            asked = seconds_asked(refused.asked, self._clock())
            self._replicas.failed(replica, asked)
            # Where another endpoint is free, nobody has to wait for the one that failed.
            elsewhere = self._replicas.other_free(replica)
            if not elsewhere and asked is not None and asked > self._max_retry_wait:
                reason = (
                    f"{refused.reason}; the server asks to wait {refused.asked} "
                    f"({asked:.0f} s), longer than the allowed {self._max_retry_wait:.0f} s"
                )
                return pending.model_copy(update={"reason": reason})
            if attempt >= self._max_attempts:
                reason = f"{refused.reason}; given up after {attempt} requests"
                return pending.model_copy(update={"reason": reason})
            if not elsewhere:
                await self._sleep(self._wait(asked, attempt))
            await slots.acquire()

    def _wait(self, asked: float | None, attempt: int) -> float:
        """Seconds before the next request; never 0, never less than the server asked for."""
        if asked is not None:
            # A little later than asked: rows that were refused together do not return together.
            return asked + self._rng.uniform(0, min(1.0, asked / 10))
        own = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_OWN_WAIT, self._max_retry_wait)
        return own * self._rng.uniform(1.0, 1.25)

    async def _try(
        self, client: httpx.AsyncClient, replica: Replica, request: ChatRequest, attempt: int
    ) -> ChatResult:
        sampling = request.sampling.model_dump(exclude_none=True)
        body = {"model": replica.endpoint.model, "messages": request.messages, **sampling}
        if request.tools:
            body["tools"] = request.tools
        try:
            async with asyncio.timeout(self._timeout):
                response = await client.post(replica.url, json=body, headers=replica.headers)
        except (TimeoutError, httpx.TimeoutException):
            raise _Retry(f"no answer within {self._timeout:g} s") from None
        except httpx.RequestError as error:
            reason = _clean(f"{type(error).__name__}: {error}", replica)
            raise _Retry(reason) from None
        status = response.status_code
        # Of several endpoints one may have another key or lack the model: no fault of the row.
        elsewhere = len(self._replicas) > 1 and status in (401, 403, 404)
        if status in (408, 409, 429) or status >= 500 or elsewhere:
            raise _Retry(_said(response, replica), response.headers.get("retry-after"))
        if status != 200:
            raise _Rejected(_said(response, replica))
        return _answer(request.id, response, attempt)


def _said(response: httpx.Response, replica: Replica) -> str:
    """Status and the server's own message, from whichever field it uses."""
    message: Any = response.text
    try:
        content = response.json()
    except ValueError:
        content = None
    if isinstance(content, Mapping):
        error = content.get("error", content)
        if isinstance(error, Mapping):
            error = error.get("message") or error.get("detail")
        message = error or message
    text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
    return _clean(f"HTTP {response.status_code}: {text.strip()}".removesuffix(": "), replica)


def _clean(text: str, replica: Replica) -> str:
    key = replica.endpoint.api_key.get_secret_value()
    if key:
        # Some servers repeat the key that they do not accept.
        text = text.replace(key, "***")
    return text[:LONGEST_REASON].encode("utf-8", "replace").decode()


def _answer(request_id: str, response: httpx.Response, attempts: int) -> ChatResult:
    """The answer in a 200; raises `_Retry` when there is none in it.

    No content is an answer too where something else was said: a tool call, a refusal, reasoning
    that used up the tokens, or a finish reason which tells why there is none.
    """
    try:
        content = response.json()
    except ValueError:
        raise _Retry("HTTP 200, but the answer is not JSON") from None
    choices = content.get("choices") if isinstance(content, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise _Retry("HTTP 200, but the answer has no choices")
    message = choices[0].get("message")
    said = _said_in(message if isinstance(message, Mapping) else {})
    finish_reason = choices[0].get("finish_reason")
    if said["text"] is None:
        if not any(said.values()) and finish_reason not in ("length", "content_filter"):
            raise _Retry("HTTP 200, but the answer has no content")
        said["text"] = ""
    if not _is_unicode(json.dumps(said, ensure_ascii=False)):
        raise _Rejected("HTTP 200, but the answer holds half of a surrogate pair")
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


def _said_in(message: Mapping[str, Any]) -> dict[str, Any]:
    """`text` (None where there is no content), `reasoning`, `refusal` and `tool_calls`."""

    def text_of(*names: str) -> str:
        found = (message.get(name) for name in names)
        return next((text for text in found if isinstance(text, str)), "")

    content, calls = message.get("content"), message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    return {
        "text": content if isinstance(content, str) else None,
        # vLLM 0.32 calls it `reasoning`; older servers and others `reasoning_content`.
        "reasoning": text_of("reasoning", "reasoning_content"),
        "refusal": text_of("refusal"),
        "tool_calls": [call for call in calls if isinstance(call, dict)],
    }


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
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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
