"""kind: distill."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from recipes.model_sources import ModelSource
from recipes.written import Written


class DistillRecipe(Written):
    """kind: distill. LoRA on the teacher's answers, loss on the assistant's tokens only."""

    kind: Literal["distill"]
    description: str
    student: ModelSource
    lora: dict[str, Any] = Field(description="peft.LoraConfig arguments, unchanged.")
    epochs: float = Field(gt=0)
    learning_rate: float = Field(gt=0)
    batch_size: int = Field(gt=0)
    max_length: int = Field(gt=0, description="Tokens of prompt and answer together.")
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    held_out_share: float = Field(default=0.05, gt=0, lt=0.5)
    seed: int = 0
