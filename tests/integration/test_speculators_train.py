"""EAGLE3 draft training: speculators' own loop, a published draft, and what vLLM makes of it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval_suites.draft_checkpoints import Acceptance
from registry.errors import StageFailed, UserError
from registry.settings import settings
from tasks.engines.draft_fit import LossLog, kept_epochs, without_accelerator
from tasks.engines.draft_model import draft_targets, new_draft, read_draft
from tasks.engines.draft_score import coverage, score
from tasks.engines.draft_states import Sample
from tasks.engines.engine_acceptance import accepted_by_segment, by_segment
from tasks.engines.greedy_agreement import compare, greedy_answers
from tasks.engines.published_draft import start_from
from tasks.engines.speculators_train import train_draft
from tasks.engines.subprocesses import run_job, wait_until
from tasks.engines.vllm_server import VllmServer
from tests.integration.draft_target import (
    QUICK,
    QUICK_ENV,
    SPECULATIVE_TOKENS,
    job,
    make_target,
    write_prompts,
)

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A draft with a reduced vocabulary, made by the process that the flow starts."""
    folder = tmp_path_factory.mktemp("draft")
    # Module scope comes before the test's own home.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTAGE_HOME", str(folder / "home"))
        settings.cache_clear()
        asked = job(target, folder)
        result = run_job("tasks.engines.speculators_train", asked, log=folder / "draft.log")
    settings.cache_clear()
    return folder / "draft", result


# -- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_training(loss: float) -> None:
    log = LossLog()
    record = logging.makeLogRecord({"msg": {"train": {"loss": loss}, "epoch": 0}})
    with pytest.raises(StageFailed, match="epoch 1"):
        log.emit(record)


def test_nan_in_the_target_is_refused(target: Path, tmp_path: Path) -> None:
    """Through the whole stage: the target's head gives nothing back that it has answered."""
    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in target.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageFailed):
        train_draft(job(broken, tmp_path, epochs=1))


def test_the_trainer_still_needs_its_workaround() -> None:
    """When this fails, speculators runs on the CPU by itself: remove `without_accelerator`."""
    import torch
    from speculators.train import trainer

    if torch.cuda.is_available():
        pytest.skip("has an accelerator")
    assert isinstance(trainer.get_local_rank(), int)
    with pytest.raises(RuntimeError):
        torch.accelerator.synchronize()
    with without_accelerator():
        assert trainer.get_local_rank() == "cpu"
        torch.accelerator.synchronize()


