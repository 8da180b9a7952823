"""The layers of each architecture, weight by weight.

Read from the model files of transformers 5.17 and compared with them on the meta device in
tests/integration/test_model_parameters.py; how they are split over GPUs from vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from registry.config_values import MOST_LAYERS, ConfigValues
from registry.linear_attention import delta_net, full_layers
from registry.shape_parts import LayerShape, Split, Weight

Flag = bool | Literal["attention_bias", "qkv_bias", "mlp_bias"]
Windows = Literal["none", "all", "mistral", "upper", "two", "six"]
Experts = Literal["none", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek", "gpt_oss"]


@dataclass(frozen=True)
class Family:
    """What tells one architecture from another. A flag is a fixed value or a key of the config."""

    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    bias_default: bool = False
    qk_norm: bool = False
    norms: int = 2
    head_dim: int | None = None
    """Where the config says none; None: hidden size through heads."""
    tied: bool = False
    windows: Windows = "none"
    experts: Experts = "none"
    mla: bool = False
    sinks: bool = False
    fused: bool = False
    gated: bool = False
    """Q has a gate beside it, as wide; layers of linear attention stand between."""
    kv_heads_may_miss: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Of transformers' class, for keys that published files leave out; compared with it in
    tests/integration/test_model_parameters.py."""


