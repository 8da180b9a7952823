"""A student whose template cannot show the prompts is found before the teacher is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry.artifacts import Stage
from registry.errors import UserError
from tasks import stages
from tasks.engines import random_llama
from tasks.prompt_files import PARTS, write_jsonl
from tasks.student_template import check_student_template

PLAIN = {"id": "p1", "segment": "a", "prompt": "Where is it?", "reference": None}
WITH_SYSTEM = {
    **PLAIN,
    "id": "p2",
    "messages": [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "Where is it?"},
    ],
}


@pytest.fixture
def student() -> Stage:
    made = Stage(name="model", label="student", version=1)
    stages.make(made, lambda folder: random_llama.make({"out": str(folder), "seed": 0}) or {})
    return made


def prompts(rows: list[dict[str, object]]) -> Stage:
    made = Stage(name="prompts", label="mine", version=1, config={"rows": rows})

    def produce(folder: Path) -> dict[str, object]:
        for part in PARTS:
            write_jsonl(folder / f"{part}.jsonl", rows if part == "eval" else [PLAIN])
        return {}

    stages.make(made, produce)
    return made


def test_a_template_that_shows_everything_and_prompts_that_need_nothing(student: Stage) -> None:
    check_student_template(student, prompts([PLAIN]))
    check_student_template(student, prompts([PLAIN, WITH_SYSTEM]))


def test_a_template_that_leaves_the_system_prompt_out_names_the_row(student: Stage) -> None:
    template = stages.folder_of(student) / "chat_template.jinja"
    template.write_text(
        "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"
    )
    with pytest.raises(UserError) as refused:
        check_student_template(student, prompts([PLAIN, WITH_SYSTEM]))
    (problem,) = refused.value.problems
    assert problem.where == "row p2"
    assert "leaves out the text of message 1 (role 'system')" in problem.what
