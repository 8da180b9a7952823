"""Runs in the serve environment: what vLLM and the plugin make of packed layers, without a server.

python unpacked_weights.py choose                          vLLM's kernel of INT4, as JSON
python unpacked_weights.py MODELS OUT.safetensors NAME...  one layer of each model, un-packed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.scalar_type import scalar_types

LAYER = "model.layers.0.mlp.down_proj"
TYPES = {
    (4, True): scalar_types.uint4b8,
    (4, False): scalar_types.uint4,
    (8, True): scalar_types.uint8b128,
}


def config(
    shape: tuple[int, int], bits: int, symmetric: bool, group_size: int
) -> MPLinearLayerConfig:
    """`shape`: inputs and outputs."""
    return MPLinearLayerConfig(
        full_weight_shape=shape,
        partition_weight_shape=shape,
        weight_type=TYPES[bits, symmetric],
        act_type=torch.bfloat16,
        group_size=group_size,
        zero_points=not symmetric,
    )


def parameter(tensor: torch.Tensor, **places: int) -> torch.nn.Parameter:
    made = torch.nn.Parameter(tensor, requires_grad=False)
    for name, value in places.items():
        setattr(made, name, value)
    return made


def unpacked(model: Path, by_columns: bool) -> tuple[torch.nn.Module, object]:
    """A layer of the checkpoint and its kernel, chosen by vLLM, as its loader hands it over."""
    tensors = load_file(model / "model.safetensors")
    packed, scale = tensors[f"{LAYER}.weight_packed"], tensors[f"{LAYER}.weight_scale"]
    zero_point = tensors.get(f"{LAYER}.weight_zero_point")
    rows, columns = tensors[f"{LAYER}.weight_shape"].tolist()
    bits = 32 * packed.shape[1] // columns
    places = (1, 0)
    if by_columns:
        packed, scale, places = packed.t().contiguous(), scale.t().contiguous(), (0, 1)
        zero_point = zero_point.t().contiguous() if zero_point is not None else None
    inputs, outputs = places
    layer = torch.nn.Module()
    layer.bias = None
    layer.weight_packed = parameter(packed, input_dim=inputs, output_dim=outputs, packed_dim=inputs)
    layer.weight_scale = parameter(scale.to(torch.bfloat16), input_dim=inputs, output_dim=outputs)
    if zero_point is not None:
        layer.weight_zero_point = parameter(
            zero_point, input_dim=inputs, output_dim=outputs, packed_dim=outputs
        )
    groups = scale.shape[inputs]
    asked = config(
        (columns, rows), bits, zero_point is None, -1 if groups == 1 else columns // groups
    )
    kernel = choose_mp_linear_kernel(asked)(
        asked, "weight_packed", "weight_scale", "weight_zero_point"
    )
    return layer, kernel


def write(models: Path, out: Path, names: list[str]) -> None:
    import vllm.model_executor.layers.linear as linear

    kept = {}
    plain = linear.UnquantizedLinearMethod.process_weights_after_loading

    def noted(self: object, layer: torch.nn.Module) -> None:
        # vLLM hands the weight to its own library and empties it.
        layer.noted = layer.weight.data.clone()
        plain(self, layer)

    linear.UnquantizedLinearMethod.process_weights_after_loading = noted
    for name in names:
        for by_columns in (False, True):
            layer, kernel = unpacked(models / name, by_columns)
            kernel.process_weights_after_loading(layer)
            kept[f"{name}.{'columns' if by_columns else 'rows'}"] = layer.noted
            if any(hasattr(layer, one) for one in ("weight_packed", "weight_zero_point")):
                kept[f"{name}.left"] = torch.ones(1)
        inputs = layer.noted.shape[1]
        x = torch.linspace(-1, 1, 3 * inputs).reshape(3, -1).to(torch.bfloat16)
        kept[f"{name}.output"] = kernel.apply_weights(layer, x).contiguous()
    save_file(kept, out)


def choice() -> dict[str, object]:
    chosen = choose_mp_linear_kernel(config((256, 256), 4, symmetric=True, group_size=64))
    return {"kernel": chosen.__name__, "operator": hasattr(torch.ops._C, "cpu_gemm_wna16")}


if __name__ == "__main__":
    load_general_plugins()
    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        if sys.argv[1] == "choose":
            print(json.dumps(choice()))
        else:
            write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
