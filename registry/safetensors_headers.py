"""The headers of safetensors files: names, dtypes, shapes and places of tensors, never their data.

The format: 8 bytes little-endian length of a JSON header, the header, the data without gaps
(https://huggingface.co/docs/safetensors). A 70B checkpoint takes a moment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.errors import Problem, UserError

MAX_HEADER = 100 << 20
"""Bytes; the format's own limit (https://huggingface.co/docs/safetensors)."""

WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
"""Bytes of one value by dtype, as the format spells it; smaller ones are not counted."""

_SAVE_AGAIN = "copy it again from where it came, or save it with `save_pretrained`"

Header = Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `file`, its first byte and its number of bytes. `dtype` as written.

    Two are equal where kind and size are: the place does not count.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path = field(compare=False)
    start: int = field(compare=False)
    size: int


def tensors(folder: Path, files: Sequence[Path] | None = None) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files by name; empty where it has no such file.

    `files`: those alone.

    Raises `UserError` naming the file for one that cannot be read.
    """
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")) if files is None else files:
        header = read_header(file)
        if isinstance(header, Problem):
            what = f"cannot be read as safetensors: {header.what}"
            raise UserError.at(header.where, what, header.remedy)
        # Data begins behind the header, and ends with the file.
        data = file.stat().st_size - max((e["data_offsets"][1] for e in header.values()), default=0)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            found[name] = Tensor(
                entry["dtype"], tuple(entry["shape"]), file, data + start, end - start
            )
    return found


def read_header(path: Path) -> Header | Problem:
    """Tensors of a safetensors file by name, or what is wrong with the file.

    8 bytes little-endian length of a JSON header, the header, the data without gaps.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            first = handle.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > size - 8:
                what = f"is {size} bytes long, and its header alone would have {length}"
                return Problem(str(path), f"is cut, or no safetensors file: it {what}", _SAVE_AGAIN)
            if length > MAX_HEADER:
                return Problem(str(path), f"has a header of {length} bytes", _SAVE_AGAIN)
            header = json.loads(handle.read(length), object_pairs_hook=_without_doubles)
    except OSError as error:
        return Problem(str(path), f"cannot be read ({error.strerror})", "make it readable")
    except (ValueError, RecursionError):
        what = "its header is no JSON, or has a name twice: no safetensors file"
        return Problem(str(path), what, _SAVE_AGAIN)
    if not isinstance(header, dict):
        return Problem(str(path), "its header is no JSON object", _SAVE_AGAIN)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(one, str) for one in notes.values()):
        return Problem(f"{path}: __metadata__", "is no mapping of texts to texts", _SAVE_AGAIN)
    for name, entry in header.items():
        found = _entry_problem(entry) if _is_text(name) else "is no name: it holds half a character"
        if found:
            return Problem(f"{path}: {name if _is_text(name) else ascii(name)}", found, _SAVE_AGAIN)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        if first != end:
            what = f"begins at byte {first} of the data, the one before it ends at {end}"
            return Problem(f"{path}: {name}", what, _SAVE_AGAIN)
        end = last
    if 8 + length + end != size:
        what = f"is {size} bytes long, its header asks for {8 + length + end}"
        return Problem(str(path), f"is cut or has something added: it {what}", _SAVE_AGAIN)
    return header


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # The last of two would win here, and nobody knows which in an engine.
        raise ValueError("a name stands there twice")
    return found


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _entry_problem(entry: Any) -> str:
    try:
        dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = [*shape, first, end]
    except (TypeError, KeyError, ValueError):
        return f"is no tensor's entry: {str(entry)[:80]}"
    counts = all(type(one) is int and one >= 0 for one in whole) and first <= end
    if not isinstance(dtype, str) or not counts:
        return f"is no tensor's entry: {str(entry)[:80]}"
    wanted = math.prod(shape) * WIDTHS[dtype] if dtype in WIDTHS else end - first
    if end - first != wanted:
        return f"{dtype} of shape {shape} takes {wanted} bytes, the file has {end - first}"
    return ""
