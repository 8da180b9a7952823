"""What a distillation's key holds, what is refused before it runs, and what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eval_suites.loader import load_accuracy
from recipes import loader
from recipes.schema import DistillRecipe, TeacherRecipe
from registry.artifacts import Stage
from registry.errors import Problem, StageFailed, UserError
from registry.settings import CHECKOUT
from tasks import distillation, planning
from tasks.distill_report import page
from tasks.engines import launching

BASE, DATA, TEACHER = (Stage(name=name, version=1) for name in ("model", "teacher_data", "model"))
SUITE = load_accuracy("freight", {})


def recipe(**changes: Any) -> DistillRecipe:
    path = CHECKOUT / "tests" / "recipes" / "distill_tiny.yaml"
    written = loader.load(str(path), "distill", DistillRecipe).model_dump(exclude_unset=True)
    return DistillRecipe.model_validate({**written, **changes})


def teacher(**changes: Any) -> TeacherRecipe:
    local = {"source": "path", "path": "/models/teacher"}
    plain = {"kind": "teacher", "description": "", "sampling": {"max_tokens": 9}}
    where = (
        {"url": "http://h/v1", "served_model": "m"}
        if "url" in changes
        else {"model": local, "serve": "cpu"}
    )
    return TeacherRecipe.model_validate({**plain, **where, **changes})


def stage(made: DistillRecipe, **more: Any) -> Stage:
    return distillation.stage(made, BASE, DATA, **more)


def test_the_key_holds_what_decides_and_nothing_else() -> None:
    plain = stage(recipe(), teacher_model=TEACHER, context="long", suite=SUITE)
    assert plain.key == stage(recipe()).key
    assert set(plain.parents) == {"base", "data"}
    often = recipe(checkpoint={"minutes": 1, "steps": 5}, description="other words")
    assert stage(often).key == plain.key
    for changes in (
        {"packing": True},
        {"processes": 2},
        {"precision": "bfloat16"},
        {"evaluate_every": 0.1},
        {"quantize_base": "nf4"},
        {"seed": 1},
    ):
        assert stage(recipe(**changes)).key != plain.key


def test_logits_build_on_the_teachers_model_and_its_context() -> None:
    logits = recipe(method="logits")
    made = stage(logits, teacher_model=TEACHER, suite=SUITE)
    assert made.parents["teacher"] == TEACHER
    assert made.config["gkd"]["lmbda"] == 0.0
    assert "trl" in made.tools
    assert stage(logits, teacher_model=TEACHER, context="long").key != made.key
    # The defaults, written out, are the same recipe.
    spelled = recipe(method="logits", gkd={"beta": 0.5})
    assert stage(spelled, teacher_model=TEACHER).key == made.key


def test_a_metric_that_chooses_brings_its_scoring_into_the_key() -> None:
    made = stage(recipe(best_by="hit_rate"), suite=SUITE)
    assert made.config["suite"]["task"] == SUITE.task
    assert set(made.inputs) == {"task", "scoring"}


def test_mistakes_between_recipe_teacher_and_suite_are_found_together() -> None:
    assert distillation.mismatches(recipe(), teacher(), SUITE) == []
    assert distillation.mismatches(recipe(method="logits"), teacher(), SUITE) == []
    wrong = recipe(method="logits", best_by="charm", gkd={"lmbda": 0.5})
    found = distillation.mismatches(wrong, teacher(url="http://h/v1", context="c"), SUITE)
    assert [problem.where for problem in found] == [
        "distill.method: logits",
        "distill.gkd",
        "distill.best_by: charm",
    ]
    assert "http://h/v1 gives none" in found[0].what
    assert found[2].remedy.startswith("one of held_out_loss, hit_rate")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gkd": {}}, "`gkd` is for `method: logits`"),
        ({"method": "logits", "packing": True}, "no packed rows"),
        ({"method": "logits", "quantize_base": "nf4"}, "for `method: responses`"),
        ({"method": "logits", "lora": {"target_modules": ["lm_head"]}}, "no adapter on `lm_head`"),
        ({"method": "logits", "gkd": {"lmbda": 1.5}}, "less than or equal to 1"),
        ({"quantize_base": "int3"}, "nf4"),
        ({"training": {"output_dir": "/"}}, r"training\.output_dir\n.*not permitted"),
        ({"training": {"gradient_accumulation_steps": 0}}, "greater than 0"),
        ({"training": {"gradient_accumulation_steps": 2.5}}, "valid integer"),
        ({"training": {"max_grad_norm": "x"}}, "valid number"),
        ({"training": {"gradient_checkpointing": "no"}}, "valid boolean"),
    ],
)
def test_a_recipe_that_cannot_be_trained_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(**changes)


def test_a_release_refuses_them_before_anything_runs() -> None:
    tiny = str(CHECKOUT / "tests" / "recipes" / "release_tiny.yaml")
    with pytest.raises(UserError, match=r"distill\.best_by: charm: is not measured"):
        planning.resolve(tiny, ["distill.best_by=charm"])


def test_the_launch_line_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    words = launching.command("tasks.engines.lora", 4, 29500, ["job", "result"])
    line = " ".join(words[1:])
    assert line.startswith("-m accelerate.commands.launch --num_processes 4 --num_machines 1")
    assert line.endswith(
        "--main_process_port 29500 --multi_gpu --module tasks.engines.lora job result"
    )
    assert launching.launch_line() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(launching.LINE, "the line")
    assert launching.is_worker() and launching.launch_line() == "the line"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_in_one_of_several_processes_ends_them_all(
    rank: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun ends the others only for a status that is not 0; NCCL would let them wait."""

    def run(job: Any) -> dict[str, Any]:
        raise StageFailed(Problem("training", "is wrong"))

    files = [tmp_path / "job.json", tmp_path / "result.json"]
    files[0].write_text("{}")
    monkeypatch.setattr("sys.argv", ["lora", *map(str, files)])
    monkeypatch.setattr(launching, "REPORT_SECONDS", 0.0)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", rank), (launching.LINE, "the line")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        launching.main(run)
    assert ended.value.code == 1
    assert files[1].exists() is (rank == "0")


