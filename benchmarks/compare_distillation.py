"""The distill stage beside a bare TRL script: the same model, rows, adapter, steps and threads.

    python -m benchmarks.compare_distillation [--model DIR] [--rows FILE] [--pairs 5] [--dtype ...]

Each trains in a process of its own, in turn, the order turned round from pair to pair. Compared
are tokens per second of training alone, as both measure it: the stage's looks at held-out rows, its
checkpoints' and its merge's time stand beside it. Processor time is compared too: on a busy
machine it wanders less than the wall's. Prints the ratios (stage over bare, above 1 is faster) as
geometric means with 95 % intervals over the pairs, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import python, random_model, take_turns

BATCH_SIZE = 8
MAX_LENGTH = 512
SMALL = {
    "vocab_size": 16384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""14M parameters, with a vocabulary large enough to make its head count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=Path, help='JSONL of {"id", "messages": [...]}.')
    parser.add_argument("--count", type=int, default=480, help="Rows that are taken.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotage-compare-") as name:
        folder = Path(name)
        model = asked.model or random_model(folder / "model", **SMALL)
        lines = asked.rows.read_text(encoding="utf-8").splitlines() if asked.rows else invented()
        job = job_of(folder, model, lines[: asked.count], asked.threads, asked.dtype)
        runs = take_turns(bare, stage, folder, job, asked.pairs)
    if {run["tokens"] for each in runs.values() for run in each} != {runs["bare"][0]["tokens"]}:
        raise SystemExit("the two did not train on the same tokens")
    found = {
        "tokens_per_second": interval(rates(runs, "seconds")),
        "tokens_per_processor_second": interval(rates(runs, "processor_seconds")),
    }
    for what, (mean, low, high) in found.items():
        print(f"{what}: {mean:.3f} of the bare script's ({low:.3f} to {high:.3f})")
    print(json.dumps({"pairs": asked.pairs, "dtype": asked.dtype, **found}))


def rates(runs: dict[str, list[dict[str, Any]]], clock: str) -> list[float]:
    """Stage's tokens per second over the bare script's, pair by pair."""
    return [
        bare[clock] / stage[clock] for bare, stage in zip(runs["bare"], runs["stage"], strict=True)
    ]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios with its 95 % interval (Student's t over their logarithms)."""
    from scipy.stats import t

    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return (round(math.exp(mean), 4), 0.0, math.inf)
    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(mean - half), math.exp(mean + half)
    return (round(math.exp(mean), 4), round(low, 4), round(high, 4))


def job_of(folder: Path, model: Path, lines: list[str], threads: int, dtype: str) -> dict[str, Any]:
    """The stage's job. The bare script gets the very rows that the stage trains on."""
    from transformers import AutoTokenizer

    from tasks.engines import loss_mask, model_files

    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends = model_files.end_token_ids(model) or [tokenizer.eos_token_id]
    data = loss_mask.load(rows, tokenizer, ends, MAX_LENGTH)
    train, _ = loss_mask.split(data.examples, 0.05, 0)
    names = {example.name for example in train}
    (folder / "trained.jsonl").write_text(
        "".join(f"{line}\n" for line in lines if json.loads(line)["id"] in names), encoding="utf-8"
    )
    return {
        "base": str(model),
        "train_file": str(rows),
        "lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
        "method": "responses",
        "gkd": None,
        "training": {},
        "teacher": None,
        "teacher_file": None,
        "suite": None,
        "quantize_base": None,
        "epochs": 1.0,
        "learning_rate": 1e-3,
        "batch_size": BATCH_SIZE,
        "processes": 1,
        "max_length": MAX_LENGTH,
        "packing": False,
        "attention": "sdpa",
        "precision": dtype,
        "warmup_ratio": 0.03,
        "held_out_share": 0.05,
        "evaluate_every": 0.5,
        "best_by": "held_out_loss",
        "held_out_answers": 8,
        "checkpoint_minutes": 10,
        "checkpoint_steps": None,
        "seed": 0,
        "threads": threads,
    }


def bare(out: Path, job: dict[str, Any]) -> dict[str, Any]:
    rows = Path(job["train_file"]).with_name("trained.jsonl")
    command = [job["base"], str(rows), str(out), "--dtype", job["precision"]]
    for option in ("epochs", "batch_size", "max_length", "learning_rate", "threads"):
        command += [f"--{option.replace('_', '-')}", str(job[option])]
    said = python("benchmarks.bare_distillation", *command)
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def stage(out: Path, job: dict[str, Any]) -> dict[str, Any]:
    job_file, result_file = out.with_suffix(".job.json"), out.with_suffix(".result.json")
    job_file.write_text(
        json.dumps({**job, "out_dir": str(out), "work_dir": str(out.with_suffix(".work"))})
    )
    python("tasks.engines.lora", str(job_file), str(result_file))
    result = json.loads(result_file.read_text())
    if "error" in result:
        raise SystemExit(f"the stage failed: {result['error']}")
    return {
        "tokens": result["tokens"],
        "seconds": result["training_seconds"],
        "processor_seconds": result["training_processor_seconds"],
        "steps": result["steps"],
        "loss": result["train_loss"],
        "whole_process": result["seconds"],
    }


def invented() -> list[str]:
    """Short conversations of one trade, one JSON object each."""
    return [
        json.dumps(
            {
                "id": f"row-{n}",
                "messages": [
                    {"role": "user", "content": f"Where is order {n}? " * (1 + n % 6)},
                    {"role": "assistant", "content": f"Order {n} left us on day {n % 31}. " * 2},
                ],
            }
        )
        for n in range(4000, 8000)
    ]


if __name__ == "__main__":
    main()
