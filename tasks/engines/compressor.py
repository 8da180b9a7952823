"""Quantize a model with llmcompressor, and believe only what stands in the written files.

`python -m tasks.engines.compressor JOB RESULT`. JOB:

    model             folder (safetensors, tokenizer, chat template)
    out_dir           gets the quantized model
    recipe            llmcompressor recipe as a mapping, or null: weights taken over unchanged
    calibration_file  JSONL of {"messages": [...]}, or null
    samples           rows of it that are used; max_length: tokens of each, the rest is cut
    max_size_ratio    largest allowed bytes of the quantized layers over their bytes before
    threads, seed

RESULT: `planned` and `found` (layer names), `linear_layers`, `size_before`, `size_after` (bytes of
all weights), `layers_before`, `layers_after` (bytes of the quantized layers), `ratio`,
`calibration` (`rows`, `tokens`, `cut`), `format`, `compute_dtype`, `samples` (prompt, text),
`quantize_seconds`, `seconds`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import model_files, quantization_plan
from tasks.engines.subprocesses import job_main

CHECK_PROMPTS = 3
CHECK_TOKENS = 16

_QUANTIZED_DTYPES = {"I8", "U8", "F8_E4M3", "F8_E5M2", "I32"}
"""How safetensors spells what quantized weights are stored in (I32: several packed into one)."""


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Plan, quantize, read back, generate. Raises `StageFailed` for whatever does not add up."""
    # Before torch is loaded: OpenMP threads that wait by spinning took five times as long, and four
    # times the processor time, on two cores with other work on them; waiting asleep cost nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    started = time.monotonic()
    model, out, recipe = Path(job["model"]), Path(job["out_dir"]), job["recipe"]
    model_files.check_weights(model, "quantize")
    model_files.check_side_files(model, model, "quantize")
    torch.set_num_threads(int(job["threads"]))
    out.mkdir(parents=True, exist_ok=True)
    rows = _conversations(job["calibration_file"], int(job["samples"]), int(job["seed"]))

    if recipe is None:
        _take_over(model, out)
        result: dict[str, Any] = {"planned": [], "found": [], "ratio": None, "format": None}
    else:
        modules = module_list(model)
        plan = quantization_plan.plan_recipe(recipe, modules)
        plan.check("recipe")
        result = {"linear_layers": plan.linear_layers}
        result |= _quantize(model, out, recipe, rows, job)
        result |= verify_written(model, out, plan.planned, modules, job["max_size_ratio"])
    model_files.check_weights(out, "quantize")
    model_files.check_side_files(out, model, "quantize")
    return {
        **result,
        "size_before": _weight_bytes(model),
        "size_after": _weight_bytes(out),
        "samples": check_generates(out, model, rows),
        "seconds": round(time.monotonic() - started, 2),
    }


def compute_dtype(stored: Any) -> Any:
    """The dtype to calibrate in: the stored one where the hardware computes in it.

    x86 without AVX512_BF16 or AMX emulates bf16: GPTQ on 135M took 180 s, AWQ over 9 min.
    """
    import torch

    if torch.cuda.is_available() or stored != torch.bfloat16:
        return stored
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return torch.bfloat16 if flags & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32


