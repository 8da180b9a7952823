"""A quantized checkpoint as it was written: are the right layers in it, and only they?

Names, dtypes and sizes come from the headers of the files; what must not have changed is compared
value by value, one tensor at a time. Nothing here believes what a quantizer said about itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from registry.safetensors_headers import Tensor
from tasks.engines import model_files, quantization_plan, quantization_recipe
from tasks.engines.quantization_plan import Module

_QUANTIZED_DTYPES = {"I8", "U8", "F8_E4M3", "F8_E5M2", "I32"}
"""How safetensors spells what quantized weights are stored in (I32: several packed into one)."""


def verify_written(
    model: Path,
    out: Path,
    planned: Sequence[str],
    modules: Sequence[Module],
    max_size_ratio: float,
) -> dict[str, Any]:
    """Compare plan, weight files and `quantization_config`, by layer name, and weigh the layers.

    Raises `StageFailed` when they differ or the layers are larger than the scheme says.
    """
    tensors = model_files.stored_tensors(out)
    found = [module.name for module in modules if is_quantized(module.name, tensors)]
    settings = _quantization_config(out)
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
    before = _bytes_before(model, found, modules)
    after = sum(
        tensor.size for name, tensor in tensors.items() if name.rpartition(".")[0] in set(found)
    )
    ratio = after / before if before else None
    if ratio is not None and ratio > max_size_ratio:
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
        "ratio": round(ratio, 4) if ratio is not None else None,
        "format": settings.get("format"),
    }


def verify_kv_cache(out: Path, modules: Sequence[Module]) -> int:
    """Attention layers with scales for a quantized KV cache. Raises `StageFailed` for a gap.

    `k_scale` and `v_scale` lie beside each attention layer, and `config.json` says the scheme.
    """
    tensors = model_files.stored_tensors(out)
    # compressed_tensors/quantization/utils/helpers.py, KV_CACHE_TARGETS, 0.19
    attention = [
        module.name for module in modules if module.name.endswith(("self_attn", "attention"))
    ]
    bare = [
        name
        for name in attention
        if f"{name}.k_scale" not in tensors or f"{name}.v_scale" not in tensors
    ]
    if bare or not attention or not _quantization_config(out).get("kv_cache_scheme"):
        raise StageFailed(
            Problem(
                str(out),
                f"the recipe quantizes the KV cache; attention layers without its scales: "
                f"{', '.join(bare) or 'none'} of {len(attention)}; kv_cache_scheme in config.json: "
                f"{_quantization_config(out).get('kv_cache_scheme') or 'none'}",
            )
        )
    return len(attention)


def verify_untouched(
    model: Path,
    out: Path,
    planned: Sequence[str],
    modules: Sequence[Module],
    recipe: Mapping[str, Any],
) -> dict[str, list[str]]:
    """Compare the values of every tensor that was not to be quantized, bit by bit.

    Head, embeddings, routers, norms and what the recipe ignores stay as they are. AWQ and
    SmoothQuant may rescale norms, ignored layers and routers (the function is the same), but
    neither head nor embeddings; pruning may change its targets: these are returned as `changed`.
    SpinQuant rotates everything, so only names and shapes are compared. A tensor stored in another
    dtype is compared after rounding to it and returned as `rounded`. Raises `StageFailed` naming
    every tensor that changed.
    """
    before, after = model_files.stored_tensors(model), model_files.stored_tensors(out)
    done = set(planned)
    fused = {name.partition(".experts.")[0] + ".experts" for name in done if ".experts." in name}
    fixed = {module.name for module in modules if module.head or "Embedding" in module.classes}
    pruned = quantization_plan.pruned_layers(recipe, modules)
    changed, rounded, problems = [], [], []
    rotates = quantization_recipe.rotates(recipe)
    read_before, read_after = tensor_reader(model), tensor_reader(out)
    for name, tensor in before.items():
        owner = name.rpartition(".")[0]
        if owner in done or owner in fused:
            continue
        if name not in after:
            problems.append(Problem(f"{out}: {name}", "is missing"))
        elif tensor.shape != after[name].shape:
            problems.append(
                Problem(f"{out}: {name}", f"has shape {after[name].shape}, it was {tensor.shape}")
            )
        elif not rotates:
            old, new = read_before(name), read_after(name)
            if old.dtype != new.dtype:
                old = old.to(new.dtype)
                rounded.append(name)
            if _same_bits(old, new):
                continue
            rescaled = quantization_recipe.rescales(recipe) and owner not in fixed
            if rescaled or owner in pruned:
                changed.append(name)
            else:
                problems.append(
                    Problem(f"{out}: {name}", "was not to be quantized, and its values changed")
                )
    if problems:
        raise StageFailed(problems)
    return {"changed": changed, "rounded": rounded}


def tensor_reader(folder: Path) -> Callable[[str], Any]:
    """A function from a tensor's name to the tensor; files are mapped, not read whole."""
    from safetensors import safe_open

    place: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            place |= dict.fromkeys(file.keys(), path)

    def read(name: str) -> Any:
        with safe_open(place[name], "pt") as file:
            return file.get_tensor(name)

    return read


def is_quantized(name: str, tensors: Mapping[str, Tensor]) -> bool:
    weight = tensors.get(f"{name}.weight_packed") or tensors.get(f"{name}.weight")
    scaled = f"{name}.weight_scale" in tensors
    return weight is not None and weight.dtype in _QUANTIZED_DTYPES and scaled


def not_in_checkpoint(model: Path, planned: Sequence[str]) -> list[Problem]:
    """Planned layers that the checkpoint stores under other names.

    transformers renames such layers when it loads them (Mixtral's `w1`), and llmcompressor 0.14
    writes them under its own names: a checkpoint that engines cannot read.
    """
    tensors = model_files.stored_tensors(model)
    owners = {name.rpartition(".")[0] for name in tensors}
    renamed = [
        name
        for name in planned
        if f"{name}.weight" not in tensors
        and name.partition(".experts.")[0] + ".experts" not in owners
    ]
    if not renamed:
        return []
    return [
        Problem(
            str(model),
            f"{len(renamed)} of {len(planned)} layers are stored under other names than "
            f"transformers gives them ({renamed[0]}): what llmcompressor 0.14 writes of them no "
            "engine finds again",
            "add them to `ignore`",
        )
    ]


def _bytes_before(model: Path, found: Sequence[str], modules: Sequence[Module]) -> int:
    """Bytes of the weights of `found` before; of experts stored as one tensor their share."""
    tensors = model_files.stored_tensors(model)
    shape = {module.name: (module.out_width or 0) * (module.in_width or 0) for module in modules}
    return sum(
        tensors[f"{name}.weight"].size if f"{name}.weight" in tensors else 2 * shape[name]
        for name in found
    )


def _same_bits(old: Any, new: Any) -> bool:
    import torch

    return torch.equal(
        old.contiguous().reshape(-1).view(torch.uint8),
        new.contiguous().reshape(-1).view(torch.uint8),
    )


def _quantization_config(out: Path) -> dict[str, Any]:
    config = json.loads((out / model_files.CONFIG).read_text(encoding="utf-8"))
    settings: dict[str, Any] = config.get("quantization_config") or {}
    return settings
