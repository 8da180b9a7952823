"""The stage as a release runs it: parents from the store, the engine in its own process, a page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes.distill_recipe import Checkpoint
from recipes.schema import DistillRecipe
from registry.artifacts import Stage
from registry.errors import StageFailed
from registry.settings import settings
from registry.store import Store
from tasks import distillation
from tests.integration.distill_builders import questions, student, write


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return student(folder / "student"), student(folder / "teacher", seed=1)


def made(name: str, source: Path | None = None) -> Stage:
    """A parent that lies in the store; without a source it holds rows to train on."""
    stage = Stage(
        name="model" if source else "teacher_data", label=name, version=1, config={"name": name}
    )

    def produce(folder: Path) -> dict[str, Any]:
        if source is None:
            write(folder / "train.jsonl", questions())
        else:
            shutil.copytree(source, folder, dirs_exist_ok=True)
        return {}

    Store(settings().store_dir).make(stage, produce, {})
    return stage


def recipe(**changes: Any) -> DistillRecipe:
    return DistillRecipe.model_validate(
        {
            "kind": "distill",
            "description": "",
            "student": {"source": "path", "path": "unused"},
            "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
            "epochs": 3,
            "learning_rate": 1e-2,
            "batch_size": 9,
            "max_length": 64,
            "held_out_share": 0.1,
            **changes,
        }
    )


def test_logits_with_a_context_from_end_to_end(models: tuple[Path, Path]) -> None:
    parents = made("student", models[0]), made("answers"), made("teacher", models[1])
    stage = distillation.stage(
        recipe(method="logits"), *parents, context="Answer as the desk does."
    )
    ref = distillation.distill.fn(stage, Checkpoint(steps=2))
    assert {path.name for path in ref.path.iterdir()} == {
        "adapter",
        "merged",
        "report.json",
        "report.md",
    }
    assert ref.summary["chosen"]["held_out_kl"] < ref.summary["looks"][0]["held_out_kl"]
    assert "curve" not in ref.summary
    assert json.loads((ref.path / "report.json").read_text())["curve"]
    assert "Chosen by `held_out_loss`" in (ref.path / "report.md").read_text()
    # Nothing of it is left but the student, and a second run finds that.
    assert not distillation.work_folder(stage).exists()
    assert distillation.distill.fn(stage, Checkpoint()).key == ref.key


def test_a_refusal_leaves_nothing_that_would_be_found_again(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    carrying = tmp_path / "carrying"
    shutil.copytree(models[0], carrying)
    (carrying / "adapter_config.json").write_text("{}")
    stage = distillation.stage(recipe(), made("carrying", carrying), made("answers"))
    with pytest.raises(StageFailed, match="is an adapter beside the weights"):
        distillation.distill.fn(stage, Checkpoint())
    assert not Store(settings().store_dir).folder(stage).exists()
    assert not distillation.work_folder(stage).exists()
