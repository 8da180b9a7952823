"""LoRA distillation: train an adapter on the teacher's answers, merge it, prove the merge.

`python -m tasks.engines.lora JOB RESULT`. JOB:

    base            folder of the student (safetensors, tokenizer, chat template)
    train_file      JSONL, rows {"id", "messages": [{"role", "content"}, ...]}; the last message
                    is the assistant's
    out_dir         gets `adapter/` (as peft saves it) and `merged/` (a complete model folder)
    lora            peft.LoraConfig arguments, unchanged
    epochs, learning_rate, batch_size, max_length (tokens), warmup_ratio, held_out_share, seed,
    threads         CPU threads

RESULT: `rows`, `train_rows`, `held_out_rows`, `too_long` (rows left out), `last_token_not_end`
(share), `tokens` (trained on, all epochs, padding not counted), `supervised_tokens` (per epoch),
`steps`, `held_out_loss_before`, `held_out_loss_after` (nat per supervised token),
`train_loss`, `training_seconds`, `tokens_per_second`, `seconds`, `trainable_parameters`,
`compute_dtype`, `merge` (see `merge_check.compared`), `samples` (prompt, answer, expected).
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import loss_mask, model_files
from tasks.engines.subprocesses import job_main

MAX_TOO_LONG_SHARE = 0.02
"""More rows than this over `max_length` is a recipe that does not fit its data."""

MERGE_PROMPTS = 8
MERGE_TOKENS = 32


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train, merge, verify. Raises `StageFailed` for unfit data and for training that failed."""
    # Before torch is loaded: OpenMP threads that wait by spinning took five times as long, and four
    # times the processor time, on two cores with other work on them; waiting asleep cost nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    started = time.monotonic()
    base, out = Path(job["base"]), Path(job["out_dir"])
    _check_base(base)
    torch.set_num_threads(int(job["threads"]))
    set_seed(int(job["seed"]))

    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    data = loss_mask.load(
        Path(job["train_file"]),
        tokenizer,
        end_ids=model_files.end_token_ids(base) or [tokenizer.eos_token_id],
        max_length=int(job["max_length"]),
    )
    print(f"rows whose last supervised token is not end-of-turn: {data.last_token_not_end:.2%}")
    print(f"rows over {job['max_length']} tokens, left out: {len(data.too_long)} of {data.rows}")
    data.check(job["train_file"], MAX_TOO_LONG_SHARE)
    train, held_out = loss_mask.split(data.examples, float(job["held_out_share"]), int(job["seed"]))

    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, trust_remote_code=False)
    model.to("cuda" if on_gpu else "cpu")
    pad_id = tokenizer.pad_token_id
    if pad_id is None:  # only fills up batches; labels and attention never look at it
        pad_id = data.end_ids[0]

    before = held_out_loss(model, held_out, pad_id, int(job["batch_size"]))
    print(f"held-out loss before: {before:.4f}")
    model, training = _train(model, train, pad_id, job)
    after = held_out_loss(model, held_out, pad_id, int(job["batch_size"]))
    print(f"held-out loss after: {after:.4f}")
    _check_losses(before, after, training["train_loss"])

    merge, samples = _merge_and_save(model, tokenizer, held_out, base, out)
    return {
        "rows": data.rows,
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "too_long": len(data.too_long),
        "last_token_not_end": data.last_token_not_end,
        "supervised_tokens": sum(example.supervised for example in train),
        "held_out_loss_before": before,
        "held_out_loss_after": after,
        **training,
        "compute_dtype": str(dtype).removeprefix("torch."),
        "merge": merge,
        "samples": samples,
        "seconds": round(time.monotonic() - started, 2),
    }


def held_out_loss(
    model: Any, examples: list[loss_mask.Example], pad_id: int, batch_size: int
) -> float:
    """Mean negative log-likelihood in nat per supervised token, over all examples."""
    import torch

    model.eval()
    total, count = 0.0, 0
    ordered = sorted(examples, key=lambda example: len(example.input_ids))
    with torch.inference_mode():
        for at in range(0, len(ordered), batch_size):
            batch = loss_mask.tensors(ordered[at : at + batch_size], pad_id)
            labels = batch.pop("labels").to(model.device)
            logits = model(**{key: value.to(model.device) for key, value in batch.items()}).logits
            total += float(
                torch.nn.functional.cross_entropy(
                    logits[:, :-1].float().flatten(0, 1),
                    labels[:, 1:].flatten(),
                    ignore_index=loss_mask.IGNORE,
                    reduction="sum",
                )
            )
            count += int((labels[:, 1:] != loss_mask.IGNORE).sum())
    return total / count


def _check_base(base: Path) -> None:
    import json

    model_files.check_weights(base, "distill")
    model_files.check_side_files(base, base, "distill")
    if (base / "adapter_config.json").exists():
        raise StageFailed(
            Problem(
                str(base / "adapter_config.json"),
                "the student already carries an adapter; a second one would be stacked on it",
                "give the merged model as the student",
            )
        )
    if "quantization_config" in json.loads((base / model_files.CONFIG).read_text()):
        raise StageFailed(
            Problem(str(base), "the student is quantized; an adapter cannot be merged into it")
        )


