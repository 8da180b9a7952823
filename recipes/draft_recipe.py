"""kind: draft."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from recipes.written import Written


class DraftRecipe(Written):
    """kind: draft. An EAGLE3 draft trained on its target's own answers."""

    kind: Literal["draft"]
    description: str
    target: Literal["student", "candidate"] = Field(
        default="student",
        description="What answers and gives its states: the merged student, one draft for all "
        "candidates of a release; or each candidate's own quantized weights, one draft for each.",
    )
    init_from: str | None = Field(
        default=None,
        description="Folder of a published draft, in speculators' format or as a plain EAGLE3 "
        "checkpoint: its weights are trained on. None: from scratch.",
    )
    num_layers: int = Field(default=1, gt=0, description="As the published draft has them.")
    draft_vocab_size: int | None = Field(
        default=None, gt=0, description="None: the target's, or the published draft's."
    )
    epochs: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    batch_tokens: int = Field(default=256, gt=0, description="Tokens of one training step.")
    max_length: int = Field(default=512, gt=0)
    num_speculative_tokens: int = Field(default=3, ge=1, le=16)
    response_tokens: int = Field(default=128, gt=0, description="Longest own answer trained on.")
    response_temperature: float = Field(
        default=0.0,
        ge=0,
        le=2,
        description="Of the answers trained on: production's. Held-out answers are greedy.",
    )
    states: Literal["auto", "vllm", "transformers"] = Field(
        default="auto",
        description="Who answers and gives the hidden states. auto: vLLM where there is a GPU.",
    )
    held_out_share: float = Field(default=0.1, gt=0, lt=1, description="Of the draft prompts.")
    engine_checkpoints: int = Field(
        default=2,
        ge=1,
        description="Checkpoints that the engine measures at most, each on a server of its own: "
        "the best by held-out loss, and the last ones.",
    )
    max_acceptance_gap: float = Field(
        default=0.15,
        gt=0,
        description="Between the acceptance length that training expects and the engine reports.",
    )
    seed: int = 0
