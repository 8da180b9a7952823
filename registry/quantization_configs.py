"""`quantization_config` of a checkpoint, in the layouts that vLLM 0.32 loads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch

from registry.config_values import ConfigValues
from registry.modelopt_configs import modelopt, mxfp8
from registry.weight_formats import ENGINE, FLOAT32, FORMATS, Quantization, Scales, WeightFormat

_COMPRESSED = "compressed-tensors"
_REMEDY = "plan the unquantized model with --format"

NOT_COUNTED = {
    **dict.fromkeys(
        ("bitsandbytes", "gguf", "aqlm", "eetq", "exl2", "higgs", "hqq", "marlin", "vptq"),
        f"vLLM {ENGINE} does not load it",
    ),
    **dict.fromkeys(
        ("deepseek_v4_fp8", "experts_int8", "fp_quant", "humming", "inc", "moe_wna16", "online",
         "quark", "torchao"),
        f"vLLM {ENGINE} loads it, and what it keeps of it cannot be counted",
    ),
}  # fmt: skip
"""Methods that are known by name alone. tests/integration/test_quantization_methods.py asks vLLM
for all that it loads."""


def quantization_of(top: ConfigValues, text: ConfigValues) -> Quantization | None:
    """None for weights that are not quantized. Raises `UserError` for a method not counted."""
    section = top.section("quantization_config") or top.section("compression_config")
    section = section or text.section("quantization_config")
    if section is None:
        return None
    method = method_of(section)
    read = READERS.get(method)
    if read is None:
        known = ", ".join(sorted(READERS))
        what = f"is {method or 'missing'!r}"
        if method in NOT_COUNTED:
            what += f": {NOT_COUNTED[method]}"
        raise section.error("quant_method", what, f"counted are {known}; {_REMEDY}")
    return read(section)


def method_of(section: ConfigValues) -> str:
    """As vLLM reads it: in small letters, and of ModelOpt's own files from who made them.

    `ModelArchConfigConvertor._normalize_quantization_config`.
    """
    method = section.text("quant_method").lower().replace("compressed_tensors", _COMPRESSED)
    producer = section.section("producer")
    if not method and producer is not None and producer.text("name") == "modelopt":
        return "modelopt"
    return method


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
    return Quantization(_COMPRESSED, tuple(found), ignore, kv_dtype)


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
        nvfp4 = "nvfp4_a16" if activation == 16 else "nvfp4"
        return replace(FORMATS["mxfp4" if group == 32 else nvfp4], activation_bits=activation)
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


def _fbgemm(section: ConfigValues) -> Quantization:
    """A float32 scale for each row; `activation_scale_ub` is a number beside it."""
    ignore = (*section.strings("modules_to_not_convert"), "lm_head")
    found = replace(FORMATS["fp8_dynamic"], matrix_bytes=FLOAT32)
    groups = ((("Linear",), found),)
    return Quantization("fbgemm_fp8", groups, ignore, oldest=(8, 0), deprecated=True)


def _mxfp4(section: ConfigValues) -> Quantization:
    """Of the routed experts alone; every other linear layer stays in 16 bit (`Mxfp4Config`)."""
    groups = (((r"re:.*\.experts\..*",), FORMATS["mxfp4"]),)
    ignore = tuple(section.strings("modules_to_not_convert"))
    return Quantization("mxfp4", groups, ignore, oldest=(8, 0))


def _awq(section: ConfigValues) -> Quantization:
    # AutoAWQ's older files spell them q_group_size and w_bit.
    bits = section.number("bits" if section.has("bits") else "w_bit")
    if bits != 4:
        raise section.error("bits", f"is {bits}; vLLM {ENGINE} loads AWQ in 4", _REMEDY)
    key = "group_size" if "group_size" in section.values else "q_group_size"
    zero = bits if section.flag("zero_point", True) else 0
    found = replace(_in_groups("awq", bits, section.number(key, least=-1)), zero_bits=zero)
    ignore = (*section.strings("modules_to_not_convert"), "lm_head")
    return Quantization("awq", ((("Linear",), found),), ignore)


def _gptq(section: ConfigValues) -> Quantization:
    """`dynamic` has rules for single modules: `-:` leaves them, `+:` (or nothing) changes them."""
    bits, group = _gptq_numbers(section)
    targets = tuple(section.strings("modules_in_block_to_quantize")) or ("Linear",)
    groups = [(targets, _in_groups("gptq", bits, group))]
    ignore = ["lm_head", *section.strings("modules_to_not_convert")]
    for pattern, rule in _rules(section):
        which = f"re:{pattern.removeprefix('-:').removeprefix('+:')}"
        _check_pattern(section, which)
        if pattern.startswith("-:"):
            ignore.append(which)
        else:
            own = _gptq_numbers(
                ConfigValues({**section.values, **rule}, f"{section.where}: dynamic")
            )
            groups.insert(len(groups) - 1, ((which,), _in_groups("gptq", *own)))
    return Quantization("gptq", tuple(groups), tuple(ignore))


def _rules(section: ConfigValues) -> Iterator[tuple[str, Mapping[str, object]]]:
    rules = section.section("dynamic")
    for pattern in rules.values if rules else ():
        rule = rules.section(pattern) if rules else None
        yield pattern, rule.values if rule else {}


def _gptq_numbers(section: ConfigValues) -> tuple[int, int]:
    """Bits and columns of a group. Raises `UserError` for what vLLM refuses (`AutoGPTQConfig`)."""
    bits, group = section.number("bits"), section.number("group_size", least=-1)
    if bits not in (4, 8):
        raise section.error("bits", f"is {bits}; known are 4 and 8", _REMEDY)
    if not section.flag("sym", True):
        raise section.error("sym", f"is false: vLLM {ENGINE} loads symmetric GPTQ only", _REMEDY)
    if section.flag("desc_act", False) and group != -1:
        what = f"is true: vLLM {ENGINE} no longer loads columns in another order"
        raise section.error("desc_act", what, f"quantize it again without; or {_REMEDY}")
    return bits, group


def _in_groups(name: str, bits: int, group: int) -> WeightFormat:
    scales: Scales = "channel" if group < 1 else "group"
    return replace(FORMATS[name], weight_bits=bits, scales=scales, group=max(group, 0))


READERS: Mapping[str, Callable[[ConfigValues], Quantization]] = {
    _COMPRESSED: _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    **dict.fromkeys(("awq", "awq_marlin", "auto_awq"), _awq),
    **dict.fromkeys(("gptq", "gptq_marlin", "auto_gptq"), _gptq),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), _mxfp4),
    "mxfp8": mxfp8,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), modelopt),
}
"""By `quant_method`, as vLLM spells it."""
