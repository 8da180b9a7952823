"""What a client does when a server says wait, says no, says nothing, or says nonsense."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from recipes.schema import Sampling
from tasks.engines.openai_chat import (
    ChatRequest,
    ChatResult,
    Endpoint,
    ask_each,
    generate,
    seconds_asked,
)

START = datetime(2030, 1, 1, tzinfo=UTC)
SAMPLING = Sampling(temperature=0.0, top_p=1.0, max_tokens=16, seed=7)
KEY = "sk-very-secret"

RATE_LIMITED: dict[str, list[dict[str, Any]]] = {
    "a": [{"status": 429, "headers": {"Retry-After": "2"}}, {"status": 200, "text": "A"}],
    "b": [
        {"status": 429, "headers": {"Retry-After": "Tue, 01 Jan 2030 00:00:07 GMT"}},
        {"status": 200, "text": "B"},
    ],
    "c": [{"status": 429, "headers": {"Retry-After": "90"}}, {"status": 200, "text": "C"}],
    "d": [{"status": 429}, {"status": 429}, {"status": 200, "text": "D"}],
    "e": [{"status": 429, "headers": {"Retry-After": "soon"}}, {"status": 200, "text": "E"}],
    "f": [{"status": 503, "headers": {"Retry-After": "1"}}, {"status": 200, "text": "F"}],
    "g": [{"status": 400, "text": "maximum context length exceeded"}],
    "h": [{"status": 429, "headers": {"Retry-After": "86400"}}],
}


class FakeClock:
    """Time that moves only when everybody who could do something waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waiting: list[float] = []

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    async def sleep(self, seconds: float) -> None:
        until = self.seconds + seconds
        heapq.heappush(self._waiting, until)
        while True:
            for _ in range(200):
                await asyncio.sleep(0)
            if until <= self.seconds or until == self._waiting[0]:
                break
        self._waiting.remove(until)
        heapq.heapify(self._waiting)
        self.seconds = max(self.seconds, until)


class Server:
    """Answers each row from its script, and notes when it was asked and for what."""

    def __init__(self, script: dict[str, list[Any]], clock: FakeClock) -> None:
        self.script = {row: list(answers) for row, answers in script.items()}
        self.clock = clock
        self.asked_at: dict[str, list[float]] = {row: [] for row in script}
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        row = body["messages"][0]["content"]
        self.asked_at[row].append(self.clock.seconds)
        self.bodies.append(body)
        self.requests.append(request)
        answer = self.script[row].pop(0)
        if answer == "hangs":
            self.clock.seconds += 30.0
            raise httpx.ReadTimeout("")
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        if answer["status"] == 200:
            return httpx.Response(200, json=completion(answer["text"]))
        error = {"error": {"message": answer.get("text", "slow down")}}
        return httpx.Response(answer["status"], json=error, headers=answer.get("headers", {}))


def completion(text: object, **choice: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": text}, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1},
    }


Ask = Callable[..., tuple[dict[str, ChatResult], Server]]


@pytest.fixture
def ask() -> Ask:
    def run(
        script: dict[str, list[Any]],
        *,
        concurrency: int = 8,
        api_key: str = "",
        url: str = "http://teacher:8000",
        **options: Any,
    ) -> tuple[dict[str, ChatResult], Server]:
        clock = FakeClock()
        server = Server(script, clock)
        results = generate(
            [
                ChatRequest(id=row, messages=[{"role": "user", "content": row}], sampling=SAMPLING)
                for row in script
            ],
            Endpoint(url=url, model="teacher", api_key=SecretStr(api_key)),
            concurrency=concurrency,
            max_retry_wait=600.0,
            request_timeout=30.0,
            clock=clock.now,
            sleep=clock.sleep,
            transport=httpx.MockTransport(server),
            rng=random.Random(0),
            **options,
        )
        assert [result.id for result in results] == list(script)
        return {result.id: result for result in results}, server

    return run


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_obeys_retry_after_in_both_forms_and_leaves_no_row_behind(
    ask: Ask, concurrency: int
) -> None:
    results, server = ask(RATE_LIMITED, concurrency=concurrency)
    states = {row: result.state for row, result in results.items()}
    assert states == dict.fromkeys("abcdef", "done") | {"g": "rejected", "h": "pending"}
    for row, earliest in {"a": 2, "b": 7, "c": 90, "f": 1}.items():
        assert len(server.asked_at[row]) == 2
        assert server.asked_at[row][1] >= earliest
    assert server.asked_at["c"][1] < 90 + 2, "obeyed, not doubled"
    first, second, third = server.asked_at["d"]
    assert 0 < second - first <= third - second
    assert len(server.asked_at["e"]) == 2
    assert server.asked_at["e"][1] > server.asked_at["e"][0]
    assert len(server.asked_at["g"]) == 1
    assert "context length" in results["g"].reason
    assert len(server.asked_at["h"]) == 1
    assert "86400" in results["h"].reason
    assert results["h"].text == ""
    assert [results[row].text for row in "abcdef"] == list("ABCDEF")


