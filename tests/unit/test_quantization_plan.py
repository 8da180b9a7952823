"""Recipes against a two-layer model of SmolLM2's widths (576, 1536), its head tied."""

from __future__ import annotations

from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines.quantization_plan import Module, plan_recipe, resolve, written_layers
from tasks.engines.quantization_recipe import needs_data

SHAPES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}
LINEAR = ("Linear", "Module")
MODULES = [
    *(
        Module(f"model.layers.{layer}.{name}", LINEAR, out_width, in_width)
        for layer in range(2)
        for name, (out_width, in_width) in SHAPES.items()
    ),
    Module("lm_head", LINEAR, 49152, 576, tied_to="model.embed_tokens", head=True),
]
NARROW = [module.name for module in MODULES[:14] if "down_proj" not in module.name]


def recipe(modifier: str = "QuantizationModifier", **args: Any) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": {modifier: args}}}


def grouped(size: int, **args: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return recipe("GPTQModifier", config_groups=groups, ignore=["lm_head"], **args)


def test_recipes_that_fit_plan_every_layer_but_the_head() -> None:
    fp8 = recipe(scheme="FP8", targets=["Linear"], ignore=["lm_head"])
    for fitting in (fp8, grouped(64)):
        plan = plan_recipe(fitting, MODULES)
        assert len(plan.planned) == 14
        assert plan.problems("r") == []
        plan.check("r")


def test_zero_layers_is_never_a_success() -> None:
    experts = recipe(scheme="FP8", targets=[r"re:.*mlp\.experts\..*"], ignore=["lm_head"])
    plan = plan_recipe(experts, MODULES)
    assert plan.planned == []
    with pytest.raises(StageFailed, match="0 of 15 linear layers match"):
        plan.check("experts_only")


@pytest.mark.parametrize(
    "written",
    [
        grouped(128),
        recipe("GPTQModifier", scheme="W4A16", targets=["Linear"], ignore=["lm_head"]),
        recipe("GPTQModifier", scheme={"w4a16": "Linear"}, ignore=["lm_head"]),
    ],
    ids=["explicit", "preset", "preset by mapping"],
)
def test_every_layer_that_the_group_size_does_not_divide_is_named(written: dict[str, Any]) -> None:
    plan = plan_recipe(written, MODULES)
    assert len(plan.planned) == 14
    assert plan.not_divisible == [(name, 576, 128) for name in NARROW]
    with pytest.raises(StageFailed) as refusal:
        plan.check("w4a16_g128")
    text = str(refusal.value)
    assert all(f"{name}: input width 576, group size 128" in text for name in NARROW)
    assert "down_proj" not in text
    assert "the largest usual one is 64" in text


def test_a_misspelt_ignore_is_refused_and_would_have_quantized_the_tied_head() -> None:
    plan = plan_recipe(recipe(scheme="FP8", targets=["Linear"], ignore=["lm-head"]), MODULES)
    assert len(plan.planned) == 15
    assert plan.unmatched_ignore == ["lm-head"]
    assert plan.not_divisible == []
    with pytest.raises(StageFailed) as refusal:
        plan.check("ignore_typo")
    assert len(refusal.value.problems) == 2
    assert "model.embed_tokens" in str(refusal.value)


def test_patterns_match_from_the_start_of_the_name_and_go_before_classes() -> None:
    plan = plan_recipe(recipe(scheme="FP8", targets=[r"re:layers\.0"], ignore=[]), MODULES)
    assert plan.planned == []
    weights = {"num_bits": 4, "strategy": "group", "group_size": 128}
    groups = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "down": {"targets": [r"re:.*down_proj$"], "weights": weights},
    }
    plan = plan_recipe(recipe(config_groups=groups, ignore=["lm_head"]), MODULES)
    assert (len(plan.planned), plan.not_divisible) == (14, [])


def test_awq_alone_does_not_quantize() -> None:
    alone = plan_recipe(recipe("AWQModifier"), MODULES)
    assert "AWQModifier only rescales" in "\n".join(alone.mistakes)
    carrying = plan_recipe(recipe("AWQModifier", scheme="W8A8", ignore=["lm_head"]), MODULES)
    assert "AWQModifier only rescales" in "\n".join(carrying.mistakes)
    both = {
        "awq_stage": {
            "awq_modifiers": {
                "AWQModifier": {"duo_scaling": "both"},
                "QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head"]},
            }
        }
    }
    assert plan_recipe(both, MODULES).problems("r") == []


