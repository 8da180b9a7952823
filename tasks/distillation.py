"""Stage `distill`: LoRA on the teacher's answers, merged into a servable student.

Files: adapter/ (as peft saves it) and merged/ (safetensors, tokenizer, chat template).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import DistillRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.provenance import tools
from registry.settings import settings
from tasks.engines.model_files import check_side_files
from tasks.engines.subprocesses import run_job
from tasks.stages import TASK_OPTIONS, folder_of, log_file, make

VERSION = 2


def stage(recipe: DistillRecipe, base: Stage, data: Stage) -> Stage:
    return Stage(
        name="distill",
        version=VERSION,
        config=recipe.model_dump(mode="json", exclude={"description", "student"}),
        parents={"base": base, "data": data},
        tools=tools("torch", "transformers", "peft", "accelerate"),
    )


@task(name="distill", **TASK_OPTIONS)
def distill(stage: Stage) -> ArtifactRef:
    """Train and merge. Raises `StageFailed` when the merge changed answers or nothing learned."""

    def produce(folder: Path) -> dict[str, Any]:
        base = folder_of(stage.parents["base"])
        job = {
            **{key: value for key, value in stage.config.items() if key != "kind"},
            "base": str(base),
            "train_file": str(folder_of(stage.parents["data"]) / "train.jsonl"),
            "out_dir": str(folder),
            "threads": settings().cpu_threads,
        }
        result = run_job("tasks.engines.lora", job, log=log_file(stage))
        check_side_files(folder / "merged", base, stage.title)
        return result

    return make(stage, produce)


def merged(stage: Stage) -> Path:
    """Folder of the merged student."""
    return folder_of(stage) / "merged"
