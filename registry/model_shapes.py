"""What a Hugging Face config.json says of a model's size: its layers, weights and cache.

Every weight is counted with its shape, so parameters, bytes in any format and shares of a GPU
follow from one list. An architecture whose list is not known is refused by name: a guess would be
a wrong number in a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.config_values import LARGEST, ConfigValues
from registry.draft_shapes import draft_shape, is_draft
from registry.model_families import FAMILIES, Family, layers_of
from registry.quantization_configs import quantization_of
from registry.shape_parts import Attention, LayerShape, ModelShape, Weight
from registry.vision_shapes import vision_weights
from registry.weight_formats import ENGINE

__all__ = ["Attention", "LayerShape", "ModelShape", "Weight", "shape_of"]

LENGTHENED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE whose `max_position_embeddings` is the length after scaling, as vLLM 0.32 reads
them (`_get_and_verify_max_len`); with the others it is multiplied by their factor, if there is
one."""

ROPE_KINDS = (
    *LENGTHENED[1:],
    *("default", "linear", "dynamic", "ntk", "proportional", "mllama4", "openpangu"),
    "bailing_mrope",
)
"""All that `get_rope` of vLLM 0.32 knows; any other is an error there."""

OLDER_KINDS = {"su": "longrope", "mrope": "default", "telechat3-yarn": "yarn"}
"""Names that it reads as others (`patch_legacy_rope_type`)."""

ANSWERS = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
"""How the architectures end that vLLM generates with (`_SUFFIX_TO_DEFAULTS`)."""

_DTYPES = ("bfloat16", "float16")


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape of a model, or of an EAGLE3 draft, from the content of its config.json.

    `where` names the file in errors. Raises `UserError` with file, key, value and remedy, also for
    an architecture that is not in the list.
    """
    top = ConfigValues(config, where)
    if is_draft(top):
        return draft_shape(top, max_len_of)
    text = top.section("text_config") or top
    model_type = text.text("model_type") or top.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise top.error(
            "model_type",
            f"is {model_type or 'missing'!r}: its weights and its cache cannot be counted",
            f"known are {', '.join(sorted(FAMILIES))}; serve this model with the engine and read "
            "its memory there",
        )
    if family.defaults:
        given = {key: value for key, value in text.values.items() if value is not None}
        text = ConfigValues({**family.defaults, **given}, text.where)
    _check_answers(top)
    seen = vision_weights(top, model_type, text.number("hidden_size"))
    hidden, vocab = text.number("hidden_size"), text.number("vocab_size")
    tied = _tied(top, text, family)
    embedding = Weight("embed_tokens", vocab, hidden, kind="embedding", split="vocab")
    norm = Weight("norm", hidden, kind="norm")
    head = Weight("lm_head", vocab, hidden, kind="head", split="vocab")
    return ModelShape(
        model_type=model_type,
        hidden=hidden,
        vocab=vocab,
        heads=text.number("num_attention_heads"),
        layers=layers_of(text, family),
        first=(embedding, *seen),
        last=(norm,) if tied else (norm, head),
        tied=tied,
        max_len=max_len_of(text, model_type),
        dtype=dtype_of(top, text),
        quantization=quantization_of(top, text),
    )


def _check_answers(top: ConfigValues) -> None:
    """Raises `UserError` for a model that classifies or embeds.

    It has another head, and vLLM keeps no cache of answers for it.
    """
    for name in top.strings("architectures"):
        if not name.endswith(ANSWERS):
            raise top.error(
                "architectures",
                f"is {name[:80]!r}: it gives classes, scores or vectors, and what is counted here "
                "are models that write answers",
                f"plan a model whose architecture ends with {' or '.join(ANSWERS[:2])}",
            )


def max_len_of(text: ConfigValues, model_type: str) -> int:
    """Tokens of context that the model was trained for, RoPE scaling understood.

    Raises `UserError` for a kind of RoPE that vLLM would refuse.
    """
    length = text.number("max_position_embeddings")
    written = text.section("rope_scaling") or text.section("rope_parameters")
    if written is None or "gemma3" in model_type:
        # Gemma 3 writes the length after scaling beside `linear`.
        return length
    scale: float = 1
    for rope in _ropes(written):
        kind = rope.text("rope_type") or rope.text("type", "default")
        kind = OLDER_KINDS.get(kind, kind)
        if kind not in ROPE_KINDS:
            what = f"is {kind[:60]!r}, which vLLM {ENGINE} does not know"
            raise rope.error("rope_type", what, f"one of {', '.join(ROPE_KINDS)}")
        factor = rope.values.get("factor")
        if kind in LENGTHENED or factor is None:
            continue
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or not 1 <= factor < LARGEST:
            raise rope.error("factor", f"is {str(factor)[:60]!r}, no number of at least 1")
        scale = factor
    return int(length * scale)


def _ropes(written: ConfigValues) -> list[ConfigValues]:
    """One, or one for each kind of layer (`iter_rope_parameters`)."""
    each = [written.section(name) for name, one in written.values.items() if isinstance(one, dict)]
    if not each or any(isinstance(one, str) for one in written.values.values()):
        return [written]
    return [rope for rope in each if rope is not None]


def dtype_of(top: ConfigValues, text: ConfigValues) -> str:
    """The 16-bit kind that vLLM computes in: what is written, and bfloat16 in place of float32."""
    for values in (text, top):
        for name in ("dtype", "torch_dtype"):
            written = values.text(name).removeprefix("torch.")
            if written in _DTYPES:
                return written
            if written not in ("", "float32", "auto"):
                raise values.error(name, f"is {written!r}; known are {', '.join(_DTYPES)}, float32")
    return "bfloat16"


def _tied(top: ConfigValues, text: ConfigValues, family: Family) -> bool:
    return text.flag("tie_word_embeddings", top.flag("tie_word_embeddings", family.tied))
