"""Which of several endpoints is asked, and what one that fails costs the others."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from pydantic import SecretStr

from recipes.schema import Sampling
from tasks.engines.endpoints import Endpoint, Replica, Replicas
from tasks.engines.openai_chat import ChatRequest, ChatResult, ask_each

START = datetime(2030, 1, 1, tzinfo=UTC)
COMPLETION = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)


def endpoints(*names: str) -> list[Endpoint]:
    return [
        Endpoint(url=f"http://{name}", model="m", api_key=SecretStr(f"key-{name}"))
        for name in names
    ]


def host(replica_url: httpx.URL) -> str:
    return replica_url.host


def take(replicas: Replicas) -> Replica:
    chosen = replicas.take()
    assert chosen is not None, "there is room"
    return chosen


def test_the_least_loaded_is_asked_and_equals_in_turn() -> None:
    replicas = Replicas(endpoints("a", "b", "c"), Clock(), 64)
    taken = [take(replicas) for _ in range(6)]
    assert [host(one.url) for one in taken] == ["a", "b", "c", "a", "b", "c"]
    replicas.answered(taken[1], 2)
    assert [host(take(replicas).url) for _ in range(2)] == ["b", "a"]


def test_one_that_failed_rests_longer_each_time_and_is_tried_by_one_request() -> None:
    clock = Clock()
    replicas = Replicas(endpoints("a", "b"), clock, 64)
    first, _ = take(replicas), take(replicas)
    again = take(replicas)
    assert again is first
    replicas.failed(first, 1, None)
    replicas.failed(first, 1, None)
    assert first.failures == 1, "what fails together counts once"
    assert {host(take(replicas).url) for _ in range(5)} == {"b"}
    clock.seconds = 1.1
    assert [host(take(replicas).url) for _ in range(3)] == ["a", "b", "b"]
    replicas.failed(first, 1, None)
    clock.seconds = 2.9
    assert host(take(replicas).url) == "b"
    clock.seconds = 3.2
    assert take(replicas) is first
    replicas.answered(first, 1)
    assert [host(take(replicas).url) for _ in range(3)] == ["a", "a", "a"]


def test_a_rest_is_as_long_as_the_endpoint_asks() -> None:
    clock = Clock()
    replicas = Replicas(endpoints("a", "b"), clock, 64)
    first = take(replicas)
    replicas.failed(first, 1, 30.0)
    clock.seconds = 29.0
    second = take(replicas)
    assert host(second.url) == "b" and not replicas.other_free(second)
    replicas.failed(second, 2, 1e300)
    assert take(replicas) is first, "where all rest, the one that is back first"
    clock.seconds = 31.0
    assert not replicas.other_free(second), "it is being tried"


@pytest.fixture
def asked() -> Counter[str]:
    return Counter()


def ask(
    asked: Counter[str], answer: Callable[[str], httpx.Response], count: int = 40
) -> list[ChatResult]:
    clock = Clock()
    results: list[ChatResult] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked[request.url.host] += 1
        assert request.headers["authorization"] == f"Bearer key-{request.url.host}"
        return answer(request.url.host)

    ask_each(
        (
            ChatRequest(id=str(number), messages=[], sampling=Sampling(max_tokens=1))
            for number in range(count)
        ),
        endpoints("a", "b"),
        results.append,
        concurrency=4,
        max_retry_wait=60.0,
        request_timeout=5.0,
        clock=clock,
        sleep=clock.sleep,
        transport=httpx.MockTransport(respond),
        rng=random.Random(0),
    )
    return results


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503, 0])
def test_one_bad_endpoint_of_two_costs_no_row(asked: Counter[str], status: int) -> None:
    def answer(name: str) -> httpx.Response:
        if name == "b":
            return httpx.Response(200, json=COMPLETION)
        if status == 0:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, headers={"Retry-After": "86400"} if status == 429 else {})

    results = ask(asked, answer)
    assert [result.state for result in results] == ["done"] * 40
    assert asked["b"] == 40
    assert 0 < asked["a"] <= 12


def test_a_wrong_row_is_rejected_by_whichever_is_asked(asked: Counter[str]) -> None:
    results = ask(asked, lambda _: httpx.Response(400), count=6)
    assert [result.state for result in results] == ["rejected"] * 6
    assert asked == {"a": 3, "b": 3}


def test_where_all_fail_the_row_is_pending(asked: Counter[str]) -> None:
    (result,) = ask(asked, lambda name: httpx.Response(503, text=f"key-{name} is down"), count=1)
    assert (result.state, result.attempts, asked.total()) == ("pending", 8, 8)
    assert result.reason.startswith("HTTP 503: *** is down; given up")