def test_recipes_that_no_model_fits() -> None:
    assert plan_recipe({"modifiers": {}}, MODULES).mistakes
    assert "no preset" in plan_recipe(recipe(scheme="W9A9"), MODULES).mistakes[0]
    twice = recipe(scheme="FP8", config_groups={"g": {"targets": ["Linear"]}})
    assert "only one" in plan_recipe(twice, MODULES).mistakes[0]
    unquantized = recipe(scheme="UNQUANTIZED", ignore=["lm_head"])
    assert plan_recipe(unquantized, MODULES).planned == []


def test_layers_of_a_written_config_are_read_by_the_same_rules() -> None:
    config = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
        "ignore": ["lm_head", "model.layers.1.mlp.down_proj"],
    }
    assert written_layers(config, MODULES) == [module.name for module in MODULES[:13]]
    assert written_layers({}, MODULES) == []


def test_which_recipes_look_at_data() -> None:
    assert not needs_data(recipe(scheme="FP8_DYNAMIC"))
    assert not needs_data(recipe(scheme={"W8A8": ["Linear"]}))
    assert needs_data(recipe(scheme="FP8"))
    assert needs_data(recipe("GPTQModifier", scheme="W8A8"))
    static = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "dynamic": False}}
    assert needs_data(recipe(config_groups={"g": static}))


def automatic(modifier: str = "GPTQModifier", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": "auto"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return recipe(modifier, config_groups=groups, **{"ignore": "auto", **more})


def test_the_largest_group_size_that_divides_every_layer_is_chosen() -> None:
    resolved, size = resolve(automatic(), MODULES)
    assert size == 64  # 576 = 4.5 x 128 = 9 x 64
    assert resolved == grouped(64)
    assert plan_recipe(resolved, MODULES).problems("r") == []
    wide = [Module("down", LINEAR, 576, 1536)]
    assert resolve(automatic(ignore=[]), wide)[1] == 128
    narrow = [*wide, Module("odd", LINEAR, 576, 48)]
    assert resolve(automatic(ignore=[]), narrow)[1] == 16
    untouched = grouped(128)
    assert resolve(untouched, MODULES) == (untouched, None)


def test_a_layer_that_no_group_size_divides_is_named() -> None:
    odd = [*MODULES, Module("odd", LINEAR, 576, 100), Module("odder", LINEAR, 8, 24)]
    with pytest.raises(StageFailed, match=r"none of 128, 64, 32, 16 .* of odd: 100, odder: 24"):
        resolve(automatic(), odd)
    resolved, size = resolve(automatic(ignore=["lm_head", "odd", "odder"]), odd)
    assert (size, plan_recipe(resolved, odd).problems("r")) == (64, [])


def test_groups_of_activations_must_divide_too() -> None:
    plan = plan_recipe(recipe(scheme="FP8_BLOCK", ignore=["lm_head"]), MODULES)
    assert plan.not_divisible == [(name, 576, 128) for name in NARROW]
    inputs = {"num_bits": 8, "strategy": "group", "group_size": 48, "dynamic": True}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    both = {"g": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    plan = plan_recipe(recipe(config_groups=both, ignore=["lm_head"]), MODULES)
    assert plan.not_divisible == []  # 576 = 6 x 96, the least that 32 and 48 divide


EXPERTS = [
    Module("model.layers.0.mlp.gate", LINEAR, 8, 576),
    Module("model.layers.0.mlp.shared_expert_gate", LINEAR, 1, 576),
    Module("model.layers.0.mlp.router", ("Qwen3MoeTopKRouter", "Module")),
    Module("model.layers.0.mlp.experts.0.gate_proj", LINEAR, 64, 576),
]


def test_moe_routers_are_never_quantized() -> None:
    refused = plan_recipe(recipe(scheme="FP8", ignore=["lm_head"]), [*MODULES, *EXPERTS])
    assert refused.routers == ["model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"]
    assert "MoE routers would be quantized" in str(refused.problems("r")[0])
    resolved, _ = resolve(recipe(scheme="FP8", ignore="auto"), [*MODULES, *EXPERTS])
    plan = plan_recipe(resolved, [*MODULES, *EXPERTS])
    assert plan.problems("r") == []
    assert len(plan.planned) == 15
    assert plan.planned[-1] == "model.layers.0.mlp.experts.0.gate_proj"
