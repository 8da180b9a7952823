"""Ask OpenAI-compatible endpoints many chat requests, politely and without losing any.

Every request ends in one of three states:

* `done`: answered.
* `rejected`: the server said that this request is wrong; asking again would not help.
* `pending`: not answered and not wrong (rate limit, outage, unreadable answer; a key, a model or a
  URL that the server does not take). A later run asks again. A pending request is never an empty
  answer.

Nothing is raised for what a server does; the reason stands in the result. Sampling is sent with
every request: a server's own defaults are never relied on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import httpx

from tasks.engines.chat_wire import (
    ChatRequest,
    ChatResult,
    Rejected,
    Unanswered,
    answer_in,
    error_in,
    seconds_asked,
)
from tasks.engines.endpoints import Endpoint, Replica, Replicas

MAX_ATTEMPTS = 8
"""Requests sent for one row at most; after that it is left pending."""

FIRST_WAIT = 1.0
LONGEST_OWN_WAIT = 60.0
"""Seconds. Our own waits double from the first to the longest, each up to a quarter longer."""

WAITING = 64
"""Rows that may wait between two of their requests while `concurrency` others are open. When so
many wait, no new row is begun: a server in trouble gets no new load."""

OVERLOADED = frozenset({408, 429, 502, 503, 504, 529})
"""Statuses that say: less at once. 502 and 504 are a proxy's words for a server that is late, 529
is Anthropic's for overload."""

NO_FAULT_OF_THE_ROW = frozenset({401, 402, 404, 405})
"""Statuses that say that key, account, model or URL are wrong, as redirections do: every other row
would be refused alike, so the row is pending, and the caller ends where it is an outage. A 403 may
be one row's, which a provider's filter refuses."""

LONGEST_REASON = 500
"""Characters of a server's message that are kept."""


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
    may_ask: Callable[[], bool] = lambda: True,
    **options: Any,
) -> None:
    """Ask `requests`, each taken when it can be sent, and hand every result to `on_done`.

    A row that waits between two requests holds no place of those `concurrency`. `on_done` is
    called in this thread as soon as a row has its final state, and nothing is held after it, so
    a million rows need no more memory than those in flight. What `on_done` or the iterable
    raises ends the whole call. An iterable that ends early leaves the rest unasked; what is open
    is waited for.

    `may_ask` is looked at after every result. Once it is false nothing more is sent: open
    requests are waited for, and rows between two of theirs are pending at once.

    Of several endpoints the least loaded one is asked (`endpoints.py`), and a row that one of them
    did not answer may be answered by another. The other options are those of `Asker`.
    """

    async def ask() -> None:
        async with Asker(endpoints, **options) as asker:
            await ask_all(asker, requests, on_done, may_ask)

    asyncio.run(ask())


