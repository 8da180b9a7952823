"""kind: draft."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from recipes.written import Written


class DraftRecipe(Written):
    """kind: draft. An EAGLE3 draft trained on the merged student's own answers."""

    kind: Literal["draft"]
    description: str
    num_layers: int = Field(default=1, gt=0)
    draft_vocab_size: int | None = Field(default=None, gt=0, description="None: the target's.")
    epochs: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    max_length: int = Field(default=512, gt=0)
    num_speculative_tokens: int = Field(default=3, ge=1, le=16)
    response_tokens: int = Field(default=128, gt=0, description="Longest own answer trained on.")
    seed: int = 0
