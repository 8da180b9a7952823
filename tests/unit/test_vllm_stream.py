"""What the load generator's client is handed of a stream, however the endpoint writes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasks.engines.vllm_bench_main import DONE, Stream, text_of

Row = dict[str, Any]


def chunk(text: str | None = None, finish: str | None = None, **delta: Any) -> Row:
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": content | delta, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
ROLE = chunk("", role="assistant")
ANSWER = [ROLE, chunk("你好 data: x"), chunk(" {there}\n\n"), chunk("", "stop"), USAGE]


def read(reads: list[bytes]) -> list[Any]:
    """As vLLM's client reads: every read without the white space at its ends."""
    stream = Stream()
    found: list[Any] = []
    for one in reads:
        if one.strip():
            found += stream.add_chunk(one.strip())
    return [
        text if text == DONE else json.loads(text)
        for text in (message.removeprefix("data: ") for message in found)
    ]


def texts(messages: list[Any]) -> list[str | None]:
    return [
        one["choices"][0]["delta"]["content"] for one in messages if one != DONE and one["choices"]
    ]


def written(style: str, messages: list[Row]) -> list[bytes]:
    """One read per event."""
    forms = {
        "plain": "data: {}\n\n",
        "crlf": "data: {}\r\n\r\n",
        "no space": "data:{}\n\n",
        "one newline": "data: {}\n",
        "named": "event: message\ndata: {}\n\n",
        "comments": ": ping data: none\n\ndata: {}\n\n",
        "numbered": "id: 7\ndata: {}\n\n",
    }
    bodies = [*(json.dumps(one, ensure_ascii=False) for one in messages), DONE]
    return [forms[style].replace("{}", body).encode() for body in bodies]


STYLES = ["plain", "crlf", "no space", "one newline", "named", "comments", "numbered"]


@pytest.mark.parametrize("style", STYLES)
def test_every_way_to_write_a_stream_is_read(style: str) -> None:
    found = read(written(style, ANSWER))
    assert texts(found) == ["你好 data: x", " {there}\n\n", None]
    assert found[-2] == USAGE
    assert found[-1] == DONE


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("size", [7, 64, 10_000])
def test_reads_may_end_anywhere(style: str, size: int) -> None:
    whole = b"".join(written(style, [ROLE, chunk("word"), chunk("s"), chunk("", "stop"), USAGE]))
    # White space inside of a text is what the client itself loses at the ends of its reads.
    found = read([whole[at : at + size] for at in range(0, len(whole), size)])
    assert texts(found) == ["word", "s", None]
    assert (found[-2], found[-1]) == (USAGE, DONE)


def test_the_first_chunk_is_the_first_with_text() -> None:
    """The role alone is no token: its arrival is not the time to the first one."""
    found = read(
        written("plain", [ROLE, chunk(None), chunk(""), chunk("a"), chunk(""), chunk("b")])
    )
    assert texts(found) == ["a", None, "b"]
    only_end = read(written("plain", [ROLE, chunk("", "stop"), USAGE]))
    assert texts(only_end) == [None]


def test_reasoning_is_text_too() -> None:
    for name in ("reasoning_content", "reasoning"):
        assert texts(read(written("plain", [ROLE, chunk(**{name: "hm"})]))) == ["hm"]


def test_a_call_of_a_tool_is_no_empty_answer() -> None:
    calls = [
        {"index": 0, "id": "c", "type": "function", "function": {"name": "track"}},
        {"index": 0, "function": {"arguments": '{"a": 1}'}},
    ]
    stream = Stream()
    found: list[str] = []
    for delta in ({"role": "assistant", "content": ""}, *({"tool_calls": [one]} for one in calls)):
        chunk = json.dumps({"choices": [{"index": 0, "delta": delta}]})
        found += stream.add_chunk(f"data: {chunk}\n\n".encode())
    deltas = [json.loads(one.removeprefix("data: "))["choices"][0]["delta"] for one in found]
    assert [delta["content"] for delta in deltas] == ["track", '{"a": 1}']


def test_usage_beside_the_choices_is_handed_on_by_itself() -> None:
    last = chunk("b", "stop") | {"usage": USAGE["usage"]}
    first = chunk("a") | {"usage": None}
    found = read(written("plain", [ROLE, first, last]))
    assert texts(found) == ["a", "b"]
    assert found[-2] == USAGE


def test_an_error_in_the_stream_is_handed_on() -> None:
    error = {"error": {"message": "EngineCore died"}}
    assert read(written("plain", [chunk("a"), error]))[1] == error


def test_the_tokens_of_a_whole_conversation_are_counted() -> None:
    messages = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "Wuhan"},
    ]
    assert text_of({"messages": messages}) == "Where is it?\n\nWuhan"
