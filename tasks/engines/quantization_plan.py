"""Does an llmcompressor recipe fit a model? Answered from names and widths, before any weight.

A recipe (llmcompressor's own YAML, as a mapping) is

    <name>_stage:
      <name>_modifiers:
        GPTQModifier: {targets: [Linear], ignore: [lm_head], scheme: W4A16}

A modifier quantizes where it carries `scheme` (a preset's name, or presets with their targets) or
`config_groups` (explicit bits and group sizes). A target is a module's full name, a class name,
or `re:` and a regular expression that must match from the start of the name
(`compressed_tensors/utils/match.py`, 0.19). `ignore` is read the same way.

The same reading is applied to the `quantization_config` of a written checkpoint, so that planned
and written layers can be compared by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.errors import Problem, StageFailed

GROUPED_PRESETS = {
    **{f"W{bits}A16": 128 for bits in range(2, 9)},
    **{f"W{bits}A8": 128 for bits in range(2, 8)},
    **{f"W{bits}A4": 128 for bits in range(2, 5)},
    "W4A16_ASYM": 128,
    "W4AFP8": 128,
    "NVFP4": 16,
    "NVFP4A16": 16,
    "MXFP4": 32,
    "MXFP4A16": 32,
    "MXFP8": 32,
    "MXFP8A16": 32,
}
"""Group size of the weights, in input columns (compressed_tensors 0.19; a test compares)."""

UNGROUPED_PRESETS = frozenset({"W8A8", "INT8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "UNQUANTIZED"})
"""Presets without a width to divide: per channel, per tensor, or blocks that may be ragged."""


@dataclass(frozen=True)
class Module:
    """One module of a model: its class and its ancestors' names, and the shape of its weight."""

    name: str
    classes: tuple[str, ...]
    out_width: int | None = None
    in_width: int | None = None
    tied_to: str | None = None

    @property
    def quantizable(self) -> bool:
        """Only layers with a weight matrix can be quantized."""
        return self.in_width is not None


@dataclass(frozen=True)
class Group:
    """Targets that share one way of quantizing; `group_size` None where none must divide."""

    targets: tuple[str, ...]
    group_size: int | None
    weights: bool = True


@dataclass
class Plan:
    """What a recipe would do to a model, and everything that speaks against it."""

    planned: list[str] = field(default_factory=list)
    linear_layers: int = 0
    unmatched_ignore: list[str] = field(default_factory=list)
    not_divisible: list[tuple[str, int, int]] = field(default_factory=list)
    """Layer, input width, group size."""
    tied: list[tuple[str, str]] = field(default_factory=list)
    """Layer and the module it shares its weight with."""
    mistakes: list[str] = field(default_factory=list)
    """What is wrong with the recipe whatever the model."""

    def problems(self, where: str) -> list[Problem]:
        """Every reason to refuse, for a person; `where` names the recipe."""
        found = [Problem(where, mistake) for mistake in self.mistakes]
        if self.unmatched_ignore:
            found.append(
                Problem(
                    where,
                    f"`ignore` entries match no module: {', '.join(self.unmatched_ignore)}",
                    "correct the name, or remove the entry",
                )
            )
        if not self.planned and not self.mistakes:
            found.append(
                Problem(
                    where,
                    f"0 of {self.linear_layers} linear layers match",
                    "check `targets` against the model's module names",
                )
            )
        if self.not_divisible:
            lines = "\n".join(
                f"    {name}: input width {width}, group size {size}"
                for name, width, size in self.not_divisible
            )
            found.append(
                Problem(
                    where,
                    "the group size does not divide the input width of "
                    f"{len(self.not_divisible)} layers:\n{lines}",
                    f"use a group size that divides all of them ({self._dividing()}), or ignore "
                    "these layers",
                )
            )
        for name, other in self.tied:
            found.append(
                Problem(
                    where,
                    f"{name} shares its weight with {other}; quantizing it would quantize both",
                    f"add {name} to `ignore`",
                )
            )
        return found

    def check(self, where: str) -> None:
        """Raise `StageFailed` with every problem at once, if there is any."""
        if problems := self.problems(where):
            raise StageFailed(problems)

    def _dividing(self) -> str:
        widths = {width for _, width, _ in self.not_divisible}
        fitting = [size for size in (128, 64, 32, 16) if all(width % size == 0 for width in widths)]
        return f"the largest usual one is {fitting[0]}" if fitting else "none of 128, 64, 32, 16"


