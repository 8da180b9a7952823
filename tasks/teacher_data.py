"""Stage `teacher_data`: the teacher's answers to the train and calibration prompts.

Files: train.jsonl and calibration.jsonl (accepted answers as conversations), responses.jsonl
(every answer with finish reason, token counts and sampling), set_aside.jsonl (id and reason).
What is kept is decided by the finish reason, never by the look of the text.

Answers are kept row by row as they come (`teacher_rows`): a killed run goes on with the rows that
have none. Prompts and answers are read a row at a time; memory does not grow with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import TeacherRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.errors import StageFailed
from registry.provenance import engine_version
from tasks.progress import LOG
from tasks.serving import Served
from tasks.stages import TASK_OPTIONS, artifact_of, make
from tasks.teacher_asking import ask_missing, asked_rows
from tasks.teacher_parts import account, write_parts
from tasks.teacher_rows import ANSWERS, AnswerFile, held, remove, work_folder

VERSION = 2


def stage(
    recipe: TeacherRecipe, prompts: Stage, parents: dict[str, Stage], config: dict[str, Any]
) -> Stage:
    """`parents` hold the model's stage where it is local; `config` says what serves it."""
    return Stage(
        name="teacher_data",
        version=VERSION,
        config={
            **recipe.model_dump(
                mode="json",
                include={"sampling", "samples", "context", "max_truncated_share"},
            ),
            "engine": config,
        },
        parents={"prompts": prompts, **parents},
        tools={"vllm": engine_version()} if parents else {},
    )


@task(name="teacher_data", **TASK_OPTIONS)
def generate_teacher_data(stage: Stage, recipe: TeacherRecipe, served: Served) -> ArtifactRef:
    """Ask the teacher. Raises `StageFailed` when too many answers were cut at the token limit."""
    prompts = artifact_of(stage.parents["prompts"])
    work = work_folder(stage, prompts.digest)

    def produce(folder: Path) -> dict[str, Any]:
        total = sum(1 for _ in asked_rows(prompts.path))
        with held(work), AnswerFile(work / ANSWERS, total, recipe.samples) as answers:
            ask_missing(prompts.path, answers, total, recipe, served)
            try:
                results = write_parts(folder, prompts.path, answers)
                return account(results, recipe.max_truncated_share)
            except StageFailed:
                LOG.warning("the answers stay in %s; remove it to ask for them anew", work)
                raise

    ref = make(stage, produce)
    # Not before the store has them.
    remove(work)
    return ref
