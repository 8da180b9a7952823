"""Other rules for the same answers ask nobody again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from registry.artifacts import ArtifactRef
from registry.errors import StageFailed
from registry.settings import settings
from tasks import stages
from tasks.teacher_rows import AnswerFile
from tests.unit.teacher_builders import Teacher, recipe_for, run, teaching

PROMPTS = 20


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "TRIES", 1)
    monkeypatch.setattr(stages, "provenance", dict)


class Thinking(Teacher):
    """Thinks aloud, and refuses what ends with 3."""

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, content = super().reply(body)
        message = content["choices"][0]["message"]
        message["content"] = f"<think>hm</think>{message['content']}"
        if body["messages"][-1]["content"].endswith("3"):
            message["content"] = "I can't help with that."
        return status, content


def texts(ref: ArtifactRef, name: str) -> list[str]:
    lines = (ref.path / name).read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["messages"][-1]["content"] for line in lines if line]


def test_other_rules_take_the_answers_that_the_store_has(home: Any) -> None:
    teacher = Thinking()
    with teaching(teacher) as url:
        first = run(recipe_for(url), PROMPTS)
        assert teacher.asked.total() == PROMPTS
        kept = run(recipe_for(url, quality={"refused": {"keep": True}}), PROMPTS)
        plain = run(recipe_for(url, quality={"reasoning_tags": [["<x>", "</x>"]]}), PROMPTS)
        assert teacher.asked.total() == PROMPTS, "nobody was asked again"
        other = {"max_tokens": 17}
        run(recipe_for(url, sampling=other), PROMPTS)
        assert teacher.asked.total() == 2 * PROMPTS, "another sampling is another answer"
    assert len({first.key, kept.key, plain.key}) == 3
    assert texts(first, "train.jsonl")[0] == "«问 p0» 答"
    assert texts(plain, "train.jsonl")[0] == "<think>hm</think>«问 p0» 答", "as it was sent"
    assert "I can't help with that." not in texts(first, "train.jsonl")
    assert texts(kept, "train.jsonl").count("I can't help with that.") == 2
    assert not list(settings().home.glob("bench/*"))


def test_a_process_that_is_killed_while_it_takes_them_asks_nobody_either(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Thinking()
    other = {"quality": {"refused": {"keep": True}}}
    with teaching(teacher) as url:
        run(recipe_for(url), PROMPTS)
        add = AnswerFile.add

        def killed(answers: AnswerFile, row: int, *rest: Any) -> None:
            if row == 7:
                raise KeyboardInterrupt
            add(answers, row, *rest)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(AnswerFile, "add", killed)
            run(recipe_for(url, **other), PROMPTS)
        run(recipe_for(url, **other), PROMPTS)
    assert set(teacher.asked.values()) == {1} and teacher.asked.total() == PROMPTS


def test_answers_that_were_changed_are_not_taken(home: Any) -> None:
    teacher = Thinking()
    with teaching(teacher) as url:
        ref = run(recipe_for(url), PROMPTS)
        with (ref.path / "responses.jsonl").open("a") as out:
            out.write("\n")
        run(recipe_for(url, quality={"refused": {"keep": True}}), PROMPTS)
    assert teacher.asked.total() == 2 * PROMPTS


def test_what_was_rejected_is_asked_again(home: Any) -> None:
    teacher = Teacher(status=lambda prompt: 400 if prompt.endswith("p5") else 200)
    with teaching(teacher) as url:
        run(recipe_for(url), PROMPTS)
        teacher.status = lambda prompt: 200
        again = run(recipe_for(url, quality={"refused": {"keep": True}}), PROMPTS)
    assert teacher.asked.total() == PROMPTS + 1
    assert "«问 p5» 答" in texts(again, "train.jsonl")


def test_a_stage_that_fails_leaves_its_card_beside_the_answers(home: Any) -> None:
    with teaching(Teacher()) as url, pytest.raises(StageFailed, match="2 of 20 answers"):
        run(recipe_for(url, max_truncated_share=0.05), PROMPTS)
    (page,) = settings().home.glob("bench/answers-*/data_card.md")
    assert "cut at the token limit: 2 (10.0%, allowed 5%)" in page.read_text(encoding="utf-8")
