"""The demo's models at a size that trains in seconds: determinism, tokenizer, template, files."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval_suites.scoring import METRICS
from registry.errors import UserError
from registry.settings import CHECKOUT
from tasks.demo_data import generate, reference_reply
from tasks.engines import tiny_llama

SMALL: dict[str, Any] = {
    "threads": 1,
    "steps": 8,
    "batch_size": 8,
    "vocab_size": 600,
    "held_out": 4,
    "log_every": 4,
    "model": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "max_positions": 256},
}

MESSAGES = [
    {"role": "user", "content": "where is FT1234? 😊"},
    {"role": "assistant", "content": '{"intent":"track_order"}'},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    records = generate(0, {"pretrain": 200})["pretrain"]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (folder / "pretrain.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def make(data: Path, out: Path, **fields: Any) -> dict[str, Any]:
    return tiny_llama.run(
        {"role": "teacher", "data_dir": str(data), "out_dir": str(out), **SMALL, **fields}
    )


@pytest.fixture(scope="module")
def teacher(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    make(data, folder)
    return folder


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_teacher_is_deterministic_for_a_seed(data: Path, teacher: Path, tmp_path: Path) -> None:
    result = make(data, tmp_path / "again")
    assert digest(tmp_path / "again") == digest(teacher)
    make(data, tmp_path / "other", seed=1)
    assert digest(tmp_path / "other") != digest(teacher)
    assert set(result["scores"]) == set(METRICS)
    assert result["loss"] > 0 and result["tokens"] > 0 and result["parameters"] > 0


def test_student_is_deterministic_and_shares_the_tokenizer(
    data: Path, teacher: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        make(data, tmp_path / name, role="student", tokenizer_dir=str(teacher))
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    for name in tiny_llama.TOKENIZER_FILES:
        assert (tmp_path / "one" / name).read_bytes() == (teacher / name).read_bytes()


def test_student_never_sees_a_reference_beside_its_prompt(data: Path, teacher: Path) -> None:
    tokenizer = tiny_llama.load_tokenizer(teacher)
    job = tiny_llama.Job.model_validate(
        {"role": "student", "data_dir": data, "out_dir": teacher, **SMALL}
    )
    records = generate(0, {"pretrain": 120})["pretrain"]
    replies = {reference_reply(record) for record in records}
    sequences = tiny_llama.student_sequences(job, tokenizer, records, random.Random(0))
    with_prompt = 0
    for sequence in sequences:
        text = tokenizer.decode(sequence.ids)
        if "<|user|>" in text:
            with_prompt += 1
            assert not [reply for reply in replies if reply in text]
    assert 0 < with_prompt < len(sequences)


def test_files_are_what_an_engine_needs(teacher: Path) -> None:
    names = {path.name for path in teacher.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json"} <= names
    assert set(tiny_llama.TOKENIZER_FILES) <= names
    assert not [name for name in names if name.endswith((".bin", ".pt"))]
    config = json.loads((teacher / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert json.loads((teacher / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize(
    "text",
    [
        "你好，FT1234到哪了？",
        "Ünïcödé  double  spaces\tand\nlines\r\n",
        "😊👨‍👩‍👧‍👦 🚚",
        "العربية हिन्दी ไทย 한국어 ｆｕｌｌ－ｗｉｄｔｈ",
        'JSON {"intent":"track_order","slots":{},"reply":"x"} </s>',
        "\u200b\x00\x7f",
        "",
    ],
)
def test_tokenizer_round_trip(teacher: Path, text: str) -> None:
    tokenizer = tiny_llama.load_tokenizer(teacher)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_chat_template_marks_the_assistant_turn(teacher: Path) -> None:
    tokenizer = tiny_llama.load_tokenizer(teacher)
    encoded = tokenizer.apply_chat_template(
        MESSAGES, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    marked = [token for token, one in zip(ids, mask, strict=True) if one]
    assert tokenizer.decode(marked) == MESSAGES[1]["content"] + "<|end|>"
    frame = tiny_llama.Frame(tokenizer)
    assert frame.turns(MESSAGES[0]["content"], MESSAGES[1]["content"], 0.0).ids == ids
    asked = tokenizer.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, tokenize=False)
    assert asked == f"<|bos|><|user|>{MESSAGES[0]['content']}<|end|><|assistant|>"


def test_trl_takes_the_template_for_assistant_only_loss(teacher: Path) -> None:
    from trl import chat_template_utils as trl_templates

    tokenizer = tiny_llama.load_tokenizer(teacher)
    assert trl_templates.has_generation_markers(tokenizer.chat_template)
    assert trl_templates.is_chat_template_stop_token_trained(tokenizer)
    assert trl_templates.is_chat_template_prefix_preserving(tokenizer)


def test_as_a_process(data: Path, tmp_path: Path) -> None:
    job = {"role": "teacher", "data_dir": str(data), "out_dir": str(tmp_path / "out"), **SMALL}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tasks.engines.tiny_llama",
            str(tmp_path / "job.json"),
            str(tmp_path / "result.json"),
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "step 8/8 loss" in done.stdout
    assert json.loads((tmp_path / "result.json").read_text())["role"] == "teacher"


def test_mistakes_are_named(data: Path, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        make(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="tokenizer_dir"):
        make(data, tmp_path / "out", role="student")
    with pytest.raises(UserError, match="held out"):
        make(data, tmp_path / "out", held_out=500)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        make(data, tmp_path / "out", role="student", tokenizer_dir=str(data))
    with pytest.raises(UserError, match="multiple"):
        make(data, tmp_path / "out", model={"hidden_size": 72})
    with pytest.raises(UserError, match=r"steps.*\n.*colour") as caught:
        make(data, tmp_path / "out", steps=0, colour="red")
    assert len(caught.value.problems) == 2
