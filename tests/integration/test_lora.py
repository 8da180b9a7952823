"""A real adapter on a tiny model: it learns, stops by itself, and merging changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines import lora, lora_merge, loss_mask, merge_check, model_files, random_llama
from tests.integration import distill_builders

ANSWERS = {"price": "yes.", "track": "no.", "cancel": "ok."}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    random_llama.make({"out": str(folder), "seed": 0})
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "id": f"{word}-{at}",
                    "messages": [
                        {"role": "user", "content": f"{at} {word}"},
                        {"role": "assistant", "content": ANSWERS[word]},
                    ],
                }
            )
            + "\n"
            for at in range(10)
            for word in ANSWERS
        )
    )
    return path


def job(base: Path, rows: Path, out: Path, **changes: Any) -> dict[str, Any]:
    # The head learns too: a random one cannot be steered by an adapter below it alone.
    layers = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    own = {
        "lora": {"r": 16, "lora_alpha": 32, "target_modules": layers},
        "epochs": 20,
        "evaluate_every": 5,
    }
    return distill_builders.job(base, rows, out, **{**own, **changes})


@pytest.fixture(scope="module")
def trained(
    base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("trained")
    return out, lora.run(job(base, rows, out))


def test_it_learns_and_merging_changes_nothing(trained: tuple[Path, dict[str, Any]]) -> None:
    _, result = trained
    assert result["held_out_loss_after"] < 0.5 * result["held_out_loss_before"]
    assert (result["train_rows"], result["held_out_rows"]) == (27, 3)
    assert result["last_token_not_end"] == 0
    assert result["tokens_per_second"] > 0
    assert result["merge"]["float32"]["token_agreement"] == 1.0
    assert result["merge"]["float32"]["max_relative"] < merge_check.MAX_FLOAT32
    assert result["merge"]["stored"]["max_abs"] > result["merge"]["float32"]["max_abs"]


def test_the_trained_model_stops_by_itself(trained: tuple[Path, dict[str, Any]]) -> None:
    """Padding token and end token are one in this tokenizer; the end is learned all the same."""
    for sample in trained[1]["samples"]:
        assert sample["answer"].endswith("<|end|>")
        assert sample["answer"].count("<|end|>") == 1
        assert len(sample["answer"]) < longest_reply()


def longest_reply() -> int:
    return len("<|end|>") + lora_merge.MERGE_TOKENS


def test_what_is_written_is_a_complete_model(
    base: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    out, _ = trained
    assert {path.name for path in out.iterdir()} == {"adapter", "merged"}
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    model_files.check_weights(out / "merged", "distill")
    model_files.check_side_files(out / "merged", base, "distill")
    before = model_files.stored_tensors(base)
    after = model_files.stored_tensors(out / "merged")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in after.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in before.items()
    }
    assert not list(out.rglob("*.bin")) and not list(out.rglob("*.pt"))


def test_training_that_does_not_help_is_refused(base: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"did not fall|not a number"):
        lora.run(job(base, rows, tmp_path, learning_rate=1e4, epochs=2))
    with pytest.raises(StageFailed, match=r"peft\.LoraConfig"):
        lora.run(job(base, rows, tmp_path, lora={"rank": 4}))


def test_a_second_adapter_cannot_be_stacked(
    base: Path, rows: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    carrying = tmp_path / "carrying"
    carrying.mkdir()
    for path in base.iterdir():
        (carrying / path.name).write_bytes(path.read_bytes())
    adapter = trained[0] / "adapter" / "adapter_config.json"
    (carrying / adapter.name).write_bytes(adapter.read_bytes())
    with pytest.raises(StageFailed, match="is an adapter beside the weights"):
        lora.run(job(carrying, rows, tmp_path / "out"))


MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("marked", [False, True], ids=["no markers", "generation markers"])
def test_exactly_the_replies_and_their_ends_are_learned(base: Path, marked: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    if marked:
        tokenizer.chat_template = MARKED
        tokenizer.bos_token = "<|system|>"
    messages = [
        {"role": "user", "content": "到哪了？ 1"},
        {"role": "assistant", "content": "在路上 "},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": "bye"},
    ]
    end = [tokenizer.eos_token_id]
    example = loss_mask.build("r", loss_mask.segments(messages, tokenizer, end), end)
    learned = [label for label in example.labels if label != loss_mask.IGNORE]
    assert tokenizer.decode(learned) == "在路上 <|end|>bye<|end|>"
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert example.input_ids == whole
    if marked:
        theirs = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]
        assert [label != loss_mask.IGNORE for label in example.labels] == list(map(bool, theirs))
