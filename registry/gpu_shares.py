"""What of each weight lies on one GPU under tensor parallelism, as vLLM 0.32 splits it.

From `QKVParallelLinear`, `VocabParallelEmbedding` and their like: heads, rows and columns are
divided, KV heads are replicated where there are fewer than GPUs, what cannot be divided is an
error.
"""

from __future__ import annotations

from math import ceil

from registry.errors import Problem, UserError
from registry.shape_parts import ModelShape, Weight

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to this (`DEFAULT_VOCAB_PADDING_SIZE`)."""


def share_of(weight: Weight, shape: ModelShape, tp: int, index: int | None) -> tuple[int, int]:
    """Rows and columns on one GPU of a weight of layer `index`."""
    if weight.split in ("column", "vocab"):
        return ceil(weight.out / tp), weight.columns
    if weight.split == "row":
        return weight.out, ceil(weight.columns / tp)
    if weight.split == "kv":
        heads = shape.layers[index or 0].kv_heads
        return weight.out // heads * max(1, heads // tp), weight.columns
    return weight.out, weight.columns


def padding_of(weight: Weight, tp: int) -> int:
    """Values that the engine adds to one GPU's share of the vocabulary."""
    if weight.split != "vocab":
        return 0
    padded = ceil(weight.out / VOCAB_PADDING) * VOCAB_PADDING
    return max(0, ceil(padded / tp) - ceil(weight.out / tp)) * weight.columns


def check_split(
    shape: ModelShape,
    draft: ModelShape | None,
    *,
    context: int,
    tp: int,
    pp: int,
    block: int,
    max_batched_tokens: int,
) -> None:
    """Raise `UserError` with everything that vLLM would refuse."""
    numbers = {
        "context": context,
        "tensor parallel size": tp,
        "pipeline parallel size": pp,
        "block size": block,
        "max batched tokens": max_batched_tokens,
    }
    problems = [
        Problem(name, f"is {value}", "give at least 1")
        for name, value in numbers.items()
        if value < 1
    ]
    if context > shape.max_len:
        what = f"is {context}, the model was trained for {shape.max_len}"
        problems.append(Problem("context", what, f"at most {shape.max_len}"))
    if not problems:
        problems = [*_split_problems(shape, tp), *(_split_problems(draft, tp) if draft else [])]
    if problems:
        raise UserError(problems)


def _split_problems(shape: ModelShape, tp: int) -> list[Problem]:
    where = f"tensor parallel size {tp}"
    remedy = "take a size that divides them"
    if shape.heads % tp:
        what = f"does not divide the {shape.heads} attention heads of {shape.model_type}"
        return [Problem(where, what, remedy)]
    counts = sorted(
        {layer.kv_heads for layer in shape.layers if layer.attention not in ("mla", "linear")}
    )
    odd = [count for count in counts if count % tp and tp % count]
    if odd:
        what = f"and {odd[0]} KV heads of {shape.model_type}: neither divides the other"
        return [Problem(where, what, remedy)]
    uneven = [
        weight
        for weight in shape.weights
        if (weight.split == "column" and weight.out % tp)
        or (weight.split == "row" and weight.columns % tp)
        or (weight.split == "vocab" and ceil(weight.out / VOCAB_PADDING) * VOCAB_PADDING % tp)
    ]
    if uneven:
        what = f"does not divide {uneven[0].name} of {shape.model_type}"
        return [Problem(where, what, remedy)]
    return []
