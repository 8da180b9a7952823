"""LoRA distillation: train an adapter on the teacher's answers, merge it, prove the merge.

`python -m tasks.engines.lora JOB RESULT`. JOB:

    base            folder of the student (safetensors, tokenizer, chat template)
    train_file      JSONL, rows {"id", "messages"[, "tools"][, "reference"][, "truncated"]}; the
                    last message is the assistant's
    out_dir         gets `adapter/` (as peft saves it) and `merged/` (a complete model folder)
    work_dir        checkpoints, so that a killed run goes on; kept (see `training_loop`)
    lora            peft.LoraConfig arguments, unchanged
    method, gkd, training, quantize_base, epochs, learning_rate, batch_size, processes, max_length,
    packing, attention, precision, warmup_ratio, held_out_share, evaluate_every, best_by,
    held_out_answers, checkpoint_minutes, checkpoint_steps, seed: see `recipes/distill_recipe.py`
    teacher         folder of the teacher's model, for `method: logits`
    teacher_file    the same rows as the teacher read them, where it had a context of its own
    suite           {"task_file", "metrics", "max_tokens"} where `best_by` is a metric
    threads         CPU threads of each process

RESULT: `rows`, `train_rows`, `held_out_rows`, `too_long` (rows left out), `truncated`,
`own_turns`, `last_token_not_end` (share), `tokens` (trained on, all epochs, padding not counted),
`supervised_tokens` (per epoch), `steps`, `resumed_from` (step; 0 in a run that was not killed),
`held_out_loss_before`, `held_out_loss_after` (nat per supervised token, of the chosen look),
`chosen` (the look at the held-out rows that is merged), `looks` (all), `curve` (step, loss),
`train_loss`, `training_seconds`, `training_processor_seconds` and `tokens_per_second` (of this
process's own steps, without the looks), `seconds`,
`trainable_parameters`, `compute_dtype`, `compute_dtype_why`, `quantize_base`, `packing`,
`peak_memory_gib`, `peak_gpu_memory_gib`, `launch`, `merge` (see `lora_merge`),
`samples` (prompt, answer, expected).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import (
    adapter_training,
    launching,
    lora_merge,
    loss_mask,
    model_files,
    training_loop,
)

MAX_TOO_LONG_SHARE = 0.02
"""More rows than this over `max_length` is a recipe that does not fit its data."""


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train, merge, verify. Raises `StageFailed` for unfit data and for training that failed."""
    check_job(job)
    if int(job["processes"]) > 1 and not launching.is_worker():
        return launching.launched("tasks.engines.lora", job, int(job["processes"]))
    # Before torch is loaded: OpenMP threads that wait by spinning took five times as long, and four
    # times the processor time, on two cores with other work on them; waiting asleep cost nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Everything lies in folders; TRL would tell its hub which trainer is used.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    launching.one_gpu_a_process()
    import torch
    from transformers import AutoTokenizer, set_seed

    started = time.monotonic()
    base, out = Path(job["base"]), Path(job["out_dir"])
    torch.set_num_threads(int(job["threads"]))
    set_seed(int(job["seed"]))

    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    data = loss_mask.load(
        Path(job["train_file"]),
        tokenizer,
        end_ids=end_ids(base, tokenizer),
        max_length=int(job["max_length"]),
    )
    print(f"rows whose last supervised token is not end-of-turn: {data.last_token_not_end:.2%}")
    print(f"rows over {job['max_length']} tokens, left out: {len(data.too_long)} of {data.rows}")
    data.check(job["train_file"], MAX_TOO_LONG_SHARE)
    train, held_out = loss_mask.split(data.examples, float(job["held_out_share"]), int(job["seed"]))

    trained = adapter_training.train(job, tokenizer, data, train, held_out)
    if launching.is_worker() and not launching.is_first():
        return {}
    chosen = choose(trained["looks"], trained["train_loss"], job)
    kept = training_loop.best_adapter(Path(job["work_dir"]), chosen)
    merge, samples = lora_merge.merge_and_save(
        base, kept, out, tokenizer, held_out, {**job, "compute_dtype": trained["compute_dtype"]}
    )
    return {
        "rows": data.rows,
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "too_long": len(data.too_long),
        "truncated": data.truncated,
        "own_turns": data.own_turns,
        "last_token_not_end": data.last_token_not_end,
        "supervised_tokens": sum(example.supervised for example in train),
        "held_out_loss_before": trained["looks"][0]["held_out_loss"],
        "held_out_loss_after": chosen["held_out_loss"],
        "chosen": chosen,
        **trained,
        "quantize_base": job["quantize_base"],
        "packing": job["packing"],
        "launch": launching.launch_line(),
        "merge": merge,
        "samples": samples,
        **launching.peak_memory(),
        "seconds": round(time.monotonic() - started, 2),
    }


def end_ids(base: Path, tokenizer: Any) -> list[int]:
    """What ends an answer. Raises `StageFailed` for a student that names no such token."""
    found = model_files.end_token_ids(base) or [tokenizer.eos_token_id]
    if None in found:
        raise StageFailed(
            Problem(
                str(base),
                "names no end token (`eos_token_id` of generation_config.json or config.json, "
                "`eos_token` of the tokenizer)",
                "name the token that ends a turn in its chat template",
            )
        )
    return found


def check_job(job: Mapping[str, Any]) -> None:
    """Raise `StageFailed` for what cannot be trained, before anything heavy is loaded."""
    import importlib.util
    import json

    base = Path(job["base"])
    model_files.check_weights(base, "distill")
    model_files.check_side_files(base, base, "distill")
    problems = []
    if "quantization_config" in json.loads((base / model_files.CONFIG).read_text()):
        problems.append(
            Problem(str(base), "the student is quantized; an adapter cannot be merged into it")
        )
    if job["quantize_base"]:
        remedy = "leave `quantize_base` out, or train on a machine with an NVIDIA GPU"
        if not launching.has_gpu():
            problems.append(Problem("quantize_base", "four bits need CUDA; none is here", remedy))
        elif importlib.util.find_spec("bitsandbytes") is None:
            problems.append(
                Problem("quantize_base", "needs bitsandbytes", "pip install bitsandbytes")
            )
    if job["attention"] == "flash_attention_2" and not launching.has_gpu():
        problems.append(Problem("attention", "flash attention needs CUDA", "write sdpa"))
    if problems:
        raise StageFailed(problems)


def choose(
    looks: list[training_loop.Look], train_loss: float, job: Mapping[str, Any]
) -> training_loop.Look:
    """The look whose adapter is merged. Raises `StageFailed` where training did not help.

    What must fall on the held-out rows is what was trained: the cross-entropy, or for logits the
    divergence from the teacher.
    """
    chosen = training_loop.best_look(looks, adapter_training.better(job))
    assert chosen is not None, "the last step is looked at"
    name = adapter_training.trained_loss(job)
    before, after = looks[0][name], chosen[name]
    named = {"held-out before": before, "held-out after": after, "training": train_loss}
    broken = [where for where, value in named.items() if not math.isfinite(value)]
    if broken:
        raise StageFailed(
            Problem(
                "training", f"the loss is not a number ({', '.join(broken)})", "lower learning_rate"
            )
        )
    if after >= before:
        what = "divergence from the teacher" if name == "held_out_kl" else "loss"
        raise StageFailed(
            Problem(
                "training",
                f"held-out {what} did not fall: {before:.4f} before, {after:.4f} after",
                "check the teacher's answers, or change learning_rate and epochs",
            )
        )
    return chosen


if __name__ == "__main__":
    launching.main(run)
