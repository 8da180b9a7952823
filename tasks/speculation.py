"""Stage `draft`: an EAGLE3 draft for the merged student, trained on the student's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import DraftRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.provenance import tools
from registry.settings import settings
from tasks.conversations import chat_of
from tasks.distillation import merged
from tasks.engines.draft_vocab import check_draft
from tasks.engines.subprocesses import run_job
from tasks.prompt_files import read_jsonl, write_jsonl
from tasks.stages import TASK_OPTIONS, folder_of, log_file, make

VERSION = 1


def stage(recipe: DraftRecipe, student: Stage, prompts: Stage) -> Stage:
    return Stage(
        name="draft",
        version=VERSION,
        config=recipe.model_dump(mode="json", exclude={"description"}),
        parents={"student": student, "prompts": prompts},
        tools=tools("torch", "transformers", "speculators", "hs-connectors"),
    )


@task(name="draft", **TASK_OPTIONS)
def train_draft(stage: Stage) -> ArtifactRef:
    """Train the draft. Raises `StageFailed` when its vocabulary map could not be served."""

    def produce(folder: Path) -> dict[str, Any]:
        rows = read_jsonl(folder_of(stage.parents["prompts"]) / "draft.jsonl")
        prompts = log_file(stage, "prompts").with_suffix(".jsonl")
        write_jsonl(prompts, [{"id": row["id"], **chat_of(row)} for row in rows])
        target = merged(stage.parents["student"])
        job = {
            **{key: value for key, value in stage.config.items() if key != "kind"},
            "target": str(target),
            "prompts_file": str(prompts),
            "out_dir": str(folder),
            "threads": settings().cpu_threads,
        }
        result = run_job("tasks.engines.speculators_train", job, log=log_file(stage))
        check_draft(folder, target)
        return result

    return make(stage, produce)