def _train(
    model: Any, examples: list[loss_mask.Example], pad_id: int, job: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model with its trained adapter, and what the training measured."""
    import peft
    import torch
    from transformers import Trainer, TrainingArguments

    arguments = {"task_type": "CAUSAL_LM", **job["lora"]}
    try:
        adapted = peft.get_peft_model(model, peft.LoraConfig(**arguments))
    except (TypeError, ValueError) as error:
        raise StageFailed(
            Problem("lora", str(error), "these are the arguments of peft.LoraConfig")
        ) from None
    if list(adapted.peft_config) != ["default"]:
        raise StageFailed(Problem("lora", f"several adapters at once: {list(adapted.peft_config)}"))
    trainable = sum(part.numel() for part in adapted.parameters() if part.requires_grad)

    rows = [{"input_ids": example.input_ids, "labels": example.labels} for example in examples]
    scratch = tempfile.mkdtemp(prefix="pilotage-trainer-")
    trainer = Trainer(
        model=adapted,
        args=TrainingArguments(
            output_dir=scratch,  # nothing is saved there
            num_train_epochs=float(job["epochs"]),
            learning_rate=float(job["learning_rate"]),
            per_device_train_batch_size=int(job["batch_size"]),
            warmup_steps=float(job["warmup_ratio"]),  # below 1 it is a share of all steps
            lr_scheduler_type="cosine",
            train_sampling_strategy="group_by_length",
            seed=int(job["seed"]),
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            dataloader_num_workers=0,
            dataloader_pin_memory=torch.cuda.is_available(),
            save_strategy="no",
            eval_strategy="no",
            logging_steps=50,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=rows,
        data_collator=lambda batch: loss_mask.tensors(
            [loss_mask.Example("", row["input_ids"], row["labels"]) for row in batch], pad_id
        ),
    )
    started = time.monotonic()
    try:
        outcome = trainer.train()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - started
    tokens = round(sum(len(row["input_ids"]) for row in rows) * float(job["epochs"]))
    return adapted, {
        "train_loss": float(outcome.training_loss),
        "steps": int(outcome.global_step),
        "tokens": tokens,
        "training_seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "trainable_parameters": trainable,
    }


def _check_losses(before: float, after: float, train: float) -> None:
    named = {"held-out before": before, "held-out after": after, "training": train}
    broken = [name for name, value in named.items() if not math.isfinite(value)]
    if broken:
        raise StageFailed(
            Problem(
                "training", f"the loss is not a number ({', '.join(broken)})", "lower learning_rate"
            )
        )
    if after >= before:
        raise StageFailed(
            Problem(
                "training",
                f"held-out loss did not fall: {before:.4f} before, {after:.4f} after",
                "check the teacher's answers, or change learning_rate and epochs",
            )
        )


def _merge_and_save(
    model: Any, tokenizer: Any, held_out: list[loss_mask.Example], base: Path, out: Path
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Save the adapter, merge, save the merged model in the base's dtype, compare all three.

    Adapter and merge are compared in float32, where only the order of additions differs; what was
    saved is read back from the disk and compared with the adapter under its own tolerance.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tasks.engines import merge_check

    adapter, merged_folder = out / "adapter", out / "merged"
    model.save_pretrained(adapter)
    model.eval().float().cpu()
    sequences = merge_check.continued(
        model, [example.prompt_ids for example in held_out[:MERGE_PROMPTS]], MERGE_TOKENS
    )
    wanted = merge_check.logits(model, sequences)

    merged = model.merge_and_unload(safe_merge=True)
    if any("lora_" in name for name, _ in merged.named_parameters()):
        raise StageFailed(Problem(str(merged_folder), "adapter weights were left after merging"))
    exact = merge_check.compared(wanted, merge_check.logits(merged, sequences))
    cut = merge_check.compared(wanted, merge_check.cut_logits(merged, sequences))

    stored_dtype = AutoConfig.from_pretrained(base).dtype or torch.bfloat16
    merged.config.dtype = stored_dtype
    merged.to(stored_dtype).save_pretrained(merged_folder)
    model_files.copy_side_files(base, merged_folder)
    model_files.check_weights(merged_folder, "distill")
    model_files.check_side_files(merged_folder, base, "distill")
    reloaded = AutoModelForCausalLM.from_pretrained(merged_folder, dtype=torch.float32)
    stored = merge_check.compared(wanted, merge_check.logits(reloaded.eval(), sequences))
    merge_check.check(exact, stored, cut, str(merged_folder))

    samples = [
        {
            "prompt": tokenizer.decode(example.prompt_ids),
            "answer": tokenizer.decode(sequence[len(example.prompt_ids) :]),
            "expected": tokenizer.decode(example.answer_ids),
        }
        for example, sequence in zip(held_out[:3], sequences, strict=False)
    ]
    found = {"float32": exact, "stored": stored, "cut": cut, "stored_dtype": str(stored_dtype)}
    return found, samples


if __name__ == "__main__":
    job_main(run)
