"""The draft on CUDA: flex attention and bfloat16 in training, vLLM's states, vLLM's acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval_suites.draft_checkpoints import Acceptance
from registry.provenance import hardware
from registry.settings import settings
from tasks.engines.draft_states import layer_ids_for
from tasks.engines.engine_acceptance import accepted_by_segment, by_segment
from tasks.engines.greedy_agreement import compare, greedy_answers
from tasks.engines.speculators_train import train_draft
from tasks.engines.subprocesses import run_job
from tasks.engines.vllm_server import VllmServer
from tasks.engines.vllm_states import (
    MAX_STATE_ERROR,
    asked_layers,
    server_arguments,
    server_environment,
)
from tests.integration.draft_target import SPECULATIVE_TOKENS, job, make_target

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not hardware()["gpus"], reason="no NVIDIA GPU here"),
]

ENGINE = {
    "dtype": "bfloat16",
    "max-model-len": 256,
    "gpu-memory-utilization": 0.3,
    "enforce-eager": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def test_training_by_transformers_states(target: Path, tmp_path: Path) -> None:
    result = train_draft(job(target, tmp_path))
    assert result["train_loss"][-1] < result["train_loss"][0]
    assert result["target_agreement"] > 0.95
    assert result["acceptance_length"] >= 1.5


@pytest.fixture(scope="module")
def from_vllm(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The draft that is trained on vLLM's answers and states, as on every machine with a GPU."""
    folder = tmp_path_factory.mktemp("vllm")
    samples, layer_ids = folder / "samples", layer_ids_for(target)
    (samples / "written").mkdir(parents=True)
    asked = job(target, folder)
    arguments = server_arguments(ENGINE, asked_layers(layer_ids, 3), samples / "written", cuda=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTAGE_HOME", str(folder / "home"))
        settings.cache_clear()
        server = VllmServer(
            target,
            log=folder / "states.log",
            served_name="m",
            engine_args=arguments,
            env=server_environment({}, cuda=True),
        )
        with server:
            told = {"layer_ids": layer_ids, "url": server.url, "served_name": "m"}
            found = run_job(
                "tasks.engines.vllm_states",
                {**asked, **told, "samples_dir": str(samples)},
                log=folder / "ask.log",
                env={"PILOTAGE_STATES_KEY": server.api_key},
            )
        result = train_draft({**asked, "samples_dir": str(samples)})
    settings.cache_clear()
    return folder / "draft", found, result


def test_vllm_gives_transformers_states(from_vllm: tuple[Path, Any, Any]) -> None:
    errors = from_vllm[1]["state_errors"]
    assert set(errors) == {"layer 1", "layer 2", "layer 3", "final"}
    assert all(error < MAX_STATE_ERROR for error in errors.values())


def test_the_engine_accepts_what_training_expects(
    from_vllm: tuple[Path, Any, Any], target: Path, tmp_path: Path
) -> None:
    folder, _, result = from_vllm
    rows = by_segment([json.loads(line) for line in (folder / "held_out.jsonl").open()])
    best = folder / "checkpoints" / f"epoch-{result['best_epoch']}"

    def server(draft: Path | None) -> VllmServer:
        return VllmServer(
            target,
            log=tmp_path / f"{draft is None}.log",
            served_name="m",
            engine_args=ENGINE,
            draft=draft,
            num_speculative_tokens=SPECULATIVE_TOKENS if draft else 0,
        )

    with server(None) as plain:
        reference = greedy_answers(plain.url, plain.api_key, plain.served_name, rows, 64)
    with server(best) as drafted:
        answers, counts = accepted_by_segment(drafted, rows, 64, SPECULATIVE_TOKENS)
    assert compare(reference, answers).agrees is True
    length = Acceptance.total(list(counts.values())).length
    assert length >= 2.0
    assert length == pytest.approx(result["acceptance_length"], abs=0.15)
