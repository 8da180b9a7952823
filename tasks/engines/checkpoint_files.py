"""Is a folder a whole model in Hugging Face format? Read from headers, before anything loads it.

A cut file, a missing shard or a table of other size than `config.json` says would otherwise come to
light in an engine, an hour later, as a fault of the machine. Only headers are read: a 70B
checkpoint takes a moment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from registry.errors import Problem
from registry.safetensors_headers import Header, read_header

INDEX = "model.safetensors.index.json"
MAX_JSON = 256 << 20

_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
_SAVE_AGAIN = "copy it again from where it came, or save it with `save_pretrained`"


def checkpoint_problems(folder: Path) -> list[Problem]:
    """All that is wrong with a model folder's config, index and weight files; empty: nothing."""
    odd = [
        Problem(str(path), "is no regular file", "remove it, or put the file itself there")
        for path in sorted(folder.rglob("*"))
        if not path.is_file() and not path.is_dir()
    ]
    if odd:
        # A pipe would be waited for without end.
        return odd
    config = _object(folder / "config.json")
    if isinstance(config, Problem):
        return [config]
    problems = list(_config_problems(folder / "config.json", config))
    headers: dict[Path, Header] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        if isinstance(header, Problem):
            problems.append(header)
        else:
            headers[path] = header
    problems += _index_problems(folder, headers)
    if not problems:
        tensors = {name: entry for header in headers.values() for name, entry in header.items()}
        if headers and not tensors:
            problems.append(Problem(str(folder), "its weight files hold no tensor", _SAVE_AGAIN))
        problems += _shape_problems(folder, config, tensors)
    return problems


def _config_problems(path: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    if not isinstance(config.get("model_type"), str):
        shown = repr(config.get("model_type"))
        what = f"`model_type` is {shown}: nothing says which architecture this is"
        yield Problem(f"{path}: model_type", what, "take the config.json that came with the model")
    text = _text_config(config)
    for name in _NUMBERS:
        value = text.get(name)
        if value is not None and (type(value) is not int or value < 1):
            what = f"is {str(value)[:60]!r}, no number above 0"
            yield Problem(f"{path}: {name}", what, "take the config.json that came with the model")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        what = f"is {str(names)[:60]!r}, no list of names"
        yield Problem(f"{path}: architectures", what, "take the config.json of the model")
    for name in ("quantization_config", "rope_parameters", "rope_scaling"):
        value = text.get(name, config.get(name))
        if value is not None and not isinstance(value, dict):
            what = f"is {str(value)[:60]!r}, no mapping"
            yield Problem(f"{path}: {name}", what, "take the config.json of the model")


def _index_problems(folder: Path, headers: Mapping[Path, Header]) -> Iterator[Problem]:
    path = folder / INDEX
    parts = sorted(path for path in headers if re.search(r"-\d+-of-\d+\.safetensors$", path.name))
    if not path.is_file():
        if parts:
            what = f"is missing, and {len(parts)} files say that they are parts"
            yield Problem(str(path), what, "copy the model again, with its index")
        return
    index = _object(path)
    if isinstance(index, Problem):
        yield index
        return
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        yield Problem(f"{path}: weight_map", "is no mapping of tensors to files", _SAVE_AGAIN)
        return
    held = {path.name: header for path, header in headers.items()}
    there = {path.name for path in folder.iterdir() if path.is_file()}
    for name in sorted({str(place) for place in places.values()}):
        if name not in there:
            outside = " (a name outside of the folder)" if "/" in name or "\\" in name else ""
            missing = sum(place == name for place in places.values())
            what = f"{missing} tensors lie in {name[:200]!r}, which is not there{outside}"
            yield Problem(f"{path}: weight_map", what, "copy the missing file")
    astray = sorted(
        name
        for name, place in places.items()
        if str(place) in held and name not in held[str(place)]
    )
    if astray:
        what = f"{len(astray)} tensors are not in the file that is named, the first is {astray[0]}"
        yield Problem(f"{path}: weight_map", what, _SAVE_AGAIN)


def _shape_problems(folder: Path, config: Mapping[str, Any], tensors: Header) -> Iterator[Problem]:
    """Of the few tensors that every decoder has, against the config."""
    text = _text_config(config)
    vocab, hidden, layers = (
        text.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")
    )
    remedy = "weights and config.json are of two models: take both from one"
    plain = "quantization_config" not in config and "quantization_config" not in text
    for name, entry in tensors.items():
        table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        wanted = [vocab, hidden] if table else [hidden]
        if table or name.endswith("input_layernorm.weight"):
            if plain and None not in wanted and entry["shape"] != wanted:
                what = f"has shape {entry['shape']}, config.json says {wanted}"
                yield Problem(f"{folder}: {name}", what, remedy)
            elif plain and entry["dtype"] not in _FLOATS:
                what = f"is {entry['dtype']}, and config.json says nothing of a quantization"
                yield Problem(f"{folder}: {name}", what, remedy)
    found = {int(match[1]) for match in map(_LAYER.search, tensors) if match}
    if found and layers is not None:
        # One after the other: the number is whatever somebody wrote.
        lacking = list(islice((one for one in range(layers) if one not in found), 10))
        if lacking:
            what = f"has no weights of layers {lacking}; num_hidden_layers is {layers}"
            yield Problem(str(folder), what, remedy)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Models for pictures too keep the decoder's settings in a mapping of their own."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _object(path: Path) -> dict[str, Any] | Problem:
    try:
        if path.stat().st_size > MAX_JSON:
            return Problem(str(path), f"is larger than {MAX_JSON} bytes", _SAVE_AGAIN)
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return Problem(str(path), f"cannot be read ({error.strerror})", "name a model's folder")
    except (ValueError, RecursionError) as error:
        return Problem(str(path), f"cannot be read as JSON: {str(error)[:200]}", _SAVE_AGAIN)
    if not isinstance(content, dict):
        kind = type(content).__name__
        return Problem(str(path), f"holds {kind}, not a JSON object", _SAVE_AGAIN)
    return content
