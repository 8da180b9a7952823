"""Every shipped quantize recipe through the real llmcompressor, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes import loader
from recipes.schema import QuantizeRecipe
from registry.errors import StageFailed
from registry.settings import CHECKOUT
from tasks.engines import (
    calibration_texts,
    checkpoint_checks,
    compressor,
    model_files,
    model_modules,
    oneshot_run,
    quantization_plan,
    random_llama,
)
from tests.integration.quantization_builders import conversations, job, simple, write_texts

RECIPES = sorted((CHECKOUT / "recipes" / "quantize").glob("*.yaml"))
RECIPES = [path for path in RECIPES if path.stem != "bf16"]  # has no stage
FORMATS = {
    "fp8_dynamic": "float-quantized",
    "w8a8_int8": "int-quantized",
    "w8a8_int8_static_foreign": "int-quantized",
    "w4a16_gptq": "pack-quantized",
    "w4a16_awq": "pack-quantized",
    "fp8_static": "float-quantized",
    "fp8_block": "float-quantized",
    "fp8_kv_cache": "float-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_llama.make({"out": str(folder), "seed": 0})
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "calibration.jsonl", conversations())


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_shipped_recipe_does_what_it_says(
    path: Path, model: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = loader.load(str(path), "quantize", QuantizeRecipe)
    changes = {
        "max_size_ratio": recipe.max_size_ratio,
        "calibration_file": str(texts) if recipe.calibration else None,
        "held_out_file": str(texts),
    }
    before = model_files.stored_tensors(model)
    result = compressor.run(job(model, tmp_path, recipe.recipe, **changes))

    assert result["format"] == FORMATS[path.stem]
    assert result["found"] == result["planned"]
    assert len(result["found"]) == 14
    assert all(sample["text"] for sample in result["samples"])
    assert 0.9 < result["perplexity"]["ratio"] < 1.1
    assert 0 < result["mean_error"] < 0.3
    model_files.check_side_files(tmp_path, model, "quantize")
    # Nothing but the planned layers has changed, in value or in dtype.
    after = model_files.stored_tensors(tmp_path)
    rest = {
        name: tensor
        for name, tensor in before.items()
        if name.rpartition(".")[0] not in result["found"]
    }
    assert {name: after[name] for name in rest} == rest


def test_a_recipe_that_does_not_fit_is_refused_before_weights_are_loaded(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 96}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    refused = {
        "0 of 15 linear layers match": simple(scheme="FP8_DYNAMIC", targets=["re:.*experts.*"]),
        "match no module: lm-head": simple(scheme="FP8_DYNAMIC", ignore=["lm-head"]),
        "input width 128, group size 96": simple(config_groups=groups, ignore=["lm_head"]),
        r"embeddings would be quantized: model\.embed_tokens": simple(
            scheme="W8A16", targets=["Embedding"]
        ),
        "no preset": simple(scheme="FP9", ignore=["lm_head"]),
    }
    for message, recipe in refused.items():
        with pytest.raises(StageFailed, match=message):
            compressor.run(job(model, tmp_path / "out", recipe))
    with pytest.raises(StageFailed, match="llmcompressor refuses it"):
        compressor.run(job(model, tmp_path / "out", simple(scheme="FP8_DYNAMIC", nonsense=1)))
    with pytest.raises(StageFailed, match="looks at data and there is none"):
        compressor.run(job(model, tmp_path / "out", simple(scheme="FP8", ignore=["lm_head"])))
    with pytest.raises(StageFailed, match="100 calibration samples were asked for, 8 rows"):
        recipe = simple("GPTQModifier", scheme="W8A8", ignore=["lm_head"])
        few = {"calibration_file": str(texts), "samples": 100}
        compressor.run(job(model, tmp_path / "out", recipe, **few))


def test_layers_that_are_not_in_the_files_fail_the_stage(model: Path, tmp_path: Path) -> None:
    recipe = simple(scheme="FP8_DYNAMIC", ignore=["lm_head"])
    compressor.run(job(model, tmp_path, recipe))
    modules = model_modules.module_list(model)
    planned = quantization_plan.plan_recipe(recipe, modules).planned
    with pytest.raises(StageFailed, match="lm_head"):
        checkpoint_checks.verify_written(model, tmp_path, [*planned, "lm_head"], modules, 0.55)
    with pytest.raises(StageFailed, match="of their size before"):
        checkpoint_checks.verify_written(model, tmp_path, planned, modules, 0.5)
    with pytest.raises(StageFailed, match="0 layers are quantized in the files"):
        checkpoint_checks.verify_written(model, model, planned, modules, 0.55)


def test_modules_are_known_without_weights(model: Path, tmp_path: Path) -> None:
    modules = {module.name: module for module in model_modules.module_list(model)}
    gate = modules["model.layers.0.mlp.gate_proj"]
    assert (gate.out_width, gate.in_width, gate.tied_to) == (256, 128, None)
    assert "Linear" in gate.classes
    assert modules["lm_head"].tied_to is None
    tied = tmp_path / "tied"
    tied.mkdir()
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    modules = {module.name: module for module in model_modules.module_list(tied)}
    assert modules["lm_head"].tied_to == "model.embed_tokens"


def test_group_sizes_are_those_of_the_installed_presets() -> None:
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    grouped = {
        name: args.group_size
        for name, scheme in PRESET_SCHEMES.items()
        for args in ((scheme or {}).get("input_activations"), (scheme or {}).get("weights"))
        if args and args.strategy in ("group", "tensor_group")
    }
    assert grouped == quantization_plan.GROUPED_PRESETS
    assert set(PRESET_SCHEMES) - set(grouped) == quantization_plan.UNGROUPED_PRESETS


def test_pinning_still_fails_without_an_accelerator() -> None:
    """When this fails, `oneshot_run._no_pinning_without_accelerator` can go."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        pytest.skip("an accelerator is here; pinning works")
    cache = IntermediatesCache(offload_device=None)
    cache.append({"x": torch.zeros(2)})
    with pytest.raises(RuntimeError, match="accelerator"):
        cache.pin_memory(0)
    with oneshot_run._no_pinning_without_accelerator():
        cache.pin_memory(0)


def test_calibration_texts_carry_no_doubled_special_tokens(model: Path, texts: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = calibration_texts.read(str(texts), 2, seed=0)
    ids, counted = calibration_texts.encode(rows, tokenizer, max_length=40)
    assert counted == {"rows": 2, "tokens": 80, "cut": 2}
    assert tokenizer.decode(ids[0]).startswith("<|user|>Where is order")
    assert calibration_texts.read(str(texts), 2, seed=1) != rows
    whole, begins = calibration_texts.encode_answer(rows[0], tokenizer, 1000)
    assert tokenizer.decode(whole[begins:]).startswith("Order 47")
    assert tokenizer.decode(whole[:begins]).endswith("<|assistant|>")
    # Of a text that is too long the question goes first: an answer is what is judged.
    part, place = calibration_texts.encode_answer(rows[0], tokenizer, 20)
    assert (len(part), place) == (20, 10)
    assert part[place:] == whole[begins : begins + 10]
    short, place = calibration_texts.encode_answer(rows[0], tokenizer, begins + 3)
    assert short[place:] == whole[begins:][: len(short) - place]


def test_as_many_texts_are_judged_as_have_the_tokens_but_some_at_least() -> None:
    texts = [([1] * 100, 90)] * 10
    assert len(calibration_texts.within(texts, 350, 2)) == 3
    assert len(calibration_texts.within(texts, 350, 8)) == 8
    assert len(calibration_texts.within(texts, 5000, 8)) == 10
    assert calibration_texts.within([], 5, 2) == []
