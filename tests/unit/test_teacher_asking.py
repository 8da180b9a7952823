"""What the teacher is sent for a row: its own system prompt, the row's tools, a seed a sample."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasks.engines.openai_chat import ChatRequest
from tasks.teacher_asking import in_context, request_for
from tests.unit.teacher_builders import recipe_for

CONTEXT = "Answer as the freight desk."
USER = {"role": "user", "content": "Where is WL7?"}


SAMPLED = {"samples": 3, "pick": {"scorer": "reference"}}


def request(content: dict[str, Any], sample: int = 0, **changes: Any) -> ChatRequest:
    return request_for(content, 3, sample, recipe_for("http://t", **changes))


@pytest.mark.parametrize(
    ("messages", "sent"),
    [
        ([USER], [{"role": "system", "content": CONTEXT}, USER]),
        (
            [{"role": "system", "content": "Be brief."}, USER],
            [{"role": "system", "content": f"{CONTEXT}\n\nBe brief."}, USER],
        ),
        (
            [{"role": "developer", "content": "Be brief."}, USER],
            [{"role": "developer", "content": f"{CONTEXT}\n\nBe brief."}, USER],
        ),
        (
            [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, USER],
            [
                {
                    "role": "system",
                    "content": [
                        {"type": "text", "text": f"{CONTEXT}\n\n"},
                        {"type": "text", "text": "Be brief."},
                    ],
                },
                USER,
            ],
        ),
    ],
)
def test_the_context_comes_first_and_there_is_one_system_prompt(
    messages: list[dict[str, Any]], sent: list[dict[str, Any]]
) -> None:
    before = json.dumps(messages)
    assert in_context(messages, CONTEXT) == sent
    assert json.dumps(messages) == before, "the student's are these"
    assert in_context(messages, None) == messages


def test_a_row_is_sent_with_its_conversation_and_tools() -> None:
    tool = {"type": "function", "function": {"name": "track"}}
    messages = [{"role": "system", "content": "Be brief."}, USER]
    row = {"prompt": USER["content"], "messages": messages, "tools": [tool]}
    sent = request(row, context=CONTEXT)
    assert sent.messages[0]["content"] == f"{CONTEXT}\n\nBe brief."
    assert sent.tools == [tool]
    assert request({"prompt": "hi"}).tools == []


def test_samples_have_seeds_of_their_own_and_are_named_by_row_and_number() -> None:
    sampling = {"max_tokens": 8, "temperature": 0.8, "seed": 11}
    sent = [request({"prompt": "hi"}, number, sampling=sampling, **SAMPLED) for number in range(3)]
    assert [one.sampling.seed for one in sent] == [11, 12, 13]
    assert [one.id for one in sent] == ["3 0", "3 1", "3 2"]
    unseeded = request({"prompt": "hi"}, 1, sampling={**sampling, "seed": None}, **SAMPLED)
    assert unseeded.sampling.seed is None
