"""How well a model predicts given texts: perplexity, and whether its numbers are numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from registry.errors import Problem, StageFailed

Encoded = tuple[list[int], int]
"""Token ids of a conversation, and the first position that counts."""

PART = 128
"""Positions whose logits are turned into float32 at a time: vocabularies are large."""
PROMPT = 512


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
            lowest, highest = logits.aminmax()  # NaN where any is; needs no memory
            if not math.isfinite(float(lowest)) or not math.isfinite(float(highest)):
                raise StageFailed(
                    Problem(where, f"logits are not finite for a text of {len(ids)} tokens")
                )
            first = max(begins, 1)  # nothing predicts the first token
            for start in range(first, len(ids), PART):
                wanted = inputs[0, start : start + PART]
                predicted = logits[start - 1 : start - 1 + len(wanted)].float()
                loss += float(torch.nn.functional.cross_entropy(predicted, wanted, reduction="sum"))
                counted += len(wanted)
    if not counted:
        raise StageFailed(
            Problem(
                "teacher's answers to the calibration prompts",
                f"the {len(texts)} that are held out are empty: nothing is left to judge",
                "look at the teacher's answers",
            )
        )
    return math.exp(min(loss / counted, 700.0))


def first_tokens(
    model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int
) -> tuple[list[dict[str, str]], bool]:
    """Prompts with their greedy texts, and whether every text is one token repeated.

    Of a prompt longer than `PROMPT` tokens the end is given.
    """
    import torch

    samples, stuck = [], True
    device = next(model.parameters()).device
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"][-PROMPT:]
        inputs = torch.tensor([ids], device=device)
        with torch.inference_mode():
            written = model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        new = written[0, len(ids) :].tolist()
        stuck = stuck and len(new) == tokens and len(set(new)) == 1
        samples.append({"prompt": prompt, "text": tokenizer.decode(new)})
    return samples, stuck
