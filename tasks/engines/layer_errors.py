"""How far each quantized layer is from what it was: ||W x - Q(x)|| / ||W x|| on real inputs.

x are the inputs that the layer gets in the unquantized model on calibration texts, W x its outputs
there, Q(x) what the layer of the written checkpoint makes of the same x, its activations quantized
where the scheme says so. One pass over the unquantized model (`Recorder`, before it is quantized)
keeps a sample of inputs and outputs on disk, layer by layer; one pass over the quantized layers
(`relative_errors`) reads them back, one text's sample at a time.

AWQ and SmoothQuant move scales from a layer into the one before: W' = diag(1/t) W diag(s), and the
layer is then given x / s. Both are recovered from W and W' by least squares (`moved_scales`), each
from as many weights as the layer has rows or columns, so that rounding shifts them by far less than
the error that is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.engines.quantization_plan import Module

ROWS = 8
"""Calibration texts that are recorded."""
LENGTH = 512
"""Tokens of each that are run through the model."""
TOKENS = 64
"""Inputs of each text that are kept per layer, evenly spaced: 512 in all."""
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that engines merge into one (vLLM's `packed_modules_mapping`): one scheme for each set."""


class Recorder:
    """Hooks on the layers of an unquantized model; `folder` gets one file per text."""

    def __init__(self, model: Any, layers: Iterable[str], folder: Path) -> None:
        self._folder = folder
        self._kept: dict[str, Any] = {}
        self._hooks = [
            model.get_submodule(name).register_forward_hook(self._keep(name)) for name in layers
        ]

    def record(self, model: Any, texts: Sequence[Sequence[int]]) -> None:
        """Run `texts` through the model, at most `ROWS` of them, and take the hooks off again."""
        import torch
        from safetensors.torch import save_file

        device = next(model.parameters()).device
        try:
            for number, ids in enumerate(texts[:ROWS]):
                with torch.inference_mode():
                    inputs = torch.tensor([ids[:LENGTH]], device=device)
                    model(input_ids=inputs, use_cache=False)
                save_file(self._kept, self._folder / f"{number}.safetensors")
                self._kept.clear()
        finally:
            for hook in self._hooks:
                hook.remove()

    def _keep(self, name: str) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            given = inputs[0].reshape(-1, inputs[0].shape[-1])
            if not given.shape[0]:  # an expert that no token of this text was sent to
                return
            step = max(1, given.shape[0] // TOKENS)
            for what, tensor in (("inputs", given), ("outputs", output)):
                rows = tensor.reshape(-1, tensor.shape[-1])[::step][:TOKENS]
                self._kept[f"{name}.{what}"] = rows.detach().to("cpu", copy=True).contiguous()

        return keep


def relative_errors(
    model: Any,
    layers: Sequence[str],
    folder: Path,
    original: Callable[[str], Any] | None = None,
) -> dict[str, float | None]:
    """Error of each layer of the quantized `model` on what a `Recorder` kept in `folder`.

    `original` gives a layer's unquantized weight, where a recipe moved scales between layers. None
    for a layer that saw no input: an expert that no token was sent to.
    """
    import torch
    from safetensors import safe_open

    missed, wanted = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    scales: dict[str, tuple[Any, Any]] = {}
    with torch.inference_mode():
        for path in sorted(folder.iterdir()):
            with safe_open(path, "pt") as file:  # its pages count as memory while it is open
                held = set(file.keys())
                for layer in (layer for layer in layers if f"{layer}.inputs" in held):
                    module = model.get_submodule(layer)
                    weight = module.weight
                    if layer not in scales:
                        one = torch.ones(1, device=weight.device)
                        scales[layer] = (one, one)
                        if original is not None:
                            before = original(layer).to(weight.device)
                            scales[layer] = moved_scales(before, weight)
                    made_scale, given_scale = scales[layer]
                    bias = module.bias.float() * made_scale if module.bias is not None else 0.0
                    given = file.get_tensor(f"{layer}.inputs").to(weight.device).float()
                    expected = file.get_tensor(f"{layer}.outputs").to(weight.device).float()
                    made = module((given / given_scale).to(weight.dtype)).float() * made_scale
                    missed[layer] += float((made - expected).square().sum())
                    wanted[layer] += float((expected - bias).square().sum())
    return {
        layer: (missed[layer] / wanted[layer]) ** 0.5 if wanted[layer] else None for layer in layers
    }


def moved_scales(before: Any, after: Any, rounds: int = 3) -> tuple[Any, Any]:
    """t (one per row) and s (one per column) with `after` near diag(1/t) `before` diag(s).

    Least squares in turn for rows and columns; starting from 1, three rounds settle.
    """
    import torch

    old, new = before.float(), after.float()
    rows, columns = torch.ones(old.shape[0], 1), torch.ones(1, old.shape[1])
    rows, columns = rows.to(old.device), columns.to(old.device)
    for _ in range(rounds):
        scaled = rows * old
        columns = _ratio((scaled * new).sum(0, keepdim=True), scaled.square().sum(0, keepdim=True))
        scaled = old * columns
        rows = _ratio((scaled * new).sum(1, keepdim=True), scaled.square().sum(1, keepdim=True))
    return 1 / rows[:, 0], columns[0]


def _ratio(upper: Any, lower: Any) -> Any:
    """`upper / lower`; 1 where either vanishes: a row or column of zeros says nothing."""
    import torch

    ratio = upper / lower
    return torch.where(torch.isfinite(ratio) & (ratio != 0), ratio, torch.ones_like(ratio))


def worst(errors: Mapping[str, float | None], count: int) -> list[tuple[str, float]]:
    """The `count` layers of the largest error, largest first; equal errors in layer order."""
    measured = [(name, error) for name, error in errors.items() if error is not None]
    return sorted(measured, key=lambda item: -item[1])[:count]


def to_keep(
    errors: Mapping[str, float | None],
    modules: Sequence[Module],
    keep_worst: int | None,
    max_layer_error: float | None,
) -> list[str]:
    """Layers that stay in 16 bit, in model order, with those that an engine merges with them."""
    if keep_worst is not None:
        chosen = [name for name, _ in worst(errors, keep_worst)]
    else:
        limit = max_layer_error if max_layer_error is not None else float("inf")
        chosen = [name for name, error in errors.items() if error is not None and error > limit]
    together = {other for name in chosen for other in _merged_with(name, errors)}
    return [module.name for module in modules if module.name in together]


def _merged_with(name: str, names: Iterable[str]) -> list[str]:
    """`name` and the layers that have to be of its precision: q/k/v, gate/up, all experts."""
    before, experts, _ = name.partition(".experts.")
    if experts:
        return [other for other in names if other.startswith(f"{before}.experts.")]
    parent, _, last = name.rpartition(".")
    siblings = next((group for group in _FUSED if last in group), (last,))
    wanted = {f"{parent}.{sibling}" for sibling in siblings}
    return [other for other in names if other in wanted]
