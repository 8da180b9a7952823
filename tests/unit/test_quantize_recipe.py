"""Presets, recipe files and group sizes as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes import loader
from recipes.quantize_presets import PRESETS
from recipes.schema import QuantizeRecipe
from registry.errors import UserError


def read(**content: Any) -> QuantizeRecipe:
    written = {"kind": "quantize", "description": "a test", **content}
    return loader.validate(written, "quantize", QuantizeRecipe, source="here.yaml")


def refusal(**content: Any) -> str:
    with pytest.raises(UserError) as refused:
        read(**content)
    return str(refused.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_plain_recipe_that_can_be_read_again(name: str) -> None:
    recipe = read(preset=name)
    assert recipe.recipe == PRESETS[name].recipe
    assert recipe.max_size_ratio == PRESETS[name].max_size_ratio
    assert (recipe.calibration is not None) == PRESETS[name].calibrated
    again = QuantizeRecipe.model_validate(recipe.model_dump())
    assert again == recipe


def test_a_preset_takes_a_group_size_and_limits_of_its_own() -> None:
    recipe = read(preset="w4a16_awq", group_size=32, max_size_ratio=0.3)
    quantizing = recipe.recipe["quant_stage"]["quant_modifiers"]["QuantizationModifier"]  # type: ignore[index]
    assert quantizing["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert recipe.max_size_ratio == 0.3
    assert PRESETS["w4a16_awq"].recipe != recipe.recipe


def test_a_recipe_file_is_read_as_it_is(tmp_path: Path) -> None:
    text = """
        quant_stage:
          quant_modifiers:
            SmoothQuantModifier: {smoothing_strength: 0.8}
            GPTQModifier: {scheme: W8A8, targets: Linear, ignore: [lm_head]}
    """
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    recipe = read(recipe_file=str(file), max_size_ratio=0.55)
    modifiers = recipe.recipe["quant_stage"]["quant_modifiers"]  # type: ignore[index]
    assert list(modifiers) == ["SmoothQuantModifier", "GPTQModifier"]
    assert "recipe_file" not in recipe.model_dump()
    assert QuantizeRecipe.model_validate(recipe.model_dump()).recipe == recipe.recipe
    file.write_text(text + "        x: [")
    assert f"{file}:" in refusal(recipe_file=str(file), max_size_ratio=0.55)
    assert "cannot be read" in refusal(recipe_file=str(tmp_path / "gone.yaml"), max_size_ratio=0.5)


def test_a_scheme_with_a_group_size_is_written_out() -> None:
    args = {"scheme": "W4A16", "targets": "Linear", "ignore": ["lm_head"], "dampening_frac": 0.1}
    written = {"a_stage": {"a_modifiers": {"GPTQModifier": args}}}
    recipe = read(recipe=written, group_size="auto", max_size_ratio=0.4)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": "auto"}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}}
    expected = {"ignore": ["lm_head"], "dampening_frac": 0.1, "config_groups": groups}
    assert recipe.recipe == {"a_stage": {"a_modifiers": {"GPTQModifier": expected}}}
    assert written["a_stage"]["a_modifiers"]["GPTQModifier"] == args


def test_mistakes_are_named() -> None:
    some = {"a_stage": {"a_modifiers": {"GPTQModifier": {"scheme": "W8A8"}}}}
    assert "no preset 'fp9'" in refusal(preset="fp9")
    assert "give `recipe`" in refusal(max_size_ratio=0.5)
    assert "give one of them" in refusal(preset="nvfp4", recipe=some)
    assert "give one of `preset`" in refusal(preset="nvfp4", recipe_file="x.yaml")
    assert "`max_size_ratio` is needed" in refusal(recipe=some)
    assert "no modifier has integer weights" in refusal(
        recipe=some, group_size=64, max_size_ratio=0.6
    )
    assert "no modifier has integer weights" in refusal(preset="nvfp4", group_size=32)
    assert "give one of `keep_worst`" in refusal(preset="nvfp4", mixed_precision={})
    assert "have no meaning" in refusal(recipe=None, mixed_precision={"keep_worst": 1})
    assert "needs `calibration`" in refusal(preset="mxfp4", compare_calibration=True)
    assert "preset: Input should be a valid string" in refusal(preset=["nvfp4"])


@pytest.mark.parametrize("groups", ["auto", [1], {"g": None}, {"g": "W4"}, {"g": {"weights": 4}}])
def test_groups_that_are_none_have_no_size(groups: Any) -> None:
    some = {"a_stage": {"a_modifiers": {"GPTQModifier": {"config_groups": groups}}}}
    said = refusal(recipe=some, group_size="auto", max_size_ratio=0.6)
    assert "no modifier has integer weights in groups" in said
