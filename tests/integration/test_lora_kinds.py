"""Each kind of adapter, of row and of precision really trains, and what is merged is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines import (
    held_out,
    launching,
    lora,
    loss_mask,
    merge_check,
    model_files,
    packing,
    training_loop,
)
from tests.integration.distill_builders import ANSWERS, conversation, job, questions, student, write


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return student(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "train.jsonl", questions())


def with_lora(**more: Any) -> dict[str, Any]:
    return {"lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **more}}


@pytest.mark.parametrize(
    "kind",
    [{"use_rslora": True}, {"lora_dropout": 0.1, "use_dora": True}],
    ids=str,
)
def test_every_kind_of_adapter_merges_to_what_it_was(
    base: Path, rows: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    result = lora.run(job(base, rows, tmp_path / "out", **with_lora(**kind)))
    assert result["held_out_loss_after"] < result["held_out_loss_before"]
    assert result["merge"]["float32"]["max_relative"] < merge_check.MAX_FLOAT32
    assert result["merge"]["float32"]["token_agreement"] == 1.0
    written = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert {name: written[name] for name in kind} == kind


def test_steps_may_be_gathered_and_activations_computed_again(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    """Three batches of three rows are one step of nine: the same curve, with less memory."""
    adapter = with_lora()
    whole = lora.run(job(base, rows, tmp_path / "whole", **adapter))
    training = {"gradient_accumulation_steps": 3, "gradient_checkpointing": True}
    parts = lora.run(
        job(base, rows, tmp_path / "parts", **adapter, batch_size=3, training=training)
    )
    assert parts["steps"] == whole["steps"] == 18
    assert [loss for _, loss in parts["curve"]] == pytest.approx(
        [loss for _, loss in whole["curve"]], rel=1e-3
    )


def test_bfloat16_trains_and_merges_in_float32(base: Path, rows: Path, tmp_path: Path) -> None:
    result = lora.run(job(base, rows, tmp_path / "out", precision="bfloat16"))
    assert result["compute_dtype"] == "bfloat16"
    # What is learned is kept in float32, `modules_to_save` too: small steps must not vanish.
    stored = model_files.stored_tensors(tmp_path / "out" / "adapter")
    assert {tensor.dtype for tensor in stored.values()} == {"F32"}
    assert result["held_out_loss_after"] < result["held_out_loss_before"]
    assert result["merge"]["float32"]["max_relative"] < merge_check.MAX_FLOAT32


def test_four_bits_are_refused_before_anything_is_loaded(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "has_gpu", lambda: False)
    for changes, message in (
        ({"quantize_base": "nf4"}, r"quantize_base: four bits need CUDA.*\n.*leave"),
        ({"attention": "flash_attention_2"}, "attention: flash attention needs CUDA"),
    ):
        with pytest.raises(StageFailed, match=message):
            lora.run(job(base, rows, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_packed_rows_do_not_see_each_other(base: Path) -> None:
    """Logits and loss of each packed example are those of the example alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    end = [tokenizer.eos_token_id]
    made = [
        loss_mask.conversation(
            conversation(f"{at}", "where is it? " * at, "at sea " * (4 - at)), tokenizer, end
        )[0]
        for at in range(1, 4)
    ]
    table = packing.packed(made, 128)
    lengths = [length for row in table for length in row["seq_lengths"]]
    assert sorted(lengths) == sorted(len(each.input_ids) for each in made)
    batch = packing.tensors(table, 0, end_to_end=False)
    labels = batch.pop("shift_labels")
    del batch["labels"]
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
        alone = {
            tuple(one.input_ids): model(torch.tensor([one.input_ids])).logits[0] for one in made
        }
    for at, row in enumerate(table):
        begin = 0
        for length in row["seq_lengths"]:
            ids = tuple(row["input_ids"][begin : begin + length])
            found = logits[at, begin : begin + length]
            assert torch.allclose(found, alone[ids], atol=1e-4)
            begin += length
    # The same targets, each once, and the same loss.
    assert int((labels != loss_mask.IGNORE).sum()) == sum(one.supervised for one in made)
    packed_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=loss_mask.IGNORE
    )
    assert float(packed_loss) == pytest.approx(held_out.loss(model, made, 0, 2), rel=1e-5)


