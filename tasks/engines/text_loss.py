"""How well a model predicts given texts: perplexity, and whether its numbers are numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from registry.errors import Problem, StageFailed

Encoded = tuple[list[int], int]
"""Token ids of a conversation, and the first position that counts."""


def perplexity(model: Any, texts: Sequence[Encoded], where: str) -> float:
    """exp of the mean negative log likelihood of every counted token, one text at a time.

    Raises `StageFailed` when a logit is not finite, or no token counts.
    """
    import torch

    loss, counted = 0.0, 0
    device = next(model.parameters()).device
    with torch.inference_mode():
        for ids, begins in texts:
            inputs = torch.tensor([ids], device=device)
            logits = model(input_ids=inputs, use_cache=False).logits[0]
            if not bool(torch.isfinite(logits).all()):
                raise StageFailed(
                    Problem(where, f"logits are not finite for a text of {len(ids)} tokens")
                )
            first = max(begins, 1)  # nothing predicts the first token
            if first >= len(ids):
                continue
            losses = torch.nn.functional.cross_entropy(
                logits[first - 1 : -1].float(), inputs[0, first:], reduction="sum"
            )
            loss += float(losses)
            counted += len(ids) - first
    if not counted:
        raise StageFailed(
            Problem(
                "calibration.max_length",
                "the answers of all held-out texts lie behind it: nothing is left to judge",
                "raise it",
            )
        )
    return math.exp(min(loss / counted, 700.0))


def first_tokens(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[Any]], tokens: int
) -> tuple[list[dict[str, str]], bool]:
    """Prompts with their greedy texts, and whether every text is one token repeated."""
    import torch

    samples, stuck = [], True
    device = next(model.parameters()).device
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            list(prompt), tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(device)
        with torch.inference_mode():
            written = model.generate(
                **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        new = written[0, inputs["input_ids"].shape[1] :].tolist()
        stuck = stuck and len(new) == tokens and len(set(new)) == 1
        samples.append({"prompt": text, "text": tokenizer.decode(new)})
    return samples, stuck
