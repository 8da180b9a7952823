"""Did merging an adapter change anything beyond rounding? Answered with logits, not with trust.

One greedy continuation per prompt is generated with the adapter applied; then both models read
the same token sequences, and their logits are compared position by position. Free-running texts
would part for good at the first near-tie and hide how small the difference was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from registry.errors import Problem, StageFailed

MAX_FLOAT32 = 2e-4
"""Largest difference between merged and applied adapter in float32, relative to the spread of the
logits: only the order of additions differs. Measured 4e-6 (2 layers), 1.5e-5 (SmolLM2)."""

SLACK = 1e-6
"""Standard deviations of the logits; a model stored in float32 differs from nothing by this."""


def continued(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Each prompt with its greedy continuation of up to `new_tokens` tokens."""
    import torch

    sequences = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            written = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            sequences.append(written[0].tolist())
    return sequences


def logits(model: Any, sequences: Sequence[Sequence[int]]) -> Any:
    """Logits in float32 at every position of every sequence, shape (positions, vocabulary)."""
    import torch

    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([list(ids)])).logits[0].float() for ids in sequences]
    return torch.cat(rows)


def cut_logits(model: Any, sequences: Sequence[Sequence[int]]) -> Any:
    """As `logits`, with every float32 weight cut to bf16 toward zero; the weights are put back.

    Cutting errs by up to twice as much as rounding to the nearest does. What it changes is the
    yardstick for the stored weights: how far rounding moves the logits depends on the model (mean
    0.001 standard deviations at two layers, 0.017 for SmolLM2, 0.05 with layers taken out of it),
    so no fixed number says what is "beyond rounding".
    """
    import torch

    kept = [(weight, weight.data) for weight in model.parameters()]
    for weight, whole in kept:
        weight.data = whole.contiguous().view(torch.int32).bitwise_and(-65536).view(torch.float32)
    found = logits(model, sequences)
    for weight, whole in kept:
        weight.data = whole
    return found


def compared(wanted: Any, found: Any) -> dict[str, Any]:
    """Differences of two logit tables of one shape (positions, vocabulary).

    `max_abs`, `mean_abs` (in logits), `max_relative`, `mean_relative` (in standard deviations of
    the wanted logits), `token_agreement` (share of positions with one greedy token), `positions`.
    """
    import torch

    difference = (wanted - found).abs()
    spread = float(wanted.std())
    return {
        "max_abs": float(difference.max()),
        "mean_abs": float(difference.mean()),
        "max_relative": float(difference.max()) / spread,
        "mean_relative": float(difference.mean()) / spread,
        "token_agreement": float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
        "positions": int(wanted.shape[0]),
        "finite": bool(torch.isfinite(found).all()),
    }


def check(float32: dict[str, Any], stored: dict[str, Any], cut: dict[str, Any], where: str) -> None:
    """Raise `StageFailed` unless the merge is exact in float32 and stored within rounding.

    Each is the answer of `compared` against the applied adapter: of the merged float32 weights,
    of the weights read back from disk, and of the merged weights cut to bf16 (`cut_logits`).
    """
    problems = []
    # Written as "not below", so that a NaN is a failure.
    if not float32["max_relative"] <= MAX_FLOAT32:
        problems.append(
            Problem(
                where,
                f"merged and applied adapter differ in float32: {float32}",
                f"the largest difference may be {MAX_FLOAT32} standard deviations of the logits",
            )
        )
    if not stored["mean_relative"] <= cut["mean_relative"] + SLACK:
        problems.append(
            Problem(
                where,
                f"the saved weights differ from the applied adapter beyond rounding: {stored}",
                f"cutting the same weights to bf16 moves the logits by {cut['mean_relative']:.4f} "
                "standard deviations on average, and no more is allowed",
            )
        )
    if problems:
        raise StageFailed(problems)
