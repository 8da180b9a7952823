"""An adapter merged into the unquantized base, in the base's own dtype, and proved.

Four models stand in a row: the one that was trained, its adapter read back and applied to the base
as it is stored, the merge, and the merge as stored. The first two must have one loss on the same
rows (a base that was trained over in four bits is another one: its figures are told apart, not
judged). The others are compared in logits, in float32, where only the order of additions differs.
What storing in the base's dtype costs is a loss again.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import held_out as held_out_rows
from tasks.engines import loss_mask, merge_check, model_files

MERGE_PROMPTS = 8
MERGE_TOKENS = 32
SAMPLES = 3
TRAINED = "trained.json"
"""Beside a kept adapter: `loss` of the model in training on the first held-out rows."""


def merge_and_save(
    base: Path,
    kept: Path,
    out: Path,
    tokenizer: Any,
    held_out: Sequence[loss_mask.Example],
    trained: Mapping[str, Any],
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Write `adapter/`, from the kept one, and `merged/`. What was compared, and some answers.

    `trained`: `compute_dtype`, `quantize_base` and `batch_size` of the training. The comparisons
    are those of `merge_check.compared`; `losses` are nat per supervised token on `loss_rows` rows.
    Raises `StageFailed` where merging changed anything beyond rounding.
    """
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    adapter, merged = out / "adapter", out / "merged"
    shutil.copytree(kept, adapter, ignore=shutil.ignore_patterns(TRAINED))
    rows = list(held_out[:MERGE_PROMPTS])
    pad_id = tokenizer.pad_token_id

    def loss(model: Any) -> float:
        return held_out_rows.loss(model, rows, pad_id, int(trained["batch_size"]))

    losses = {"trained": float(json.loads((kept / TRAINED).read_text())["loss"])}
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    model = peft.PeftModel.from_pretrained(plain, adapter).eval()
    losses["applied"] = loss(model)
    sequences = merge_check.continued(model, [example.prompt_ids for example in rows], MERGE_TOKENS)
    wanted = merge_check.logits(model, sequences)

    whole = model.merge_and_unload(safe_merge=True)
    if any("lora_" in name for name, _ in whole.named_parameters()):
        raise StageFailed(Problem(str(merged), "adapter weights were left after merging"))
    exact = merge_check.compared(wanted, merge_check.logits(whole, sequences))
    stored_dtype = AutoConfig.from_pretrained(base, trust_remote_code=False).dtype or torch.bfloat16
    for weight in whole.parameters():  # not the buffers: they are computed again at every load
        weight.data = weight.data.to(stored_dtype).float()
    rounded = merge_check.logits(whole, sequences)
    whole.config.dtype = stored_dtype
    whole.to(stored_dtype).save_pretrained(merged)
    model_files.copy_side_files(base, merged)
    model_files.check_weights(merged, "distill")
    model_files.check_side_files(merged, base, "distill")
    del plain, model, whole
    gc.collect()
    reloaded = AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.float32, trust_remote_code=False
    ).eval()
    found = merge_check.logits(reloaded, sequences)
    losses["stored"] = loss(reloaded)
    merge_check.check(exact, merge_check.compared(rounded, found), str(merged))
    merge_check.check_losses(
        losses, trained["compute_dtype"], bool(trained["quantize_base"]), str(merged)
    )

    samples = [
        {
            "prompt": tokenizer.decode(example.prompt_ids),
            "answer": tokenizer.decode(sequence[len(example.prompt_ids) :]),
            "expected": tokenizer.decode(example.answer_ids),
        }
        for example, sequence in zip(held_out[:SAMPLES], sequences, strict=False)
    ]
    compared = {
        "float32": exact,
        "stored": merge_check.compared(wanted, found),
        "stored_dtype": str(stored_dtype),
        "losses": losses,
        "loss_rows": len(rows),
    }
    return compared, samples