def test_others_go_on_while_one_waits(ask: Ask) -> None:
    written: list[str] = []
    script = {"c": RATE_LIMITED["c"], "x": [{"status": 200, "text": "X"}]}
    _, server = ask(script, concurrency=1, on_done=lambda result: written.append(result.id))
    assert server.asked_at["x"] == [0.0]
    assert written == ["x", "c"]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2.0),
        (" 1.5 ", 1.5),
        ("9" * 30, float("9" * 30)),
        ("Tue, 01 Jan 2030 00:00:07 GMT", 7.0),
        ("Tuesday, 01-Jan-30 00:00:07 GMT", 7.0),
        ("Tue, 01 Jan 2030 00:00:07 -0000", 7.0),
        ("Mon, 31 Dec 2029 23:00:00 GMT", None),
        ("0", None),
        ("-5", None),
        ("soon", None),
        ("", None),
        ("nan", None),
        ("1e3", None),
        ("٣", None),
        ("Tue, 99 Foo 2030 99:99:99 GMT", None),
        (None, None),
    ],
)
def test_reads_retry_after(header: str | None, seconds: float | None) -> None:
    assert seconds_asked(header, START) == seconds


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
def test_gives_up_after_eight_requests_and_stays_pending(ask: Ask, status: int) -> None:
    results, server = ask({"r": [{"status": status, "text": "busy"}] * 20})
    assert results["r"].state == "pending"
    assert results["r"].attempts == len(server.asked_at["r"]) == 8
    assert f"HTTP {status}: busy" in results["r"].reason
    times = server.asked_at["r"]
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(wait > 0 for wait in waits)
    assert waits == sorted(waits)


@pytest.mark.parametrize("status", [301, 401, 402, 404, 405])
def test_what_is_no_fault_of_the_row_leaves_it_pending_after_one_request(
    ask: Ask, status: int
) -> None:
    results, server = ask({"r": [{"status": status, "text": "no"}]})
    assert (results["r"].state, len(server.asked_at["r"])) == ("pending", 1)
    assert results["r"].reason == f"HTTP {status}: no"


@pytest.mark.parametrize("status", [400, 403, 413, 422])
def test_a_wrong_request_is_rejected_at_once(ask: Ask, status: int) -> None:
    results, server = ask({"r": [{"status": status, "text": "no"}]})
    assert (results["r"].state, len(server.asked_at["r"])) == ("rejected", 1)
    assert results["r"].reason == f"HTTP {status}: no"


