"""What the parts of the prompts may have in common, and what stops a release."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from recipes.written import Written

Action = Literal["block", "report"]


class Disjointness(Written):
    """How each measure of overlap is answered. Everything is measured and reported in any case.

    `exact` is answered for every pair of parts; the others where one part is learned from (train,
    calibration, draft, the demo models' own messages) and the other is measured on (eval, load).
    """

    exact: Action = Field(default="block", description="The same prompt in two parts.")
    normalized: Action = Field(
        default="block", description="Equal but for case, width, white space and punctuation."
    )
    near_duplicate: Action = Field(default="block", description="As alike as `threshold` says.")
    threshold: float = Field(
        default=0.85,
        ge=0.5,
        le=1,
        description="Jaccard similarity of character shingles. Rows of one file that are this "
        "alike come into one part.",
    )
    ngram: Action = Field(
        default="report", description="A run of `n` words (of Chinese characters) in common."
    )
    n: int = Field(default=13, ge=2, description="Words; shorter prompts are not compared so.")