GEMMA3_TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""The files of Gemma 3 with pictures have of their text part only what differs from these."""

_GEMMA = Family(
    qkv_bias="attention_bias", o_bias="attention_bias", head_dim=256, tied=True, norms=4
)
_QWEN3 = Family(
    qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, head_dim=128, windows="upper"
)

_LLAMA = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    kv_heads_may_miss=True,
)
_DEEPSEEK = Family(mla=True, experts="deepseek", kv_heads_may_miss=True)

FAMILIES = {
    "llama": _LLAMA,
    "mistral": Family(windows="mistral"),
    "mixtral": Family(windows="all", experts="mixtral"),
    "qwen2": Family(qkv_bias=True, windows="upper"),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias", bias_default=True, windows="upper", experts="qwen2_moe"
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, head_dim=None, windows="all", experts="qwen3_moe"),
    "qwen3_next": replace(_QWEN3, head_dim=256, windows="none", experts="qwen2_moe", gated=True),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gemma": replace(_GEMMA, norms=2),
    "gemma2": replace(_GEMMA, windows="two"),
    "gemma3_text": replace(_GEMMA, qk_norm=True, windows="six", defaults=GEMMA3_TEXT),
    "phi3": Family(fused=True, windows="all", kv_heads_may_miss=True),
    "gpt_oss": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        bias_default=True,
        sinks=True,
        windows="two",
        experts="gpt_oss",
    ),
}


def layers_of(text: ConfigValues, family: Family) -> tuple[LayerShape, ...]:
    """Every decoder layer of a model, in order."""
    count = text.number("num_hidden_layers", most=MOST_LAYERS)
    if family.gated:
        full = full_layers(text, count)
        return tuple(
            _layer(text, family, index, None) if full[index] else _linear(text, family, index)
            for index in range(count)
        )
    windows = _windows(text, family, count)
    return tuple(_layer(text, family, index, windows[index]) for index in range(count))


def _linear(text: ConfigValues, family: Family, index: int) -> LayerShape:
    """A layer of gated delta-net: a state for each sequence, no cache of tokens."""
    hidden = text.number("hidden_size")
    norms = [Weight(f"norm.{place}", hidden, kind="norm") for place in range(family.norms)]
    experts, per_token, widest, mlp = _feed_forward(text, family, index)
    state, matrix, attention = delta_net(text)
    return LayerShape(
        attention="linear",
        kv_heads=0,
        head_dim=0,
        v_head_dim=0,
        weights=(*attention, *mlp, *norms),
        widest=widest,
        state=state,
        state_matrix=matrix,
        experts=experts,
        experts_per_token=per_token,
    )


def _layer(text: ConfigValues, family: Family, index: int, window: int | None) -> LayerShape:
    hidden = text.number("hidden_size")
    norms = [Weight(f"norm.{place}", hidden, kind="norm") for place in range(family.norms)]
    experts, per_token, widest, mlp = _feed_forward(text, family, index)
    if family.mla:
        latent, copied, attention = _latent_attention(text)
        return LayerShape(
            attention="mla",
            kv_heads=1,
            head_dim=latent,
            v_head_dim=0,
            weights=(*attention, *mlp, *norms),
            widest=widest,
            experts=experts,
            experts_per_token=per_token,
            latent_copy=copied,
        )
    heads = text.number("num_attention_heads")
    kv_heads = text.number("num_key_value_heads", heads if family.kv_heads_may_miss else None)
    if heads % kv_heads:
        what = f"is {kv_heads}, which does not divide the {heads} attention heads"
        raise text.error("num_key_value_heads", what)
    head_dim = head_dim_of(text, family.head_dim)
    attention = attention_weights(
        hidden,
        heads,
        kv_heads,
        head_dim,
        qkv_bias=_flag(text, family.qkv_bias, family.bias_default),
        o_bias=_flag(text, family.o_bias, family.bias_default),
        fused=family.fused,
        gated=family.gated,
    )
    if family.qk_norm:
        attention += [Weight(f"self_attn.{one}_norm", head_dim, kind="norm") for one in "qk"]
    if family.sinks:
        attention.append(Weight("self_attn.sinks", heads, kind="other", split="column"))
    return LayerShape(
        attention="full" if window is None else "sliding",
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        weights=(*attention, *mlp, *norms),
        widest=widest,
        window=window,
        experts=experts,
        experts_per_token=per_token,
    )


def head_dim_of(text: ConfigValues, default: int | None = None) -> int:
    """Given, or the hidden size through the heads. Raises where that leaves a rest."""
    if text.has("head_dim"):
        return text.number("head_dim")
    if default is not None:
        return default
    hidden, heads = text.number("hidden_size"), text.number("num_attention_heads")
    if hidden % heads:
        raise text.error("num_attention_heads", f"is {heads}, which does not divide {hidden}")
    return hidden // heads


def attention_weights(
    columns: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    fused: bool = False,
    gated: bool = False,
    hidden: int | None = None,
) -> list[Weight]:
    """Q (twice as wide with a gate), K, V and output.

    `columns`: width of the input; `hidden`: of the output, where that is another.
    """
    parts: list[tuple[str, int, Split]] = [
        ("q_proj", heads * (1 + gated), "column"),
        ("k_proj", kv_heads, "kv"),
        ("v_proj", kv_heads, "kv"),
    ]
    found = []
    for part, count, split in parts:
        name = "self_attn.qkv_proj" if fused else f"self_attn.{part}"
        found.append(Weight(name, count * head_dim, columns, split=split))
        if qkv_bias:
            found.append(Weight(name, count * head_dim, kind="bias", split=split))
    hidden = hidden or columns
    found.append(Weight("self_attn.o_proj", hidden, heads * head_dim, split="row"))
    if o_bias:
        found.append(Weight("self_attn.o_proj", hidden, kind="bias"))
    return found


def mlp_weights(
    hidden: int,
    inner: int,
    *,
    bias: bool = False,
    prefix: str = "mlp",
    fused: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    count: int = 1,
    active: int = 1,
) -> list[Weight]:
    """Gate, up and down of one feed-forward network, or of `count` experts."""
    gate, up, down = ("gate_up_proj", "gate_up_proj", "down_proj") if fused else names
    parts: list[tuple[str, int, int, Split]] = [
        (gate, inner, hidden, "column"),
        (up, inner, hidden, "column"),
        (down, hidden, inner, "row"),
    ]
    found = [
        Weight(f"{prefix}.{name}", out, columns, split=split, count=count, active=active)
        for name, out, columns, split in parts
    ]
    if bias:
        found += [
            replace(
                weight,
                columns=1,
                kind="bias",
                split="none" if weight.name.endswith(down) else "column",
            )
            for weight in found
        ]
    return found


def _latent_attention(text: ConfigValues) -> tuple[int, int, list[Weight]]:
    """DeepSeek's MLA: values cached of a token, values that vLLM copies decompressed, weights.

    vLLM keeps `kv_b_proj` for prefill and beside it W_UK and W_UV in 16 bit for decoding
    (`MLAAttention.process_weights_after_loading`).
    """
    hidden, heads = text.number("hidden_size"), text.number("num_attention_heads")
    rank, rope = text.number("kv_lora_rank"), text.number("qk_rope_head_dim")
    nope, value = text.number("qk_nope_head_dim"), text.number("v_head_dim")
    bias = text.flag("attention_bias", False)
    rows = heads * (nope + rope)
    if "q_lora_rank" in text.values and text.values["q_lora_rank"] is None:
        found = [Weight("self_attn.q_proj", rows, hidden, split="column")]
    else:
        inner = text.number("q_lora_rank")
        found = [Weight("self_attn.q_a_proj", inner, hidden)]
        found += [Weight("self_attn.q_a_proj", inner, kind="bias")] * bias
        found += [
            Weight("self_attn.q_a_layernorm", inner, kind="norm"),
            Weight("self_attn.q_b_proj", rows, inner, split="column"),
        ]
    found.append(Weight("self_attn.kv_a_proj_with_mqa", rank + rope, hidden))
    found += [Weight("self_attn.kv_a_proj_with_mqa", rank + rope, kind="bias")] * bias
    found += [
        Weight("self_attn.kv_a_layernorm", rank, kind="norm"),
        Weight("self_attn.kv_b_proj", heads * (nope + value), rank, split="column"),
        Weight("self_attn.o_proj", hidden, heads * value, split="row"),
    ]
    found += [Weight("self_attn.o_proj", hidden, kind="bias")] * bias
    return rank + rope, heads * (nope + value) * rank, found


def _feed_forward(
    text: ConfigValues, family: Family, index: int
) -> tuple[int, int, int, list[Weight]]:
    """Experts, experts of a token, values of the widest row, weights."""
    hidden = text.number("hidden_size")
    if not _has_experts(text, family, index):
        inner = text.number("intermediate_size")
        bias = _flag(text, family.mlp_bias, False)
        return 0, 0, 2 * inner, mlp_weights(hidden, inner, bias=bias, fused=family.fused)
    per_token = text.number("num_experts_per_tok")
    key = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts"}.get(
        family.experts, "n_routed_experts" if family.experts == "deepseek" else "num_experts"
    )
    if family.experts == "gpt_oss" and not text.has(key):
        key = "num_experts"
    count = text.number(key)
    inner = text.number(
        "intermediate_size" if family.experts in ("mixtral", "gpt_oss") else "moe_intermediate_size"
    )
    if family.experts == "mixtral":
        router, prefix, names = "block_sparse_moe.gate", "block_sparse_moe", ("w1", "w3", "w2")
    else:
        router = "mlp.router" if family.experts == "gpt_oss" else "mlp.gate"
        prefix, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    found = [Weight(router, count, hidden, kind="router")]
    if family.experts == "gpt_oss":
        found.append(Weight(router, count, kind="bias"))
    found += mlp_weights(
        hidden,
        inner,
        bias=family.experts == "gpt_oss",
        prefix=f"{prefix}.experts.0",
        names=names,
        count=count,
        active=per_token,
    )
    shared = 0
    if family.experts == "deepseek" and text.has("n_shared_experts"):
        shared = inner * text.number("n_shared_experts")
        found += mlp_weights(hidden, shared, prefix="mlp.shared_experts")
    if family.experts == "qwen2_moe":
        shared = text.number("shared_expert_intermediate_size")
        found += mlp_weights(hidden, shared, prefix="mlp.shared_expert")
        found.append(Weight("mlp.shared_expert_gate", 1, hidden, kind="router"))
    return count, per_token, 2 * (per_token * inner + shared), found


def _has_experts(text: ConfigValues, family: Family, index: int) -> bool:
    if family.experts == "none":
        return False
    if family.experts == "deepseek":
        if text.number("moe_layer_freq", 1) != 1:
            raise text.error("moe_layer_freq", "is not 1: which layers have experts is not known")
        return index >= text.number("first_k_dense_replace", 0, least=0)
    if family.experts in ("qwen2_moe", "qwen3_moe"):
        dense = text.numbers("mlp_only_layers")
        step = text.number("decoder_sparse_step", 1)
        return index not in dense and (index + 1) % step == 0
    return True


def _windows(text: ConfigValues, family: Family, count: int) -> list[int | None]:
    """Tokens that each layer looks back; None: all of them."""
    types = text.strings("layer_types")
    alternating = family.windows in ("two", "six", "upper")
    if types and (alternating or "sliding_attention" in types):
        return _typed(text, types, count)
    if set(types) - {"full_attention"}:
        return _typed(text, types, count)
    if family.windows == "none":
        return [None] * count
    if family.windows in ("two", "six"):
        window = text.number("sliding_window")
        every = 2 if family.windows == "two" else text.number("sliding_window_pattern", 6)
        return [window if (index + 1) % every else None for index in range(count)]
    if family.windows == "mistral" and "sliding_window" not in text.values:
        # transformers' own default, which vLLM reads; newer versions write null.
        return [4096] * count
    if not text.has("sliding_window"):
        return [None] * count
    if "use_sliding_window" in text.values and not text.flag("use_sliding_window", False):
        return [None] * count
    if family.windows == "upper" and not text.flag("use_sliding_window", False):
        return [None] * count
    first = text.number("max_window_layers", 28, least=0) if family.windows == "upper" else 0
    window = text.number("sliding_window")
    return [window if index >= first else None for index in range(count)]


def _typed(text: ConfigValues, types: list[str], count: int) -> list[int | None]:
    text.check_layer_types(types, {"full_attention", "sliding_attention"}, count)
    window = text.number("sliding_window") if "sliding_attention" in types else 0
    return [window if one == "sliding_attention" else None for one in types]


def _flag(text: ConfigValues, flag: Flag, default: bool) -> bool:
    return flag if isinstance(flag, bool) else text.flag(flag, default)