@pytest.mark.parametrize(
    "fault",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("server disconnected"),
        httpx.Response(200, text="<html>gateway</html>"),
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json={"choices": [{"finish_reason": "stop"}]}),
        httpx.Response(200, json=completion(None)),
        httpx.Response(200, json={"error": {"message": "overloaded"}}),
        httpx.Response(200, json=completion([{"type": "image"}])),
        httpx.Response(200, content=b""),
        httpx.Response(200, content=b"[" * 100_000),
        httpx.Response(200, content=b'{"choices": [{"message": {"con'),
        httpx.Response(200, content=json.dumps(completion("x")).encode("utf-8")[:-2] + b"\xe9}"),
    ],
)
def test_broken_answers_are_asked_again_and_never_taken_for_empty_ones(
    ask: Ask, fault: Any
) -> None:
    results, _ = ask({"r": [fault, {"status": 200, "text": "R"}]})
    assert (results["r"].state, results["r"].text, results["r"].attempts) == ("done", "R", 2)
    results, _ = ask({"r": [fault] * 8})
    assert (results["r"].state, results["r"].text, results["r"].attempts) == ("pending", "", 8)
    assert results["r"].reason


def test_keeps_what_the_server_says_about_the_answer(ask: Ask) -> None:
    cut = httpx.Response(200, json=completion("x", finish_reason="length"))
    unsaid = httpx.Response(200, json={"choices": [{"message": {"content": ""}}]})
    results, _ = ask({"cut": [cut], "unsaid": [unsaid]})
    assert results["cut"].finish_reason == "length"
    assert (results["cut"].prompt_tokens, results["cut"].completion_tokens) == (5, 1)
    assert results["unsaid"].state == "done"
    assert results["unsaid"].finish_reason is None
    assert results["unsaid"].prompt_tokens is None


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (httpx.Response(200, json={"error": {"message": f"{KEY} is out of credit"}}),
         "HTTP 200, but the answer has no choices: *** is out of credit"),
        (httpx.Response(200, text="<html>Sign in</html>"),
         "HTTP 200, but the answer is not JSON: '<html>Sign in</html>'"),
        (httpx.Response(200, text='data: {"choices": []}\n\n'),
         "HTTP 200, but the answer is not JSON: 'data: "),
    ],
)  # fmt: skip
def test_a_200_that_is_no_answer_says_what_it_is(
    ask: Ask, reply: httpx.Response, reason: str
) -> None:
    results, _ = ask({"r": [reply] * 8}, api_key=KEY)
    assert results["r"].reason.startswith(reason)


def test_an_error_that_is_nested_too_deeply_is_a_reason_like_any_other(ask: Ask) -> None:
    results, _ = ask({"r": [httpx.Response(400, content=b"[" * 100_000)]})
    assert (results["r"].state, results["r"].reason[:11]) == ("rejected", "HTTP 400: [")


@pytest.mark.parametrize("counted", [-5, float("nan"), "31", True, None])
def test_a_number_of_tokens_that_is_none_counts_as_not_said(ask: Ask, counted: Any) -> None:
    body = completion("x") | {"usage": {"prompt_tokens": counted, "completion_tokens": 3}}
    results, _ = ask({"r": [httpx.Response(200, content=json.dumps(body).encode())]})
    assert (results["r"].prompt_tokens, results["r"].completion_tokens) == (None, 3)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_an_answer_in_another_unicode_encoding_is_read(ask: Ask, encoding: str) -> None:
    text = json.dumps(completion("您好 é"), ensure_ascii=False)
    results, _ = ask({"r": [httpx.Response(200, content=text.encode(encoding))]})
    assert results["r"].text == "您好 é"


CALL = {"id": "c1", "type": "function", "function": {"name": "track", "arguments": '{"no":7}'}}