async def ask_all(
    asker: Asker,
    requests: Iterable[ChatRequest],
    on_done: Callable[[ChatResult], None],
    may_ask: Callable[[], bool],
) -> None:
    rest = iter(requests)

    async def work() -> None:
        while True:
            replica = await asker.replicas.next()
            request = next(rest, None)
            if request is None:
                asker.replicas.unused(replica)
                return
            on_done(await asker.ask(request, replica))
            if not may_ask():
                asker.stop()

    tasks = [asyncio.create_task(work()) for _ in range(asker.concurrency + WAITING)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class Asker:
    """Asks the replicas of one model; to be used within one event loop.

    `concurrency` requests are open at most, and fewer where an endpoint takes no more.

    `max_retry_wait` (seconds) is the longest Retry-After that is obeyed: a server that asks for
    more leaves its row pending without another request. `request_timeout` (seconds) is the
    deadline of one request as a whole, however slowly its bytes come. The clock (aware, UTC),
    the sleep and the transport are for tests.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
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
        self.concurrency = concurrency
        self.replicas = Replicas(endpoints, clock, concurrency)
        self._max_retry_wait = max_retry_wait
        self._timeout = request_timeout
        self._max_attempts = max_attempts
        self._clock = clock
        self._sleep = sleep
        self._transport = transport
        self._rng = rng or random.Random()
        self._trusted = httpx.create_ssl_context()
        self._stopped = asyncio.Event()
        self._silent_since: datetime | None = None
        # A client for each open request: httpx looks through all connections of a client for
        # every request, which with 64 of them takes four times as long as the request itself.
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._idle:
            await client.aclose()

    @property
    def longest_silence(self) -> float:
        """Seconds that one row alone may be tried. Who answers no row for so long answers none.

        Endpoints that hang get one request at a time, and the rows that wait take turns: without
        this, 80 rows of 8 requests of 2 minutes were 21 hours.
        """
        wait = min(LONGEST_OWN_WAIT, self._max_retry_wait)
        return self._max_attempts * (self._timeout + wait)

    def _silent(self, began: datetime) -> float:
        """Seconds since the first request of those that failed with no answer in between."""
        self._silent_since = self._silent_since or began
        return (self._clock() - self._silent_since).total_seconds()

    def stop(self) -> None:
        """Send nothing more; what is open is still answered."""
        self._stopped.set()

    async def ask(self, request: ChatRequest, replica: Replica | None = None) -> ChatResult:
        """The row's final state; `replica` is one that was taken for it already."""
        replica = replica or await self.replicas.next()
        pending = ChatResult(id=request.id, state="pending", reason="not asked")
        attempt = 0
        while True:
            if self._stopped.is_set():
                self.replicas.unused(replica)
                return pending
            attempt += 1
            number = replica.taken
            client = self._client()
            began = self._clock()
            try:
                answer = await self._try(client, replica, request, attempt)
            except Rejected as rejected:
                self._silent_since = None
                self.replicas.answered(replica, number, clean=False)
                return ChatResult(
                    id=request.id, state="rejected", reason=str(rejected), attempts=attempt
                )
            except Unanswered as failed:
                refused = failed
            except BaseException:
                self.replicas.unused(replica)
                raise
            else:
                self._silent_since = None
                self.replicas.answered(replica, number)
                return answer
            finally:
                self._idle.append(client)
            pending = ChatResult(
                id=request.id, state="pending", reason=refused.reason, attempts=attempt
            )
            asked = seconds_asked(refused.asked, self._clock())
            if asked is not None:
                # It says itself when to come back.
                self._silent_since = None
            elif (silent := self._silent(began)) > self.longest_silence:
                self.replicas.failed(replica, number, asked)
                self.stop()
                reason = f"{refused.reason}; nothing was answered for {silent:.0f} s"
                return pending.model_copy(update={"reason": reason})
            overload = refused.reason if refused.overload else ""
            self.replicas.failed(replica, number, asked, overload=overload)
            if not refused.again:
                return pending
            # Where another endpoint is free, nobody has to wait for the one that failed.
            elsewhere = self.replicas.other_free(replica)
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
                await self._pause(self._wait(asked, attempt))
            replica = await self.replicas.next()

    def _client(self) -> httpx.AsyncClient:
        if self._idle:
            return self._idle.pop()
        # The deadline is kept in `_try`; httpx's own limits are of single reads.
        return httpx.AsyncClient(transport=self._transport, verify=self._trusted, timeout=None)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not on after `stop`."""
        either = [
            asyncio.ensure_future(self._sleep(seconds)),
            asyncio.ensure_future(self._stopped.wait()),
        ]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in either:
                one.cancel()

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
            raise Unanswered(f"no answer within {self._timeout:g} s", overload=True) from None
        except httpx.RequestError as error:
            reason = _clean(f"{type(error).__name__}: {error}", replica)
            raise Unanswered(reason, overload=True) from None
        status = response.status_code
        several = len(self.replicas) > 1
        if status in (408, 409, 429) or status >= 500 or (several and status == 403):
            asked = response.headers.get("retry-after")
            raise Unanswered(_said(response, replica), asked, overload=status in OVERLOADED)
        if status in NO_FAULT_OF_THE_ROW or (status < 400 and status != 200):
            # Of several endpoints another one may have the model, or take the key.
            raise Unanswered(_said(response, replica), again=several)
        if status != 200:
            raise Rejected(_said(response, replica))
        try:
            return answer_in(request.id, response, attempt)
        except Unanswered as nothing:
            raise Unanswered(_clean(nothing.reason, replica)) from None


def _said(response: httpx.Response, replica: Replica) -> str:
    """Status and the server's own message."""
    reason = f"HTTP {response.status_code}: {error_in(response)}".removesuffix(": ")
    return _clean(reason, replica)


def _clean(text: str, replica: Replica) -> str:
    key = replica.endpoint.api_key.get_secret_value()
    if key:
        # Some servers repeat the key that they do not accept.
        text = text.replace(key, "***")
    return text[:LONGEST_REASON].encode("utf-8", "replace").decode()
