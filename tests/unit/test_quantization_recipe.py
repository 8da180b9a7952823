"""What each modifier of llmcompressor is taken for, alone and in company."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.engines import quantization_recipe as reading
from tasks.engines.quantization_plan import Module, plan_recipe, resolve

ROUNDING = {"QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def recipe(**modifiers: Any) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": modifiers}}


@pytest.mark.parametrize(
    "accepted",
    [
        recipe(**ROUNDING),
        recipe(SmoothQuantModifier={"smoothing_strength": 0.8}, **ROUNDING),
        recipe(LogarithmicEqualizationModifier={}, **ROUNDING),
        recipe(AWQModifier={}, **ROUNDING),
        recipe(SpinQuantModifier={"rotations": ["r1", "R2"]}, **ROUNDING),
        recipe(SparseGPTModifier={"sparsity": 0.5}, **ROUNDING),
        recipe(WandaPruningModifier={"sparsity": 0.5}, **ROUNDING),
        recipe(AutoRoundModifier={"scheme": "W4A16", "ignore": ["lm_head"]}),
        recipe(QuantizationModifier={"kv_cache_scheme": KV_CACHE}),
        {"args": {"x": 1}, **recipe(**ROUNDING)},
        {"a_stage": {"run_type": "oneshot", "a_modifiers": ROUNDING}},
        {
            "prune_stage": {"prune_modifiers": {"SparseGPTModifier": {"sparsity": 0.5}}},
            "quant_stage": {"quant_modifiers": ROUNDING},
        },
    ],
)
def test_recipes_that_are_accepted(accepted: dict[str, Any]) -> None:
    assert reading.mistakes(accepted) == []


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("rotates activations at run time", recipe(QuIPModifier={}, **ROUNDING)),
        ("with R4 rotates", recipe(SpinQuantModifier={"rotations": ["R1", "R4"]}, **ROUNDING)),
        ("transform_config", recipe(SpinQuantModifier={"transform_config": {"a": 1}}, **ROUNDING)),
        ("not one weight at zero", recipe(MagnitudePruningModifier={}, **ROUNDING)),
        ("does nothing in one shot", recipe(ConstantPruningModifier={}, **ROUNDING)),
        ("removes experts", recipe(REAPPruningModifier={"sparsity": 0.5}, **ROUNDING)),
        ("no modifier 'GPTQModifer'", recipe(GPTQModifer={}, **ROUNDING)),
        ("no modifier quantizes", recipe(SparseGPTModifier={"sparsity": 0.5})),
        ("no modifier quantizes", recipe(GPTQModifier={"targets": ["Linear"]})),
        ("put it before", recipe(**ROUNDING, SmoothQuantModifier={})),
        ("section 'quantize' is skipped", {"quantize": {}, **recipe(**ROUNDING)}),
        ("section a_stage.modifiers is skipped", {"a_stage": {"modifiers": ROUNDING}}),
        ("config_groups is no mapping", recipe(GPTQModifier={"config_groups": [1]})),
        ("g: weights must be", recipe(GPTQModifier={"config_groups": {"g": {"weights": 4}}})),
        ("g: it must be", recipe(GPTQModifier={"config_groups": {"g": "W4A16"}})),
        ("'re:(' is no regular", recipe(GPTQModifier={"scheme": "W8A8", "ignore": ["re:("]})),
        ("scheme is neither a preset's", recipe(GPTQModifier={"scheme": ["W4A16"]})),
        ("scheme is neither a preset's", recipe(GPTQModifier={"scheme": {8: ["Linear"]}})),
        ("no modifier '1'", {"a_stage": {"a_modifiers": {1: {"scheme": "W8A8"}}}}),
        ("AWQModifier has no arguments", recipe(AWQModifier=None, **ROUNDING)),
    ],
)
def test_recipes_that_are_refused(said: str, refused: dict[str, Any]) -> None:
    assert any(said in mistake for mistake in reading.mistakes(refused))
    # Nothing that a person writes ends in an exception.
    layers = [Module("a", ("Linear", "Module"), 64, 64)]
    assert said in str(plan_recipe(refused, layers).problems("recipe"))
    assert reading.needs_data(refused) in (True, False)
    assert resolve(refused, layers)[1] is None


def test_what_looks_at_data() -> None:
    free = [recipe(**ROUNDING), recipe(SpinQuantModifier={}, **ROUNDING)]
    assert not any(map(reading.needs_data, free))
    output = {"weights": {"num_bits": 8}, "output_activations": {"num_bits": 8}}
    looking = [
        recipe(QuantizationModifier={"kv_cache_scheme": KV_CACHE}),
        recipe(QuantizationModifier={"scheme": "W8A8", "weight_observer": "imatrix_mse"}),
        recipe(QuantizationModifier={"config_groups": {"g": output}}),
        recipe(SmoothQuantModifier={}, **ROUNDING),
        recipe(WandaPruningModifier={"sparsity": 0.5}, **ROUNDING),
    ]
    assert all(map(reading.needs_data, looking))


def test_layers_are_added_to_what_quantizing_modifiers_ignore() -> None:
    written = recipe(AWQModifier={"ignore": []}, **ROUNDING)
    changed = reading.with_ignored(written, ["a", "b"])
    arguments = changed["quant_stage"]["quant_modifiers"]
    assert arguments["QuantizationModifier"]["ignore"] == ["lm_head", "a", "b"]
    assert arguments["AWQModifier"]["ignore"] == []
    assert written == recipe(AWQModifier={"ignore": []}, **ROUNDING)
