"""kind: distill."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from recipes.model_sources import ModelSource
from recipes.written import Written

HELD_OUT_LOSS = "held_out_loss"


class Training(TypedDict, total=False):
    """What may stand in `training`, as transformers.TrainingArguments has it: all else is ours."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[misc]

    adam_beta1: Annotated[float, Field(ge=0, lt=1)]
    adam_beta2: Annotated[float, Field(ge=0, lt=1)]
    adam_epsilon: Annotated[float, Field(gt=0)]
    gradient_accumulation_steps: Annotated[int, Field(gt=0, strict=True)]
    gradient_checkpointing: Annotated[bool, Field(strict=True)]
    gradient_checkpointing_kwargs: dict[str, Any]
    lr_scheduler_kwargs: dict[str, Any]
    lr_scheduler_type: str
    max_grad_norm: Annotated[float, Field(ge=0)]
    neftune_noise_alpha: Annotated[float, Field(gt=0)]
    optim: str
    optim_args: str
    tf32: Annotated[bool, Field(strict=True)]
    weight_decay: Annotated[float, Field(ge=0)]


class Gkd(Written):
    """Generalized knowledge distillation (Agarwal et al. 2023), in the words of TRL's GKDConfig."""

    lmbda: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of batches whose answers the student writes itself while it trains; "
        "the others are the teacher's stored answers. TRL's own default is 0.5.",
    )
    beta: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="0: KL(teacher, student); 1: KL(student, teacher); between: Jensen-Shannon.",
    )
    temperature: float = Field(
        default=0.9,
        gt=0,
        description="Of the answers sampled for `lmbda` and `seq_kd`; TRL leaves the loss at 1.",
    )
    seq_kd: bool = Field(
        default=False, description="The teacher writes new answers for the other batches."
    )
    max_new_tokens: int = Field(default=128, gt=0, description="Of an answer sampled on the way.")

    @property
    def samples(self) -> bool:
        """Whether answers are written while training."""
        return self.lmbda > 0 or self.seq_kd


class Checkpoint(Written):
    """How much work a run that is killed loses at most."""

    minutes: float = Field(default=10.0, gt=0)
    steps: int | None = Field(default=None, gt=0, description="Instead of minutes.")


class DistillRecipe(Written):
    """kind: distill. LoRA on the teacher's answers, loss on the assistant's tokens only."""

    kind: Literal["distill"]
    description: str
    student: ModelSource
    method: Literal["responses", "logits"] = Field(
        default="responses",
        description="`responses`: cross-entropy on the teacher's answers. `logits`: the teacher's "
        "distribution at every token of an answer; needs a local teacher with the student's "
        "tokenizer.",
    )
    gkd: Gkd | None = Field(default=None, description="For `method: logits`.")
    lora: dict[str, Any] = Field(description="peft.LoraConfig arguments, unchanged.")
    training: Training = Field(
        default_factory=lambda: Training(),
        description="transformers.TrainingArguments, unchanged: optimizer, its schedule, gradient "
        "accumulation and checkpointing.",
    )
    quantize_base: Literal["nf4"] | None = Field(
        default=None,
        description="QLoRA: train over the base in 4 bits (bitsandbytes, CUDA only). The adapter "
        "is merged into the unquantized base.",
    )
    epochs: float = Field(gt=0)
    learning_rate: float = Field(gt=0)
    batch_size: int = Field(gt=0, description="Rows of one step and one process.")
    processes: int = Field(
        default=1, gt=0, le=64, description="Started by `accelerate launch`; one per GPU."
    )
    max_length: int = Field(gt=0, description="Tokens of prompt and answer together.")
    packing: bool = Field(
        default=False,
        description="Several rows in one of up to `max_length` tokens; none sees another.",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        default="sdpa", description="transformers' `attn_implementation` while training."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="`auto`: bfloat16 where the hardware has it, else float32."
    )
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    held_out_share: float = Field(default=0.05, gt=0, lt=0.5)
    evaluate_every: float = Field(
        default=0.5, gt=0, description="Share of an epoch between two looks at the held-out rows."
    )
    best_by: str = Field(
        default=HELD_OUT_LOSS,
        description="What chooses the checkpoint that is merged: `held_out_loss` (for logits the "
        "divergence from the teacher), or a metric of the release's accuracy suite on greedy "
        "answers to held-out prompts.",
    )
    held_out_answers: int = Field(
        default=64, gt=0, description="Held-out prompts that are answered for a metric."
    )
    checkpoint: Checkpoint = Field(
        default_factory=Checkpoint, description="No part of the stage's key."
    )
    seed: int = 0

    @model_validator(mode="after")
    def _fits_together(self) -> DistillRecipe:
        logits = self.method == "logits"
        if self.gkd is not None and not logits:
            raise ValueError("`gkd` is for `method: logits`")
        if logits and self.packing:
            raise ValueError("TRL's GKD reads no packed rows; leave `packing` out")
        if logits and self.quantize_base:
            raise ValueError("`quantize_base` is for `method: responses`")
        if logits and "lm_head" in _named_modules(self.lora):
            raise ValueError("TRL's GKD trains no adapter on `lm_head`; take it out of `lora`")
        return self


def _named_modules(lora: dict[str, Any]) -> list[str]:
    named = lora.get("target_modules") or []
    return [named] if isinstance(named, str) else list(named)
