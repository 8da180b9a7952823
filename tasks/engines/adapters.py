"""The adapter that a recipe asks for, on a model; refused where its merge would be another model.

peft trains more kinds of adapter than it can merge, and passes over names that fit nothing. Both
are found here, before the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.errors import Problem, StageFailed


def adapted(model: Any, job: Mapping[str, Any]) -> Any:
    """`model` with one new adapter. Raises `StageFailed` for arguments that peft does not take."""
    import peft

    arguments = {"task_type": "CAUSAL_LM", **job["lora"]}
    try:
        found = peft.get_peft_model(model, peft.LoraConfig(**arguments))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise StageFailed(
            Problem("lora", str(error), "these are the arguments of peft.LoraConfig")
        ) from None
    check_adapter(found, bool(job["quantize_base"]))
    if job["training"].get("gradient_checkpointing"):
        # Nothing below the first adapter has a gradient, and recomputing would give none.
        found.enable_input_require_grads()
    # peft does so for the adapter, not for `modules_to_save`: in bfloat16 small steps would vanish.
    for part in found.parameters():
        if part.requires_grad:
            part.data = part.data.float()
    return found


NEW_AT_EVERY_LOAD = ("pissa_niter",)
"""`init_lora_weights` that take random numbers to find out what is left of the base: a loaded
adapter stands on another rest than the one that it was trained on."""

FROM_THE_BASE = ("pissa", "olora", "corda")
"""`init_lora_weights` that take the adapter out of the weights that are trained over."""


def check_adapter(model: Any, over_four_bits: bool) -> None:
    """Raise `StageFailed` for an adapter that peft trains and cannot merge to what it was."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    problems = []
    if list(model.peft_config) != ["default"]:
        problems.append(Problem("lora", f"several adapters at once: {list(model.peft_config)}"))
    config = model.active_peft_config
    if not any(part.requires_grad for part in model.parameters()):
        problems.append(Problem("lora", "leaves nothing to train", "take `inference_mode` out"))
    if getattr(config, "alora_invocation_tokens", None):
        what = "an adapter that waits for its own tokens cannot be merged"
        problems.append(Problem("lora.alora_invocation_tokens", what, "take it out"))
    if getattr(config, "layer_replication", None):
        what = "several layers on one set of weights cannot be merged"
        problems.append(Problem("lora.layer_replication", what, "take it out"))
    for name in _without_module(model):
        problems.append(
            Problem("lora", f"no module of the student is called {name!r}", "spell it as it is")
        )
    start = str(config.init_lora_weights)
    if start.startswith(NEW_AT_EVERY_LOAD):
        what = "is drawn anew at every load, so the merge would be another model"
        problems.append(Problem(f"lora.init_lora_weights: {start}", what, "write pissa"))
    elif over_four_bits and start.startswith(FROM_THE_BASE):
        what = "starts from the base in four bits and would be merged into another one"
        problems.append(Problem(f"lora.init_lora_weights: {start}", what, "leave it out"))
    base = model.get_base_model()
    ends = {"input": base.get_input_embeddings(), "output": base.get_output_embeddings()}
    adapted_ends = [name for name, end in ends.items() if isinstance(end, BaseTunerLayer)]
    if base.config.get_text_config().tie_word_embeddings and adapted_ends:
        problems.append(
            Problem(
                "lora.target_modules",
                f"the student's {' and '.join(adapted_ends)} embedding is one with its other: an "
                "adapter on one of them cannot be merged without changing both",
                "leave it to `modules_to_save: [embed_tokens]` with `ensure_weight_tying: true`",
            )
        )
    if problems:
        raise StageFailed(problems)


def _without_module(model: Any) -> list[str]:
    """Names of the recipe that peft passed over: a list is taken where one of its names fits."""
    from peft.utils import ModulesToSaveWrapper

    config = model.active_peft_config
    targets = config.target_modules if not isinstance(config.target_modules, str) else None
    saved = [name for name, part in model.named_modules() if isinstance(part, ModulesToSaveWrapper)]
    missing = []
    for wanted, found in (
        (targets or (), model.targeted_module_names),
        (config.modules_to_save or (), saved),
    ):
        missing += [
            name for name in wanted if not any(f".{each}".endswith(f".{name}") for each in found)
        ]
    return sorted(missing)
