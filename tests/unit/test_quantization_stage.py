"""The quantize stage around its engine: which texts go where, what is in its key, what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import QuantizeRecipe
from registry.artifacts import Stage
from registry.errors import InfrastructureError, StageFailed
from registry.settings import settings
from tasks import quantization, stages

STUDENT, ANSWERS, PROMPTS = (
    Stage(name=name, version=1) for name in ("distill", "teacher_data", "prompts")
)


def recipe(**changes: Any) -> QuantizeRecipe:
    content = {"kind": "quantize", "description": "a test", "preset": "w8a8_int8", **changes}
    return QuantizeRecipe.model_validate(content)


def stage(wanted: QuantizeRecipe) -> Stage:
    return quantization.stage("w8a8_int8", wanted, STUDENT, ANSWERS, PROMPTS)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    monkeypatch.setattr(quantization, "check_side_files", lambda *arguments: None)
    answers = [
        {
            "id": f"c-{number}",
            "segment": "s",
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            **({"tools": [{"type": "function"}]} if number == 1 else {}),
        }
        for number in range(100)
    ]
    foreign = [{"id": f"f-{number}", "segment": "s", "prompt": "x"} for number in range(10)]
    stages.begin_run(1)
    for parent, name, rows in (
        (STUDENT, "merged/config", [{}]),
        (ANSWERS, "calibration", answers),
        (PROMPTS, "foreign", foreign),
    ):

        def produce(folder: Path, name: str = name, rows: Any = rows) -> dict[str, Any]:
            path = folder / f"{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return {}

        stages.make(parent, produce)
    yield
    settings.cache_clear()


def run(wanted: QuantizeRecipe, monkeypatch: pytest.MonkeyPatch, engine: Any) -> Any:
    monkeypatch.setattr(quantization, "run_job", engine)
    monkeypatch.setattr(stages.time, "sleep", lambda seconds: None)
    return quantization.quantize.fn(stage(wanted), wanted)


def ids(file: str) -> list[str]:
    return [json.loads(line)["id"] for line in Path(file).read_text().splitlines()]


def test_no_answer_is_both_calibrated_and_judged_on(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    def engine(module: str, job: dict[str, Any], log: Path) -> dict[str, Any]:
        jobs.append(job)
        Path(job["out_dir"]).mkdir()
        (Path(job["out_dir"]) / "model").write_text("weights")
        return {"layers": 14}

    wanted = recipe(compare_calibration=True, calibration={"samples": 90})
    run(wanted, monkeypatch, engine)
    calibrated, judged = ids(jobs[0]["calibration_file"]), ids(jobs[0]["held_out_file"])
    assert calibrated == [f"c-{number}" for number in range(75)]
    assert judged == [f"c-{number}" for number in range(75, 100)]
    assert ids(jobs[0]["compare_file"]) == [f"f-{number}" for number in range(10)]
    assert jobs[0]["compare_names"] == ["business", "foreign"]
    rows = [json.loads(line) for line in Path(jobs[0]["calibration_file"]).read_text().splitlines()]
    assert rows[1]["tools"] == [{"type": "function"}]
    assert set(rows[0]) == {"id", "messages"}


def test_foreign_calibration_is_judged_on_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    def engine(module: str, job: dict[str, Any], log: Path) -> dict[str, Any]:
        jobs.append(job)
        Path(job["out_dir"]).mkdir()
        (Path(job["out_dir"]) / "model").write_text("weights")
        return {}

    run(recipe(calibration={"source": "foreign", "samples": 4}), monkeypatch, engine)
    run(recipe(preset="fp8_dynamic"), monkeypatch, engine)
    assert ids(jobs[0]["calibration_file"]) == ["f-0", "f-1", "f-2", "f-3"]
    assert jobs[1]["calibration_file"] is None
    assert ids(jobs[0]["held_out_file"]) == ids(jobs[1]["held_out_file"])


def test_too_few_answers_are_named() -> None:
    rows = [{"id": "a", "messages": []}] * 3
    with pytest.raises(StageFailed, match="3 are there"):
        quantization.held_out(rows)
    assert len(quantization.held_out(rows * 2)) == 1
    assert len(quantization.held_out(rows * 100)) == quantization.HELD_OUT


def test_a_process_that_was_killed_leaves_nothing_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def engine(module: str, job: dict[str, Any], log: Path) -> dict[str, Any]:
        tries.append(job["out_dir"])
        Path(job["out_dir"]).mkdir()
        (Path(job["out_dir"]) / "model.safetensors").write_text("half of it")
        raise InfrastructureError(f"{module} ended with status -9 and no result")

    with pytest.raises(InfrastructureError, match="because memory ran out"):
        run(recipe(), monkeypatch, engine)
    assert len(tries) == stages.TRIES
    assert not list(settings().store_dir.rglob("model.safetensors"))


def test_the_key_holds_what_decides_the_outcome_and_no_more() -> None:
    key = stage(recipe()).key
    assert stage(recipe(description="other words")).key == key
    written_out = recipe().model_dump() | {"preset": None}
    assert stage(QuantizeRecipe.model_validate(written_out)).key == key
    changes = [
        {"max_perplexity_ratio": 2.0},
        {"mixed_precision": {"keep_worst": 2}},
        {"compare_calibration": True},
        {"calibration": {"samples": 64}},
        {"preset": "w4a16_gptq"},
        {"preset": "w4a16_gptq", "group_size": 64},
    ]
    assert len({stage(recipe(**change)).key for change in changes} | {key}) == 7


def test_the_order_of_modifiers_is_in_the_key() -> None:
    one, other = {"AWQModifier": {}}, {"QuantizationModifier": {"scheme": "W8A8"}}
    keys = set()
    for modifiers in ({**one, **other}, {**other, **one}):
        content = {"recipe": {"a_stage": {"a_modifiers": modifiers}}, "max_size_ratio": 0.6}
        keys.add(stage(recipe(preset=None, **content)).key)
    assert len(keys) == 2
