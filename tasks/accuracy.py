"""Stage `accuracy`: an lm-eval task over the eval part, against the served bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from eval_suites import scoring
from eval_suites.loader import TASKS_DIR
from eval_suites.schema import AccuracySuite
from registry.artifacts import ArtifactRef, Stage
from registry.digests import digest_of, digest_of_file, digest_of_folder, files_below
from registry.errors import UserError
from registry.evidence import note_transfer
from registry.provenance import driver_versions, engine_version, tools
from tasks.engines.model_files import chat_template, tokenizer_digest
from tasks.engines.subprocesses import run_job
from tasks.engines.vllm_server import VllmServer
from tasks.serving import Served, ServedBundle, Watched, renewed_after_fault
from tasks.stages import TASK_OPTIONS, folder_of, log_file, make

VERSION = 2
REFERENCE_TOOLS = ("torch", "transformers", "compressed-tensors")
KEY_VARIABLE = "PILOTAGE_ENGINE_KEY"
"""Environment variable by which the harness's process gets the server's random key."""


def stage(
    name: str,
    suite: AccuracySuite,
    prompts: Stage,
    parents: dict[str, Stage],
    config: dict[str, Any],
    *,
    engine: str = "vllm",
    repeat: int = 0,
) -> Stage:
    """`engine` is `transformers` where the serving engine has no kernel for the weights.

    `repeat` is 1 for a second run of the same bundle (A/A), with another sampling seed.
    """
    return Stage(
        name="accuracy",
        label=name,
        version=VERSION,
        config={
            "suite": suite.model_dump(mode="json", exclude={"description"}),
            "bundle": config,
            "engine": engine,
            **({"repeat": repeat} if repeat else {}),
        },
        parents={"prompts": prompts, **parents},
        inputs={
            "task": task_digest(TASKS_DIR / suite.task),
            "scoring": digest_of_file(Path(scoring.__file__)),
        },
        tools={
            **({"vllm": engine_version()} if engine == "vllm" else tools(*REFERENCE_TOOLS)),
            "lm_eval": str(driver_versions()["lm_eval"]),
        },
    )


def task_digest(task_file: Path) -> str:
    """Digest of a task's own files; what Python leaves beside them does not count."""
    if not task_file.is_file():
        raise UserError.at(task_file, "no such lm-eval task", "correct the suite's `task`")
    folder = task_file.parent
    own = [path for path in files_below(folder) if path.suffix in (".yaml", ".py")]
    return digest_of_folder(folder, own)


@task(name="accuracy", **TASK_OPTIONS)
def measure_accuracy(
    stage: Stage, suite: AccuracySuite, suite_name: str, served: Served
) -> ArtifactRef:
    """Score every item. The evidence says how many were asked and how many were scored."""

    def produce(folder: Path) -> dict[str, Any]:
        transformers = stage.config["engine"] == "transformers"
        sampling = suite.sampling.model_dump(mode="json")
        sampling["seed"] = (sampling.get("seed") or 0) + stage.config.get("repeat", 0)
        job: dict[str, Any] = {
            "task_file": str(TASKS_DIR / suite.task),
            "items_file": str(folder_of(stage.parents["prompts"]) / "eval.jsonl"),
            "items": suite.items,
            "sampling": sampling,
            "concurrency": suite.concurrency,
            "metrics": suite.metrics,
            "smoke": suite.smoke,
            "suite": suite_name,
            "bundle": served.digest,
            "out_dir": str(folder),
        }
        if isinstance(served, ServedBundle):
            target = served.bundle.target.path
            job["tokenizer"] = str(target)
            job["chat_template_digest"] = digest_of(chat_template(target, str(target)))
            job["tokenizer_digest"] = tokenizer_digest(target)
        env = {}
        watched = None
        if transformers:
            assert isinstance(served, ServedBundle), "the reference engine loads local weights"
            version = driver_versions()["transformers"]
            job["engine"] = f"transformers {version}"
            job["model"] = {"kind": "hf", "path": str(served.bundle.target.path)}
        else:
            server = served.server
            watched = Watched(server) if isinstance(server, VllmServer) else None
            env[KEY_VARIABLE] = server.api_key
            job["engine"] = served.engine
            job["model"] = {
                "kind": "chat",
                "url": server.url,
                "served_name": server.served_name,
                "api_key_env": KEY_VARIABLE,
            }
        with renewed_after_fault(served):
            result = run_job("tasks.engines.lm_eval_run", job, log=log_file(stage), env=env)
            if watched is not None:
                watched.check()
                note_transfer(folder, watched.transfer)
            return result

    return make(stage, produce, heavy=isinstance(served, ServedBundle))
