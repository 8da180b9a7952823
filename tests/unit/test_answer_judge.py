"""Another model gives each answer a number; what it was asked is never asked again."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import JudgePick, TeacherRecipe
from registry.artifacts import ArtifactRef
from registry.errors import InfrastructureError, StageFailed, UserError
from registry.settings import settings
from tasks import stages
from tasks.answer_judge import number_said, question
from tasks.answer_quality import Judged
from tasks.engines.openai_chat import ChatResult
from tests.unit.teacher_builders import Teacher, recipe_for, run, teaching

PROMPTS = 20
SAMPLES = 3


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "TRIES", 1)
    monkeypatch.setattr(stages, "provenance", dict)


class Several(Teacher):
    """Its answers to one prompt differ; those to `p4` are refusals but for one."""

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        _, content = super().reply(body)
        prompt = body["messages"][-1]["content"]
        text = f"{prompt}, answer {body['seed'] + 1}"
        if prompt.endswith("p4") and body["seed"] > 0:
            text = "I can't help with that."
        content["choices"][0] = {"message": {"content": text}, "finish_reason": "stop"}
        return 200, content


@dataclass
class Judging(Teacher):
    """Gives answer n the number n, or says what `instead` has."""

    instead: dict[str, str] = field(default_factory=dict)
    answers: int | None = None
    """So many and no more."""
    said: Counter[str] = field(default_factory=Counter)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = body["messages"][-1]["content"].partition("ANSWER ")[2]
        with self.guard:
            if self.answers is not None and self.said.total() >= self.answers:
                return 503, {"error": {"message": "down"}}
            self.said[answer] += 1
        text = self.instead.get(answer, answer[-1:])
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        return 200, {"choices": [choice], "usage": usage}


def recipe(teacher: str, judge: str, **pick: Any) -> TeacherRecipe:
    chosen = {
        "scorer": "judge",
        "url": judge,
        "served_model": "j",
        "prompt": "PROMPT {prompt} ANSWER {answer}",
        "concurrency": 1,
    }
    return recipe_for(
        teacher,
        samples=SAMPLES,
        sampling={"max_tokens": 16, "temperature": 1.0, "seed": 0},
        max_retry_wait=0.1,
        pick=chosen | pick,
    )


def rows(ref: ArtifactRef, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ref.path / name).read_text().split("\n") if line]


def test_the_answer_with_the_highest_number_is_learned(home: Path) -> None:
    judge = Judging()
    with teaching(Several()) as teacher, teaching(judge) as url:
        ref = run(recipe(teacher, url), PROMPTS)
    learned = rows(ref, "train.jsonl") + rows(ref, "calibration.jsonl")
    said = {row["id"]: row["messages"][-1]["content"] for row in learned}
    assert said.pop("p4") == "问 p4, answer 1", "the only one that is kept needs no judge"
    assert said == {f"p{n}": f"问 p{n}, answer 3" for n in range(PROMPTS) if n != 4}
    assert set(judge.said.values()) == {1}
    assert judge.said.total() == SAMPLES * (PROMPTS - 1)
    picked = [row for row in rows(ref, "responses.jsonl") if row["picked"]]
    assert {row.get("score") for row in picked} == {3.0, None}
    card = json.loads((ref.path / "data_card.json").read_text())
    assert card["picks"]["only one answer kept"] == 1
    assert card["picks"]["scores"]["best"]["mean"] == 3.0
    assert card["picks"]["tokens of the judge"] == 6 * SAMPLES * (PROMPTS - 1)
    assert not list(settings().home.glob("bench/*")), "the store has the answers"


def test_other_rules_ask_neither_the_teacher_nor_the_judge_again(home: Path) -> None:
    judge, several = Judging(), Several()
    with teaching(several) as teacher, teaching(judge) as url:
        first = run(recipe(teacher, url), PROMPTS)
        asked = judge.said.total(), several.asked.total()
        other = recipe(teacher, url).model_copy(update={"max_truncated_share": 0.7})
        again = run(other, PROMPTS)
        assert (judge.said.total(), several.asked.total()) == asked
        run(recipe(teacher, url, prompt="HOW GOOD IS {prompt} ANSWER {answer}"), PROMPTS)
        assert judge.said.total() == 2 * asked[0], "another question is another judgement"
        assert several.asked.total() == asked[1]
    assert first.key != again.key
    for name in ("train.jsonl", "responses.jsonl"):
        assert (first.path / name).read_bytes() == (again.path / name).read_bytes()
    card = json.loads((again.path / "data_card.json").read_text())
    assert card["picks"]["tokens of the judge"] == 6 * SAMPLES * (PROMPTS - 1)


def test_a_judge_that_fails_is_asked_for_the_rest_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.engines.openai_chat.FIRST_WAIT", 0.001)
    teacher, judge = Several(), Judging(answers=10)
    with teaching(teacher) as asked, teaching(judge) as url:
        with pytest.raises(InfrastructureError, match=r"the judge at .* did not judge"):
            run(recipe(asked, url), PROMPTS)
        assert judge.said.total() == 10
        judge.answers = None
        teacher.asked.clear()
        run(recipe(asked, url), PROMPTS)
    assert not teacher.asked
    assert set(judge.said.values()) == {1}
    assert judge.said.total() == SAMPLES * (PROMPTS - 1)


def test_answers_that_are_no_number_are_counted_and_too_many_refused(home: Path) -> None:
    judge = Judging(instead={f"问 p{n}, answer {n % 3 + 1}": "It is good." for n in range(6)})
    with teaching(Several()) as teacher, teaching(judge) as url:
        with pytest.raises(StageFailed, match=r"5 of 57 answers of the judge are no number") as bad:
            run(recipe(teacher, url, max_unreadable_share=0.05), PROMPTS)
        assert "p0: 'It is good.'" in str(bad.value)
        ref = run(recipe(teacher, url, max_unreadable_share=0.1), PROMPTS)
    learned = {row["id"]: row["messages"][-1]["content"] for row in rows(ref, "train.jsonl")}
    assert learned["p2"] == "问 p2, answer 2", "its third answer has no number"
    assert set(judge.said.values()) == {1}, "the judge's answers are those of before"


def test_the_judge_has_a_budget_of_its_own(home: Path) -> None:
    judge = Judging()
    with teaching(Several()) as teacher, teaching(judge) as url:
        with pytest.raises(UserError, match="budget of 60 tokens is spent") as spent:
            run(recipe(teacher, url, max_total_tokens=60), PROMPTS)
        assert "pick.max_total_tokens" in str(spent.value)
        assert judge.said.total() == 10
        run(recipe(teacher, url, max_total_tokens=6 * 57), PROMPTS)
    assert set(judge.said.values()) == {1}


PICK = JudgePick(scorer="judge", url="http://h", served_model="m", prompt="{answer}")


@pytest.mark.parametrize(
    ("text", "finish", "number"),
    [
        ("7", "stop", 7.0),
        (" 7.5\n", "stop", 7.5),
        ("<think>7 or 8?</think>8", "stop", 8.0),
        ("1", "length", None),  # of a 10
        ("7/10", "stop", None),
        ("Score: 7", "stop", None),
        ("11", "stop", None),
        ("0", "stop", None),
        ("-3", "stop", None),
        ("七", "stop", None),
        ("nan", "stop", None),
        ("", "stop", None),
    ],
)
def test_a_number_alone_is_one(text: str, finish: str, number: float | None) -> None:
    result = ChatResult(id="a", state="done", text=text, finish_reason=finish)
    assert number_said(result, PICK) == number


def test_what_the_judge_is_asked() -> None:
    pick = PICK.model_copy(update={"prompt": "Q {prompt} A {answer} R {reference} {x}"})
    call = {"function": {"name": "f"}}
    result = ChatResult(id="a", state="done", tool_calls=[call])
    row = {"id": "a", "prompt": "{answer}?", "reference": {"intent": "问"}}
    asked = question(pick, row, Judged(result, "accepted", "{reference}"))
    assert asked == 'Q {answer}? A {reference}\n{"function": {"name": "f"}} R {"intent": "问"} {x}'
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    asked = question(
        pick, {**row, "messages": messages, "reference": None}, Judged(result, "a", "")
    )
    assert asked.startswith("Q system: Be kind.\n\nuser: Hi A {")
    assert asked.endswith(" R  {x}")
