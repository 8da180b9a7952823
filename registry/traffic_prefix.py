"""What the prompts of a log begin with in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix

from registry.traffic_requests import Text


def shared_tokens(texts: Sequence[Text]) -> list[float]:
    """Of each sampled prompt the tokens of the longest beginning that another one has too.

    Prompts that share a beginning stand beside each other in alphabetical order, so the neighbours
    decide. Characters become tokens by the prompt's own ratio, so templates and special tokens
    are spread over it. A prompt that occurs twice is shared as a whole.
    """
    order = sorted(range(len(texts)), key=lambda at: texts[at].begin)
    shared = [0] * len(texts)
    for one, other in pairwise(order):
        # Texts, not paths: character by character is what is meant.
        common = len(commonprefix([texts[one].begin, texts[other].begin]))  # noqa: RUF071
        shared[one] = max(shared[one], common)
        shared[other] = max(shared[other], common)
    return [
        text.tokens * min(1.0, characters / text.characters) if text.characters else 0.0
        for text, characters in zip(texts, shared, strict=True)
    ]
