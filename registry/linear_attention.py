"""Layers that keep a state instead of tokens: the gated delta-net of Qwen3-Next."""

from __future__ import annotations

from registry.config_values import ConfigValues
from registry.shape_parts import Weight


def full_layers(text: ConfigValues, count: int) -> list[bool]:
    """Which layers have full attention; the others are linear."""
    types = text.strings("layer_types")
    if not types:
        every = text.number("full_attention_interval", 4)
        return [(index + 1) % every == 0 for index in range(count)]
    text.check_layer_types(types, {"full_attention", "linear_attention"}, count)
    return [one == "full_attention" for one in types]


def delta_net(text: ConfigValues) -> tuple[int, int, list[Weight]]:
    """Values of the state of one sequence, of the convolution and of the matrix; weights.

    `MambaStateShapeCalculator.gated_delta_net_state_shape` of vLLM 0.32, without a draft.
    """
    hidden = text.number("hidden_size")
    key_heads, value_heads = (text.number(f"linear_num_{one}_heads") for one in ("key", "value"))
    key, value = (text.number(f"linear_{one}_head_dim") for one in ("key", "value"))
    kernel = text.number("linear_conv_kernel_dim", 4)
    keys, values = key_heads * key, value_heads * value
    mixed = 2 * keys + values
    found = [
        Weight("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, hidden, split="column"),
        Weight("linear_attn.in_proj_ba", 2 * value_heads, hidden, split="column"),
        Weight("linear_attn.conv1d", mixed, kernel, kind="other", split="column"),
        Weight("linear_attn.dt_bias", value_heads, kind="other", split="column"),
        Weight("linear_attn.A_log", value_heads, kind="other", split="column"),
        Weight("linear_attn.norm", value, kind="norm"),
        Weight("linear_attn.out_proj", hidden, values, split="row"),
    ]
    return mixed * (kernel - 1), value_heads * value * key, found
