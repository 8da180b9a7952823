"""What the teacher is sent for a row: its own system prompt, the row's tools, a seed a sample."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from registry.errors import InfrastructureError
from tasks import teacher_asking
from tasks.engines import openai_chat
from tasks.engines.openai_chat import ChatRequest
from tasks.serving import RemoteTeacher
from tasks.teacher_asking import ask_missing, in_context, request_for
from tasks.teacher_rows import AnswerFile
from tests.unit.teacher_builders import recipe_for
from tests.unit.test_openai_chat import RATE_LIMITED, FakeClock, Server

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


def test_a_server_that_says_wait_leaves_the_stage_incomplete_and_the_answers_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits in seconds and as a date, a refusal, and a wait of a day, longer than allowed."""
    clock = FakeClock()
    server = Server(RATE_LIMITED, clock)
    monkeypatch.setattr(
        teacher_asking,
        "ask_each",
        partial(
            openai_chat.ask_each,
            clock=clock.now,
            sleep=clock.sleep,
            transport=httpx.MockTransport(server),
            rng=random.Random(0),
        ),
    )
    rows = [{"id": f"id-{name}", "segment": "s", "prompt": name} for name in RATE_LIMITED]
    for part, own in (("train", rows[:6]), ("calibration", rows[6:])):
        lines = "".join(json.dumps(row) + "\n" for row in own)
        (tmp_path / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    asked = recipe_for("http://t", concurrency=8, max_retry_wait=600.0)
    path = tmp_path / "work" / "answers.jsonl"

    def ask() -> None:
        with AnswerFile(path, len(rows)) as answers:
            ask_missing(tmp_path, answers, len(rows), asked, RemoteTeacher(asked))

    with pytest.raises(InfrastructureError, match=r"1 of 8 prompts got no answer; id-h:.*86400"):
        ask()
    with AnswerFile(path, len(rows)) as answers:
        assert [answer.text for row in range(6) for answer in answers.samples_of(row)] == [
            *"ABCDEF"
        ]
        assert list(answers.missing()) == [(6, 0), (7, 0)], "refused, and not yet answered"
    server.script = {"g": [{"status": 200, "text": "G"}], "h": [{"status": 200, "text": "H"}]}
    times = {row: len(at) for row, at in server.asked_at.items()}
    ask()
    later = {row: len(at) - times[row] for row, at in server.asked_at.items()}
    assert later == {**dict.fromkeys("abcdef", 0), "g": 1, "h": 1}
