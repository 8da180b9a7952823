"""An adapter merged into the unquantized base, in the base's own dtype, and proved.

Adapter and merge are compared in float32, where only the order of additions differs; what was
saved is read back from the disk and compared with the adapter under its own tolerance. The
adapter is applied to the base as it is stored, whatever it was trained over: one that was trained
over four bits is measured, and served, on the weights that it is merged into.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import loss_mask, merge_check, model_files

MERGE_PROMPTS = 8
MERGE_TOKENS = 32
SAMPLES = 3


def merge_and_save(
    base: Path, adapter: Path, tokenizer: Any, held_out: Sequence[loss_mask.Example], merged: Path
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Write the merged model. The comparisons (`merge_check.compared`), and some greedy answers.

    Raises `StageFailed` where merging changed anything beyond rounding.
    """
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    model = peft.PeftModel.from_pretrained(plain, adapter).eval()
    sequences = merge_check.continued(
        model, [example.prompt_ids for example in held_out[:MERGE_PROMPTS]], MERGE_TOKENS
    )
    wanted = merge_check.logits(model, sequences)

    whole = model.merge_and_unload(safe_merge=True)
    if any("lora_" in name for name, _ in whole.named_parameters()):
        raise StageFailed(Problem(str(merged), "adapter weights were left after merging"))
    exact = merge_check.compared(wanted, merge_check.logits(whole, sequences))
    cut = merge_check.compared(wanted, merge_check.cut_logits(whole, sequences))

    stored_dtype = AutoConfig.from_pretrained(base).dtype or torch.bfloat16
    whole.config.dtype = stored_dtype
    whole.to(stored_dtype).save_pretrained(merged)
    model_files.copy_side_files(base, merged)
    model_files.check_weights(merged, "distill")
    model_files.check_side_files(merged, base, "distill")
    reloaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    stored = merge_check.compared(wanted, merge_check.logits(reloaded.eval(), sequences))
    merge_check.check(exact, stored, cut, str(merged))

    samples = [
        {
            "prompt": tokenizer.decode(example.prompt_ids),
            "answer": tokenizer.decode(sequence[len(example.prompt_ids) :]),
            "expected": tokenizer.decode(example.answer_ids),
        }
        for example, sequence in zip(held_out[:SAMPLES], sequences, strict=False)
    ]
    found = {"float32": exact, "stored": stored, "cut": cut, "stored_dtype": str(stored_dtype)}
    return found, samples