@pytest.mark.parametrize(
    ("message", "finish", "expected"),
    [
        ({"content": None, "tool_calls": [CALL]}, "tool_calls", {"tool_calls": [CALL]}),
        ({"content": "I look.", "tool_calls": [CALL]}, "tool_calls",
         {"text": "I look.", "tool_calls": [CALL]}),
        ({"content": "4", "reasoning": "2 and 2"}, "stop", {"text": "4", "reasoning": "2 and 2"}),
        ({"content": "4", "reasoning_content": "2 and 2"}, "stop",
         {"text": "4", "reasoning": "2 and 2"}),
        ({"content": "4", "reasoning": None, "tool_calls": []}, "stop", {"text": "4"}),
        ({"content": None, "reasoning": "2 and"}, "length", {"reasoning": "2 and"}),
        ({"content": None, "reasoning": "2 and 2"}, "stop", {"reasoning": "2 and 2"}),
        ({"content": None, "refusal": "I cannot."}, "stop", {"refusal": "I cannot."}),
        ({"content": None}, "content_filter", {}),
        ({"content": None}, "length", {}),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "2 and 2"}]},
                      {"type": "text", "text": "4"}]}, "stop",
         {"text": "4", "reasoning": "2 and 2"}),
    ],
)  # fmt: skip
def test_what_was_said_apart_from_the_content_is_kept(
    ask: Ask, message: dict[str, Any], finish: str, expected: dict[str, Any]
) -> None:
    body = {"choices": [{"message": message, "finish_reason": finish}]}
    results, server = ask({"r": [httpx.Response(200, json=body)]})
    said = {"text": "", "reasoning": "", "refusal": "", "tool_calls": [], **expected}
    assert results["r"].model_dump(include=set(said)) == said
    assert (results["r"].state, results["r"].finish_reason) == ("done", finish)
    assert len(server.asked_at["r"]) == 1


def test_half_a_surrogate_pair_in_a_tool_call_or_in_reasoning_is_no_answer(ask: Ask) -> None:
    def reply(**message: Any) -> httpx.Response:
        choice = {"message": {"content": "x", **message}, "finish_reason": "stop"}
        return httpx.Response(200, content=json.dumps({"choices": [choice]}).encode("ascii"))

    call = {"function": {"name": "f", "arguments": "\ud83d"}}
    results, _ = ask({"a": [reply(tool_calls=[call])], "b": [reply(reasoning="\ud83d")]})
    assert {one.state for one in results.values()} == {"rejected"}


def test_tools_are_sent_where_there_are_any() -> None:
    tool = {"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}
    bodies: list[dict[str, Any]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=completion("x"))

    generate(
        [
            ChatRequest(id="with", messages=[], sampling=SAMPLING, tools=[tool]),
            ChatRequest(id="without", messages=[], sampling=SAMPLING),
        ],
        Endpoint(url="http://t", model="m"),
        concurrency=1, max_retry_wait=1.0, request_timeout=1.0,
        transport=httpx.MockTransport(respond),
    )  # fmt: skip
    assert bodies[0]["tools"] == [tool]
    assert "tools" not in bodies[1]


def test_sends_sampling_and_model_explicitly(ask: Ask) -> None:
    _, server = ask({"r": [{"status": 200, "text": "R"}]})
    assert server.bodies == [
        {
            "model": "teacher",
            "messages": [{"role": "user", "content": "r"}],
            "temperature": 0.0,
            "top_p": 1.0,
            "max_tokens": 16,
            "seed": 7,
        }
    ]
    assert "authorization" not in server.requests[0].headers


def test_the_key_is_sent_and_shown_nowhere(ask: Ask) -> None:
    echo = httpx.Response(401, json={"error": {"message": f"Incorrect API key provided: {KEY}"}})
    results, server = ask({"r": [echo]}, api_key=KEY)
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert "Incorrect API key provided: ***" in results["r"].reason
    endpoint = Endpoint(url="http://t", model="m", api_key=SecretStr(KEY))
    assert KEY not in repr(endpoint) + str(endpoint) + endpoint.model_dump_json()


@pytest.mark.parametrize("written", [f"{KEY}\n", f"{KEY}\r\n", f" {KEY}", f"\ufeff{KEY}\x00"])
def test_a_key_with_the_end_of_a_line_is_the_key(ask: Ask, written: str) -> None:
    _, server = ask({"r": [{"status": 200, "text": "R"}]}, api_key=written)
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_a_key_that_is_not_ascii_is_for_the_server_to_refuse(ask: Ask) -> None:
    _, server = ask({"r": [{"status": 200, "text": "R"}]}, api_key="schlüssel")
    assert dict(server.requests[0].headers.raw)[b"Authorization"] == "Bearer schlüssel".encode()


@pytest.mark.parametrize(
    ("url", "chat_url"),
    [
        ("http://t:8000", "http://t:8000/v1/chat/completions"),
        ("http://t:8000/", "http://t:8000/v1/chat/completions"),
        ("http://t:8000/v1", "http://t:8000/v1/chat/completions"),
        ("http://t:8000/v1/", "http://t:8000/v1/chat/completions"),
        ("https://t/proxy", "https://t/proxy/v1/chat/completions"),
        ("https://t/v1beta/openai/", "https://t/v1beta/openai/chat/completions"),
        ("https://t/v1/chat/completions", "https://t/v1/chat/completions"),
    ],
)
def test_url_with_or_without_v1(ask: Ask, url: str, chat_url: str) -> None:
    _, server = ask({"r": [{"status": 200, "text": "R"}]}, url=url)
    assert str(server.requests[0].url) == chat_url


def test_a_url_without_scheme_is_refused() -> None:
    with pytest.raises(ValidationError, match="http://"):
        Endpoint(url="teacher:8000", model="m")


def test_half_a_surrogate_pair_is_no_answer_and_not_asked_for_again(ask: Ask) -> None:
    half = httpx.Response(200, content=json.dumps(completion("\ud83d")).encode("ascii"))
    odd = httpx.Response(200, content=json.dumps(completion("x", finish_reason="\udc00")).encode())
    results, server = ask({"half": [half], "odd": [odd]})
    assert (results["half"].state, len(server.asked_at["half"])) == ("rejected", 1)
    assert "surrogate" in results["half"].reason
    assert (results["odd"].state, results["odd"].finish_reason) == ("done", None)


def test_a_row_is_taken_when_it_can_be_sent_and_not_before() -> None:
    taken: list[str] = []
    finished: list[str] = []

    def requests() -> Iterator[ChatRequest]:
        for number in range(20):
            if len(finished) >= 10:
                return
            taken.append(str(number))
            yield ChatRequest(id=str(number), messages=[], sampling=SAMPLING)

    def on_done(result: ChatResult) -> None:
        finished.append(result.id)
        assert len(taken) - len(finished) < 3

    ask_each(
        requests(), [Endpoint(url="http://t", model="m")], on_done,
        concurrency=3, max_retry_wait=1.0, request_timeout=1.0,
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json=completion("x"))),
    )  # fmt: skip
    assert len(taken) == len(finished) < 13


