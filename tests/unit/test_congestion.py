"""How many requests an endpoint is given: cut where it refuses, grown where it answers."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from recipes.schema import Sampling
from tasks.engines.chat_wire import ChatRequest, ChatResult
from tasks.engines.congestion import Window
from tasks.engines.endpoints import Endpoint, Replicas
from tasks.engines.openai_chat import Asker, ask_all, ask_each

START = datetime(2030, 1, 1, tzinfo=UTC)
COMPLETION = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}


def a_round(window: Window, first: int) -> int:
    """As many clean answers as the window holds; the number after the last request."""
    size = int(window.size)
    for number in range(first, first + size):
        window.answered(number, size)
    return first + size


def test_a_window_without_refusals_never_changes() -> None:
    window = Window(64)
    for number in range(1, 1000):
        window.answered(number, 64)
    assert (window.size, window.full) == (64.0, True)
    assert window.room(63) and not window.room(64)


def test_what_was_sent_before_a_cut_cuts_no_more_and_proves_nothing() -> None:
    window = Window(64)
    assert window.refused(3, opened=50, newest=50)
    assert window.size == 35.0, "0.7 of what was open"
    assert not any(window.refused(number, 40, newest=60) for number in (1, 4, 50))
    window.answered(50, 40)
    assert window.size == 35.0
    assert window.refused(51, opened=20, newest=60)
    assert window.size == 14.0


def test_it_grows_by_one_a_round_and_only_where_it_is_used() -> None:
    window = Window(64)
    window.refused(1, opened=20, newest=20)
    assert window.size == 14.0
    window.answered(21, opened=7)
    assert window.size == 14.0
    number = a_round(window, 22)
    assert 14.9 < window.size <= 15.0
    window.size = 15.0
    a_round(window, number)
    assert 15.9 < window.size <= 16.0


def test_after_an_outage_it_doubles_up_to_where_the_trouble_began() -> None:
    window = Window(64)
    newest = 64
    window.refused(1, opened=64, newest=newest)
    before = window.size
    for _ in range(40):
        newest += 1
        window.refused(newest, opened=int(window.size), newest=newest)
    assert window.size == 1.0
    sizes = []
    number = newest + 1
    for _ in range(7):
        number = a_round(window, number)
        sizes.append(int(window.size))
    assert sizes[:5] == [2, 4, 8, 16, 32]
    assert before == pytest.approx(44.8)
    assert 44 <= sizes[5] <= 46 and sizes[6] - sizes[5] <= 1


def test_one_endpoint_at_its_limit_leaves_the_others_theirs() -> None:
    clock = lambda: START  # noqa: E731
    replicas = Replicas([Endpoint(url=f"http://{name}", model="m") for name in "ab"], clock, 8)
    taken = [replicas.take() for _ in range(8)]
    assert replicas.take() is None, "8 in all"
    first, second = taken[0], taken[1]
    assert first is not None and second is not None
    replicas.failed(first, 1, None, overload="busy")
    assert int(first.window.size) == 2
    assert int(second.window.size) == 8


class Timed:
    """Seconds that pass when everybody waits; sleepers wake in order."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.seconds + seconds, len(self._sleepers), woken))
        await woken

    async def run(self) -> None:
        while True:
            for _ in range(50):
                await asyncio.sleep(0)
            self._sleepers = [one for one in self._sleepers if not one[2].done()]
            if self._sleepers:
                until = min(one[0] for one in self._sleepers)
                self.seconds = until
                for one in self._sleepers:
                    if one[0] == until:
                        one[2].set_result(None)


class Limited:
    """Answers in a second; refuses what is more than `most` at once."""

    def __init__(self, time: Timed, most: int) -> None:
        self.time = time
        self.most = most
        self.open = self.peak = 0
        self.statuses: Counter[int] = Counter()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.open >= self.most:
            self.statuses[429] += 1
            return httpx.Response(429, json={"error": {"message": "too many"}})
        self.open += 1
        self.peak = max(self.peak, self.open)
        await self.time.sleep(1.0)
        self.open -= 1
        self.statuses[200] += 1
        return httpx.Response(200, json=COMPLETION)


def ask_limited(
    rows: int, concurrency: int, *most: int
) -> tuple[Timed, list[Limited], list[ChatResult]]:
    """Servers with these limits, `most` of each."""
    time = Timed()
    servers = {f"t{number}": Limited(time, limit) for number, limit in enumerate(most)}
    results: list[ChatResult] = []

    async def respond(request: httpx.Request) -> httpx.Response:
        return await servers[request.url.host](request)

    async def ask() -> None:
        passing = asyncio.create_task(time.run())
        async with Asker(
            [Endpoint(url=f"http://{name}", model="m") for name in servers],
            concurrency=concurrency, max_retry_wait=60.0, request_timeout=1e6, max_attempts=30,
            clock=time.now, sleep=time.sleep, transport=httpx.MockTransport(respond),
            rng=random.Random(0),
        ) as asker:  # fmt: skip
            requests = (
                ChatRequest(id=str(number), messages=[], sampling=Sampling(max_tokens=1))
                for number in range(rows)
            )
            await ask_all(asker, requests, results.append, lambda: True)
        passing.cancel()

    asyncio.run(ask())
    return time, list(servers.values()), results


def test_a_server_that_takes_ten_at_once_is_given_about_ten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="pilotage"):
        time, (server,), results = ask_limited(1000, 64, 10)
    assert Counter(result.state for result in results) == {"done": 1000}
    assert server.peak == 10
    # 100 s are the least that it needs; a few refusals tell where its limit is.
    assert time.seconds < 140
    assert server.statuses[429] < 400
    lines = [record.getMessage() for record in caplog.records if "http://t0" in record.getMessage()]
    assert lines[0] == (
        "http://t0/v1/chat/completions: HTTP 429: too many; "
        "at most 7 of 64 requests are open there now, more as it answers"
    )
    assert len(lines) <= 1 + time.seconds / 60, "one a minute"


def test_a_server_that_takes_all_is_given_all() -> None:
    time, (server,), results = ask_limited(640, 64, 64)
    assert (len(results), server.peak, server.statuses[429]) == (640, 64, 0)
    assert time.seconds == 10.0


def test_what_one_server_refuses_the_other_is_asked_for() -> None:
    time, (small, large), results = ask_limited(1500, 64, 10, 100)
    assert Counter(result.state for result in results) == {"done": 1500}
    assert small.peak == 10 and large.statuses[429] == 0
    # 23.4 s are the least at 64 open requests.
    assert time.seconds <= 26
    assert small.statuses[429] < 30


def test_once_nothing_may_be_asked_rows_that_wait_are_pending_at_once() -> None:
    finished: list[ChatResult] = []

    def respond(request: httpx.Request) -> httpx.Response:
        row = json.loads(request.content)["messages"][0]["content"]
        if row != "9":
            return httpx.Response(503, headers={"Retry-After": "500"})
        return httpx.Response(200, json=COMPLETION)

    ask_each(
        (
            ChatRequest(
                id=str(number),
                messages=[{"role": "user", "content": str(number)}],
                sampling=Sampling(max_tokens=1),
            )
            for number in range(10)
        ),
        [Endpoint(url="http://t", model="m")],
        finished.append,
        may_ask=lambda: not finished,
        concurrency=16,
        max_retry_wait=600.0,
        request_timeout=5.0,
        transport=httpx.MockTransport(respond),
    )
    assert {result.id: result.state for result in finished} == {
        "9": "done",
        **{str(number): "pending" for number in range(9)},
    }
    assert {result.attempts for result in finished} <= {0, 1}
