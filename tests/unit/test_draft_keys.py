"""What decides a draft's training, and what decides its choice, stands in their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.schema import DraftRecipe
from registry.artifacts import Stage
from registry.errors import Infeasible, StageFailed
from tasks import draft_checkpoints, speculation

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
RECIPE = DraftRecipe(kind="draft", description="", epochs=3, learning_rate=1e-3)
CONFIG = {"engine": "vllm", "engine_args": {}, "env": {}, "num_speculative_tokens": 3}


@pytest.fixture(autouse=True)
def no_serve_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (speculation, draft_checkpoints):
        monkeypatch.setattr(module, "engine_tools", lambda: {"vllm": "0.0.test"})


def stages_of(changes: dict[str, Any], quantized: Stage | None = None) -> tuple[str, str]:
    """Keys of training and choice."""
    recipe = RECIPE.model_copy(update=changes)
    student, prompts = Stage(name="distill", version=1), Stage(name="prompts", version=1)
    training = speculation.stage(recipe, student, prompts, quantized, CONFIG)
    target = quantized or student
    choice = draft_checkpoints.stage("x", recipe, training, student, target, CONFIG)
    return training.key, choice.key


QUANTIZED = Stage(name="quantize", label="w8a8", version=1)


@pytest.mark.parametrize(
    ("changes", "trains_again"),
    [
        ({"description": "x"}, None),
        ({"max_acceptance_gap": 0.3}, False),
        ({"target": "candidate"}, None),
        ({"engine_checkpoints": 3}, True),
        ({"response_temperature": 0.7}, True),
        ({"held_out_share": 0.2}, True),
        ({"batch_tokens": 512}, True),
    ],
)
def test_keys_hold_what_decides(
    changes: dict[str, Any], trains_again: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a student that is served as it is; None: neither is made again."""
    monkeypatch.setattr(speculation, "hardware", lambda: {"gpus": []})
    (training, choice), (other, chosen) = stages_of({}), stages_of(changes)
    assert (training != other) is bool(trains_again)
    assert (choice != chosen) is (trains_again is not None)


def test_a_quantized_target_has_a_draft_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "hardware", lambda: {"gpus": []})
    shared, own = stages_of({}, QUANTIZED), stages_of({"target": "candidate"}, QUANTIZED)
    assert shared[0] == stages_of({})[0]
    assert own[0] != shared[0]
    assert len({shared[1], own[1], stages_of({})[1]}) == 3


def test_on_a_gpu_vllm_gives_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "hardware", lambda: {"gpus": ["NVIDIA H100"]})
    assert speculation.states_source(RECIPE) == "vllm"
    assert speculation.states_source(RECIPE.model_copy(update={"states": "transformers"})) == (
        "transformers"
    )
    prompts = Stage(name="prompts", version=1)
    student = Stage(name="distill", version=1)
    stage = speculation.stage(RECIPE, student, prompts, None, CONFIG)
    assert stage.config["serve"] == CONFIG
    assert "vllm" in stage.tools
    monkeypatch.setattr(speculation, "hardware", lambda: {"gpus": []})
    stage = speculation.stage(RECIPE, student, prompts, None, CONFIG)
    assert stage.config["states"] == "transformers"
    assert "serve" not in stage.config


def test_a_published_drafts_content_is_in_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    one = stages_of({"init_from": str(folder), "states": "transformers"})
    moved = folder.rename(tmp_path / "moved")
    assert stages_of({"init_from": str(moved), "states": "transformers"}) == one
    (moved / "config.json").write_text('{"other": 1}')
    assert stages_of({"init_from": str(moved), "states": "transformers"})[0] != one[0]


def test_a_published_draft_that_changed_since_the_plan_fails_its_candidate(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    recipe = RECIPE.model_copy(update={"init_from": str(folder), "states": "transformers"})
    student, prompts = Stage(name="distill", version=1), Stage(name="prompts", version=1)
    stage = speculation.stage(recipe, student, prompts)
    # As it was planned, and no draft of this target: the candidate's mistake, not the release's.
    with pytest.raises(StageFailed, match="cannot be read"):
        speculation.check_published(stage, str(folder), tmp_path, {})
    (folder / "config.json").write_text('{"other": 1}')
    with pytest.raises(StageFailed, match="was changed since the release was planned"):
        speculation.check_published(stage, str(folder), tmp_path, {})


def test_a_target_that_gives_no_states_here_fails_its_candidate_alone() -> None:
    class Server:
        def __enter__(self) -> None:
            raise Infeasible("no kernel for W4A16")

        def __exit__(self, *_: object) -> None: ...

    server: Any = Server()
    with (
        pytest.raises(StageFailed, match="cannot serve the target: no kernel for W4A16") as told,
        speculation.serving_states(server),
    ):
        pass
    assert "states: transformers" in told.value.problems[0].remedy


def test_a_model_that_changed_since_the_plan_is_not_adopted(tmp_path: Path) -> None:
    from recipes.schema import PathModel
    from registry.digests import digest_of_folder
    from tasks import models

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    planned = {"model": digest_of_folder(folder)}
    stage = Stage(name="model", label="student", version=1, inputs=planned)
    source = PathModel(source="path", path=str(folder))
    (folder / "model.safetensors").write_bytes(NO_TENSORS + b"x")
    with pytest.raises(StageFailed, match="was changed since the release was planned"):
        models.prepare_model.fn(stage, source)
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    ref = models.prepare_model.fn(stage, source)
    assert ref.digest == planned["model"]