def test_the_deadline_is_of_the_whole_request_however_slowly_it_comes() -> None:
    class Dripping(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(0.01)
                yield b" "

    (result,) = generate(
        [ChatRequest(id="r", messages=[], sampling=SAMPLING)], Endpoint(url="http://t", model="m"),
        concurrency=1, max_retry_wait=1.0, request_timeout=0.1, max_attempts=1,
        transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Dripping())),
    )  # fmt: skip
    assert result.state == "pending"
    assert result.reason == "no answer within 0.1 s; given up after 1 requests"


def test_what_on_done_raises_ends_the_call(ask: Ask) -> None:
    def full(result: ChatResult) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ask(RATE_LIMITED, on_done=full)


def test_an_endpoint_that_hangs_is_given_up_in_the_time_of_one_row(ask: Ask) -> None:
    """80 rows of 8 requests of 30 s, one after the other, would be 5 hours."""
    rows = {str(number): ["hangs"] * 8 for number in range(80)}
    results, server = ask(rows)
    assert {result.state for result in results.values()} == {"pending"}
    assert any("nothing was answered for" in result.reason for result in results.values())
    # One row alone: 8 requests of 30 s and its waits.
    assert 8 * 30 < server.clock.seconds <= 8 * (30 + 60) + 100


def test_a_slow_endpoint_that_answers_now_and_then_is_not_given_up(ask: Ask) -> None:
    answer = {"status": 200, "text": "A"}
    rows = {str(n): [*(["hangs"] if n % 2 else []), answer] for n in range(100)}
    results, server = ask(rows)
    assert server.clock.seconds > 8 * (30 + 60), "longer than the longest silence"
    assert {result.state for result in results.values()} == {"done"}
