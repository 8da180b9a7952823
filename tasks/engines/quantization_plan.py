"""Does an llmcompressor recipe fit a model? Answered from names and widths, before any weight.

A modifier quantizes layers where it carries `scheme` (a preset's name, or presets with their
targets) or `config_groups` (explicit bits and group sizes). A target is a module's full name, a
class name, or `re:` and a regular expression that must match from the start of the name
(`compressed_tensors/utils/match.py`, 0.19). `ignore` is read the same way. The recipe itself is
read in `quantization_recipe.py`.

The same reading is applied to the `quantization_config` of a written checkpoint, so that planned
and written layers can be compared by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import quantization_recipe
from tasks.engines.quantization_recipe import texts

GROUPED_PRESETS = {
    **{f"W{bits}A16": 128 for bits in range(2, 9)},
    **{f"W{bits}A8": 128 for bits in range(2, 8)},
    **{f"W{bits}A4": 128 for bits in range(2, 5)},
    "FP8_BLOCK": 128,
    "W4A16_ASYM": 128,
    "W4AFP8": 128,
    "NVFP4": 16,
    "NVFP4A16": 16,
    "MXFP4": 32,
    "MXFP4A16": 32,
    "MXFP8": 32,
    "MXFP8A16": 32,
}
"""Group size of weights or activations, in input columns (compressed_tensors 0.19; a test
compares). Blocks of FP8_BLOCK's weights may be ragged, its activations' groups of 128 may not: such
a checkpoint is written and then fails in its first forward pass."""

UNGROUPED_PRESETS = frozenset({"W8A8", "INT8", "FP8", "FP8_DYNAMIC", "UNQUANTIZED"})
"""Presets without a width to divide: per channel, per token or per tensor."""

GROUP_SIZES = (128, 64, 32, 16)
"""What engines have kernels for, and `group_size: auto` chooses from, best compression first."""

_NO_DIVISOR = 1 << 40


@dataclass(frozen=True)
class Module:
    """One module of a model: its class and its ancestors' names, and the shape of its weight."""

    name: str
    classes: tuple[str, ...]
    out_width: int | None = None
    in_width: int | None = None
    tied_to: str | None = None
    head: bool = False
    """The output embedding, which turns states into logits."""

    @property
    def router(self) -> bool:
        """A MoE router: it decides which expert sees a token, and a small error flips that.

        Classes such as `Qwen3MoeTopKRouter`, or linear layers named as such (`gate` is one beside
        experts, `shared_expert_gate` weighs the shared one).
        """
        named = self.name.rpartition(".")[2] in ("gate", "router", "shared_expert_gate")
        return named or self.classes[0].endswith("Router")

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
    routers: list[str] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    kv_cache: bool = False
    group_size: int | None = None
    """Chosen for `group_size: auto`; None where the recipe says its own."""
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
        if not self.planned and not self.mistakes and not self.kv_cache:
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
        if self.routers:
            found.append(
                Problem(
                    where,
                    f"MoE routers would be quantized: {', '.join(self.routers)}",
                    "add them to `ignore`",
                )
            )
        if self.embeddings:
            found.append(
                Problem(
                    where,
                    f"embeddings would be quantized: {', '.join(self.embeddings)}; transformers "
                    "5.17 does not load such files",
                    "quantize linear layers only",
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
        fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
        return f"the largest usual one is {fitting[0]}" if fitting else "none of 128, 64, 32, 16"


def plan_recipe(recipe: Mapping[str, Any], modules: Sequence[Module]) -> Plan:
    """What `recipe` would quantize in a model of these modules. Pure; nothing is raised."""
    plan = Plan(linear_layers=sum(1 for module in modules if "Linear" in module.classes))
    plan.mistakes += quantization_recipe.mistakes(recipe)
    plan.kv_cache = quantization_recipe.quantizes_kv_cache(recipe)
    group_of: dict[str, Group] = {}
    for name, args in quantization_recipe.modifiers(recipe):
        if not quantization_recipe.quantizes(args):
            continue
        ignore = texts(args.get("ignore"))
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
        if "Embedding" in module.classes:
            plan.embeddings.append(module.name)
        if module.router:
            plan.routers.append(module.name)
    return plan


def resolve(
    recipe: Mapping[str, Any], modules: Sequence[Module]
) -> tuple[dict[str, Any], int | None]:
    """`recipe` with its words `auto` replaced for this model, and the group size chosen.

    `ignore: auto` becomes the head and the routers, `group_size: auto` the largest of
    `GROUP_SIZES` that divides the input width of every layer of such a group. Raises `StageFailed`
    naming every layer that none of them divides.
    """
    kept = [m.name for m in modules if m.quantizable and (m.head or m.router)]
    resolved = quantization_recipe.with_ignore_resolved(recipe, kept)
    if not quantization_recipe.auto_groups(resolved):
        return resolved, None
    # A size that divides no width: the plan then lists every layer of such a group.
    probe = plan_recipe(quantization_recipe.with_group_size(resolved, _NO_DIVISOR), modules)
    widths = {name: width for name, width, size in probe.not_divisible if size == _NO_DIVISOR}
    for size in GROUP_SIZES:
        if all(width % size == 0 for width in widths.values()):
            return quantization_recipe.with_group_size(resolved, size), size
    smallest = GROUP_SIZES[-1]
    misfits = [f"{name}: {width}" for name, width in widths.items() if width % smallest]
    raise StageFailed(
        Problem(
            "recipe: group_size",
            f"none of {', '.join(map(str, GROUP_SIZES))} divides the input width of "
            f"{', '.join(misfits)}",
            "add these layers to `ignore`",
        )
    )


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


def pruned_layers(recipe: Mapping[str, Any], modules: Sequence[Module]) -> set[str]:
    """Layers that a pruning modifier may change."""
    found: set[str] = set()
    for _, targets, ignore in quantization_recipe.pruned(recipe):
        found |= set(select(modules, [Group(tuple(targets or ["Linear"]), None)], ignore))
    return found


def written_layers(quantization_config: Mapping[str, Any], modules: Sequence[Module]) -> list[str]:
    """Layers that a checkpoint's own `quantization_config` calls quantized, in module order."""
    groups = _config_groups(quantization_config.get("config_groups", {}))
    return list(select(modules, groups, texts(quantization_config.get("ignore"))))


# -- reading a recipe ------------------------------------------------------------------------


def _groups(modifier: str, args: Mapping[str, Any]) -> tuple[list[Group], list[str]]:
    scheme, explicit = args.get("scheme"), args.get("config_groups")
    if scheme and explicit:
        return [], [f"{modifier} has both `scheme` and `config_groups`; only one is possible"]
    if explicit:
        return _config_groups(quantization_recipe.groups_of(args)), []
    presets = quantization_recipe.schemes_of(args) or {}
    unknown = [
        name for name in presets if name.upper() not in {*GROUPED_PRESETS, *UNGROUPED_PRESETS}
    ]
    groups = [
        Group(
            targets=tuple(texts(of)),
            group_size=GROUPED_PRESETS.get(name.upper()),
            weights=name.upper() != "UNQUANTIZED",
        )
        for name, of in presets.items()
    ]
    known = ", ".join(sorted([*GROUPED_PRESETS, *UNGROUPED_PRESETS]))
    return groups, [f"{modifier}: no preset {name!r}; there are {known}" for name in unknown]


def _config_groups(groups: Mapping[str, Any]) -> list[Group]:
    return [
        Group(
            targets=tuple(texts(group.get("targets", ["Linear"]))),
            group_size=math.lcm(*sizes) if (sizes := _sizes(group)) else None,
            weights=bool(group.get("weights")),
        )
        for group in groups.values()
    ]


def _sizes(group: Mapping[str, Any]) -> list[int]:
    """Group sizes of weights and of input activations; either must divide the input width."""
    sizes = []
    for what in ("weights", "input_activations"):
        args = group.get(what) or {}
        size = args.get("group_size")
        grouped = args.get("strategy", "group") in ("group", "tensor_group")
        if grouped and isinstance(size, int) and size > 0:
            sizes.append(size)
    return sizes


def _matches(module: Module, entry: str) -> bool:
    return _matches_name(module.name, entry) or entry in module.classes


def _matches_name(name: str, entry: str) -> bool:
    if not entry.startswith("re:"):
        return entry == name
    try:
        return re.match(entry.removeprefix("re:"), name) is not None
    except re.error:  # one of the recipe's mistakes (`quantization_recipe.py`)
        return False