def module_list(model: Path) -> list[quantization_plan.Module]:
    """Every module of the model by name, class and weight shape; no weight is loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    owner: dict[int, str] = {}
    modules = []
    for name, module in empty.named_modules():
        matrix = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        shape = tuple(module.weight.shape) if matrix else (None, None)
        tied_to = owner.setdefault(id(module.weight), name) if matrix else name
        modules.append(
            quantization_plan.Module(
                name=name,
                classes=tuple(kind.__name__ for kind in type(module).__mro__),
                out_width=shape[0],
                in_width=shape[1],
                tied_to=tied_to if tied_to != name else None,
            )
        )
    return modules


def verify_written(
    model: Path,
    out: Path,
    planned: Sequence[str],
    modules: Sequence[quantization_plan.Module],
    max_size_ratio: float,
) -> dict[str, Any]:
    """Compare plan, weight files and `quantization_config`, by layer name, and weigh the layers.

    Raises `StageFailed` when they differ or the layers are larger than the scheme says.
    """
    tensors = model_files.stored_tensors(out)
    found = [module.name for module in modules if _is_quantized(module.name, tensors)]
    config = json.loads((out / model_files.CONFIG).read_text(encoding="utf-8"))
    settings = config.get("quantization_config", {})
    declared = quantization_plan.written_layers(settings, modules)
    problems = []
    for what, names in (("quantized in the files", found), ("declared in config.json", declared)):
        missing = sorted(set(planned) - set(names))
        extra = sorted(set(names) - set(planned))
        if missing or extra:
            problems.append(
                Problem(
                    str(out),
                    f"{len(names)} layers are {what}, {len(planned)} were planned; "
                    f"missing: {missing or 'none'}; not planned: {extra or 'none'}",
                )
            )
    before_tensors = model_files.stored_tensors(model)
    before = sum(before_tensors[f"{name}.weight"].size for name in found)
    after = sum(
        tensor.size for name, tensor in tensors.items() if name.rpartition(".")[0] in set(found)
    )
    ratio = after / before if before else 1.0
    if ratio > max_size_ratio:
        problems.append(
            Problem(
                str(out),
                f"the quantized layers take {ratio:.3f} of their size before "
                f"({after} of {before} bytes); the recipe promises {max_size_ratio}",
            )
        )
    if problems:
        raise StageFailed(problems)
    return {
        "planned": list(planned),
        "found": found,
        "layers_before": before,
        "layers_after": after,
        "ratio": round(ratio, 4),
        "format": settings.get("format"),
    }


def check_generates(
    folder: Path, parent: Path, rows: Sequence[Sequence[Mapping[str, Any]]]
) -> list[dict[str, str]]:
    """A few greedy tokens to prompts from `rows`, from the files as written.

    Raises `StageFailed` for logits that are not finite, and for a model that repeats one token
    whatever it is asked, unless `parent` does so too.
    """
    prompts = [_question(row) for row in rows[:CHECK_PROMPTS]] or [model_files.PROBES[0][0]]
    samples, stuck = generate(folder, prompts)
    if stuck and not generate(parent, prompts)[1]:
        raise StageFailed(
            Problem(
                str(folder),
                f"the model repeats one token and says nothing else: {samples[0]['text']!r}",
                "quantize less, or calibrate on texts of the kind that it will see",
            )
        )
    return samples


def generate(
    folder: Path, prompts: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[list[dict[str, str]], bool]:
    """Prompts and greedy texts, and whether every text is one token repeated."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    samples, stuck = [], True
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            list(prompt), tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            if not bool(torch.isfinite(model(**inputs).logits).all()):
                raise StageFailed(Problem(str(folder), f"logits are not finite for {text!r}"))
            written = model.generate(
                **inputs, max_new_tokens=CHECK_TOKENS, do_sample=False, pad_token_id=0
            )
        new = written[0, inputs["input_ids"].shape[1] :].tolist()
        stuck = stuck and len(new) == CHECK_TOKENS and len(set(new)) == 1
        samples.append({"prompt": text, "text": tokenizer.decode(new)})
    return samples, stuck


# -- quantizing ------------------------------------------------------------------------------


def _quantize(
    model: Path,
    out: Path,
    recipe: Mapping[str, Any],
    rows: Sequence[Sequence[Mapping[str, Any]]],
    job: Mapping[str, Any],
) -> dict[str, Any]:
    # Its own warning asks for this: tokenizer threads and data set workers block each other.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    import yaml
    from llmcompressor import oneshot
    from llmcompressor.recipe import Recipe
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

    text = yaml.safe_dump(dict(recipe), sort_keys=False)
    try:
        Recipe.create_instance(text)
    except (ValueError, TypeError) as error:
        raise StageFailed(
            Problem("recipe", f"llmcompressor refuses it: {error}", "see its documentation")
        ) from None
    if quantization_plan.needs_data(recipe) and not rows:
        raise StageFailed(
            Problem("calibration", "the recipe looks at data and there is none", "add it")
        )
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    dataset, calibration = _calibration(rows, tokenizer, int(job["max_length"]))
    stored = AutoConfig.from_pretrained(model).dtype or torch.bfloat16
    dtype = compute_dtype(stored)
    set_seed(int(job["seed"]))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=False)
    started = time.monotonic()
    with _no_pinning_without_accelerator():
        oneshot(
            model=loaded,
            tokenizer=tokenizer,
            recipe=text,
            dataset=dataset,
            num_calibration_samples=len(rows) or 1,
            shuffle_calibration_samples=False,  # the rows were drawn with our seed
            max_seq_length=int(job["max_length"]) or None,
        )
    seconds = time.monotonic() - started
    _cast(loaded, stored)
    loaded.save_pretrained(out)  # llmcompressor's: compresses and writes quantization_config
    model_files.copy_side_files(model, out)
    return {
        "calibration": calibration,
        "compute_dtype": str(dtype).removeprefix("torch."),
        "quantize_seconds": round(seconds, 2),
    }


