"""Did merging an adapter change anything beyond rounding? Answered with logits, not with trust.

One greedy continuation per prompt is generated with the adapter applied; then both models read
the same token sequences, and their logits are compared position by position. Free-running texts
would part for good at the first near-tie and hide how small the difference was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from registry.errors import Problem, StageFailed

MAX_FLOAT32 = 2e-4
"""Largest difference between merged and applied adapter in float32, relative to the spread of the
logits: only the order of additions differs. Measured 4e-6 (2 layers), 1.5e-5 (SmolLM2)."""

MAX_LOSS = {"float32": 1e-3, "bfloat16": 0.05}
"""By how much the loss of an adapter that was read back may differ from what it was in training,
by the dtype of training; relative, above 1 nat. Measured for `pissa_niter_4`, which is read back
onto another rest of the base: 0.03."""

MAX_STORED_LOSS = 0.05
"""How much worse rounding to the base's dtype may make the loss; relative, above 1 nat."""


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


def check(float32: dict[str, Any], saved: dict[str, Any], where: str) -> None:
    """Raise `StageFailed` unless the merge is exact in float32 and saved as it was rounded.

    Each is the answer of `compared`: of the merge with the applied adapter, and of the weights
    read back from disk with the merge rounded in memory.
    """
    problems = []
    # Written as "not below", so that a NaN is a failure.
    for name, found in (
        ("merged and applied adapter differ in float32", float32),
        ("the weights read back from the disk are not those that were saved", saved),
    ):
        if not found["max_relative"] <= MAX_FLOAT32:
            problems.append(
                Problem(
                    where,
                    f"{name}: {found}",
                    f"the largest difference may be {MAX_FLOAT32} standard deviations of the "
                    "logits",
                )
            )
    if problems:
        raise StageFailed(problems)


def check_losses(
    losses: Mapping[str, float], compute_dtype: str, over_four_bits: bool, where: str
) -> None:
    """Raise `StageFailed` where the served model is not as good as the one that was trained. Pure.

    `losses` of one set of rows: `trained`, `applied` (the adapter read back, on the base in
    float32), `stored` (the merge read back). Over four bits the base in training was another one.
    """
    trained, applied, stored = (losses[name] for name in ("trained", "applied", "stored"))
    problems = []
    allowed = MAX_LOSS[compute_dtype]
    if not over_four_bits and not abs(applied - trained) <= allowed * max(1.0, trained):
        problems.append(
            Problem(
                where,
                f"the adapter read back has a loss of {applied:.4f}, and {trained:.4f} when it was "
                "trained",
                "this kind of adapter is not read back as it was; leave its option out of `lora`",
            )
        )
    if not stored - applied <= MAX_STORED_LOSS * max(1.0, applied):
        problems.append(
            Problem(
                where,
                f"rounding lost what was learned: a loss of {applied:.4f} before it is stored and "
                f"{stored:.4f} after",
                "what was learned is smaller than a step of the base's dtype: raise learning_rate, "
                "or give the student in float32",
            )
        )
    if problems:
        raise StageFailed(problems)
