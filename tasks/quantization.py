"""Stage `quantize`: one llmcompressor recipe on the merged student.

Files: quantized/ (the model as it is served) and, beside it, report.md and report.json, which show
calibration texts and are no part of a bundle. A recipe without modifiers (`recipe: null`) has no
stage: its bundle serves the student as it is. That vLLM loads the result is proved by the serving
stage, which comes before every measurement (`tasks/serving.py`, `prove_serving`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from recipes.loader import short_name
from recipes.schema import CalibrationSet, QuantizeRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.errors import InfrastructureError, Problem, StageFailed
from registry.provenance import tools
from registry.settings import settings
from registry.stage_pages import DOCUMENTS, PAGES
from tasks.conversations import messages_of, tools_of
from tasks.distillation import merged
from tasks.engines.model_files import check_side_files
from tasks.engines.quantization_recipe import modifiers
from tasks.engines.subprocesses import run_job
from tasks.prompt_files import read_jsonl, write_jsonl
from tasks.stages import TASK_OPTIONS, folder_of, log_file, make

VERSION = 4
QUANTIZED = "quantized"
"""The folder of the model within the artifact."""

HELD_OUT = 32
"""Answers that no quantizer sees and every quantized student is judged on, at most a quarter."""


def stage(name: str, recipe: QuantizeRecipe, student: Stage, data: Stage, prompts: Stage) -> Stage:
    """`data` holds the teacher's answers to the calibration prompts, `prompts` foreign text."""
    parents = {"student": student, "held_out": data}
    if recipe.calibration is not None:
        business = recipe.calibration.source == "business"
        parents["calibration"] = data if business else prompts
        if recipe.compare_calibration:
            parents["compared"] = prompts if business else data
    config = recipe.model_dump(mode="json", exclude={"description", "preset", "group_size"})
    # A digest knows no order of keys, and AWQ after rounding is not AWQ before it.
    config["modifiers"] = [modifier for modifier, _ in modifiers(recipe.recipe or {})]
    return Stage(
        name="quantize",
        label=short_name(name),
        version=VERSION,
        config=config,
        parents=parents,
        tools=tools("torch", "transformers", "llmcompressor", "compressed-tensors"),
    )


@task(name="quantize", **TASK_OPTIONS)
def quantize(stage: Stage, recipe: QuantizeRecipe) -> ArtifactRef:
    """Quantize and check. Raises `StageFailed` when layers, size or output are not as planned."""

    def produce(folder: Path) -> dict[str, Any]:
        student, out = merged(stage.parents["student"]), folder / QUANTIZED
        calibration = recipe.calibration
        job = {
            "model": str(student),
            "out_dir": str(out),
            "recipe": recipe.recipe,
            "calibration_file": None,
            "held_out_file": _written(stage, "held_out", held_out(_answers(stage))),
            "compare_file": None,
            "samples": calibration.samples if calibration else 0,
            "max_length": calibration.max_length if calibration else 0,
            "mixed_precision": stage.config["mixed_precision"],
            "max_size_ratio": recipe.max_size_ratio,
            "max_perplexity_ratio": recipe.max_perplexity_ratio,
            "threads": settings().cpu_threads,
            "seed": 0,
        }
        if calibration is not None:
            texts = calibration_texts(stage, calibration)
            job["calibration_file"] = _written(stage, "calibration", texts)
            if recipe.compare_calibration:
                other = calibration.model_copy(update={"source": _other(calibration.source)})
                texts = calibration_texts(stage, other)
                job["compare_file"] = _written(stage, "compared", texts)
                job["compare_names"] = [calibration.source, other.source]
        try:
            result = run_job("tasks.engines.compressor", job, log=log_file(stage))
        except InfrastructureError as error:
            raise InfrastructureError(f"{error}{_killed(str(error))}") from error
        check_side_files(out, student, stage.title)
        for page in (*PAGES, *DOCUMENTS):
            if (out / page).exists():
                (out / page).rename(folder / page)
        return result

    return make(stage, produce, heavy=True)


def quantized(stage: Stage) -> Path:
    """Folder of the quantized model."""
    return folder_of(stage) / QUANTIZED


def calibration_texts(stage: Stage, calibration: CalibrationSet) -> list[dict[str, Any]]:
    """The first `samples` conversations a quantizer looks at, as `{"id", "messages"[, "tools"]}`.

    Of the teacher's answers those that are held out are left out.
    """
    if calibration.source == "foreign":
        role = "calibration" if stage.config["calibration"]["source"] == "foreign" else "compared"
        rows = read_jsonl(folder_of(stage.parents[role]) / "foreign.jsonl")
        return [_conversation(row, messages_of(row)) for row in rows[: calibration.samples]]
    rows = _answers(stage)
    rows = rows[: len(rows) - len(held_out(rows))]
    return [_conversation(row, row["messages"]) for row in rows[: calibration.samples]]


def held_out_count(answers: int) -> int:
    """How many of so many answers are held out."""
    return min(HELD_OUT, answers // 4)


def held_out(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last `HELD_OUT` answers, at most a quarter of all; the same for every recipe.

    Raises `StageFailed` for fewer than four answers.
    """
    count = held_out_count(len(rows))
    if not count:
        raise StageFailed(
            Problem(
                "teacher's answers to the calibration prompts",
                f"{len(rows)} are there; a quarter of them judges the quantized model",
                "raise prompts.sizes.calibration",
            )
        )
    return [_conversation(row, row["messages"]) for row in rows[-count:]]


def _answers(stage: Stage) -> list[dict[str, Any]]:
    return read_jsonl(folder_of(stage.parents["held_out"]) / "calibration.jsonl")


def _conversation(row: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    tools_given = {"tools": tools_of(row)} if tools_of(row) else {}
    return {"id": row["id"], "messages": messages, **tools_given}


def _written(stage: Stage, part: str, rows: list[dict[str, Any]]) -> str:
    path = log_file(stage, part).with_suffix(".jsonl")
    write_jsonl(path, rows)
    return str(path)


def _other(source: str) -> str:
    return "foreign" if source == "business" else "business"


def _killed(message: str) -> str:
    """What a process that was killed from outside could not say itself."""
    if "status -9" not in message:
        return ""
    return (
        "\nIt was killed by signal 9. Where nobody did that by hand, the kernel ended it because "
        "memory ran out: give the machine more, or lower calibration.samples and max_length."
    )