def _cast(model: Any, stored: Any) -> None:
    """What is not quantized, and the scales, go back to the dtype that the model came in.

    Weights of quantized layers stay as they are until they are compressed: they lie on a grid of
    full precision, and rounding them first could move one to its neighbour.
    """
    import torch

    for module in model.modules():
        quantized = getattr(module, "quantization_scheme", None) is not None
        for name, parameter in module.named_parameters(recurse=False):
            kept = quantized and (name == "weight" or name.endswith("global_scale"))
            if parameter.dtype == torch.float32 and not kept:
                parameter.data = parameter.data.to(stored)
    model.config.dtype = stored


@contextmanager
def _no_pinning_without_accelerator() -> Iterator[None]:
    """AWQ pins its cached activations, which raises where no accelerator is.

    llmcompressor 0.14.0.1 calls `IntermediatesCache.pin_memory` without asking
    (`modifiers/transform/awq/base.py`). `tests/integration/test_compressor.py` tells when this
    can go.
    """
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        yield
        return
    original = IntermediatesCache.pin_memory
    IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = original


def _take_over(model: Path, out: Path) -> None:
    """The same files again: hard links where the file system allows, else copies."""
    names = [model_files.CONFIG, "model.safetensors.index.json", *model_files.SIDE_FILES]
    for path in [*model.glob("*.safetensors"), *(model / name for name in names)]:
        if not path.is_file():
            continue
        try:
            os.link(path, out / path.name)
        except OSError:
            shutil.copyfile(path, out / path.name)


# -- calibration texts -----------------------------------------------------------------------


def _conversations(file: str | None, samples: int, seed: int) -> list[list[Mapping[str, Any]]]:
    """`samples` conversations of a JSONL file, drawn with `seed`; all of them when it has fewer.

    Fewer than half of what was asked is refused.
    """
    if file is None:
        return []
    lines = Path(file).read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line)["messages"] for line in lines if line.strip()]
    if len(rows) < samples / 2:
        raise StageFailed(
            Problem(
                file,
                f"{samples} calibration samples were asked for, {len(rows)} rows are there",
                "lower calibration.samples, or give more prompts",
            )
        )
    random.Random(seed).shuffle(rows)
    return rows[:samples]


def _calibration(
    rows: Sequence[Sequence[Mapping[str, Any]]], tokenizer: Any, max_length: int
) -> tuple[Any, dict[str, int]]:
    """Conversations as an engine sees them: the chat template's text, no special tokens added."""
    from datasets import Dataset

    if not rows:
        return None, {"rows": 0, "tokens": 0, "cut": 0}
    ids = []
    for row in rows:
        text = tokenizer.apply_chat_template(
            list(row), tokenize=False, add_generation_prompt=row[-1]["role"] != "assistant"
        )
        ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    cut = sum(len(row) > max_length for row in ids)
    ids = [row[:max_length] for row in ids]
    dataset = Dataset.from_list(
        [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]
    )
    return dataset, {"rows": len(ids), "tokens": sum(map(len, ids)), "cut": cut}


def _question(row: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The conversation up to its last user message."""
    last = max((at for at, message in enumerate(row) if message["role"] == "user"), default=0)
    return row[: last + 1]


# -- sizes -----------------------------------------------------------------------------------


def _is_quantized(name: str, tensors: Mapping[str, model_files.StoredTensor]) -> bool:
    weight = tensors.get(f"{name}.weight_packed") or tensors.get(f"{name}.weight")
    scaled = f"{name}.weight_scale" in tensors
    return weight is not None and weight.dtype in _QUANTIZED_DTYPES and scaled


def _weight_bytes(folder: Path) -> int:
    return sum(tensor.size for tensor in model_files.stored_tensors(folder).values())


if __name__ == "__main__":
    job_main(run)
