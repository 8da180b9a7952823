"""What of the teacher's answers is kept, and what they add up to."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipes.quality_recipe import ClassRule
from recipes.schema import TeacherRecipe
from registry.errors import StageFailed
from tasks.answer_quality import CLASSES, RULES, Judge
from tasks.engines.loss_mask import build, segments
from tasks.engines.openai_chat import ChatResult
from tasks.teacher_parts import (
    REMEDIES,
    Answered,
    account,
    judged_rows,
    share_problems,
    write_parts,
)
from tasks.teacher_rows import AnswerFile
from tests.unit.teacher_builders import recipe_for


def answer(name: str, text: str, finish: str | None = "stop", **more: Any) -> ChatResult:
    content = {"id": name, "state": "done", "text": text, "finish_reason": finish, "attempts": 1}
    return ChatResult.model_validate(content | more)


ANSWERS = [
    answer("t01", "Lisbon."),
    answer("t02", "1. Open the order page. 2. Print the", "length"),
    answer("t03", "Danke."),
    answer("t04", "It covers two years from delivery.", "length"),
    answer("t05", "Yes, within the EU."),
    answer("t06", "We open at nine.", None),
    answer("t07", "", "content_filter"),
    answer("t08", "4"),
    answer("t09", "首先登录账户，然后并上", "length"),
    answer("t10", "Hello!"),
]


def sorted_into(
    folder: Path,
    answers: list[ChatResult],
    recipe: TeacherRecipe,
    rows: list[dict[str, Any]] | None = None,
) -> list[Answered]:
    """The files in `folder`/made, of prompts of which the last two are the calibration part."""
    prompts, made = folder / "prompts", folder / "made"
    prompts.mkdir()
    made.mkdir()
    names = [one.id for one in answers[:: recipe.samples]]
    rows = rows or [{"id": one, "segment": "s", "prompt": f"p {one}"} for one in names]
    cut = max(1, len(rows) - 2)
    for part, own in (("train", rows[:cut]), ("calibration", rows[cut:])):
        lines = "".join(json.dumps(row) + "\n" for row in own)
        (prompts / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    with AnswerFile(folder / "answers.jsonl", len(rows), recipe.samples) as file:
        for number in reversed(range(len(answers))):  # answers come in any order
            row, sample = divmod(number, recipe.samples)
            file.add(row, answers[number].model_copy(update={"id": str(row)}), sample)
        judge = Judge(recipe.quality, recipe.keep_truncated)
        found = judged_rows(prompts, file, judge, lambda *one: float(len(one[2].text)))
        return list(write_parts(made, found))


def written(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "made" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


RECIPE = recipe_for("http://host", max_truncated_share=0.4)


def test_only_complete_answers_are_trained_on(tmp_path: Path) -> None:
    sorted_into(tmp_path, ANSWERS, RECIPE)
    assert [row["id"] for row in written(tmp_path, "train")] == ["t01", "t03", "t05", "t08"]
    assert [row["id"] for row in written(tmp_path, "calibration")] == ["t10"]
    assert written(tmp_path, "train")[0] == {
        "id": "t01",
        "segment": "s",
        "messages": [
            {"role": "user", "content": "p t01"},
            {"role": "assistant", "content": "Lisbon."},
        ],
    }
    responses = written(tmp_path, "responses")
    assert [row["id"] for row in responses] == [one.id for one in ANSWERS]
    assert responses[0] == ANSWERS[0].model_dump() | {"class": "accepted", "why": "", "score": 7.0}
    assert [row["class"] for row in responses[5:8]] == ["unknown", "content_filter", "accepted"]
    assert written(tmp_path, "set_aside") == [
        {"id": "t02", "reason": "length"},
        {"id": "t04", "reason": "length"},
        {"id": "t06", "reason": "unknown"},
        {"id": "t07", "reason": "content_filter"},
        {"id": "t09", "reason": "length"},
    ]


def test_cut_answers_that_are_kept_are_marked_and_their_end_is_not_learned(tmp_path: Path) -> None:
    recipe = recipe_for("http://host", max_truncated_share=0.4, keep_truncated=True)
    sorted_into(tmp_path, ANSWERS, recipe)
    rows = {row["id"]: row for row in written(tmp_path, "train") + written(tmp_path, "calibration")}
    assert {name for name, row in rows.items() if row.get("truncated")} == {"t02", "t04", "t09"}
    assert set(rows) == {"t01", "t02", "t03", "t04", "t05", "t08", "t09", "t10"}
    assert [row["id"] for row in written(tmp_path, "set_aside")] == ["t06", "t07"]
    for name in ("t03", "t04"):
        row = rows[name]
        cut = bool(row.get("truncated"))
        example = build(name, segments(row["messages"], Letters(), [0], truncated=cut), [0])
        learned = "".join(map(chr, example.answer_ids))
        assert learned == row["messages"][-1]["content"] + ("" if cut else "\0")


class Letters:
    """A tokenizer with a token a character, whose turns end with NUL."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "".join(f"<{one['role']}>{one['content']}\0" for one in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


