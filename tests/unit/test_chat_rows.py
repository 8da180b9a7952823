"""Conversations and tools in people's rows: sent as they stand, or refused with their place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasks.chat_rows import Malformed, messages_in, tools_in
from tasks.conversations import (
    chat_of,
    for_template,
    messages_of,
    texts_of_people,
    with_prompt,
    with_system,
)

USER = {"role": "user", "content": " hello\n"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "track", "arguments": '{"order": "FT1"}'},
}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "Wuhan", "tool_call_id": "c1"}
TOOL = {"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}


def test_good_conversations_stay_what_they_are() -> None:
    system = {"role": "system", "content": "Be  brief. \u2028ＡＢ"}
    for messages in (
        [USER],
        [system, USER],
        [system, USER, {"role": "assistant", "content": "hi"}, USER],
        [USER, CALLS, RESULT],
        [USER, {**CALLS, "content": "Let me see."}, {**RESULT, "content": ""}, USER],
        [USER, {**CALLS, "tool_calls": [CALL, OTHER]}, {**RESULT, "tool_call_id": "c2"}, RESULT],
        [{**USER, "name": "Ann"}],
    ):
        assert messages_in(messages, "m") == messages
        assert messages_in(json.dumps(messages), "m") == messages, "as a text of JSON"


def test_what_is_absent_and_what_is_null_are_one() -> None:
    filled = [
        {**USER, "name": None, "tool_calls": None},
        {"role": "assistant", "tool_calls": [CALL], "tool_call_id": None},
        {**RESULT, "name": None, "tool_calls": None},
    ]
    assert messages_in(filled, "m") == [USER, CALLS, RESULT]
    # As OpenAI's client dumps an answer.
    dumped = {"role": "assistant", "content": "hi", "tool_calls": [], "annotations": []}
    answered = [USER, {**dumped, "refusal": None, "audio": None}, USER]
    assert messages_in(answered, "m")[1] == {"role": "assistant", "content": "hi"}


def test_parts_of_text_are_joined_and_arguments_become_a_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_in([{"role": "user", "content": parts}], "m")[0]["content"] == "a\nb"
    asked = {**CALL, "function": {"name": "track", "arguments": {"order": "好"}}}
    calls = messages_in([USER, {**CALLS, "tool_calls": [asked]}, RESULT], "m")[1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == '{"order": "好"}'


OTHER = {**CALL, "id": "c2"}
NAN = '{"weight": NaN}'

BAD: list[tuple[Any, str]] = [
    (None, "m is missing, not a list"),
    ({"role": "user", "content": "x"}, "m is an object, not a list"),
    ([], "m is empty"),
    (" ", "m is empty"),
    ("hello", "m is a text, but not JSON: "),
    ("[" * 100_000, "m is a text, but not JSON: "),
    (["hello"], r"m\[0\] is a text, not an object"),
    ([{"content": "x"}], r"m\[0\] has no role; known are system, user"),
    ([{"role": "human", "content": "x"}], r"m\[0\] has role 'human'; known are system, user"),
    ([{"role": ["user"], "content": "x"}], r"m\[0\] has role \['user'\]"),
    ([{"from": "user", "role": "user", "content": "x"}], r"m\[0\] has a field 'from'"),
    ([USER, {"role": "user"}], r"m\[1\] has no content"),
    ([{"role": "user", "content": " "}], r"m\[0\] has an empty content"),
    ([{"role": "user", "content": 3}], r"m\[0\] content is a number, not a text"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        r"m\[0\] content holds a part of type 'image_url'; only text is asked",
    ),
    ([{**USER, "name": 3}], r"m\[0\] name is a number, not a text"),
    ([USER, RESULT], r"m\[1\] answers call 'c1', which no message before it makes"),
    ([{**USER, "tool_call_id": "c1"}], r"m\[0\] has a tool_call_id, but is no tool's"),
    ([{**USER, "tool_calls": [CALL]}], r"m\[0\] has tool_calls, but is not the assistant's"),
    ([USER, {**CALLS, "tool_calls": "x"}], r"m\[1\] tool_calls is a text, not a list"),
    ([USER, {**CALLS, "tool_calls": [{}]}], r"m\[1\] a tool call is no object with a `function`"),
    (
        [USER, {**CALLS, "tool_calls": [{"function": {"name": "f"}}]}],
        r"m\[1\] a tool call has no id",
    ),
    (
        [USER, {**CALLS, "tool_calls": [{"id": "a", "function": {"name": ""}}]}],
        r"m\[1\] a tool call names no function",
    ),
    (
        [USER, {**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}],
        r"m\[1\] arguments of 'f' are no JSON object",
    ),
    (
        [USER, {**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": NAN}}]}],
        r"m\[1\] arguments of 'f' are no JSON object",
    ),
    ('[{"role": "user", "content": "a", "content": "b"}]', "m is a text, but not JSON: the field"),
    ([USER, {**CALLS, "tool_calls": [CALL, OTHER]}, RESULT], "m ends before call 'c2' is answered"),
    ([USER, CALLS, USER], r"m\[2\] comes before call 'c1' is answered"),
    ([{"role": "system", "content": "x"}], "m has no user message"),
    ([USER, {"role": "assistant", "content": "hi"}], "m ends with a message of role 'assistant'"),
    ([USER, CALLS], "m ends with a message of role 'assistant': nothing is asked"),
]


@pytest.mark.parametrize(("value", "reason"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_sent_is_named_with_its_place(value: Any, reason: str) -> None:
    with pytest.raises(Malformed, match=f"^{reason}"):
        messages_in(value, "m")


def test_tools() -> None:
    for none in (None, [], "", "null", "[]"):
        assert tools_in(none, "t") == []
    assert tools_in([TOOL], "t") == tools_in(json.dumps([TOOL]), "t") == [TOOL]
    for value, reason in (
        ("{", "t is a text, but not JSON"),
        (TOOL, "t is an object, not a list"),
        (["track"], r"t\[0\] is no object of type 'function'"),
        ([{"type": "web_search"}], r"t\[0\] is no object of type 'function'"),
        ([TOOL["function"]], r"t\[0\] is no object of type 'function'"),
        ([{"type": "function", "function": {}}], r"t\[0\] names no function"),
        ([TOOL, TOOL], r"t\[1\] names function 'track' again"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
            r"t\[0\] parameters of 'f' are no object",
        ),
    ):
        with pytest.raises(Malformed, match=f"^{reason}"):
            tools_in(value, "t")


# -- rows of ours ----------------------------------------------------------------------------


def test_a_system_prompt_stands_before_the_rows_own() -> None:
    row = with_system({"id": "a", "prompt": "x"}, "First.")
    wanted = [{"role": "system", "content": "First."}, {"role": "user", "content": "x"}]
    assert row == {"id": "a", "prompt": "x", "messages": wanted}
    again = with_system(row, "Before it.")
    assert again["messages"][0]["content"] == "Before it.\n\nFirst."
    assert again["messages"][1:] == wanted[1:]


def test_the_template_goes_round_the_last_user_message() -> None:
    row = {"prompt": "b", "messages": [{**USER, "content": "a"}, CALLS, RESULT]}
    row["messages"] = [{"role": "user", "content": "a"}, CALLS, RESULT, {**USER, "content": "b"}]
    made = with_prompt(row, "<b>")
    assert made["prompt"] == made["messages"][-1]["content"] == "<b>"
    assert made["messages"][:-1] == row["messages"][:-1]
    assert row["messages"][-1]["content"] == "b", "the row itself stays"
    last_tool = with_prompt({"prompt": " hello\n", "messages": [USER, CALLS, RESULT]}, "q")
    assert [one["content"] for one in last_tool["messages"]] == ["q", None, "Wuhan"]
    assert with_prompt({"prompt": "a", "tools": [TOOL]}, "c") == {"prompt": "c", "tools": [TOOL]}


def test_what_is_sent_and_what_people_wrote() -> None:
    row = with_system({"prompt": " hello\n", "messages": [USER, CALLS, RESULT]}, "System.")
    assert chat_of({"prompt": "x"}) == {"messages": [{"role": "user", "content": "x"}]}
    assert chat_of(row | {"tools": [TOOL]}) == {"messages": messages_of(row), "tools": [TOOL]}
    assert list(texts_of_people(row)) == [" hello\n", "Wuhan"]


def test_a_chat_template_gets_arguments_as_an_object() -> None:
    made = for_template([USER, CALLS, RESULT])
    assert made[1]["tool_calls"][0]["function"] == {"name": "track", "arguments": {"order": "FT1"}}
    assert made[1]["content"] == ""
    assert CALLS["content"] is None and CALL["function"]["arguments"] == '{"order": "FT1"}'
