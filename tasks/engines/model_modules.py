"""Every module of a model by name, class and shape, from its `config.json` alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.engines.quantization_plan import Module


def module_list(model: Path) -> list[Module]:
    """The modules that a quantizer will see in the model of this folder; no weight is loaded.

    Experts that transformers holds in one tensor are listed one by one, under the names that
    llmcompressor gives them when it takes them apart (`modeling/moe/linearize.py`, 0.14).
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = empty.get_output_embeddings()
    owner: dict[int, str] = {}
    modules = []
    for name, module in empty.named_modules():
        matrix = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        shape = tuple(module.weight.shape) if matrix else (None, None)
        tied_to = owner.setdefault(id(module.weight), name) if matrix else name
        modules.append(
            Module(
                name=name,
                classes=tuple(kind.__name__ for kind in type(module).__mro__),
                out_width=shape[0],
                in_width=shape[1],
                tied_to=tied_to if tied_to != name else None,
                head=module is head,
            )
        )
        modules += _experts(name, module)
    return modules


def _experts(name: str, module: Any) -> Iterator[Module]:
    """The linear layers of experts that are held in one tensor, expert by expert."""
    weights = dict(module.named_parameters(recurse=False))
    gated = "gate_up_proj" in weights
    first = weights.get("gate_up_proj" if gated else "up_proj")
    if first is None or first.ndim != 3 or "down_proj" not in weights:
        return
    count, out_width, hidden = first.shape
    if getattr(module, "is_transposed", False):
        out_width, hidden = hidden, out_width
    inner = out_width // 2 if gated else out_width
    shapes = {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if gated:
        shapes = {"gate_proj": (inner, hidden), **shapes}
    for expert in range(count):
        for layer, (out, width) in shapes.items():
            yield Module(f"{name}.{expert}.{layer}", ("Linear", "Module", "object"), out, width)
