"""Side files next to weights: the template that was lost, doubled, or quietly replaced."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines import model_files, template_check
from tasks.engines.template_check import check_apart

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITHOUT_PROMPT = TEMPLATE.partition("{% if")[0]
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "运费多少？"},
]
RENDERED = "<|system|>Be brief.<|end|><|user|>运费多少？<|end|><|assistant|>"


def folder(
    root: Path,
    *,
    inside: object = None,
    beside: str | None = None,
    tokenizer: bool = True,
    **config: object,
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if tokenizer:
        (root / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        written = {"eos_token": "<|end|>"} | ({"chat_template": inside} if inside else {})
        (root / "tokenizer_config.json").write_text(json.dumps(written))
    if beside is not None:
        (root / "chat_template.jinja").write_text(beside)
    return root


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(tmp_path / "base", inside=TEMPLATE)


@pytest.mark.parametrize(
    "files",
    [
        {"inside": TEMPLATE},
        {"beside": TEMPLATE + "\n"},
        {"inside": TEMPLATE, "beside": TEMPLATE},
        {"inside": [{"name": "default", "template": TEMPLATE}]},
    ],
    ids=["base", "jinja file with one more newline", "both the same", "named default"],
)
def test_the_same_rendering_is_accepted_wherever_it_stands(
    tmp_path: Path, base: Path, files: dict[str, Any]
) -> None:
    derived = folder(tmp_path / "merged", **files)
    model_files.check_side_files(derived, base, "distill")
    assert model_files.render(derived, CONVERSATION) == RENDERED


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no chat template"),
        ({"inside": TEMPLATE, "beside": WITHOUT_PROMPT}, "two different chat templates"),
        ({"tokenizer": False}, "no tokenizer files"),
        ({"tokenizer": False, "beside": TEMPLATE}, "no tokenizer files"),
        ({"inside": WITHOUT_PROMPT}, "chat template"),
    ],
    ids=["missing", "conflict", "no tokenizer", "template alone", "another template"],
)
def test_a_lost_or_foreign_template_is_refused_by_folder_file_and_stage(
    tmp_path: Path, base: Path, files: dict[str, Any], message: str
) -> None:
    derived = folder(tmp_path / "derived", **files)
    with pytest.raises(StageFailed) as refusal:
        model_files.check_side_files(derived, base, "quantize")
    text = str(refusal.value)
    assert message in text
    assert str(derived) in text
    assert "quantize" in text
    assert any(name in text for name in ("tokenizer_config.json", "tokenizer.json"))


def test_two_templates_are_an_error_even_in_the_reference(tmp_path: Path, base: Path) -> None:
    both = folder(tmp_path / "both", inside=TEMPLATE, beside=WITHOUT_PROMPT)
    with pytest.raises(StageFailed, match="two different"):
        model_files.check_side_files(base, both, "distill")
    with pytest.raises(StageFailed, match="two different"):
        model_files.render(both, CONVERSATION)


def test_the_same_text_with_other_token_ids_is_refused(tmp_path: Path, base: Path) -> None:
    derived = folder(tmp_path / "derived", inside=TEMPLATE)
    changed = json.loads(json.dumps(TOKENIZER))
    changed["model"]["vocab"] = {"<unk>": 1}
    (derived / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(StageFailed, match="other token ids"):
        model_files.check_side_files(derived, base, "distill")


def test_generation_markers_render_as_transformers_renders_them(tmp_path: Path) -> None:
    marked = (
        "{%- for m in messages %}\n"
        "{%- if m['role'] == 'assistant' %}\n"
        "  {% generation %}{{ m['content'] }}{% endgeneration %}\n"
        "{%- else %}<u>{{ m['content'] }}</u>{% endif %}\n"
        "{%- endfor %}"
    )
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    theirs, _ = render_jinja_template([conversation], chat_template=marked)
    ours = model_files.render(
        folder(tmp_path / "m", beside=marked), conversation, add_generation_prompt=False
    )
    assert ours == theirs[0]


def test_only_safetensors_and_no_code_of_the_folders_own(tmp_path: Path) -> None:
    good = folder(tmp_path / "good", inside=TEMPLATE)
    (good / "model.safetensors").touch()
    model_files.check_weights(good, "distill")

    pickled = folder(tmp_path / "pickled", inside=TEMPLATE)
    (pickled / "pytorch_model.bin").touch()
    with pytest.raises(StageFailed) as refusal:
        model_files.check_weights(pickled, "distill")
    assert "pytorch_model.bin" in str(refusal.value)
    assert "no *.safetensors" in str(refusal.value)

    remote = folder(tmp_path / "remote", inside=TEMPLATE, auto_map={"AutoModel": "evil.Model"})
    (remote / "model.safetensors").touch()
    with pytest.raises(StageFailed, match="auto_map"):
        model_files.check_weights(remote, "distill")

    with pytest.raises(StageFailed, match=r"no config\.json"):
        model_files.check_weights(tmp_path / "nowhere", "distill")


def test_end_tokens_are_those_that_end_a_generation(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", inside=TEMPLATE, eos_token_id=2)
    assert model_files.end_token_ids(model) == [2]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert model_files.end_token_ids(model) == [2, 7]


def test_side_files_are_copied_unchanged(tmp_path: Path, base: Path) -> None:
    derived = tmp_path / "derived"
    derived.mkdir()
    copied = model_files.copy_side_files(base, derived)
    assert copied == ["tokenizer.json", "tokenizer_config.json"]
    for name in copied:
        assert (derived / name).read_bytes() == (base / name).read_bytes()
    model_files.check_side_files(derived, base, "distill")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "1 s"),
        ("{{ 'x'.center(10**10) }}", "more memory"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
    ids=["time", "memory", "fault"],
)
def test_a_template_of_somebody_else_gets_little_time_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    monkeypatch.setattr(template_check, "SECONDS", 1)
    with pytest.raises(StageFailed, match=said):
        check_apart(folder(tmp_path / "m", inside=template))
    check_apart(folder(tmp_path / "good", inside=TEMPLATE))


def test_a_template_is_tried_without_our_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted-secret")
    seen: dict[str, str] = {}
    run = subprocess.run

    def look(*words: Any, **options: Any) -> Any:
        seen.update(options["env"])
        return run(*words, **options)

    monkeypatch.setattr(subprocess, "run", look)
    check_apart(folder(tmp_path / "m", inside=TEMPLATE))
    assert "PATH" in seen and "SOME_API_KEY" not in seen
