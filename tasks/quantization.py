"""Stage `quantize`: one llmcompressor recipe on the merged student.

A recipe without modifiers (`recipe: null`) has no stage: its bundle serves the student as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from recipes.loader import short_name
from recipes.schema import QuantizeRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.provenance import tools
from registry.settings import settings
from tasks.conversations import chat_of
from tasks.distillation import merged
from tasks.engines.model_files import check_side_files
from tasks.engines.subprocesses import run_job
from tasks.prompt_files import read_jsonl, write_jsonl
from tasks.stages import TASK_OPTIONS, folder_of, log_file, make

VERSION = 1


def stage(name: str, recipe: QuantizeRecipe, student: Stage, data: Stage, prompts: Stage) -> Stage:
    """`data` holds the teacher's answers to the calibration prompts, `prompts` foreign text."""
    parents = {"student": student}
    if recipe.calibration is not None:
        business = recipe.calibration.source == "business"
        parents["calibration"] = data if business else prompts
    return Stage(
        name="quantize",
        label=short_name(name),
        version=VERSION,
        config=recipe.model_dump(mode="json", exclude={"description"}),
        parents=parents,
        tools=tools("torch", "transformers", "llmcompressor", "compressed-tensors"),
    )


@task(name="quantize", **TASK_OPTIONS)
def quantize(stage: Stage, recipe: QuantizeRecipe) -> ArtifactRef:
    """Quantize and check. Raises `StageFailed` when layers, size or output are not as planned."""

    def produce(folder: Path) -> dict[str, Any]:
        student = merged(stage.parents["student"])
        calibration = recipe.calibration
        texts = log_file(stage, "calibration").with_suffix(".jsonl")
        if calibration is not None:
            write_jsonl(texts, calibration_texts(stage, calibration.source, calibration.samples))
        job = {
            "model": str(student),
            "out_dir": str(folder),
            "recipe": recipe.recipe,
            "calibration_file": str(texts) if calibration else None,
            "samples": calibration.samples if calibration else 0,
            "max_length": calibration.max_length if calibration else 0,
            "max_size_ratio": recipe.max_size_ratio,
            "threads": settings().cpu_threads,
            "seed": 0,
        }
        result = run_job("tasks.engines.compressor", job, log=log_file(stage))
        check_side_files(folder, student, stage.title)
        return result

    return make(stage, produce)


def calibration_texts(stage: Stage, source: str, samples: int) -> list[dict[str, Any]]:
    """The first `samples` conversations a quantizer looks at: `{"id", "messages"[, "tools"]}`."""
    folder = folder_of(stage.parents["calibration"])
    if source == "foreign":
        rows = read_jsonl(folder / "foreign.jsonl")[:samples]
    else:
        rows = read_jsonl(folder / "calibration.jsonl")[:samples]
    return [{"id": row["id"], **chat_of(row)} for row in rows]
