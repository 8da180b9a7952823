"""One run of llmcompressor on a loaded model, and the loading of what it wrote."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import calibration_texts, quantization_recipe, training_precision

MEASURED = (
    "quantize_seconds",
    "quantize_cpu_seconds",
    "quantize_peak_bytes",
    "compute_dtype",
)
"""Facts of `oneshot` that depend on the machine."""


def compute_dtype(stored: Any) -> Any:
    """The dtype to calibrate in: the stored one where the hardware computes in it.

    x86 without AVX512_BF16 or AMX emulates bf16: GPTQ on 135M took 180 s, AWQ over 9 min.
    """
    import torch

    if torch.cuda.is_available() or stored != torch.bfloat16:
        return stored
    return getattr(torch, training_precision.here("auto").name)


def load(model: Path, seed: int) -> tuple[Any, Any]:
    """The unquantized model, its experts taken apart, and the dtype that it computes in."""
    # Its own warning asks for this: tokenizer threads and data set workers block each other.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    stored = AutoConfig.from_pretrained(model, trust_remote_code=False).dtype or torch.bfloat16
    set_seed(seed)
    dtype = compute_dtype(stored)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=False)
    linearize_moe(loaded)
    loaded.stored_dtype = stored
    return loaded.eval(), dtype


def oneshot(
    loaded: Any,
    tokenizer: Any,
    recipe: Mapping[str, Any],
    ids: Sequence[Sequence[int]],
    max_length: int,
    out: Path,
) -> dict[str, Any]:
    """Quantize `loaded` by `recipe` on the texts `ids`, and save it to `out`.

    Returns `quantize_seconds`, `quantize_cpu_seconds` (of all threads), `quantize_peak_bytes` and
    `fallback`: layers that GPTQ rounded to nearest because their Hessian could not be inverted.
    Raises `StageFailed` with llmcompressor's
    own words when it refuses the recipe or stops, when pruning left fewer zeros than it promises,
    and when more than half of the layers fell back.
    """
    import yaml
    from llmcompressor import oneshot as run_oneshot
    from llmcompressor.core import reset_session
    from llmcompressor.recipe import Recipe

    started, worked = time.monotonic(), time.process_time()
    text = yaml.safe_dump(dict(recipe), sort_keys=False)
    try:
        Recipe.create_instance(text)
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise StageFailed(
            Problem("recipe", f"llmcompressor refuses it: {error}", "see its documentation")
        ) from None
    with _no_pinning_without_accelerator(), _warnings() as warned:
        try:
            run_oneshot(
                model=loaded,
                tokenizer=tokenizer,
                recipe=text,
                dataset=calibration_texts.dataset(ids),
                num_calibration_samples=len(ids) or 1,
                shuffle_calibration_samples=False,  # the rows were drawn with our seed
                max_seq_length=max_length or None,
            )
        except Exception as error:  # AWQ 0.14 raises a plain one where its search finds NaN
            if _of_the_machine(error):
                raise
            raise StageFailed(
                Problem("recipe", f"llmcompressor stopped: {error}", "see its log of this stage")
            ) from error
    _check_pruned(loaded, recipe)
    fallback = fallen_back(warned)
    _cast(loaded, loaded.stored_dtype)
    loaded.save_pretrained(out)  # llmcompressor's: compresses and writes quantization_config
    reset_session()  # it holds the model, and with it the memory
    return {
        "fallback": fallback,
        "quantize_seconds": round(time.monotonic() - started, 2),
        "quantize_cpu_seconds": round(time.process_time() - worked, 2),
        "quantize_peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_written(out: Path) -> Any:
    """The checkpoint as transformers loads it, decompressed, in the dtype the hardware computes in.

    Raises `StageFailed` when it does not load, or when a weight is missing: transformers puts
    random ones in its place and only logs it.
    """
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from transformers import AutoModelForCausalLM

    try:
        loaded, told = AutoModelForCausalLM.from_pretrained(
            out, trust_remote_code=False, output_loading_info=True
        )
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        if _of_the_machine(error):
            raise
        raise StageFailed(
            Problem(str(out), f"transformers does not load it: {error}", "use another scheme")
        ) from error
    wrong = {what: sorted(map(str, told[what])) for what in told if told[what]}
    if wrong:
        raise StageFailed(
            Problem(
                str(out),
                "transformers loads it with other weights than the files have: "
                + "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in wrong.items()),
            )
        )
    if hasattr(loaded, "ct_decompress_hook"):
        # What its first forward pass would do, which for a large model takes minutes on a CPU.
        loaded.hf_quantizer.compressor.decompress_model(loaded)
        # What was not compressed still lies in the mapped file, and keeps all of it in memory.
        for module in loaded.modules():
            made = {"weight"} if hasattr(module, "quantization_scheme") else set()
            for name, parameter in module.named_parameters(recurse=False):
                if name not in made:
                    parameter.data = parameter.data.clone()
    linearize_moe(loaded)
    return loaded.eval().to(compute_dtype(loaded.dtype))


def let_go(model: Any) -> None:
    """Free the weights of a model that llmcompressor has run, whoever still holds its modules.

    torch.fx does: the functions that llmcompressor 0.14 traces are noted, with the model among
    their globals, in a list of its own for ever (`pipelines/sequential/ast_helpers.py`).
    """
    import torch

    for module in model.modules():
        module._parameters, module._buffers = {}, {}
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what is freed
    if trim is not None:
        trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def on_accelerator(model: Any) -> Iterator[None]:
    """Let `model` compute on a GPU where there is one.

    A model with room on it goes there as a whole and comes back afterwards. The weights of a larger
    one stay in main memory, and each layer's go over when it computes, as in llmcompressor's own
    passes.
    """
    import torch
    from compressed_tensors.offload import remove_dispatch, set_onload_device

    if not torch.cuda.is_available():
        yield
        return
    device = torch.device("cuda", torch.cuda.current_device())
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    fits = size * 1.2 < torch.cuda.mem_get_info(device)[0]
    if fits:
        model.to(device)
    else:
        set_onload_device(model, device)
    try:
        yield
    finally:
        if fits:
            model.to("cpu")
        else:
            remove_dispatch(model)
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a GPU or in the machine."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in said for words in ("out of memory", "can't allocate memory", "cannot allocate")
    )


def _of_the_machine(error: Exception) -> bool:
    """Whether another try, or another machine, might end otherwise."""
    return isinstance(error, OSError) or out_of_memory(error) or "CUDA error" in str(error)


def fallen_back(warned: Sequence[str]) -> list[str]:
    """Layers of which llmcompressor's log says that their Hessian could not be inverted.

    Its lists of such layers are private and cleared at the end (`modifiers/gptq/base.py`, 0.14).
    The log names ten at most. Raises `StageFailed` when it was more than half of the layers.
    """
    layers: list[str] = []
    for line in warned:
        match = re.search(r"Hessian inversion failed for (\d+)/(\d+) modules", line)
        if not match:
            continue
        failed, total = int(match[1]), int(match[2])
        named = line.partition("Affected modules: ")[2]
        if 2 * failed > total:
            raise StageFailed(
                Problem(
                    "recipe",
                    f"GPTQ could not invert the Hessian of {failed} of {total} layers and rounded "
                    f"them to nearest: {named}",
                    "raise calibration.samples or the modifier's dampening_frac",
                )
            )
        layers += [name.strip() for name in named.split(",") if name.strip()]
    return layers


def _check_pruned(loaded: Any, recipe: Mapping[str, Any]) -> None:
    """Every pruning modifier must have left the share of zeros that it promises, in the mean."""
    import torch
    from compressed_tensors.utils import match_named_modules

    for share, targets, ignore in quantization_recipe.pruned(recipe):
        found = [
            float((module.weight == 0).float().mean())
            for _, module in match_named_modules(loaded, targets or ["Linear"], ignore)
            if isinstance(module, torch.nn.Linear)
        ]
        mean = sum(found) / len(found) if found else 0.0
        if mean < share - 0.01:
            raise StageFailed(
                Problem(
                    "recipe",
                    f"pruning promises {share:.0%} zeros; {mean:.1%} of the weights of "
                    f"{len(found)} layers are zero",
                    "correct its targets, and let it run before the modifier that quantizes",
                )
            )


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
def _warnings() -> Iterator[list[str]]:
    """llmcompressor's own warnings while it runs, beside its log."""
    from loguru import logger

    told: list[str] = []
    sink = logger.add(lambda message: told.append(str(message)), level="WARNING")
    try:
        yield told
    finally:
        logger.remove(sink)


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
