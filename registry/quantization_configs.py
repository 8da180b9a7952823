"""`quantization_config` of a checkpoint, in the layouts that vLLM 0.32 loads."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch

from registry.config_values import ConfigValues
from registry.weight_formats import FORMATS, Quantization, Scales, WeightFormat

_KNOWN = ("compressed-tensors", "fp8", "awq", "gptq", "mxfp4")
_REMEDY = f"known are {', '.join(_KNOWN)}; plan the unquantized model with --format"


def quantization_of(top: ConfigValues, text: ConfigValues) -> Quantization | None:
    """None for weights that are not quantized. Raises `UserError` for an unknown method."""
    section = top.section("quantization_config") or top.section("compression_config")
    section = section or text.section("quantization_config")
    if section is None:
        return None
    method = section.text("quant_method").lower()
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if method == "fp8":
        return _fp8(section)
    if method in ("awq", "gptq"):
        return _grouped(section, method)
    if method == "mxfp4":
        ignore = (*section.strings("modules_to_not_convert"), "self_attn", "lm_head", "router")
        groups = (((r"re:.*experts.*",), FORMATS["mxfp4"]),)
        return Quantization("mxfp4", groups, ignore)
    raise section.error("quant_method", f"is {method or 'missing'!r}", _REMEDY)


def format_of(quantization: Quantization, names: tuple[str, ...]) -> WeightFormat | None:
    """Of the module that goes by these names; None: it stays in 16 bit."""
    if any(_matches(pattern, names) for pattern in quantization.ignore):
        return None
    for patterns, found in quantization.groups:
        if any(pattern == "Linear" or _matches(pattern, names) for pattern in patterns):
            return found
    return None


def _matches(pattern: str, names: tuple[str, ...]) -> bool:
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    if "*" in pattern:
        return any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*") for name in names)
    # A whole name, its end, or a module that it lies in.
    return any(f".{pattern}." in f".{name}." for name in names)


def _compressed_tensors(section: ConfigValues) -> Quantization:
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        raise section.error("config_groups", "is missing: nothing says how weights lie", _REMEDY)
    found = []
    for name in groups.values:
        group = groups.section(name)
        weights = group.section("weights") if group else None
        if group is None or weights is None:
            raise groups.error(name, "has no `weights`", _REMEDY)
        targets = tuple(group.strings("targets")) or ("Linear",)
        # The older name of all linear modules.
        inputs = group.section("input_activations")
        found.append((targets, _scheme(weights, inputs)))
    kv_dtype = "fp8" if section.has("kv_cache_scheme") else "auto"
    ignore = tuple(section.strings("ignore"))
    for pattern in (*ignore, *(one for targets, _ in found for one in targets)):
        _check_pattern(section, pattern)
    return Quantization("compressed-tensors", tuple(found), ignore, kv_dtype)


def _check_pattern(section: ConfigValues, pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            what = f"has {pattern[:60]!r}, no regular expression: {error}"
            raise section.error("ignore or targets", what, _REMEDY) from None


def _scheme(weights: ConfigValues, inputs: ConfigValues | None) -> WeightFormat:
    bits = weights.number("num_bits", least=2)
    floating = weights.text("type", "int") == "float"
    strategy = weights.text("strategy", "tensor")
    # compressed-tensors writes null for a choice that has no group.
    group = weights.number("group_size", 0, least=-1)
    activation = inputs.number("num_bits", 16, least=2) if inputs else 16
    if bits == 4 and floating:
        base = FORMATS["mxfp4" if group == 32 else "nvfp4"]
        return replace(base, activation_bits=activation)
    if bits not in (4, 8):
        raise weights.error("num_bits", f"is {bits}; known are 4 and 8", _REMEDY)
    base = FORMATS["w4a16"] if bits == 4 else FORMATS["fp8" if floating else "int8"]
    if bits == 8 and activation == 16:
        base = replace(FORMATS["w8a16"], floating=floating)
    base = replace(base, activation_bits=activation)
    if strategy == "group":
        if group < 1:
            raise weights.error("group_size", f"is {group} with strategy `group`", _REMEDY)
        zero = 0 if weights.flag("symmetric", True) else bits
        return replace(base, scales="group", scale_bits=16, group=group, zero_bits=zero)
    if strategy == "block":
        sides = weights.values.get("block_structure")
        if not isinstance(sides, list) or sides != [128, 128]:
            raise weights.error("block_structure", f"is {sides}; known is [128, 128]", _REMEDY)
        return replace(base, name="fp8_block", scales="block", scale_bits=32, group=128)
    if strategy == "tensor":
        static = inputs is not None and inputs.values.get("dynamic") is False
        return replace(base, scales="tensor", matrix_bytes=4 if static else 0)
    if strategy != "channel":
        raise weights.error("strategy", f"is {strategy!r}", _REMEDY)
    return replace(base, scales="channel")


def _fp8(section: ConfigValues) -> Quantization:
    ignore = (*section.strings("ignored_layers"), *section.strings("modules_to_not_convert"))
    sides = section.values.get("weight_block_size")
    if sides is None:
        name = "fp8_static" if section.text("activation_scheme") == "static" else "fp8_dynamic"
        found = replace(FORMATS[name], scales="tensor")
    elif sides == [128, 128]:
        found = FORMATS["fp8_block"]
    else:
        raise section.error("weight_block_size", f"is {sides}; known is [128, 128]", _REMEDY)
    return Quantization("fp8", ((("Linear",), found),), (*ignore, "lm_head"))


def _grouped(section: ConfigValues, method: str) -> Quantization:
    bits = section.number("bits" if section.has("bits") else "w_bit")
    if bits not in (4, 8):
        raise section.error("bits", f"is {bits}; known are 4 and 8", _REMEDY)
    # AutoAWQ's older files spell them q_group_size and w_bit.
    key = "group_size" if "group_size" in section.values else "q_group_size"
    group = section.number(key, least=-1)
    scales: Scales = "channel" if group < 1 else "group"
    found = replace(
        FORMATS[method], weight_bits=bits, zero_bits=bits, scales=scales, group=max(group, 0)
    )
    ignore = (*section.strings("modules_to_not_convert"), "lm_head")
    return Quantization(method, ((("Linear",), found),), ignore)
