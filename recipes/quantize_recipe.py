"""kind: quantize."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from recipes.loader import read_yaml
from recipes.quantize_presets import AUTO, PRESETS
from recipes.written import Written


class CalibrationSet(Written):
    """The texts a quantizer looks at."""

    source: Literal["business", "foreign"] = Field(
        default="business",
        description="business: the teacher's answers to calibration prompts; foreign: other texts.",
    )
    samples: int = Field(gt=0, description="Conversations. A part of all is held out of them.")
    max_length: int = Field(default=512, gt=0, description="Tokens of each; the rest is cut.")


class MixedPrecision(Written):
    """Layers that stay in 16 bit because they suffer most; exactly one of the two."""

    keep_worst: int | None = Field(
        default=None, gt=0, description="This many layers of the largest error."
    )
    max_layer_error: float | None = Field(
        default=None, gt=0, description="Every layer of a larger relative error."
    )

    @model_validator(mode="after")
    def _one(self) -> MixedPrecision:
        if (self.keep_worst is None) == (self.max_layer_error is None):
            raise ValueError("give one of `keep_worst` and `max_layer_error`")
        return self


class QuantizeRecipe(Written):
    """kind: quantize. An llmcompressor recipe, unchanged, and what must be true afterwards.

    `preset` and `recipe_file` are other ways to write `recipe`: after reading, `recipe` holds what
    they stand for, so that a stage's key and manifest show it.
    """

    kind: Literal["quantize"]
    description: str
    recipe: dict[str, Any] | None = Field(
        default=None,
        description="llmcompressor stages and modifiers; null leaves the weights as they are.",
    )
    recipe_file: str | None = Field(
        default=None,
        exclude=True,
        description="A file with such a recipe (YAML or JSON), instead of `recipe`.",
    )
    preset: str | None = Field(
        default=None,
        description="Instead of `recipe`, one of: "
        + "; ".join(f"{name} (for {preset.hardware})" for name, preset in PRESETS.items()),
    )
    group_size: Literal["auto"] | int | None = Field(
        default=None,
        description="Of integer weights in groups, in place of what the recipe says. auto: the "
        "largest of 128, 64, 32, 16 that divides every layer.",
    )
    calibration: CalibrationSet | None = None
    compare_calibration: bool = Field(
        default=False,
        description="Quantize a second time, on texts of the other source, and report the "
        "difference. Costs that second run.",
    )
    mixed_precision: MixedPrecision | None = Field(
        default=None, description="Which layers stay in 16 bit. Costs a second run."
    )
    max_size_ratio: float | None = Field(
        default=None, gt=0, le=1, description="Quantized layers' bytes over their bytes before."
    )
    max_perplexity_ratio: float = Field(
        default=1.5,
        gt=1,
        description="Perplexity of the quantized over that of the unquantized student, on answers "
        "that no calibration saw. Wide on purpose: it finds a checkpoint that broke within a "
        "minute; how much loss is bearable, the gates decide on the evaluation.",
    )

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, written: Any) -> Any:
        """Fill in what `preset`, `recipe_file` and `group_size` stand for."""
        if not isinstance(written, dict):
            return written
        content, name, file = dict(written), written.get("preset"), written.get("recipe_file")
        if not any(key in content for key in ("recipe", "preset", "recipe_file")):
            raise ValueError("give `recipe` (null leaves the weights), `recipe_file` or `preset`")
        if name is not None and file is not None:
            raise ValueError("give one of `preset` and `recipe_file`")
        found = None
        if isinstance(name, str):
            if name not in PRESETS:
                raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
            preset = PRESETS[name]
            found = preset.recipe
            content.setdefault("max_size_ratio", preset.max_size_ratio)
            if preset.calibrated:
                content.setdefault("calibration", {"samples": 128})
        elif isinstance(file, str):
            found = read_yaml(Path(file).expanduser())
        recipe = content.get("recipe") if found is None else found
        if content.get("group_size") is not None and isinstance(recipe, dict):
            recipe = _with_group_size(recipe, content["group_size"])
        if found is not None and content.get("recipe") not in (None, recipe):
            raise ValueError("gives `recipe` beside `preset` or `recipe_file`: give one of them")
        return {**content, "recipe": recipe}

    @model_validator(mode="after")
    def _complete(self) -> QuantizeRecipe:
        if self.recipe is None and (self.mixed_precision or self.compare_calibration):
            raise ValueError("nothing is quantized: `mixed_precision` and the like have no meaning")
        if self.recipe is not None and self.max_size_ratio is None:
            raise ValueError("`max_size_ratio` is needed where something is quantized")
        if self.compare_calibration and self.calibration is None:
            raise ValueError("`compare_calibration` needs `calibration`")
        return self


def _with_group_size(recipe: dict[str, Any], size: Any) -> dict[str, Any]:
    """`recipe` with `size` as the group size of every group of integer weights.

    A scheme's name (`W4A16`) carries its own size and is written out. Raises `ValueError` where
    nothing has such a size: the groups of NVFP4 and MXFP4 are fixed by their formats.
    """
    if size != AUTO and (not isinstance(size, int) or size < 1):
        raise ValueError("`group_size` is `auto` or a number of columns")
    changed, places = deepcopy(recipe), 0
    for arguments in _mappings(*_mappings(*_mappings(changed))):
        match = re.fullmatch(r"W([2-8])A16(_ASYM)?", str(arguments.get("scheme")).upper())
        if match:
            del arguments["scheme"]
            weights: dict[str, Any] = {"num_bits": int(match[1]), "type": "int"}
            weights |= {"strategy": "group", "group_size": size, "symmetric": not match[2]}
            targets = arguments.pop("targets", ["Linear"])
            targets = [targets] if isinstance(targets, str) else targets
            arguments["config_groups"] = {"group_0": {"targets": targets, "weights": weights}}
            places += 1
            continue
        for group in _mappings(*_mappings({"": arguments.get("config_groups")})):
            written = group.get("weights")
            if not isinstance(written, dict) or written.get("type", "int") != "int":
                continue
            if written.get("group_size"):
                written["group_size"] = size
                places += 1
    if not places:
        raise ValueError("`group_size` is given, and no modifier has integer weights in groups")
    return changed


def _mappings(*parents: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The values of these mappings that are mappings themselves."""
    return [one for parent in parents for one in parent.values() if isinstance(one, dict)]