def plan_recipe(recipe: Mapping[str, Any], modules: Sequence[Module]) -> Plan:
    """What `recipe` would quantize in a model of these modules. Pure; nothing is raised."""
    plan = Plan(linear_layers=sum(1 for module in modules if "Linear" in module.classes))
    modifiers = list(_modifiers(recipe))
    if not modifiers:
        plan.mistakes.append("no modifiers: expected `<name>_stage: {<name>_modifiers: {...}}`")
    quantizing = [name for name, args in modifiers if _quantizes(args)]
    if modifiers and not quantizing:
        plan.mistakes.append(
            f"no modifier quantizes ({', '.join(name for name, _ in modifiers)}): one of them "
            "needs `scheme` or `config_groups`"
        )
    group_of: dict[str, Group] = {}
    for position, (name, args) in enumerate(modifiers):
        follows = any(_quantizes(later) for _, later in modifiers[position + 1 :])
        if name == "AWQModifier" and (_quantizes(args) or not follows):
            plan.mistakes.append(
                "AWQModifier only rescales: put `scheme` or `config_groups` on a "
                "QuantizationModifier after it"
            )
        if not _quantizes(args):
            continue
        ignore = _texts(args.get("ignore"))
        plan.unmatched_ignore += [
            entry for entry in ignore if not any(_matches(module, entry) for module in modules)
        ]
        groups, mistakes = _groups(name, args)
        plan.mistakes += mistakes
        group_of |= select(modules, groups, ignore)  # a later modifier replaces an earlier one
    for module in modules:
        group = group_of.get(module.name)
        if group is None:
            continue
        plan.planned.append(module.name)
        if group.group_size and module.in_width and module.in_width % group.group_size:
            plan.not_divisible.append((module.name, module.in_width, group.group_size))
        if module.tied_to:
            plan.tied.append((module.name, module.tied_to))
    return plan


def select(
    modules: Iterable[Module], groups: Sequence[Group], ignore: Sequence[str]
) -> dict[str, Group]:
    """Which group each layer falls into. Full names and patterns go before class names."""
    chosen: dict[str, Group] = {}
    for module in modules:
        if not module.quantizable or any(_matches(module, entry) for entry in ignore):
            continue
        by_name = (g for g in groups for t in g.targets if _matches_name(module.name, t))
        by_class = (g for g in groups for t in g.targets if t in module.classes)
        group = next(by_name, None) or next(by_class, None)
        if group is not None and group.weights:
            chosen[module.name] = group
    return chosen


def written_layers(quantization_config: Mapping[str, Any], modules: Sequence[Module]) -> list[str]:
    """Layers that a checkpoint's own `quantization_config` calls quantized, in module order."""
    groups = _config_groups(quantization_config.get("config_groups", {}))
    return list(select(modules, groups, _texts(quantization_config.get("ignore"))))


def needs_data(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe looks at calibration data.

    GPTQ, AWQ and everything else beyond plain rounding does; so does plain rounding with static
    activation scales.
    """
    for name, args in _modifiers(recipe):
        if name != "QuantizationModifier":
            return True
        schemes = [str(args.get("scheme"))] if isinstance(args.get("scheme"), str) else []
        schemes += list(args["scheme"]) if isinstance(args.get("scheme"), Mapping) else []
        if any(scheme.upper() in ("FP8", "NVFP4") for scheme in schemes):
            return True
        for group in (args.get("config_groups") or {}).values():
            inputs = group.get("input_activations")
            if inputs and inputs.get("dynamic") in (None, False, "local"):
                return True
    return False


# -- reading a recipe ------------------------------------------------------------------------


def _modifiers(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Modifier names with their arguments, in order (`llmcompressor/recipe/recipe.py`)."""
    for stage_name, stage in recipe.items():
        if not stage_name.endswith("_stage") or not isinstance(stage, Mapping):
            continue
        for group_name, group in stage.items():
            if group_name.endswith("_modifiers") and isinstance(group, Mapping):
                for name, args in group.items():
                    yield name, args or {}


def _quantizes(args: Mapping[str, Any]) -> bool:
    return bool(args.get("scheme") or args.get("config_groups"))


def _groups(modifier: str, args: Mapping[str, Any]) -> tuple[list[Group], list[str]]:
    scheme, explicit = args.get("scheme"), args.get("config_groups")
    if scheme and explicit:
        return [], [f"{modifier} has both `scheme` and `config_groups`; only one is possible"]
    if explicit:
        return _config_groups(explicit), []
    targets = args.get("targets", ["Linear"])
    presets = {scheme: targets} if isinstance(scheme, str) else dict(scheme or {})
    unknown = [
        name for name in presets if name.upper() not in {*GROUPED_PRESETS, *UNGROUPED_PRESETS}
    ]
    groups = [
        Group(
            targets=tuple(_texts(of)),
            group_size=GROUPED_PRESETS.get(name.upper()),
            weights=name.upper() != "UNQUANTIZED",
        )
        for name, of in presets.items()
    ]
    known = ", ".join(sorted([*GROUPED_PRESETS, *UNGROUPED_PRESETS]))
    return groups, [f"{modifier}: no preset {name!r}; there are {known}" for name in unknown]


def _config_groups(groups: Mapping[str, Any]) -> list[Group]:
    read = []
    for group in groups.values():
        weights = group.get("weights") or {}
        size = weights.get("group_size")
        grouped = weights.get("strategy", "group") in ("group", "tensor_group")
        read.append(
            Group(
                targets=tuple(_texts(group.get("targets", ["Linear"]))),
                group_size=size if size and size > 0 and grouped else None,
                weights=bool(weights),
            )
        )
    return read


def _texts(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _matches(module: Module, entry: str) -> bool:
    return _matches_name(module.name, entry) or entry in module.classes


def _matches_name(name: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return entry == name
