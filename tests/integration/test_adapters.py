"""Adapters that peft trains, and that would be merged into another model, are refused at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines import adapters, lora, loss_mask, model_files
from tests.integration.distill_builders import job, questions, student, write


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return student(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tied(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As SmolLM2: one matrix is the input and the output embedding."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tied")
    shutil.copytree(base, folder, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    assert "lm_head.weight" not in model_files.stored_tensors(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "train.jsonl", questions())


def asked(**lora_arguments: Any) -> dict[str, Any]:
    adapter = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **lora_arguments}
    return {"lora": adapter, "quantize_base": None, "training": {}}


def refusal(folder: Path, **lora_arguments: Any) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(StageFailed) as found:
        adapters.adapted(model, asked(**lora_arguments))
    return str(found.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules_to_save": ["wte"]}, "no module of the student is called 'wte'"),
        ({"target_modules": ["q_proj", "up_porj"]}, "no module of the student is called 'up_porj'"),
        ({"inference_mode": True}, "leaves nothing to train"),
        ({"init_lora_weights": "pissa_niter_4"}, "drawn anew at every load"),
        ({"alora_invocation_tokens": [3]}, "cannot be merged"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication: several layers on one"),
        ({"rank": 4}, r"these are the arguments of peft.LoraConfig"),
        ({"r": "8"}, r"these are the arguments of peft.LoraConfig"),
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_refused(
    base: Path, arguments: dict[str, Any], message: str
) -> None:
    assert message in refusal(base, **arguments)


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_an_adapter_on_a_tied_embedding_is_refused(tied: Path, base: Path, end: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert "is one with its other" in refusal(tied, target_modules=["q_proj", end])
    apart = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapters.adapted(apart, asked(target_modules=["q_proj", end]))


def test_over_four_bits_an_adapter_does_not_start_from_the_base(base: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    over = {**asked(init_lora_weights="pissa"), "quantize_base": "nf4"}
    with pytest.raises(StageFailed, match="starts from the base in four bits"):
        adapters.adapted(model, over)


@pytest.mark.parametrize(
    ("more", "head"),
    [
        ({}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, False),
        ({"modules_to_save": ["embed_tokens"]}, True),
    ],
    ids=["linear", "tied on", "let apart"],
)
def test_a_tied_student_is_served_as_it_was_trained(
    tied: Path, rows: Path, tmp_path: Path, more: dict[str, Any], head: bool
) -> None:
    """vLLM reads `lm_head` only where the config says that the two are apart."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from tasks.engines import held_out

    out = tmp_path / "out"
    result = lora.run(job(tied, rows, out, **{**asked(**more), "epochs": 3}))
    assert AutoConfig.from_pretrained(out / "merged").tie_word_embeddings is not head
    assert ("lm_head.weight" in model_files.stored_tensors(out / "merged")) is head
    losses = result["merge"]["losses"]
    assert losses["applied"] == pytest.approx(losses["trained"], rel=1e-5)
    # The three held-out rows are those of the look that was chosen; read from the disk by hand.
    assert losses["trained"] == pytest.approx(result["chosen"]["held_out_loss"], rel=1e-5)
    data = loss_mask.load(rows, AutoTokenizer.from_pretrained(tied), [0], 64)
    _, held = loss_mask.split(data.examples, 0.1, 0)
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    assert held_out.loss(merged, held, 0, 8) == pytest.approx(losses["stored"], rel=1e-6)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optim": "nope"}, "nope is not a valid OptimizerNames"),
        ({"optim": "lomo"}, "install `lomo_optim`"),
        ({"lr_scheduler_type": "greedy"}, "requires an eval strategy"),
        ({"lr_scheduler_kwargs": {"bad": 1}}, "unexpected keyword argument 'bad'"),
    ],
    ids=str,
)
def test_a_training_that_transformers_refuses_is_a_mistake_of_the_recipe(
    base: Path, rows: Path, tmp_path: Path, training: dict[str, Any], message: str
) -> None:
    with pytest.raises(StageFailed, match="are transformers") as found:
        lora.run(job(base, rows, tmp_path / "out", **{**asked(), "training": training}))
    assert message in str(found.value)


def test_a_student_without_an_end_token_is_named(base: Path, rows: Path, tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    shutil.copytree(base, endless)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = endless / name
        text = path.read_text().replace('"eos_token_id": 0', '"eos_token_id": null')
        path.write_text(text.replace('"eos_token": "<|end|>"', '"eos_token": null'))
    with pytest.raises(StageFailed, match="endless: names no end token"):
        lora.run(job(endless, rows, tmp_path / "out"))


DATED = (
    "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}no day{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_that_writes_todays_date_writes_one_day_in_training(base: Path) -> None:
    """A run that went on after midnight had other tokens, and held out other rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = DATED
    row = questions(1)[0]
    example = loss_mask.conversation(row, tokenizer, [0])[0]
    assert tokenizer.decode(example.input_ids).startswith("01 Jan 2026<|user|>0 price<|end|>")
    # What the template refuses is a row of the file, not a crash.
    called = {**row, "messages": [{"role": "tool", "content": "x"}, *row["messages"]]}
    with pytest.raises(loss_mask.Refused, match="cannot show it: no tools here"):
        loss_mask.conversation(called, tokenizer, [0])
