"""EAGLE3 draft training: speculators' own loop, a published draft, and what vLLM makes of it."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval_suites.draft_checkpoints import Acceptance
from registry.errors import StageFailed, UserError
from registry.settings import settings
from tasks.engines.draft_fit import LossLog, kept_epochs, without_accelerator
from tasks.engines.draft_model import new_draft
from tasks.engines.draft_score import coverage, score
from tasks.engines.draft_states import Sample, load_target, record_states
from tasks.engines.engine_acceptance import accepted_by_segment, by_segment
from tasks.engines.greedy_agreement import compare, greedy_answers
from tasks.engines.sample_files import read_samples
from tasks.engines.speculators_train import train_draft
from tasks.engines.subprocesses import run_job, wait_until
from tasks.engines.vllm_server import VllmServer
from tasks.engines.vllm_states import asked_layers, server_arguments, server_environment
from tests.integration.draft_target import (
    QUICK,
    QUICK_ENV,
    SPECULATIVE_TOKENS,
    job,
    make_target,
    plain_eagle3,
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
    asked = job(broken, tmp_path, epochs=1, response_tokens=8)
    write_prompts(Path(asked["prompts_file"]), 24, seed=1)
    with pytest.raises(StageFailed, match=r"give back 0|loss became nan"):
        train_draft(asked)


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


def test_a_quantized_target_answers_and_gives_its_states(target: Path, tmp_path: Path) -> None:
    """Its decoder alone, its own head and embeddings; nothing of the quantization in the draft."""
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    oneshot(model=model, recipe=recipe)
    quantized = tmp_path / "quantized"
    model.save_pretrained(quantized, save_compressed=True)
    AutoTokenizer.from_pretrained(target).save_pretrained(quantized)

    loaded = load_target(quantized)
    sample = Sample("a", list(range(5, 25)), 4, True)
    record_states(loaded, [sample], [1, 2, 3])
    with torch.inference_mode():
        whole = loaded(torch.tensor([sample.tokens]), output_hidden_states=True)
    torch.testing.assert_close(sample.states[:, :128], whole.hidden_states[1][0])
    assert not torch.equal(sample.states, states_of(target, sample))

    asked = job(quantized, tmp_path, epochs=1)
    write_prompts(Path(asked["prompts_file"]), 24, seed=1)
    result = train_draft(asked)
    assert result["target_agreement"] > 0.95
    saved = (Path(asked["out_dir"]) / "checkpoints" / "epoch-1" / "config.json").read_text()
    assert "quantization" not in saved


def states_of(target: Path, sample: Sample) -> Any:
    own = Sample("a", sample.tokens, sample.prompt_length, True)
    record_states(load_target(target), [own], [1, 2, 3])
    return own.states


# -- a published draft ---------------------------------------------------------------------------


def best_of(trained: tuple[Path, dict[str, Any]]) -> Path:
    folder, result = trained
    return folder / "checkpoints" / f"epoch-{result['best_epoch']}"


def test_training_goes_on_from_it(
    trained: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    """One epoch more starts where four ended, not where the first one did."""
    first = trained[1]
    published = plain_eagle3(best_of(trained), tmp_path / "published")
    asked = job(target, tmp_path, epochs=1, init_from=str(published), draft_vocab_size=None)
    write_prompts(Path(asked["prompts_file"]), 60, seed=1)
    result = train_draft(asked)
    assert result["train_loss"][0] < first["train_loss"][1]
    assert result["held_out_loss"][0] < first["held_out_loss"][0]
    assert result["draft_vocab_size"] == 384


# -- the engine ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_gives_the_same_states_and_accepts_what_training_expects(
    trained: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    """Two servers: one gives its states and answers by itself, one has the draft.

    The whole way of the states: vLLM's own collecting of them, a file per request, the comparison.
    Then the same greedy answers, and the same acceptance as training expects on the same prompts.
    """
    folder, result = trained
    rows = by_segment([json.loads(line) for line in (folder / "held_out.jsonl").open()])
    samples_dir, layer_ids = tmp_path / "samples", [0, 1, 3]
    written = samples_dir / "written"
    written.mkdir(parents=True)
    asked = job(target, tmp_path)
    write_prompts(Path(asked["prompts_file"]), 12, seed=3)
    asked |= {"samples_dir": str(samples_dir), "layer_ids": layer_ids, "served_name": "m"}
    with states_server(target, layer_ids, written, tmp_path) as plain:
        gathered = run_job(
            "tasks.engines.vllm_states",
            {**asked, "url": plain.url},
            log=settings().logs_dir / "states.log",
            env={"PILOTAGE_STATES_KEY": plain.api_key},
        )
        # What the server wrote was taken away, but for the token it proves itself with.
        assert len(list(written.glob("*.safetensors"))) == 1
        reference = greedy_answers(plain.url, plain.api_key, plain.served_name, rows, 64)
    check_samples(target, samples_dir, layer_ids, gathered)

    with drafted_server(target, best_of(trained), tmp_path) as drafted:
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


def check_samples(
    target: Path, samples_dir: Path, layer_ids: list[int], gathered: dict[str, Any]
) -> None:
    """Every sample's states against transformers', all tokens of them."""
    errors = gathered["state_errors"]
    assert set(errors) == {"layer 0", "layer 1", "layer 3", "final"}
    assert all(0 <= error < 0.05 for error in errors.values())
    samples = read_samples(samples_dir)
    assert len(samples) == gathered["samples"]
    own = [replace(sample, states_file=None) for sample in samples]
    record_states(load_target(target), own, layer_ids)
    for given, right in zip(samples, own, strict=True):
        for one, two in zip(given.recorded(), right.recorded(), strict=True):
            assert one.shape == two.shape
            distance = (one.float() - two.float()).norm() / two.float().norm()
            assert distance < 0.05
    # And its greedy answers are what the training row expects: prompt, answer, end of turn.
    assert all(sample.prompt_length < len(sample.tokens) <= 128 for sample in samples)


def states_server(target: Path, layer_ids: list[int], written: Path, folder: Path) -> VllmServer:
    import torch

    cuda = torch.cuda.is_available()
    return VllmServer(
        target,
        log=folder / "vllm-states.log",
        served_name="m",
        engine_args=server_arguments(QUICK, asked_layers(layer_ids, 3), written, cuda=cuda),
        env=server_environment(QUICK_ENV, cuda=cuda),
    )


def drafted_server(target: Path, draft: Path, folder: Path) -> VllmServer:
    return VllmServer(
        target,
        log=folder / "vllm-draft.log",
        served_name="m",
        engine_args=QUICK,
        env=QUICK_ENV,
        draft=draft,
        num_speculative_tokens=SPECULATIVE_TOKENS,
    )
