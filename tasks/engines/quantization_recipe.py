"""Reading an llmcompressor recipe: its modifiers, what each does to a model, what it needs.

A recipe (llmcompressor's own YAML, as a mapping) is

    <name>_stage:
      <name>_modifiers:
        GPTQModifier: {targets: [Linear], ignore: [lm_head], scheme: W4A16}

All stages run one after the other, as one list of modifiers (`llmcompressor/recipe/recipe.py`,
0.14). A section whose name ends otherwise is skipped by llmcompressor without a word, so it is a
mistake here. Everything in this module is pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

QUANTIZERS = frozenset({"QuantizationModifier", "GPTQModifier", "AutoRoundModifier"})
"""They give layers fewer bits, where they carry `scheme`, `config_groups` or `kv_cache_scheme`."""

RESCALERS = frozenset({"AWQModifier", "SmoothQuantModifier", "LogarithmicEqualizationModifier"})
"""They move scales from one layer, often a norm, into the next: same function, other weights."""

ROTATORS = frozenset({"SpinQuantModifier"})
"""They rotate every weight, embedding and head included, and untie the two."""

PRUNERS = frozenset({"SparseGPTModifier", "WandaPruningModifier"})
"""They set a share of the weights to zero; files get no smaller (compressed-tensors 0.19)."""

REFUSED = {
    "QuIPModifier": "rotates activations at run time, which transformers 5.17 leaves out when it "
    "loads the files: its answers, and so the accuracy measured with it, would be another model's; "
    "use SpinQuantModifier with rotations [R1, R2], which stay in the weights",
    "MagnitudePruningModifier": "prunes during training; llmcompressor 0.14 in one shot leaves not "
    "one weight at zero and reports success; use SparseGPTModifier or WandaPruningModifier",
    "ConstantPruningModifier": "keeps zeros during training and does nothing in one shot; remove "
    "it",
    "REAPPruningModifier": "removes experts, so that the layers are no longer those of the "
    "student; prune first and give the pruned model as the student",
}
"""Modifiers of llmcompressor 0.14 that cannot be judged here, and why."""

KNOWN = QUANTIZERS | RESCALERS | ROTATORS | PRUNERS | set(REFUSED)

AUTO = "auto"


def modifiers(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Modifier names with their arguments, in the order in which they run."""
    for stage_name, stage in recipe.items():
        if not str(stage_name).endswith("_stage") or not isinstance(stage, Mapping):
            continue
        for group_name, group in stage.items():
            if str(group_name).endswith("_modifiers") and isinstance(group, Mapping):
                for name, args in group.items():
                    yield str(name), args if isinstance(args, Mapping) else {}


def mistakes(recipe: Mapping[str, Any]) -> list[str]:
    """What is wrong with a recipe whatever the model; modifiers' own arguments are not looked at,
    llmcompressor refuses those itself."""
    found = [*_skipped(recipe), *_empty(recipe)]
    listed = list(modifiers(recipe))
    for name, args in listed:
        found += _misshapen(name, args)
    if not listed:
        found.append("no modifiers: expected `<name>_stage: {<name>_modifiers: {...}}`")
    for name, args in listed:
        if name in REFUSED:
            found.append(f"{name} {REFUSED[name]}")
        elif name not in KNOWN:
            found.append(
                f"no modifier {name!r}; there are {', '.join(sorted(KNOWN - set(REFUSED)))}"
            )
        online = [str(one) for one in texts(args.get("rotations")) if str(one).upper() > "R2"]
        if name in ROTATORS and (online or args.get("transform_config")):
            found.append(f"{name} with {', '.join(online) or 'transform_config'} {_ONLINE}")
    if listed and not any(quantizes(args) for _, args in listed):
        found.append(
            f"no modifier quantizes ({', '.join(name for name, _ in listed)}): one of them "
            "needs `scheme` or `config_groups`"
        )
    for position, (name, args) in enumerate(listed):
        follows = any(quantizes(later) for _, later in listed[position + 1 :])
        if name == "AWQModifier" and (quantizes(args) or not follows):
            found.append(
                "AWQModifier only rescales: put `scheme` or `config_groups` on a "
                "QuantizationModifier after it"
            )
        elif name in (RESCALERS | ROTATORS | PRUNERS) and not follows:
            found.append(f"{name} stands after the modifier that quantizes: put it before")
    return found


_ONLINE = (
    "rotates activations at run time, which transformers 5.17 leaves out when it loads the files; "
    "use rotations [R1, R2], which stay in the weights"
)


def quantizes(args: Mapping[str, Any]) -> bool:
    """Whether a modifier with these arguments gives layers or the KV cache fewer bits."""
    return bool(args.get("scheme") or args.get("config_groups") or args.get("kv_cache_scheme"))


def quantizes_kv_cache(recipe: Mapping[str, Any]) -> bool:
    return any(args.get("kv_cache_scheme") for _, args in modifiers(recipe))


def rescales(recipe: Mapping[str, Any]) -> bool:
    return any(name in RESCALERS for name, _ in modifiers(recipe))


def rotates(recipe: Mapping[str, Any]) -> bool:
    return any(name in ROTATORS for name, _ in modifiers(recipe))


