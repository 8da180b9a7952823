"""Stage `draft`: an EAGLE3 draft for the merged student or for a candidate's quantized weights.

Trained on the target's own answers. Files: `checkpoints/epoch-N` for a few epochs, `held_out.jsonl`
with the prompts that were kept apart, `report.md` and `report.json`. Which checkpoint is served,
the engine decides (`tasks/draft_checkpoints.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import DraftRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.digests import digest_of_folder
from registry.errors import Infeasible, Problem, StageFailed, UserError
from registry.json_files import json_object
from registry.provenance import engine_tools, hardware, tools
from registry.safetensors_headers import read_header
from registry.settings import settings
from tasks.conversations import messages_of, tools_of
from tasks.distillation import merged
from tasks.draft_reports import write_training_report
from tasks.engines.draft_states import layer_ids_for
from tasks.engines.model_files import check_weights
from tasks.engines.published_draft import check_start
from tasks.engines.subprocesses import run_job
from tasks.engines.vllm_server import VllmServer
from tasks.engines.vllm_states import asked_layers, server_arguments, server_environment
from tasks.prompt_files import read_jsonl, write_jsonl
from tasks.quantization import quantized
from tasks.stages import TASK_OPTIONS, folder_of, log_file, make

VERSION = 2

_NOT_TRAINED = {"description", "target", "init_from", "states", "max_acceptance_gap"}
"""Of the recipe: what judges afterwards, and what the key holds otherwise."""


def stage(
    recipe: DraftRecipe,
    student: Stage,
    prompts: Stage,
    own_weights: Stage | None = None,
    serve: dict[str, Any] | None = None,
) -> Stage:
    """`own_weights`: the candidate's quantized ones, where the draft is trained for them.

    `serve`: engine arguments and environment of the server that answers, where vLLM does. Raises
    `UserError` for a published draft that is not there, and for states without a server.
    """
    config = recipe.model_dump(mode="json", exclude=_NOT_TRAINED)
    config["states"] = source = states_source(recipe)
    names = tools("torch", "transformers", "speculators", "hs-connectors")
    parents = {"student": student, "prompts": prompts}
    if recipe.target == "candidate" and own_weights is not None:
        parents["target"] = own_weights
        names |= tools("compressed-tensors")
    if source == "vllm":
        if serve is None:
            raise UserError.at("draft: states", "vllm needs the serve recipe of a candidate")
        # One server gives the states, however the bundle will be served.
        config["serve"] = {name: value for name, value in serve.items() if name != "topology"}
        names |= engine_tools()
    inputs = {}
    if recipe.init_from is not None:
        inputs["init_from"] = digest_of_folder(published(recipe.init_from))
    return Stage(
        name="draft",
        label=own_weights.label if "target" in parents and own_weights else "",
        version=VERSION,
        config=config,
        parents=parents,
        inputs=inputs,
        tools=names,
    )


def published(folder: str) -> Path:
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise UserError.at(
            f"draft: init_from: {folder}",
            "is no folder with a config.json",
            "give the folder of a published draft",
        )
    headers = map(read_header, sorted(path.glob("*.safetensors")))
    if problems := [one for one in headers if isinstance(one, Problem)]:
        raise UserError(problems)
    check_weights(path, "draft: init_from")
    return path


def states_source(recipe: DraftRecipe) -> str:
    """Who answers and gives the states: `vllm` or `transformers`."""
    if recipe.states == "auto":
        return "vllm" if hardware()["gpus"] else "transformers"
    return recipe.states


@task(name="draft", **TASK_OPTIONS)
def train_draft(stage: Stage, recipe: DraftRecipe) -> ArtifactRef:
    """Train the draft.

    Raises `StageFailed` when its states or its vocabulary map are wrong, when it cannot go on from
    the published draft, and when the engine that is to give the states cannot serve the target.
    """

    def produce(folder: Path) -> dict[str, Any]:
        rows = read_jsonl(folder_of(stage.parents["prompts"]) / "draft.jsonl")
        prompts = log_file(stage, "prompts").with_suffix(".jsonl")
        write_jsonl(prompts, [prompt_row(row) for row in rows])
        target = target_of(stage)
        job = {
            **{key: value for key, value in stage.config.items() if key not in ("kind", "serve")},
            "target": str(target),
            "prompts_file": str(prompts),
            "samples_dir": None,
            "out_dir": str(folder),
            "init_from": str(Path(recipe.init_from).resolve()) if recipe.init_from else None,
            "threads": settings().cpu_threads,
        }
        found: dict[str, Any] = {}
        samples = folder / "samples"
        if recipe.init_from:
            check_published(stage, recipe.init_from, target, job)
        if stage.config["states"] == "vllm":
            found = gather_states(stage, job, samples)
            job["samples_dir"] = str(samples)
        result = run_job("tasks.engines.speculators_train", job, log=log_file(stage)) | found
        shutil.rmtree(samples, ignore_errors=True)
        write_training_report(folder, result)
        return result

    return make(stage, produce, heavy=True)


def target_of(stage: Stage) -> Path:
    """Folder of the weights that the draft is trained for."""
    own = stage.parents.get("target")
    return quantized(own) if own else merged(stage.parents["student"])


def check_published(stage: Stage, given: str, target: Path, job: dict[str, Any]) -> None:
    """Raise `StageFailed` for another folder than was planned, or one of another model's draft.

    Of this candidate: the others go on.
    """
    folder = published(given)
    if digest_of_folder(folder) != stage.inputs["init_from"]:
        raise StageFailed.at(
            f"draft: init_from: {given}",
            "was changed since the release was planned",
            "run the release again",
        )
    try:
        check_start(folder, target, job)
    except UserError as error:
        raise StageFailed(error.problems) from None


def prompt_row(row: dict[str, Any]) -> dict[str, Any]:
    asked = {"id": row["id"], "segment": row["segment"], "messages": messages_of(row)}
    return {**asked, "tools": tools_of(row)} if tools_of(row) else asked


def gather_states(stage: Stage, job: dict[str, Any], samples: Path) -> dict[str, Any]:
    """Answers and states from a vLLM server of the target, into `samples`.

    The server is started for it alone and ends before the training needs the memory. Raises as
    `VllmServer` and `vllm_states.gather` do.
    """
    target, serve = Path(job["target"]), stage.config["serve"]
    config = json_object(target / "config.json")
    layers = int(config.get("text_config", config)["num_hidden_layers"])
    layer_ids = layer_ids_for(target, Path(job["init_from"]) if job["init_from"] else None)
    cuda = bool(hardware()["gpus"])
    written = samples / "written"
    written.mkdir(parents=True)
    server = VllmServer(
        target=target,
        served_name="target",
        engine_args=server_arguments(
            serve["engine_args"], asked_layers(layer_ids, layers), written, cuda=cuda
        ),
        env=server_environment(serve["env"], cuda=cuda),
        log=log_file(stage, "serve"),
    )
    with serving_states(server):
        asked = {
            **job,
            "samples_dir": str(samples),
            "layer_ids": layer_ids,
            "url": server.url,
            "served_name": server.served_name,
        }
        found = run_job(
            "tasks.engines.vllm_states",
            asked,
            log=log_file(stage, "states"),
            env={"PILOTAGE_STATES_KEY": server.api_key},
        )
    return {"state_errors": found["state_errors"]}


@contextmanager
def serving_states(server: VllmServer) -> Iterator[None]:
    """A target that the engine cannot run here fails its own candidate, and no other."""
    try:
        with server:
            yield
    except Infeasible as reason:
        raise StageFailed(
            Problem(
                "draft: states",
                f"the engine that is to give them cannot serve the target: {reason}",
                "`states: transformers` in the draft recipe trains without the engine",
            )
        ) from None
