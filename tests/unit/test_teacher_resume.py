"""A run of the stage that ends early goes on: what was answered is never asked for again."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from registry.artifacts import ArtifactRef, Stage
from registry.errors import InfrastructureError, StageFailed, UserError
from registry.settings import CHECKOUT, settings
from tasks import stages
from tasks.engines.openai_chat import ChatResult
from tasks.teacher_budget import cost_of
from tasks.teacher_rows import AnswerFile, held, work_folder
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


SAMPLED = {
    "samples": 3,
    "sampling": {"max_tokens": 16, "temperature": 0.7, "seed": 5},
    "pick": {"scorer": "rubric", "rules": [{"has": "答"}]},
}


@pytest.mark.parametrize(
    ("changes", "seeds"), [({}, [""]), (SAMPLED, [" 5", " 6", " 7"])], ids=["one", "samples"]
)
def test_kill_9_costs_the_rows_in_flight_only(
    changes: dict[str, Any],
    seeds: list[str],
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = Teacher(seconds=0.02)
    wanted = PROMPTS * len(seeds)
    with teaching(teacher) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.teacher_builders", url, str(PROMPTS),
             json.dumps(changes)],
            cwd=CHECKOUT,
            env={**os.environ, "PILOTAGE_HOME": str(home)},
        )  # fmt: skip
        while teacher.asked.total() < wanted // 2:
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.1)  # the teacher still notes what had been sent
        first = set(teacher.asked)
        lines = answers_file().read_bytes().split(b"\n")[:-1]
        kept = {json.loads(line)["text"].removeprefix("«").partition("»")[0] for line in lines}
        assert wanted // 4 < len(kept) < wanted
        assert kept < first and len(first - kept) <= CONCURRENCY
        teacher.asked.clear()
        resumed = run(recipe_for(url, **changes), PROMPTS)
        everyone = {f"问 p{number}{seed}" for number in range(PROMPTS) for seed in seeds}
        assert dict(teacher.asked) == dict.fromkeys(everyone - kept, 1)
        assert not list(settings().home.glob("bench/*")), "the store has them"
        teacher.asked.clear()
        assert run(recipe_for(url, **changes), PROMPTS).reused
        assert not teacher.asked
        other_home(monkeypatch, tmp_path / "unbroken")
        unbroken = run(recipe_for(url, **changes), PROMPTS)
    assert contents(resumed) == contents(unbroken)
    assert resumed.summary == unbroken.summary
    ids = [json.loads(line)["id"] for line in contents(resumed)["responses.jsonl"].splitlines()]
    assert list(dict.fromkeys(ids)) == [f"p{number}" for number in range(PROMPTS)]


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


@pytest.mark.parametrize("status", [401, 402, 404])
def test_a_key_that_is_no_longer_taken_stops_the_asking_and_rejects_no_row(status: int) -> None:
    """Half of the rows are allowed to be rejected: these must not be among them."""
    expired = True
    teacher = Teacher(
        status=lambda prompt: status if expired and int(prompt.removeprefix("问 p")) >= 120 else 200
    )
    with teaching(teacher) as url:
        with pytest.raises(InfrastructureError, match=rf"80 of 200 .*; p12\d: HTTP {status}: no"):
            run(recipe_for(url), 200)
        assert teacher.asked.total() < 160, "not all of them"
        expired = False
        teacher.asked.clear()
        assert run(recipe_for(url), 200).summary["answers"] == {"accepted": 180, "length": 20}
        assert teacher.asked.total() == 80


def test_a_rejected_row_is_asked_again_by_the_next_run() -> None:
    wrong_model = True
    teacher = Teacher(status=lambda prompt: 400 if wrong_model else 200)
    with teaching(teacher) as url:
        with pytest.raises(StageFailed, match="no answer was usable"):
            run(recipe_for(url), 10)
        with pytest.raises(UserError, match=r"first (1[6-9]|2\d) requests, all with: HTTP 400: no"):
            run(recipe_for(url), 200)
        assert teacher.asked.total() < 10 + 30, "not all of them"
        wrong_model = False
        assert run(recipe_for(url), 20).summary["answers"] == {"accepted": 18, "length": 2}


def test_a_higher_share_of_cut_answers_asks_nothing_again() -> None:
    teacher = Teacher()
    with teaching(teacher) as url:
        with pytest.raises(StageFailed, match="max_truncated_share"):
            run(recipe_for(url, max_truncated_share=0.0), 20)
        teacher.asked.clear()
        assert run(recipe_for(url), 20).summary["asked"] == 20
        assert not teacher.asked


def test_the_token_budget_stops_the_asking_and_a_higher_one_goes_on() -> None:
    teacher = Teacher(seconds=0.01)
    with teaching(teacher) as url:
        with pytest.raises(
            UserError, match=r"the budget of 200 tokens is spent \(2\d0\)"
        ) as caught:
            run(recipe_for(url, max_total_tokens=200), 100)
        # 10 tokens an answer: 20 answers, and those that were open then.
        spent = teacher.asked.total()
        assert 20 <= spent < 20 + CONCURRENCY
        assert f"{100 - spent} prompts have no answer yet" in str(caught.value)
        with pytest.raises(UserError, match="is spent"):
            run(recipe_for(url, max_total_tokens=200), 100)
        assert teacher.asked.total() == spent, "those of the earlier run count"
        ref = run(recipe_for(url, max_total_tokens=1000), 100)
        assert ref.summary["asked"] == teacher.asked.total() == 100


PRICES: dict[str, Any] = {
    "price_per_million_prompt_tokens": 500_000.0,
    "price_per_million_completion_tokens": 1_750_000.0,
    "currency": "EUR",
}
"""6 tokens in and 4 out cost 10 EUR."""


def test_the_cost_budget_stops_the_asking_and_a_higher_one_goes_on() -> None:
    teacher = Teacher(seconds=0.01)
    with teaching(teacher) as url:
        with pytest.raises(UserError, match=r"the budget of 200 EUR is spent \(2\d0\)") as caught:
            run(recipe_for(url, max_cost=200.0, **PRICES), 100)
        spent = teacher.asked.total()
        assert 20 <= spent < 20 + CONCURRENCY, "at most those that were open"
        assert f"{100 - spent} prompts have no answer yet" in str(caught.value)
        ref = run(recipe_for(url, max_cost=1000.5, **PRICES), 100)
        assert ref.summary["asked"] == teacher.asked.total() == 100


def test_a_row_that_waits_is_not_asked_again_once_the_budget_is_spent() -> None:
    """A server that is busy for some rows: they wait, and the others spend the budget."""
    teacher = Teacher(seconds=0.01, status=lambda prompt: 503 if prompt.endswith("3") else 200)
    with teaching(teacher) as url, pytest.raises(UserError, match="is spent"):
        run(recipe_for(url, max_cost=100.0, **PRICES), 100)
    assert {name for name, times in teacher.asked.items() if times > 1} == set()


def test_the_cost_is_counted_by_both_prices() -> None:
    recipe = recipe_for("http://t", **PRICES)
    assert cost_of(6, 4, recipe) == 10.0
    assert cost_of(1_000_000, 0, recipe) == 500_000.0
    assert cost_of(6, 4, recipe_for("http://t")) is None


def test_a_budget_needs_a_teacher_that_counts() -> None:
    teacher = Teacher(usage=False)
    with teaching(teacher) as url:
        with pytest.raises(UserError, match="does not say how many tokens"):
            run(recipe_for(url, max_total_tokens=10_000), 100)
        assert teacher.asked.total() < 20
        assert run(recipe_for(url), 100).summary["completion_tokens"] == 0


def test_two_teachers_share_the_rows_and_either_can_be_missing() -> None:
    first, second = Teacher(seconds=0.01), Teacher(seconds=0.01)
    with teaching(first) as url, teaching(second) as other:
        run(recipe_for(url, more_urls=[other]), 60)
        assert first.asked.total() + second.asked.total() == 60
        assert 10 < first.asked.total() < 50
    first.asked.clear()
    with teaching(first) as url:
        # Nobody listens there any more.
        ref = run(recipe_for(url, more_urls=[other]), 80)
        assert ref.summary["asked"] == first.asked.total() == 80


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"more_urls": ["http://127.0.0.1:1"]}, "stands twice"),
        ({"more_urls": ["http://key@host"]}, "PILOTAGE_TEACHER_API_KEY"),
        ({"max_total_tokens": 0}, "greater than 0"),
        ({"max_cost": 5.0}, "`price_per_million_prompt_tokens`.*`currency` missing"),
        ({"max_cost": 5.0, **PRICES, "currency": None}, "`currency` missing"),
        ({"currency": "EUR"}, "belong together"),
        ({**PRICES, "price_per_million_prompt_tokens": -1.0}, "greater than or equal to 0"),
        ({**PRICES, "price_per_million_prompt_tokens": float("nan")}, "finite"),
        ({**PRICES, "max_cost": float("inf")}, "finite"),
        (
            {
                "price_per_million_prompt_tokens": 0.0,
                "price_per_million_completion_tokens": 0.0,
                "currency": "EUR",
                "max_cost": 1.0,
            },
            "never reached",
        ),
        ({"samples": 2}, "temperature above 0"),
        ({"samples": 0}, "greater than 0"),
        ({"sampling": {"max_tokens": 1, "temperature": float("inf")}}, "finite"),
        ({"request_timeout": float("inf")}, "finite"),
        ({"max_retry_wait": float("inf")}, "finite"),
        ({"context": " \n"}, "blank"),
        ({"ray": {"workers": CONCURRENCY + 1}}, "not be more than `concurrency`"),
        ({"ray": {"workers": 2, "address": "10.0.0.1"}}, "pattern"),
    ],
)
def test_recipes_that_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        recipe_for("http://127.0.0.1:1", **changes)


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
        assert list(answers.missing()) == [(2, 0)]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * 40 + b"\n5\n[]\n" + lines[1] + lines[3] + lines[2][:-9])
    with AnswerFile(path, 5) as answers:
        assert list(answers.missing()) == [(0, 0), (2, 0), (4, 0)]
        assert (answers.count_missing(), answers.tokens) == (3, 4)
        answers.add(0, result("0", text="again"))
        found = answers.get(0)
        assert found is not None and found.text == "again"
        assert answers.get(2) is None
    with AnswerFile(path, 5) as answers:
        assert list(answers.missing()) == [(2, 0), (4, 0)]
        found = answers.get(1)
        assert found == result("1", completion_tokens=2)


def test_a_full_disk_is_told_with_the_file_and_costs_the_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = -1
    with pytest.raises(InfrastructureError, match=r"answers\.jsonl: .*File too large"):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
            with AnswerFile(path, 100) as answers:
                for kept in range(100):
                    answers.add(kept, result(str(kept), completion_tokens=2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < kept < 99
    with AnswerFile(path, 100) as answers:
        assert list(answers.missing()) == [(row, 0) for row in range(kept, 100)]
        assert answers.tokens == 2 * kept


def test_who_waits_for_another_process_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pilotage")
    with held(tmp_path / "answers-a"):
        assert "waiting" not in caplog.text
        with (
            pytest.raises(InfrastructureError, match="another process"),
            held(tmp_path / "answers-a", timeout=0.1),
        ):
            pass
        assert "waiting for another process" in caplog.text
    with held(tmp_path / "answers-a", timeout=0.1):
        pass


def test_every_sample_has_a_place_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "work" / "answers.jsonl"
    with AnswerFile(path, 3, samples=2) as answers:
        for row, sample in ((2, 1), (0, 0), (2, 0)):
            answers.add(
                row, result(f"{row} {sample}", prompt_tokens=3, completion_tokens=1), sample
            )
        assert list(answers.missing()) == [(0, 1), (1, 0), (1, 1)]
        assert [one.id for one in answers.samples_of(2)] == ["2 0", "2 1"]
        assert [one.id for one in answers.samples_of(0)] == ["0 0"]
        assert answers.samples_of(1) == []
        with pytest.raises(LookupError):
            answers.add(0, result("0 2"), sample=2)
    with AnswerFile(path, 3, samples=2) as answers:
        assert list(answers.missing()) == [(0, 1), (1, 0), (1, 1)]
        assert (answers.prompt_tokens, answers.completion_tokens, answers.tokens) == (9, 3, 12)


def test_answers_are_kept_for_what_decides_them() -> None:
    config = {"sampling": {"max_tokens": 8}, "max_truncated_share": 0.1, "engine": {"url": "a"}}
    stage = Stage(name="teacher_data", version=1, config=config)
    folder = work_folder(stage, "digest")
    assert folder == work_folder(with_config(stage, max_truncated_share=0.9), "digest")
    assert folder != work_folder(with_config(stage, sampling={"max_tokens": 9}), "digest")
    assert folder != work_folder(with_config(stage, engine={"url": "b"}), "digest")
    assert folder != work_folder(with_config(stage, samples=2), "digest")
    assert folder != work_folder(with_config(stage, context="c"), "digest")
    assert folder == work_folder(with_config(stage, languages=["de"]), "digest")
    assert folder == work_folder(stage.model_copy(update={"version": 2}), "digest")
    other_model = {"teacher": Stage(name="model", version=1, config={"seed": 2})}
    assert folder != work_folder(stage.model_copy(update={"parents": other_model}), "digest")
    assert folder != work_folder(stage.model_copy(update={"tools": {"vllm": "0.33"}}), "digest")
    assert folder == work_folder(stage.model_copy(update={"tools": {"lingua": "3"}}), "digest")
    assert folder != work_folder(stage, "other prompts under the same key")


def with_config(stage: Stage, **changes: object) -> Stage:
    return stage.model_copy(update={"config": {**stage.config, **changes}})
