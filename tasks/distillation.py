"""Stage `distill`: LoRA on what the teacher knows, merged into a servable student.

Files: adapter/ (as peft saves it), merged/ (safetensors, tokenizer, chat template), report.md and
report.json (looks at the held-out rows, loss curve, merge, samples).

While it trains, checkpoints lie in `<home>/bench/distill-<key>`; a run that was killed goes on from
the last one, and the folder goes when the store has the student.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from prefect import task

from eval_suites import scoring
from eval_suites.loader import TASKS_DIR
from eval_suites.schema import AccuracySuite
from recipes.distill_recipe import HELD_OUT_LOSS, Checkpoint, Gkd
from recipes.schema import DistillRecipe, TeacherRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.digests import digest_of_file
from registry.draft_binding import MERGED
from registry.errors import Problem, StageFailed
from registry.provenance import tools
from registry.settings import settings
from tasks.accuracy import task_digest
from tasks.distill_report import page
from tasks.engines.model_files import check_side_files
from tasks.engines.subprocesses import run_job
from tasks.prompt_files import read_jsonl, write_jsonl
from tasks.stages import TASK_OPTIONS, folder_of, log_file, make
from tasks.teacher_asking import in_context

VERSION = 4

NO_PART_OF_THE_KEY = {"description", "student", "checkpoint"}


def mismatches(
    recipe: DistillRecipe, teacher: TeacherRecipe, suite: AccuracySuite
) -> list[Problem]:
    """Mistakes that show only when recipe, teacher and suite are seen together. Pure."""
    problems = []
    if recipe.method == "logits" and teacher.model is None:
        problems.append(
            Problem(
                "distill.method: logits",
                f"compares with the teacher's own logits, and {teacher.url} gives none",
                "`method: responses`, or a teacher with a local `model`",
            )
        )
    gkd = recipe.gkd or Gkd()
    if recipe.method == "logits" and teacher.context is not None and gkd.samples:
        problems.append(
            Problem(
                "distill.gkd",
                "the teacher has a context of its own, and TRL writes new answers from one prompt "
                "that both models read",
                "lmbda: 0 and seq_kd: false, or a teacher without `context`",
            )
        )
    if recipe.best_by != HELD_OUT_LOSS and recipe.best_by not in suite.metrics:
        problems.append(
            Problem(
                f"distill.best_by: {recipe.best_by}",
                "is not measured by the release's accuracy suite",
                f"one of {', '.join([HELD_OUT_LOSS, *suite.metrics])}",
            )
        )
    return problems


def stage(
    recipe: DistillRecipe,
    base: Stage,
    data: Stage,
    teacher_model: Stage | None = None,
    context: str | None = None,
    suite: AccuracySuite | None = None,
) -> Stage:
    """`teacher_model` and its `context` count for logits, `suite` where a metric of it chooses."""
    config = recipe.model_dump(mode="json", exclude=NO_PART_OF_THE_KEY)
    parents = {"base": base, "data": data}
    inputs: dict[str, str] = {}
    names = ["torch", "transformers", "peft", "accelerate"]
    if recipe.method == "logits" and teacher_model is not None:
        config["gkd"] = (recipe.gkd or Gkd()).model_dump(mode="json")
        config["context"] = context
        parents["teacher"] = teacher_model
        names.append("trl")
    if recipe.packing:
        names.append("trl")
    if recipe.quantize_base:
        names.append("bitsandbytes")
    if recipe.best_by != HELD_OUT_LOSS and suite is not None:
        config["suite"] = {
            "task": suite.task,
            "metrics": suite.metrics,
            "max_tokens": suite.sampling.max_tokens,
        }
        inputs = {
            "task": task_digest(TASKS_DIR / suite.task),
            "scoring": digest_of_file(Path(scoring.__file__)),
        }
    return Stage(
        name="distill",
        version=VERSION,
        config=config,
        parents=parents,
        inputs=inputs,
        tools=tools(*names),
    )


@task(name="distill", **TASK_OPTIONS)
def distill(stage: Stage, checkpoint: Checkpoint) -> ArtifactRef:
    """Train and merge. Raises `StageFailed` when the merge changed answers or nothing learned."""

    def produce(folder: Path) -> dict[str, Any]:
        base = folder_of(stage.parents["base"])
        work = work_folder(stage)
        # The store lets one process at a time make a key, so nobody else writes there.
        work.mkdir(parents=True, exist_ok=True)
        job = job_of(stage, checkpoint, folder, work)
        try:
            result = run_job("tasks.engines.lora", job, log=log_file(stage))
        except StageFailed:
            # A refusal is not remembered: the next run trains again, and from the beginning.
            shutil.rmtree(work, ignore_errors=True)
            raise
        check_side_files(folder / "merged", base, stage.title)
        report = json.dumps(result, ensure_ascii=False, indent=1)
        (folder / "report.json").write_text(report + "\n", encoding="utf-8")
        (folder / "report.md").write_text(page(stage.config, result), encoding="utf-8")
        return {name: value for name, value in result.items() if name != "curve"}

    ref = make(stage, produce, heavy=True)
    shutil.rmtree(work_folder(stage), ignore_errors=True)
    return ref


def job_of(stage: Stage, checkpoint: Checkpoint, folder: Path, work: Path) -> dict[str, Any]:
    """The engine's job; writes what the teacher read where that was more than the student does."""
    train_file = folder_of(stage.parents["data"]) / "train.jsonl"
    teacher = stage.parents.get("teacher")
    suite = stage.config.get("suite")
    context = stage.config.get("context")
    read = work / "teacher_reads.jsonl"
    if context is not None:
        rows = read_jsonl(train_file)
        write_jsonl(
            read, [{**row, "messages": in_context(row["messages"], context)} for row in rows]
        )
    return {
        **{name: value for name, value in stage.config.items() if name not in ("kind", "context")},
        "checkpoint_minutes": checkpoint.minutes,
        "checkpoint_steps": checkpoint.steps,
        "base": str(folder_of(stage.parents["base"])),
        "train_file": str(train_file),
        "out_dir": str(folder),
        "work_dir": str(work),
        "teacher": str(folder_of(teacher)) if teacher else None,
        "teacher_file": str(read) if context is not None else None,
        "suite": {**suite, "task_file": str(TASKS_DIR / suite["task"])} if suite else None,
        # Several processes share the machine's cores.
        "threads": max(1, settings().cpu_threads // int(stage.config["processes"])),
    }


def work_folder(stage: Stage) -> Path:
    """Where the checkpoints of a stage lie until the store has the student."""
    return settings().home / "bench" / f"distill-{stage.key[:32]}"


def merged(stage: Stage) -> Path:
    """Folder of the merged student."""
    return folder_of(stage) / MERGED
