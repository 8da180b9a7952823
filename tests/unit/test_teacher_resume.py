"""A run of the stage that ends early goes on: what was answered is never asked for again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from registry.artifacts import ArtifactRef, Stage
from registry.errors import InfrastructureError, StageFailed
from registry.settings import CHECKOUT, settings
from tasks import stages
from tasks.engines.openai_chat import ChatResult
from tasks.teacher_rows import AnswerFile, work_folder
from tests.unit.teacher_builders import CONCURRENCY, Teacher, recipe_for, run, teaching

PROMPTS = 120


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "TRIES", 1)
    monkeypatch.setattr(stages, "provenance", dict)


def answers_file() -> Path:
    (file,) = settings().home.glob("bench/answers-*/answers.jsonl")
    return file


def contents(ref: ArtifactRef) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in ref.path.iterdir()}


def other_home(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(path))
    settings.cache_clear()


def test_kill_9_costs_the_rows_in_flight_only(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher(seconds=0.02)
    with teaching(teacher) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.teacher_builders", url, str(PROMPTS)],
            cwd=CHECKOUT,
            env={**os.environ, "PILOTAGE_HOME": str(home)},
        )
        while teacher.asked.total() < PROMPTS // 2:
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.1)  # the teacher still notes what had been sent
        first = set(teacher.asked)
        lines = answers_file().read_bytes().split(b"\n")[:-1]
        kept = {json.loads(line)["text"].removeprefix("«").partition("»")[0] for line in lines}
        assert PROMPTS // 4 < len(kept) < PROMPTS
        assert kept < first and len(first - kept) <= CONCURRENCY
        teacher.asked.clear()
        resumed = run(recipe_for(url), PROMPTS)
        everyone = {f"问 p{number}" for number in range(PROMPTS)}
        assert dict(teacher.asked) == dict.fromkeys(everyone - kept, 1)
        assert not list(settings().home.glob("bench/*")), "the store has them"
        teacher.asked.clear()
        assert run(recipe_for(url), PROMPTS).reused
        assert not teacher.asked
        other_home(monkeypatch, tmp_path / "unbroken")
        unbroken = run(recipe_for(url), PROMPTS)
    assert contents(resumed) == contents(unbroken)
    assert resumed.summary == unbroken.summary
    ids = [json.loads(line)["id"] for line in contents(resumed)["responses.jsonl"].splitlines()]
    assert ids == [f"p{number}" for number in range(PROMPTS)]


def test_an_outage_stops_the_asking_and_keeps_what_is_there() -> None:
    broken = True

    def status(prompt: str) -> int:
        return 503 if broken and int(prompt.removeprefix("问 p")) >= 20 else 200

    teacher = Teacher(status=status)
    with teaching(teacher) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.engines.openai_chat.FIRST_WAIT", 0.001)
        with pytest.raises(InfrastructureError, match=r"180 of 200 prompts got no answer; p2\d"):
            run(recipe_for(url), 200)
        assert len(teacher.asked) < 150, "not all of them"
        broken = False
        teacher.asked.clear()
        run(recipe_for(url), 200)
        assert len(teacher.asked) == 180


def test_a_rejected_row_is_asked_again_by_the_next_run() -> None:
    wrong_key = True
    teacher = Teacher(status=lambda prompt: 401 if wrong_key else 200)
    with teaching(teacher) as url:
        with pytest.raises(StageFailed, match="no answer was usable"):
            run(recipe_for(url), 20)
        wrong_key = False
        assert run(recipe_for(url), 20).summary["answers"] == {"accepted": 18, "length": 2}


def test_a_higher_share_of_cut_answers_asks_nothing_again() -> None:
    teacher = Teacher()
    with teaching(teacher) as url:
        with pytest.raises(StageFailed, match="max_truncated_share"):
            run(recipe_for(url, max_truncated_share=0.0), 20)
        teacher.asked.clear()
        assert run(recipe_for(url), 20).summary["asked"] == 20
        assert not teacher.asked


def result(name: str, **changes: object) -> ChatResult:
    return ChatResult.model_validate(
        {"id": name, "state": "done", "text": "好", "finish_reason": "stop", **changes}
    )


def test_half_a_line_and_a_line_that_cannot_be_read_are_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "work" / "answers.jsonl"
    with AnswerFile(path, 5) as answers:
        for row in (3, 1, 0):
            answers.add(row, result(str(row), completion_tokens=2))
        answers.add(4, result("4", state="rejected"))
        assert list(answers.missing()) == [2]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * 40 + b"\n" + lines[1] + lines[3] + lines[2][:-9])
    with AnswerFile(path, 5) as answers:
        assert list(answers.missing()) == [0, 2, 4]
        assert (answers.count_missing(), answers.tokens) == (3, 4)
        answers.add(0, result("0", text="again"))
        found = answers.get(0)
        assert found is not None and found.text == "again"
        assert answers.get(2) is None
    with AnswerFile(path, 5) as answers:
        assert list(answers.missing()) == [2, 4]
        found = answers.get(1)
        assert found == result("1", completion_tokens=2)


def test_answers_are_kept_for_what_decides_them() -> None:
    config = {"sampling": {"max_tokens": 8}, "max_truncated_share": 0.1, "engine": {"url": "a"}}
    stage = Stage(name="teacher_data", version=1, config=config)
    folder = work_folder(stage, "digest")
    assert folder == work_folder(with_config(stage, max_truncated_share=0.9), "digest")
    assert folder != work_folder(with_config(stage, sampling={"max_tokens": 9}), "digest")
    assert folder != work_folder(with_config(stage, engine={"url": "b"}), "digest")
    assert folder != work_folder(stage, "other prompts under the same key")


def with_config(stage: Stage, **changes: object) -> Stage:
    return stage.model_copy(update={"config": {**stage.config, **changes}})
