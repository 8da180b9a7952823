"""How weights lie in memory, by format, and how many bytes a matrix takes in each.

Bytes are those of the engine: vLLM 0.32 keeps scales per channel, per tensor and per block in
float32 (`ChannelQuantScaleParameter`, `BlockQuantScaleParameter`) and group scales in the model's
own 16 bit, whatever the checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

ENGINE = "0.32"
"""The vLLM that all of this was read from."""

GROUPS = (128, 64, 32, 16)
"""What `group_size: auto` of a quantize recipe chooses among: the largest that divides."""

FLOAT32 = 4

Scales = Literal["none", "tensor", "channel", "group", "block"]


@dataclass(frozen=True)
class WeightFormat:
    """A format of linear weights. Everything else of a model stays in 16 bit.

    `activation_bits` and `floating` say what is multiplied, which decides the kernel.
    `scale_bits` is the width of one scale, `group` the columns (for `block` rows too) that share
    one, `zero_bits` the width of a zero point beside it, `matrix_bytes` what each matrix has once.
    `kv_dtype`: of the KV cache, where it comes along.
    """

    name: str
    weight_bits: int
    activation_bits: int = 16
    floating: bool = False
    scales: Scales = "none"
    scale_bits: int = 32
    group: int = 0
    zero_bits: int = 0
    matrix_bytes: int = 0
    kv_dtype: str = "auto"
    fixed: bool = False
    """Whether `group` was asked for, whatever the matrices' widths are."""

    def matrix(self, rows: int, columns: int) -> int:
        """Bytes of one matrix, its scales and zero points included."""
        values = ceil(rows * columns * self.weight_bits / 8)
        if self.scales == "none":
            return values
        if self.scales == "tensor":
            scales = 1
        elif self.scales == "channel":
            scales = rows
        elif self.scales == "group":
            scales = rows * ceil(columns / self.group)
        else:
            scales = ceil(rows / self.group) * ceil(columns / self.group)
        return values + ceil(scales * (self.scale_bits + self.zero_bits) / 8) + self.matrix_bytes

    @property
    def in_groups(self) -> bool:
        """Whether the quantizer chooses how many columns share a scale."""
        return self.scales == "group" and self.weight_bits == 4 and not self.floating

    def fitted(self, columns: Iterable[int]) -> WeightFormat:
        """With the group that `group_size: auto` gives where these are the matrices' widths.

        The smallest where none divides: the quantizer refuses such a model.
        """
        if self.fixed or not self.in_groups:
            return self
        widths = set(columns)
        fits = [size for size in GROUPS if not any(width % size for width in widths)]
        return replace(self, group=min(self.group, fits[0] if fits else GROUPS[-1]))


_INT4 = WeightFormat(
    "w4a16",
    4,
    scales="group",
    scale_bits=16,
    group=128,
    # `weight_shape`, two int64.
    matrix_bytes=16,
)
_FP8 = WeightFormat("fp8_dynamic", 8, activation_bits=8, floating=True, scales="channel")

_ALL = (
    WeightFormat("bf16", 16, floating=True),
    WeightFormat("fp16", 16, floating=True),
    WeightFormat("fp32", 32, activation_bits=32, floating=True),
    _FP8,
    # One scale of the weights and one of the inputs.
    replace(_FP8, name="fp8_static", scales="tensor", matrix_bytes=FLOAT32),
    replace(_FP8, name="fp8_block", scales="block", group=128),
    replace(_FP8, name="fp8_kv_cache", kv_dtype="fp8"),
    WeightFormat("w8a8_int8", 8, activation_bits=8, scales="channel"),
    WeightFormat("w8a16", 8, scales="channel", scale_bits=16, matrix_bytes=16),
    _INT4,
    replace(_INT4, name="w4a16_gptq"),
    replace(_INT4, name="w4a16_awq"),
    # AutoAWQ and AutoGPTQ write zero points. vLLM keeps the former's; of the latter's, which are
    # all alike (`sym`), it keeps none, nor the group of each column.
    replace(_INT4, name="awq", zero_bits=4, matrix_bytes=0),
    replace(_INT4, name="gptq", matrix_bytes=0),
    # A float8 scale for each group of 16, two float32 for the matrix.
    WeightFormat(
        "nvfp4", 4, 4, floating=True, scales="group", scale_bits=8, group=16, matrix_bytes=8
    ),
    # The same with inputs in 16 bit: one scale less of the matrix.
    WeightFormat(
        "nvfp4_a16", 4, floating=True, scales="group", scale_bits=8, group=16, matrix_bytes=4
    ),
    WeightFormat("mxfp4", 4, 4, floating=True, scales="group", scale_bits=8, group=32),
    WeightFormat("mxfp8", 8, 8, floating=True, scales="group", scale_bits=8, group=32),
)

_SYNONYMS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "fp8": "fp8_dynamic",
    "w8a8_fp8": "fp8_dynamic",
    "fp8_w8a8": "fp8_dynamic",
    "int8": "w8a8_int8",
    "w8a8": "w8a8_int8",
    "int4": "w4a16",
    "w4a16_int4": "w4a16",
    "nvfp4a16": "nvfp4_a16",
    "autoawq": "awq",
    "autogptq": "gptq",
}

FORMATS: dict[str, WeightFormat] = {one.name: one for one in _ALL}
FORMATS.update({name: FORMATS[meant] for name, meant in _SYNONYMS.items()})
"""By name: what the project's quantize presets are called, what checkpoints call themselves, and
synonyms."""


def format_named(name: str) -> WeightFormat | None:
    """A format by its name; of 4-bit integers also with the columns of a group: `w4a16_g64`.

    None for a name that is not known.
    """
    name = name.lower()
    if (known := FORMATS.get(name)) is not None:
        return known
    base, _, size = name.rpartition("_g")
    known = FORMATS.get(base)
    if known is None or not known.in_groups or size not in {str(one) for one in GROUPS}:
        return None
    return replace(known, name=f"{known.name}_g{size}", group=int(size), fixed=True)


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint's own quantization says: the format of each module.

    `groups`: module patterns and the format of what they match, the first that matches counts.
    A pattern is `Linear` (all), `re:` and a regular expression, or (a part of) a name; `ignore`
    holds such patterns too. `oldest`: the compute capability that vLLM asks for before it looks
    for a kernel. `deprecated`: it loads the method only with `--allow-deprecated-quantization`.
    """

    name: str
    groups: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    ignore: tuple[str, ...] = ()
    kv_dtype: str = "auto"
    oldest: tuple[int, int] = (7, 5)
    deprecated: bool = False

    @property
    def format(self) -> WeightFormat:
        """Of the first group, which is nearly all of the model."""
        return self.groups[0][1]