def pruned(recipe: Mapping[str, Any]) -> list[tuple[float, list[str], list[str]]]:
    """What is set to zero: share, targets and ignored of each pruning modifier."""
    return [
        (float(args.get("sparsity") or 0), texts(args.get("targets")), texts(args.get("ignore")))
        for name, args in modifiers(recipe)
        if name in PRUNERS
    ]


def needs_data(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe looks at calibration data (`requires_calibration_data`, 0.14).

    GPTQ, AWQ and their like do; so does plain rounding with static activation scales, with a
    quantized KV cache, or with an observer that weighs by importance.
    """
    for name, args in modifiers(recipe):
        if name != "QuantizationModifier" and name not in ROTATORS:
            return True
        if args.get("kv_cache_scheme") or "imatrix" in str(args):
            return True
        if any(one.upper() in ("FP8", "NVFP4") for one in schemes_of(args) or {}):
            return True
        for group in groups_of(args).values():
            inputs, outputs = group.get("input_activations"), group.get("output_activations")
            if inputs and inputs.get("dynamic") in (None, False, "local"):
                return True
            if outputs and not outputs.get("dynamic"):
                return True
    return False


def with_ignored(recipe: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """`recipe` with `names` added to the `ignore` of every modifier that quantizes."""
    changed = deepcopy(dict(recipe))
    for _, args in modifiers(changed):
        if quantizes(args):
            args["ignore"] = [*texts(args.get("ignore")), *names]  # type: ignore[index]
    return changed


def with_ignore_resolved(recipe: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """`recipe` with every `ignore: auto` replaced by `names`."""
    changed = deepcopy(dict(recipe))
    for _, args in modifiers(changed):
        if args.get("ignore") == AUTO:
            args["ignore"] = list(names)  # type: ignore[index]
    return changed


def with_group_size(recipe: Mapping[str, Any], size: int) -> dict[str, Any]:
    """`recipe` with every `group_size: auto` replaced by `size`."""
    changed = deepcopy(dict(recipe))
    for group in auto_groups(changed):
        group["weights"]["group_size"] = size
    return changed


def auto_groups(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The config groups whose weights say `group_size: auto`."""
    return [
        group
        for _, args in modifiers(recipe)
        for group in groups_of(args).values()
        if (group.get("weights") or {}).get("group_size") == AUTO
    ]


def groups_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """The config groups of a modifier that are written as such; see `_misshapen` for others."""
    groups = args.get("config_groups")
    found = groups.items() if isinstance(groups, Mapping) else ()
    return {name: group for name, group in found if not _bad_parts(group)}


def schemes_of(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """A modifier's presets with their targets; None where `scheme` is nothing of the kind."""
    scheme = args.get("scheme")
    if isinstance(scheme, str):
        return {scheme: args.get("targets", ["Linear"])}
    if isinstance(scheme, Mapping) and all(isinstance(name, str) for name in scheme):
        return dict(scheme)
    return None


def texts(value: Any) -> list[str]:
    """A text or a list of texts, as a list."""
    if value is None:
        return []
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


_PARTS = ("weights", "input_activations", "output_activations")


def _bad_parts(group: Any) -> list[str]:
    """Parts of a config group that are no mappings; the group itself where it is none."""
    if not isinstance(group, Mapping):
        return ["it"]
    return [part for part in _PARTS if not isinstance(group.get(part) or {}, Mapping)]


def _misshapen(name: str, args: Mapping[str, Any]) -> list[str]:
    """What cannot be read at all: groups that are no mappings, patterns that are none."""
    groups, scheme = args.get("config_groups"), args.get("scheme")
    found = []
    if scheme is not None and schemes_of(args) is None:
        found.append(
            f"{name}.scheme is neither a preset's name nor a mapping of names to targets: "
            f"{scheme!r}"
        )
    if groups is not None and not isinstance(groups, Mapping):
        found.append(f"{name}.config_groups is no mapping of groups: {groups!r}")
    for group_name, group in (groups if isinstance(groups, Mapping) else {}).items():
        found += [
            f"{name}.config_groups.{group_name}: {part} must be a mapping"
            for part in _bad_parts(group)
        ]
    entries = [*texts(args.get("ignore")), *texts(args.get("targets"))]
    for group in groups_of(args).values():
        entries += texts(group.get("targets"))
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            found.append(f"{name}: {entry!r} is no regular expression: {error}")
    return found


def _skipped(recipe: Mapping[str, Any]) -> list[str]:
    """Sections that llmcompressor would pass over although they hold something."""
    found = []
    for stage_name, stage in recipe.items():
        if not isinstance(stage, Mapping) or stage_name in ("args", "metadata"):
            continue
        if not str(stage_name).endswith("_stage"):
            found.append(f"section {stage_name!r} is skipped: its name must end with `_stage`")
            continue
        found += [
            f"section {stage_name}.{name} is skipped: its name must end with `_modifiers`"
            for name, group in stage.items()
            if isinstance(group, Mapping) and not str(name).endswith("_modifiers")
        ]
    return found


def _empty(recipe: Mapping[str, Any]) -> list[str]:
    """Modifiers without a mapping of arguments, on which llmcompressor ends with an error."""
    return [
        f"{name} has no arguments: write `{name}: {{}}`"
        for stage in recipe.values()
        if isinstance(stage, Mapping)
        for group_name, group in stage.items()
        if str(group_name).endswith("_modifiers") and isinstance(group, Mapping)
        for name, args in group.items()
        if not isinstance(args, Mapping)
    ]
