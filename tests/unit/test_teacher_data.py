"""What of the teacher's answers is kept: by the finish reason, never by the look of the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from registry.errors import StageFailed
from tasks.engines.openai_chat import ChatResult
from tasks.teacher_parts import account, classify, write_parts
from tasks.teacher_rows import AnswerFile


def answer(name: str, text: str, finish: str | None, state: str = "done") -> ChatResult:
    return ChatResult.model_validate(
        {"id": name, "state": state, "text": text, "finish_reason": finish, "attempts": 1}
    )


ANSWERS = [
    answer("t01", "Lisbon.", "stop"),
    answer("t02", "1. Open the order page. 2. Print the", "length"),
    answer("t03", "Danke.", "stop"),
    answer("t04", "It covers two years from delivery.", "length"),
    answer("t05", "Yes, within the EU.", "stop"),
    answer("t06", "We open at nine.", None),
    answer("t07", "", "content_filter"),
    answer("t08", "4", "stop"),
    answer("t09", "首先登录账户，然后并上", "length"),
    answer("t10", "Hello!", "stop"),
]


def test_only_complete_answers_are_trained_on(tmp_path: Path) -> None:
    prompts, made = tmp_path / "prompts", tmp_path / "made"
    prompts.mkdir()
    made.mkdir()
    rows = [{"id": one.id, "segment": "s", "prompt": f"p {one.id}"} for one in ANSWERS]
    for part, own in (("train", rows[:8]), ("calibration", rows[8:])):
        lines = "".join(json.dumps(row) + "\n" for row in own)
        (prompts / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    with AnswerFile(tmp_path / "answers.jsonl", len(ANSWERS)) as answers:
        for number in reversed(range(len(ANSWERS))):  # answers come in any order
            answers.add(number, ANSWERS[number].model_copy(update={"id": str(number)}))
        assert list(write_parts(made, prompts, answers)) == ANSWERS

    def written(name: str) -> list[dict[str, object]]:
        lines = (made / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    assert [row["id"] for row in written("train")] == ["t01", "t03", "t05", "t08"]
    assert [row["id"] for row in written("calibration")] == ["t10"]
    assert written("train")[0] == {
        "id": "t01",
        "segment": "s",
        "messages": [
            {"role": "user", "content": "p t01"},
            {"role": "assistant", "content": "Lisbon."},
        ],
    }
    assert written("responses") == [one.model_dump() for one in ANSWERS]
    assert written("set_aside") == [
        {"id": "t02", "reason": "length"},
        {"id": "t04", "reason": "length"},
        {"id": "t06", "reason": "unknown"},
        {"id": "t07", "reason": "content_filter"},
        {"id": "t09", "reason": "length"},
    ]


def test_too_many_cut_answers_end_the_stage_with_the_number() -> None:
    with pytest.raises(StageFailed, match=r"3 of 10 answers \(30%\)") as caught:
        account(ANSWERS, max_truncated_share=0.10)
    assert "t02, t04, t09" in str(caught.value)


def test_the_counts_add_up() -> None:
    summary = account(ANSWERS, max_truncated_share=0.40)
    assert summary["answers"] == {"accepted": 5, "content_filter": 1, "length": 3, "unknown": 1}
    assert sum(summary["answers"].values()) == summary["asked"] == 10


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (answer("a", "  ", "stop"), "empty"),
        (answer("a", "", None, "rejected"), "rejected"),
        (answer("a", "text", "tool_calls"), "unknown"),
    ],
)
def test_other_classes(result: ChatResult, expected: str) -> None:
    assert classify(result) == expected


def test_nothing_usable_is_an_error() -> None:
    with pytest.raises(StageFailed, match="no answer was usable"):
        account([answer("a", "", "stop")], max_truncated_share=1.0)
