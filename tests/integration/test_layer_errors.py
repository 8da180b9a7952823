"""Errors of layers against what a person would compute by hand, on layers of a known error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.engines import layer_errors
from tasks.engines.quantization_plan import Module


class Pair(torch.nn.Module):
    """Two linear layers; called as a causal language model is."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(16, 32, bias=bias)
        self.down_proj = torch.nn.Linear(32, 16, bias=bias)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        torch.manual_seed(int(input_ids.sum()))
        states = torch.randn(1, input_ids.shape[1], 16)
        made: torch.Tensor = self.down_proj(self.up_proj(states))
        return made


def model(*, bias: bool = False) -> Pair:
    torch.manual_seed(1)
    return Pair(bias=bias)


TEXTS = [list(range(length)) for length in (3, 70, 100)]


@pytest.mark.parametrize("bias", [False, True])
def test_the_error_of_a_layer_is_that_of_its_outputs(bias: bool, tmp_path: Path) -> None:
    original = model(bias=bias)
    layers = ["up_proj", "down_proj"]
    layer_errors.Recorder(original, layers, tmp_path).record(original, TEXTS)
    assert layer_errors.relative_errors(original, layers, tmp_path) == {
        "up_proj": pytest.approx(0, abs=1e-6),
        "down_proj": pytest.approx(0, abs=1e-6),
    }
    changed = model(bias=bias)
    with torch.no_grad():
        changed.up_proj.weight *= 1.1
    found = layer_errors.relative_errors(changed, layers, tmp_path)
    assert found["up_proj"] == pytest.approx(0.1, rel=1e-3)
    # Its inputs are those of the unquantized model: an error before it is not its own.
    assert found["down_proj"] == pytest.approx(0, abs=1e-6)
    assert not original.up_proj._forward_hooks


def test_inputs_are_spread_over_each_text_and_bounded(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    original = model()
    layer_errors.Recorder(original, ["up_proj"], tmp_path).record(original, [*TEXTS] * 10)
    kept = [load_file(file)["up_proj.inputs"].shape for file in sorted(tmp_path.iterdir())]
    assert len(kept) == layer_errors.ROWS
    assert {rows for rows, _ in kept} == {3, layer_errors.TOKENS}


def test_a_layer_without_inputs_has_no_error(tmp_path: Path) -> None:
    original = model()
    layer_errors.Recorder(original, ["up_proj"], tmp_path).record(original, TEXTS)
    found = layer_errors.relative_errors(original, ["up_proj", "down_proj"], tmp_path)
    assert found["down_proj"] is None
    assert layer_errors.worst({"a": None, "b": 0.1, "c": 0.3}, 2) == [("c", 0.3), ("b", 0.1)]


def test_scales_that_were_moved_between_layers_are_no_error(tmp_path: Path) -> None:
    """As AWQ does: columns by s, rows by 1/t, and rounding noise of 5 % on top."""
    original = model(bias=True)
    layer_errors.Recorder(original, ["up_proj"], tmp_path).record(original, TEXTS)
    before = original.up_proj.weight.detach()
    rows, columns = torch.rand(32) + 0.5, torch.rand(16) + 0.5
    noise = torch.randn(before.shape) * 0.05 * before.square().mean().sqrt()
    moved, rounded = model(bias=True), model(bias=True)
    with torch.no_grad():
        rounded.up_proj.weight.copy_(before + noise)
        moved.up_proj.weight.copy_((before + noise) * columns / rows[:, None])
        moved.up_proj.bias /= rows
    names = ["up_proj"]
    true = layer_errors.relative_errors(rounded, names, tmp_path)["up_proj"]
    blind = layer_errors.relative_errors(moved, names, tmp_path)["up_proj"]
    found = layer_errors.relative_errors(moved, names, tmp_path, lambda name: before)["up_proj"]
    assert true is not None and 0.03 < true < 0.07
    assert blind is not None and blind > 0.3
    assert found == pytest.approx(true, rel=0.15)  # 48 of 512 numbers are spent on scales


def test_layers_that_an_engine_merges_stay_together() -> None:
    names = [
        *(f"layers.0.self_attn.{name}_proj" for name in "qkvo"),
        *(f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"layers.1.mlp.experts.{expert}.up_proj" for expert in range(2)),
    ]
    modules = [Module(name, ("Linear",), 8, 8) for name in names]
    errors: dict[str, float | None] = dict.fromkeys(names, 0.1)
    errors |= {names[1]: 0.9, names[6]: 0.8, names[7]: 0.7, names[8]: None}
    assert layer_errors.to_keep(errors, modules, 1, None) == names[:3]
    assert layer_errors.to_keep(errors, modules, 2, None) == [*names[:3], names[6]]
    assert layer_errors.to_keep(errors, modules, None, 0.75) == [*names[:3], names[6]]
    assert layer_errors.to_keep(errors, modules, None, 0.6) == [*names[:3], *names[6:]]
    assert layer_errors.to_keep(errors, modules, None, 1.0) == []