def test_same_seed_same_bytes(target: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("one", "two"):
        asked = job(target, tmp_path / name, epochs=1)
        write_prompts(Path(asked["prompts_file"]), 24, seed=1)
        train_draft(asked)
        files = sorted(Path(asked["out_dir"]).rglob("*"))
        digests.append(
            {
                file.relative_to(asked["out_dir"]).as_posix(): hashlib.sha256(
                    file.read_bytes()
                ).hexdigest()
                for file in files
                if file.is_file()
            }
        )
    assert set(digests[0]) == {
        "held_out.jsonl",
        "checkpoints/epoch-1/config.json",
        "checkpoints/epoch-1/model.safetensors",
    }
    assert digests[0] == digests[1]


def test_result_and_checkpoints(trained: tuple[Path, dict[str, Any]], target: Path) -> None:
    from safetensors import safe_open

    folder, result = trained
    assert result["prompts"] == result["answers"] + result["dropped"]
    assert result["truncated"] == 0
    assert result["layer_ids"] == [1, 2, 3]
    assert result["vocab_coverage"] > 0.95
    assert set(result["vocab_coverage_by_segment"]) == {"book", "track"}
    assert result["target_agreement"] > 0.95
    assert len(result["train_loss"]) == len(result["held_out_loss"]) == 4
    assert result["train_loss"][-1] < result["train_loss"][0]
    assert result["acceptance"] == sorted(result["acceptance"], reverse=True)
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["acceptance"]), abs=1e-4)

    losses = result["held_out_loss"]
    assert result["kept_epochs"] == [epoch + 1 for epoch in kept_epochs(losses, 2)]
    assert set(result["expected"]) == {str(epoch) for epoch in result["kept_epochs"]}
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == [f"epoch-{epoch}" for epoch in result["kept_epochs"]]
    held_out = [json.loads(line) for line in (folder / "held_out.jsonl").open()]
    assert len(held_out) == result["held_out"] == round(0.1 * result["prompts"])
    assert {row["segment"] for row in held_out} == {"book", "track"}

    chosen = folder / "checkpoints" / f"epoch-{result['best_epoch']}"
    config = json.loads((chosen / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["dtype"] == "bfloat16"
    assert str(target) not in json.dumps(config)
    with safe_open(chosen / "model.safetensors", framework="pt") as weights:
        kinds = {name: str(weights.get_tensor(name).dtype) for name in weights.keys()}  # noqa: SIM118
    assert kinds.pop("d2t") == "torch.int64"
    assert kinds.pop("t2d") == "torch.bool"
    assert set(kinds.values()) == {"torch.bfloat16"}


@pytest.mark.parametrize(
    ("losses", "count", "kept"),
    [
        ([3.0], 2, [0]),
        ([3.0, 2.0, 1.0], 1, [2]),
        ([3.0, 1.0, 2.0], 1, [1]),
        ([3.0, 1.0, 2.0], 2, [1, 2]),
        ([3.0, 2.0, 1.0], 2, [2]),
        ([1.0, 3.0, 2.0, 4.0], 3, [0, 2, 3]),
        ([1.0, 1.0], 1, [0]),
    ],
)
def test_kept_are_the_best_epoch_and_the_last_ones(
    losses: list[float], count: int, kept: list[int]
) -> None:
    assert kept_epochs(losses, count) == kept


def test_coverage_is_told_by_segment() -> None:
    def sample(segment: str, *answer: int) -> Sample:
        return Sample(segment, [9, 9, *answer], 2, True, segment)

    told = coverage([sample("a", 1, 2, 3), sample("a", 1), sample("b", 7, 1)], {1, 2})
    assert told == {
        "vocab_coverage": round(4 / 6, 6),
        "vocab_coverage_by_segment": {"a": 0.75, "b": 0.5},
    }


def test_score_counts_as_the_server_does() -> None:
    """A pretend draft that is right at its first two proposals and wrong at the third."""
    import torch

    sample = Sample("a", [9, 9, 20, 21, 22, 23, 24, 25, 26], 2, finished=True, segment="s")
    sample.states, sample.last_states = torch.zeros(9, 384), torch.zeros(9, 128)

    class Pretend:
        d2t, draft_vocab_size = None, 512
        device, dtype = torch.device("cpu"), torch.float32

        def __call__(self, *, input_ids: Any, ttt_steps: int, **_: Any) -> list[Any]:
            after = [torch.roll(input_ids, -1 - step, dims=1) for step in range(ttt_steps)]
            return [*after[:2], torch.zeros_like(input_ids)]

    counted = score(Pretend(), [sample], steps=3)
    # Seven answer tokens: the first is the target's, then drafts start at tokens 0, 3 and 6 of the
    # answer; the one at 6 would be behind the end. Six places to draft from in all.
    assert counted["acceptance"] == [1.0, 1.0, 0.0]
    assert counted["acceptance_length"] == 3.0
    assert counted["accuracy"] == [1.0, 1.0, 0.0]
    assert counted["by_segment"] == {"s": 3.0}


def test_too_large_draft_vocabulary_is_refused(target: Path) -> None:
    asked = {"target": str(target), "num_layers": 1, "draft_vocab_size": 513}
    with pytest.raises(UserError, match="513 is more than the target's 512"):
        new_draft(asked, [1, 2, 3], Counter({5: 1}), [1], eager=True)


def test_stopped_training_leaves_no_result_and_no_checkpoint(target: Path, tmp_path: Path) -> None:
    """speculators' Trainer answers SIGTERM by saving and returning as if it were done."""
    asked = job(target, tmp_path, epochs=500)
    write_prompts(Path(asked["prompts_file"]), 24, seed=1)
    files = [tmp_path / name for name in ("job.json", "result.json", "log")]
    files[0].write_text(json.dumps(asked))
    with files[2].open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", "tasks.engines.speculators_train", *map(str, files[:2])],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        assert wait_until(lambda: b"epoch 1:" in files[2].read_bytes(), 300)
        running.terminate()
        assert running.wait(120) == 1
    finally:
        running.kill()
    assert "training was interrupted in epoch" in files[2].read_text()
    assert not files[1].exists()
    assert not list(Path(asked["out_dir"]).iterdir())


# -- a published draft ---------------------------------------------------------------------------


def best_of(trained: tuple[Path, dict[str, Any]]) -> Path:
    folder, result = trained
    return folder / "checkpoints" / f"epoch-{result['best_epoch']}"


def plain_eagle3(published: Path, folder: Path, **changes: Any) -> Path:
    """The same draft as the authors of EAGLE publish theirs: no embeddings, `midlayer.`."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    config = json.loads((published / "config.json").read_text())
    inner = config["transformer_layer_config"]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
             "num_key_value_heads", "num_hidden_layers", "rms_norm_eps", "rope_parameters",
             "max_position_embeddings")  # fmt: skip
    plain = {name: inner[name] for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config["norm_before_residual"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    (folder / "config.json").write_text(json.dumps(plain | changes))
    weights = load_file(published / "model.safetensors")
    save_file(
        {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in weights.items()
            if "embed_tokens" not in name
        },
        folder / "model.safetensors",
    )
    return folder


def start_job(target: Path) -> dict[str, Any]:
    return {"target": str(target), "num_layers": 1, "draft_vocab_size": None}


@pytest.mark.parametrize("layout", ["speculators", "plain"])
def test_a_published_draft_is_taken_over(
    trained: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path, layout: str
) -> None:
    import torch
    from safetensors.torch import load_file

    published = best_of(trained)
    if layout == "plain":
        published = plain_eagle3(published, tmp_path / "published")
    draft = start_from(published, target, start_job(target), tmp_path, eager=True)
    saved, own = load_file(best_of(trained) / "model.safetensors"), draft.state_dict()
    for name, tensor in saved.items():
        assert torch.equal(own[name].to(tensor.dtype), tensor), name
    assert own["fc.weight"].dtype == torch.float32
    assert draft.config.norm_before_residual is True
    assert draft_targets(draft) == draft_targets(read_draft(best_of(trained), target))
    trained_ones = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert "fc.weight" in trained_ones
    assert not {"lm_head.weight", "embed_tokens.weight", "verifier_lm_head.weight"} & trained_ones


def test_training_goes_on_from_it(
    trained: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    """One epoch more starts where four ended, not where the first one did."""
    first = trained[1]
    published = plain_eagle3(best_of(trained), tmp_path / "published")
    asked = job(target, tmp_path, epochs=1, init_from=str(published), draft_vocab_size=None)
    result = train_draft(asked)
    assert result["train_loss"][0] < first["train_loss"][1]
    assert result["held_out_loss"][0] < first["held_out_loss"][0]
    assert result["draft_vocab_size"] == 384


def test_another_students_embeddings_are_replaced(
    trained: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    """A draft of the base model for a student whose embeddings were trained on."""
    import torch
    from safetensors.torch import load_file, save_file

    published = tmp_path / "published"
    shutil.copytree(best_of(trained), published)
    weights = load_file(published / "model.safetensors")
    right = weights["embed_tokens.weight"]
    save_file({**weights, "embed_tokens.weight": right + 1}, published / "model.safetensors")
    draft = start_from(published, target, start_job(target), tmp_path, eager=True)
    assert torch.equal(draft.embed_tokens.weight.to(right.dtype), right)


def edited(published: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(published, folder)
    config = json.loads((folder / "config.json").read_text())
    inner = {name: value for name, value in changes.items() if name in ("hidden_size",)}
    config["transformer_layer_config"] |= inner
    config |= {name: value for name, value in changes.items() if name not in inner}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "asked", "told"),
    [
        ({"hidden_size": 64}, {}, "hidden size: the draft reads 64, the target has 128"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
            {},
            r"layer ids: the draft reads \[2, 16, 29\], the target has layers 0 to 3",
        ),
        ({}, {"num_layers": 2}, "num_layers: the draft has 1, the recipe says 2"),
        ({}, {"draft_vocab_size": 100}, "draft_vocab_size: the draft has 384, the recipe says 100"),
        (
            {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}},
            {},
            "verifier: the draft was made for Qwen3ForCausalLM, this is LlamaForCausalLM",
        ),
        ({"speculators_model_type": "dflash"}, {}, "is a dflash speculator, no EAGLE3 draft"),
    ],
)
def test_a_draft_of_another_model_is_refused(
    trained: tuple[Path, dict[str, Any]],
    target: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    asked: dict[str, Any],
    told: str,
) -> None:
    published = edited(best_of(trained), tmp_path / "published", **changes)
    with pytest.raises(UserError, match=told) as caught:
        start_from(published, target, start_job(target) | asked, tmp_path, eager=True)
    assert caught.value.problems[0].where == f"init_from: {published}"


def test_a_wrong_map_is_refused_before_anything_is_trained(
    trained: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    published = tmp_path / "published"
    shutil.copytree(best_of(trained), published)
    weights = load_file(published / "model.safetensors")
    save_file({**weights, "d2t": weights["d2t"] * 0}, published / "model.safetensors")
    asked = job(target, tmp_path, init_from=str(published), draft_vocab_size=None)
    with pytest.raises(UserError, match="d2t and t2d disagree"):
        train_draft(asked)
    assert not list(Path(asked["out_dir"]).iterdir())


@pytest.mark.parametrize(
    ("renamed", "told"),
    [
        ({"fc.weight": "fc2.weight"}, "1 of its tensors are none of an EAGLE3 draft: fc2.weight"),
        ({"norm.weight": None}, "1 trained tensors are not in it: norm.weight"),
    ],
)
def test_weights_that_were_not_taken_over_are_named(
    trained: tuple[Path, dict[str, Any]],
    target: Path,
    tmp_path: Path,
    renamed: dict[str, str | None],
    told: str,
) -> None:
    """speculators' converter only warns of both, and trains on from random numbers."""
    from safetensors.torch import load_file, save_file

    published = plain_eagle3(best_of(trained), tmp_path / "published")
    weights = load_file(published / "model.safetensors")
    for old, new in renamed.items():
        tensor = weights.pop(old)
        if new is not None:
            weights[new] = tensor
    save_file(weights, published / "model.safetensors")
    with pytest.raises(UserError, match=told):
        start_from(published, target, start_job(target), tmp_path, eager=True)


# -- the engine ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_engine_accepts_what_training_expects(
    trained: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    """vLLM with the draft: the same greedy answers, the same acceptance on the same prompts."""
    folder, result = trained
    rows = by_segment([json.loads(line) for line in (folder / "held_out.jsonl").open()])
    with server(target, None, tmp_path) as plain:
        reference = greedy_answers(plain.url, plain.api_key, plain.served_name, rows, 64)
    with server(target, best_of(trained), tmp_path) as drafted:
        answers, counts = accepted_by_segment(drafted, rows, 64, SPECULATIVE_TOKENS)
    agreement = compare(reference, answers)
    assert agreement.agrees is True, agreement.words
    assert set(counts) == {"book", "track"}
    total = Acceptance.total(list(counts.values()))
    assert total.drafts > 100
    assert sum(total.per_position) == total.accepted
    assert total.proposed == SPECULATIVE_TOKENS * total.drafts
    assert total.length >= 2.0
    assert total.length == pytest.approx(result["acceptance_length"], abs=0.15)


def server(target: Path, draft: Path | None, folder: Path) -> VllmServer:
    return VllmServer(
        target,
        log=folder / f"vllm-{'draft' if draft else 'plain'}.log",
        served_name="m",
        engine_args=QUICK,
        env=QUICK_ENV,
        draft=draft,
        num_speculative_tokens=SPECULATIVE_TOKENS if draft else 0,
    )