def test_a_model_whose_attention_leaks_is_refused(base: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    row = {"input_ids": list(range(4, 44)), "labels": [1] * 40, "seq_lengths": [20, 20]}
    assert packing.check_apart(model, [row], 0, end_to_end=False) < 1e-4

    class Leaking(torch.nn.Module):
        device, training = model.device, False
        parameters = model.parameters

        def forward(self, position_ids: Any = None, **given: Any) -> Any:
            return model(**given)  # as a model that does not look at position ids

    with pytest.raises(StageFailed, match="reaches from one packed row into the next"):
        packing.check_apart(Leaking(), [row], 0, end_to_end=False)


def test_rows_end_to_end_carry_their_lengths(base: Path) -> None:
    """What flash attention's kernel is told; it runs on CUDA only."""
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "seq_lengths": [2, 2]},
        {"input_ids": [9, 4], "labels": [-100, 4], "seq_lengths": [2]},
    ]
    laid = packing.tensors(rows, 0, end_to_end=True)
    assert laid["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4]]
    assert laid["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1]]
    assert laid["cu_seq_lens_q"].tolist() == [0, 2, 4, 6]
    assert laid["shift_labels"].tolist() == [[6, -100, 8, -100, 4, -100]]


def test_a_packed_run_learns(base: Path, rows: Path, tmp_path: Path) -> None:
    result = lora.run(job(base, rows, tmp_path / "out", packing=True, batch_size=2, epochs=8))
    assert result["held_out_loss_after"] < 0.7 * result["held_out_loss_before"]
    assert result["packed_rows"] < result["train_rows"] / 2
    assert result["packing_difference"] < 1e-4


def test_a_metric_of_the_suite_chooses(base: Path, rows: Path, tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    (task / "utils.py").write_text(
        "def prompt(doc):\n    return doc['prompt']\n\n"
        "def scored(doc, results):\n"
        "    assert doc['prompt'].split()[1] in ('price', 'track', 'cancel')\n"
        "    return {'hit_rate': float(results[0] == doc['reference']['intent'])}\n"
    )
    (task / "task.yaml").write_text(
        "task: tiny\ndataset_path: json\ndataset_kwargs: {data_files: {test: items.jsonl}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: !function utils.prompt\n"
        "doc_to_target: id\nprocess_results: !function utils.scored\n"
        "metric_list: [{metric: hit_rate, aggregation: mean, higher_is_better: true}]\n"
    )
    suite = {"task_file": str(task / "task.yaml"), "metrics": ["hit_rate"], "max_tokens": 8}
    changes: dict[str, Any] = {"suite": suite, "best_by": "hit_rate", "epochs": 20}
    changes["evaluate_every"] = 2.0
    result = lora.run(job(base, rows, tmp_path / "out", **changes))
    looks = result["looks"]
    assert looks[0]["hit_rate"] == looks[0]["ended"] == 0.0
    assert result["chosen"]["hit_rate"] == max(look["hit_rate"] for look in looks) == 1.0
    assert result["chosen"]["ended"] == 1.0
    # Among equal rates the lower loss.
    best = [look for look in looks if look["hit_rate"] == 1.0]
    assert result["chosen"]["held_out_loss"] == min(look["held_out_loss"] for look in best)

    # What is merged answers as the chosen look did.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = tmp_path / "out" / "merged"
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    prompts = [tokenizer.encode(f"<|user|>3 {word}<|end|><|assistant|>") for word in ANSWERS]
    answers, ended = held_out.answered(model, tokenizer, prompts, 8, 2)
    assert (answers, ended) == (list(ANSWERS.values()), 3)

    unmeasured = {**suite, "metrics": ["slot_f1"]}
    with pytest.raises(StageFailed, match="computes no 'slot_f1'"):
        lora.run(job(base, rows, tmp_path / "no", **{**changes, "suite": unmeasured}))
    plain = write(tmp_path / "plain.jsonl", [conversation(f"{i}", f"{i}", "ok") for i in range(9)])
    with pytest.raises(StageFailed, match="no held-out row has a reference"):
        lora.run(job(base, plain, tmp_path / "no", **changes))


def test_ten_rows_learned_by_heart_end_by_themselves(base: Path, tmp_path: Path) -> None:
    """Padding and end token are one here; 30 words fit into the limit, the answers have one."""
    some = [
        conversation(f"{at}", f"{at} {word}", ANSWERS[word], reference={})
        for at, word in enumerate(["price", "track", "cancel"] * 4)
    ]
    lora.run(job(base, write(tmp_path / "ten.jsonl", some), tmp_path / "out", epochs=20))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = tmp_path / "out" / "merged"
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    data = loss_mask.load(tmp_path / "ten.jsonl", tokenizer, [tokenizer.eos_token_id], 64)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    prompts = [example.prompt_ids for example in data.examples]
    _, ended = held_out.answered(model, tokenizer, prompts, 30, 4)
    assert ended == len(some)


def test_the_order_of_rows_follows_from_seed_and_epoch(base: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.state = type("State", (), {"global_step": 0})()

    lengths = list(range(40))

    def order(seed: int, step: int) -> list[int]:
        import torch

        torch.manual_seed(step)  # the global state must not matter
        trainer = training_loop.ordered(Trainer, lengths, 8, seed)()
        trainer.state.global_step = step
        return list(trainer._get_train_sampler())

    assert order(0, 0) == order(0, 4)  # five steps are an epoch
    assert order(0, 5) == order(0, 9) != order(0, 0)
    assert order(1, 0) != order(0, 0)
    assert sorted(order(0, 5)) == lengths
