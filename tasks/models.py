"""Stage `model`: teacher and student base as folders of safetensors, tokenizer and template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import DemoModel, ModelSource, PackagedGguf, PathModel, PrunedModel
from registry.artifacts import ArtifactRef, Stage
from registry.digests import digest_of_file, digest_of_folder
from registry.errors import Problem, StageFailed, UserError
from registry.provenance import tools
from registry.settings import settings
from tasks import demo_data
from tasks.engines import tiny_llama
from tasks.engines.checkpoint_files import checkpoint_problems
from tasks.engines.model_files import check_weights, tokenizer_problem
from tasks.engines.subprocesses import run_job
from tasks.engines.template_check import check_apart
from tasks.prompt_files import write_jsonl
from tasks.stages import TASK_OPTIONS, folder_of, log_file, make

VERSION = 1


def stage(source: ModelSource, role: str, teacher: Stage | None = None, seed: int = 0) -> Stage:
    """`teacher` is the stage of the teacher's model where the source builds on it.

    A folder that the source names was looked at by `given_problems`.
    """
    config: dict[str, Any] = source.model_dump(mode="json")
    parents: dict[str, Stage | None] = {}
    names: tuple[str, ...] = ()
    inputs: dict[str, str] = {}
    if isinstance(source, DemoModel):
        config["seed"] = seed
        inputs = {
            "generator": demo_data.source_digest(),
            "trainer": digest_of_file(Path(tiny_llama.__file__)),
        }
        parents = {"tokenizer": teacher} if source.role == "student" else {}
        names = ("torch", "transformers", "tokenizers")
    elif isinstance(source, PrunedModel):
        parents, names = {"teacher": teacher}, ("torch", "transformers")
    elif isinstance(source, PackagedGguf):
        names = ("transformers", "gguf", source.package.replace("_", "-"))
    else:
        inputs = {"model": digest_of_folder(Path(source.path))}
        return Stage(name="model", label=role, version=VERSION, inputs=inputs)
    needed = {name: parent for name, parent in parents.items() if parent is not None}
    if len(needed) != len(parents):
        raise UserError.at(
            f"{role}.source: {source.source}", "needs a local teacher", "give the teacher a model"
        )
    return Stage(
        name="model",
        label=role,
        version=VERSION,
        config=config,
        parents=needed,
        inputs=inputs,
        tools=tools(*names),
    )


def given_problems(sources: Mapping[str, ModelSource | None]) -> list[Problem]:
    """All that is wrong with the model folders that recipes name, by role."""
    problems: list[Problem] = []
    for role, source in sources.items():
        if isinstance(source, PathModel):
            try:
                _check_given(Path(source.path), role)
            except UserError as error:
                problems += error.problems
    return problems


def _check_given(path: Path, role: str) -> None:
    key = "teacher.model.path" if role == "teacher" else "distill.student.path"
    remedy = f"name the {role}'s folder: --set {key}=FOLDER"
    try:
        whole = path.is_dir()
    except (OSError, ValueError) as error:
        raise UserError.at(f"{str(path)[:200]!a}", str(error), remedy) from None
    if not whole:
        raise UserError.at(path, "no such folder", remedy)
    if problems := checkpoint_problems(path):
        raise UserError(problems)
    check_weights(path, f"the {role}'s own folder")
    check_apart(path)
    if problem := tokenizer_problem(path):
        raise UserError.at(path, problem, "copy the tokenizer's files beside the weights")


@task(name="model", **TASK_OPTIONS)
def prepare_model(stage: Stage, source: ModelSource) -> ArtifactRef:
    """Train, convert, prune or adopt a model. Returns the artifact that holds it."""

    def produce(folder: Path) -> dict[str, Any]:
        if isinstance(source, PathModel):
            if digest_of_folder(Path(source.path)) != stage.inputs["model"]:
                raise StageFailed.at(
                    source.path, "was changed since the release was planned", "run it again"
                )
            for path in Path(source.path).iterdir():
                if path.is_file():
                    # Adopted by symbolic link: a 70B teacher is not copied.
                    (folder / path.name).symlink_to(path.resolve())
            return {"source": "path"}
        job: dict[str, Any] = {"out_dir": str(folder), "threads": settings().cpu_threads}
        if isinstance(source, DemoModel):
            return _demo_model(stage, source, folder, job)
        if isinstance(source, PackagedGguf):
            job |= {"source": "package_gguf", "package": source.package, "file": source.file}
        else:
            model = str(folder_of(stage.parents["teacher"]))
            job |= {"source": "depth_pruned", "model": model, "keep_layers": source.keep_layers}
        return run_job("tasks.engines.model_import", job, log=log_file(stage))

    return make(stage, produce, heavy=isinstance(source, DemoModel))


def _demo_model(
    stage: Stage, source: DemoModel, folder: Path, job: dict[str, Any]
) -> dict[str, Any]:
    seed = stage.config["seed"]
    corpus = folder / "corpus"
    corpus.mkdir()
    messages = demo_data.generate(seed, {"pretrain": source.pretrain_messages})
    write_jsonl(corpus / "pretrain.jsonl", messages["pretrain"])
    tokenizer = stage.parents.get("tokenizer")
    job |= {
        "role": source.role,
        "seed": seed,
        "data_dir": str(corpus),
        "tokenizer_dir": str(folder_of(tokenizer)) if tokenizer else None,
        **source.training,
    }
    result = run_job("tasks.engines.tiny_llama", job, log=log_file(stage))
    # Made from the seed in a moment, so it is not kept beside the weights.
    (corpus / "pretrain.jsonl").unlink()
    corpus.rmdir()
    return result