def test_a_row_carries_reference_tools_and_calls_but_no_reasoning(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "track"}}]
    call = {"id": "c", "type": "function", "function": {"name": "track", "arguments": "{}"}}
    row = {"id": "a", "segment": "s", "prompt": "p", "reference": {"intent": "i"}, "tools": tools}
    answers = [
        answer("a", "<think>hm</think>", "tool_calls", tool_calls=[call], reasoning="first"),
        answer("b", "<think>hm</think>Yes."),
        answer("c", "<think>hm</think>"),
    ]
    rows = [row, *({"id": name, "segment": "s", "prompt": "p"} for name in "bc")]
    sorted_into(tmp_path, answers, RECIPE, rows)
    (learned,) = written(tmp_path, "train")
    assert learned["messages"][-1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (learned["reference"], learned["tools"]) == ({"intent": "i"}, tools)
    (plain,) = written(tmp_path, "calibration")
    assert plain["messages"][-1] == {"role": "assistant", "content": "Yes."}
    assert not {"reference", "tools", "truncated"} & set(plain)
    said = [(row["text"], row["reasoning"]) for row in written(tmp_path, "responses")]
    assert said == [("", "first\nhm"), ("Yes.", "hm"), ("", "hm")]
    for part in ("train", "calibration"):
        assert "hm" not in (tmp_path / "made" / f"{part}.jsonl").read_text()


def test_of_several_samples_the_best_is_learned_and_all_are_kept(tmp_path: Path) -> None:
    recipe = recipe_for(
        "http://host",
        samples=3,
        sampling={"max_tokens": 16, "temperature": 1.0},
        pick={"scorer": "reference"},
        max_truncated_share=0.5,
    )
    answers = [
        answer("a", "short"), answer("a", "a longer one, cut", "length"), answer("a", "longer"),
        answer("b", "", "stop"), answer("b", "cut", "length"), answer("b", "x", None),
        answer("c", "same1"), answer("c", "same2"), answer("c", "s"),
    ]  # fmt: skip
    rows = sorted_into(tmp_path, answers, recipe)
    learned = written(tmp_path, "train") + written(tmp_path, "calibration")
    assert [(row["id"], row["messages"][-1]["content"]) for row in learned] == [
        ("a", "longer"),
        ("c", "same1"),
    ]
    assert written(tmp_path, "set_aside") == [{"id": "b", "reason": "empty"}]
    responses = written(tmp_path, "responses")
    assert [(row["id"], row["sample"]) for row in responses] == [
        (name, sample) for name in "abc" for sample in range(3)
    ]
    assert [row.get("score") for row in responses[:3]] == [5.0, None, 6.0]
    assert [row["picked"] for row in responses] == [False] * 2 + [True] + [False] * 3 + [
        True,
        False,
        False,
    ]
    summary = account(rows, recipe)
    assert summary["answers"] == {"accepted": 2, "empty": 1}
    assert sum(summary["answers"].values()) == summary["asked"] == 3
    assert summary["samples"] == {"accepted": 5, "empty": 1, "length": 2, "unknown": 1}
    assert summary["kept"] == 2


def test_too_many_cut_answers_end_the_stage_with_the_number(tmp_path: Path) -> None:
    rows = sorted_into(tmp_path, ANSWERS, RECIPE)
    with pytest.raises(StageFailed, match=r"3 of 10 answers \(30%\) were cut") as caught:
        account(rows, recipe_for("http://host", max_truncated_share=0.10))
    assert "t02, t04, t09" in str(caught.value)


@pytest.mark.parametrize(("cut", "allowed"), [(29, 0.29), (57, 0.57), (7, 0.07)])
def test_a_share_that_is_reached_is_not_exceeded(cut: int, allowed: float) -> None:
    """0.29 * 100 is 28.999999999999996."""
    recipe = recipe_for("http://host", max_truncated_share=allowed)
    assert share_problems(Counter(length=cut, accepted=100 - cut), {}, recipe) == []
    more = Counter(length=10 * cut + 1, accepted=999 - 10 * cut)
    (problem,) = share_problems(more, {"length": ["a"]}, recipe)
    assert f"({cut}.1%) were cut at the token limit, more than max_truncated_share {cut}%" in str(
        problem
    )


def test_the_counts_add_up(tmp_path: Path) -> None:
    summary = account(sorted_into(tmp_path, ANSWERS, RECIPE), RECIPE)
    assert summary["answers"] == {"accepted": 5, "content_filter": 1, "length": 3, "unknown": 1}
    assert sum(summary["answers"].values()) == summary["asked"] == 10
    assert summary["kept"] == 5


def test_every_class_has_a_share_and_all_that_are_over_it_are_said(tmp_path: Path) -> None:
    rule = {"max_share": 0.1}
    recipe = recipe_for(
        "http://host", quality={"unknown": rule, "content_filter": rule, "refused": rule}
    )
    answers = [
        *ANSWERS,
        answer("t11", "I can't help with that."),
        answer("t12", "I'm unable to assist."),
    ]
    rows = sorted_into(tmp_path, answers, recipe)
    with pytest.raises(StageFailed) as caught:
        account(rows, recipe)
    (problem,) = caught.value.problems
    assert "2 of 12 answers (16.67%) are of the class refused, more than quality.refused" in str(
        problem
    )
    assert "first: t11, t12" in str(problem)
    for kind in set(CLASSES) - {"accepted", "length"}:
        assert RULES[kind] and REMEDIES[kind]
    assert ClassRule().max_share == 0.5


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    recipe = recipe_for("http://host", quality={"empty": {"max_share": 1.0}})
    rows = sorted_into(tmp_path, [answer("a", ""), answer("b", ""), answer("c", "")], recipe)
    with pytest.raises(StageFailed, match="no answer was usable: empty 3"):
        account(rows, recipe)
