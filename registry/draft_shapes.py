"""The shape of an EAGLE3 draft: a few Llama layers that read the target's hidden states.

As vLLM 0.32 builds it (`model_executor/models/llama_eagle3.py`). Two layouts of config.json are
known, speculators' (the layer's settings in `transformer_layer_config`) and EAGLE's own.
"""

from __future__ import annotations

from collections.abc import Callable

from registry.config_values import MOST_LAYERS, ConfigValues
from registry.model_families import attention_weights, head_dim_of, mlp_weights
from registry.shape_parts import LayerShape, ModelShape, Weight

MODEL_TYPE = "eagle3"
AUX_STATES = 3
"""Hidden states of the target that a draft reads where its config names none."""


def is_draft(top: ConfigValues) -> bool:
    names = top.values.get("architectures") or []
    named = isinstance(names, list) and any("eagle3" in str(one).lower() for one in names)
    return named or top.text("speculators_model_type") == MODEL_TYPE


def draft_shape(top: ConfigValues, max_len: Callable[[ConfigValues, str], int]) -> ModelShape:
    """`max_len` reads the trained length. Raises `UserError` for what cannot be counted."""
    inner = top.section("transformer_layer_config") or top
    hidden, vocab = inner.number("hidden_size"), inner.number("vocab_size")
    count = inner.number("num_hidden_layers", most=MOST_LAYERS)
    proposed = top.number("draft_vocab_size", vocab)
    target = top.number("target_hidden_size", hidden)
    embedding = Weight("embed_tokens", vocab, hidden, kind="embedding", split="vocab")
    last = [
        Weight("fc", hidden, target * _states(top), kind="other"),
        Weight("norm", hidden, kind="norm"),
        Weight("lm_head", proposed, hidden, kind="head", split="vocab"),
    ]
    if top.flag("norm_before_fc", False):
        last.append(Weight("input_norm", target * _states(top), kind="norm"))
    if top.flag("fc_norm", False):
        last.append(Weight("fc_norm", target * _states(top), kind="norm"))
    return ModelShape(
        model_type=MODEL_TYPE,
        hidden=hidden,
        vocab=proposed,
        heads=inner.number("num_attention_heads"),
        layers=tuple(_layer(inner, hidden, index) for index in range(count)),
        first=(embedding,),
        last=tuple(last),
        tied=False,
        max_len=max_len(inner, MODEL_TYPE),
        dtype="bfloat16",
        # vLLM keeps one table where the draft's is the target's, and training freezes it.
        shares_embedding=not top.flag("embed_requires_grad", False),
        index_bytes=8 * proposed if proposed != vocab else 0,
    )


def _states(top: ConfigValues) -> int:
    if top.has("num_aux_hidden_states"):
        return top.number("num_aux_hidden_states")
    key = "eagle_aux_hidden_state_layer_ids"
    inner = top.section("eagle_config")
    ids = top.values.get(key) or (inner.values.get(key) if inner else None)
    return len(ids) if isinstance(ids, list) and ids else AUX_STATES


def _layer(inner: ConfigValues, hidden: int, index: int) -> LayerShape:
    """The first reads embeddings and hidden states side by side."""
    heads = inner.number("num_attention_heads")
    kv_heads, head_dim = inner.number("num_key_value_heads", heads), head_dim_of(inner)
    width = inner.number("intermediate_size")
    bias = inner.flag("attention_bias", False)
    weights = attention_weights(
        2 * hidden if index == 0 else hidden,
        heads,
        kv_heads,
        head_dim,
        qkv_bias=bias,
        o_bias=bias,
        hidden=hidden,
    )
    weights += mlp_weights(hidden, width, bias=inner.flag("mlp_bias", False))
    weights += [Weight(f"norm.{place}", hidden, kind="norm") for place in range(3)]
    return LayerShape(
        attention="full",
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        weights=tuple(weights),
        widest=2 * width,
    )