@pytest.mark.parametrize(("seen", "kept"), [(None, "0"), ("2,3", "2"), ("5", "5"), ("", "")])
def test_one_process_sees_one_gpu(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, kept: str
) -> None:
    import os

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "x")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    launching.one_gpu_a_process()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == kept


def result(**more: Any) -> dict[str, Any]:
    figures = {"mean_relative": 1e-6, "max_relative": 2e-6, "token_agreement": 1.0}
    losses = {"trained": 1.0, "applied": 1.0001, "stored": 1.01}
    looks = [
        {"step": 0.0, "epoch": 0.0, "held_out_loss": 2.0, "hit_rate": 0.0},
        {"step": 6.0, "epoch": 0.5, "held_out_loss": 1.0, "hit_rate": 0.75},
        {"step": 12.0, "epoch": 1.0, "held_out_loss": 1.5, "hit_rate": 0.5},
    ]
    return {
        "rows": 100,
        "train_rows": 95,
        "held_out_rows": 5,
        "too_long": 1,
        "truncated": 2,
        "own_turns": 0,
        "supervised_tokens": 400,
        "tokens": 1000,
        "steps": 12,
        "resumed_from": 0,
        "looks": looks,
        "chosen": looks[1],
        "curve": [(step, 24.0 - step) for step in range(1, 13)],
        "training_seconds": 10.0,
        "seconds": 15.0,
        "tokens_per_second": 100.0,
        "trainable_parameters": 7,
        "compute_dtype": "float32",
        "compute_dtype_why": "CPU without bfloat16 instructions",
        "peak_memory_gib": 1.5,
        "peak_gpu_memory_gib": None,
        "launch": None,
        "merge": {
            "float32": figures,
            "stored": figures,
            "stored_dtype": "torch.bfloat16",
            "losses": losses,
            "loss_rows": 5,
        },
        "samples": [{"prompt": "a | b\nc", "answer": "d", "expected": "e"}],
        **more,
    }


def test_the_page_says_what_was_chosen_and_what_was_used(tmp_path: Path) -> None:
    config = {"method": "responses", "best_by": "hit_rate", "quantize_base": None}
    text = page(config, result())
    assert "Chosen by `hit_rate`: step 6, marked with `*`." in text
    assert "| 6 * | 0.50 | 1.0000 | 0.7500 |" in text
    assert "| precision | float32 (CPU without bfloat16 instructions) |" in text
    assert "| peak memory | 1.50 GiB |" in text
    assert "Loss of 5 held-out rows: 1.0000 in training, 1.0001 with the adapter" in text
    assert "| 1 | 23.0000 |" in text and "| 12 | 12.0000 |" in text
    assert "    a | b\n    c\n" in text
    quantized = page(
        {**config, "quantize_base": "nf4"},
        result(peak_gpu_memory_gib=3.0, launch="accelerate launch x", resumed_from=6),
    )
    assert "merged into the unquantized base" in quantized
    assert "on the GPU 3.00 GiB" in quantized
    assert "| went on from step | 6 |" in quantized
    assert "| launched by | `accelerate launch x` |" in quantized


def test_a_long_curve_is_shown_as_means_of_its_parts() -> None:
    config = {"method": "responses", "best_by": "held_out_loss", "quantize_base": None}
    curve = [(step, float(step)) for step in range(1, 121)]
    text = page(config, result(curve=curve, steps=120))
    assert "| 10 | 5.5000 |" in text and "| 120 | 115.5000 |" in text
    assert text.count("\n| ") < 45
