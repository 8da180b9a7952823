"""A tiny student, rows for it, and a distillation job: what the tests of training share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.engines import random_llama

ANSWERS = {"price": "yes.", "track": "no.", "cancel": "ok."}


def student(folder: Path, seed: int = 0) -> Path:
    random_llama.make({"out": str(folder), "seed": seed})
    return folder


def conversation(name: str, prompt: str, answer: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer},
        ],
        **more,
    }


def questions(count: int = 10) -> list[dict[str, Any]]:
    return [
        conversation(f"{word}-{at}", f"{at} {word}", answer, reference={"intent": answer})
        for at in range(count)
        for word, answer in ANSWERS.items()
    ]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def job(base: Path, rows: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "base": str(base),
        "train_file": str(rows),
        "out_dir": str(out),
        "work_dir": str(out.with_name(f"{out.name}-work")),
        "lora": {
            "r": 16,
            "lora_alpha": 32,
            "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
            # A random head cannot be steered by an adapter below it alone: it learns too.
            "modules_to_save": ["lm_head"],
        },
        "epochs": 6,
        "learning_rate": 1e-2,
        "batch_size": 9,
        "max_length": 64,
        "warmup_ratio": 0.1,
        "held_out_share": 0.1,
        "seed": 0,
        "threads": 1,
        "method": "responses",
        "gkd": None,
        "training": {},
        "teacher": None,
        "teacher_file": None,
        "suite": None,
        "quantize_base": None,
        "processes": 1,
        "packing": False,
        "attention": "sdpa",
        "precision": "float32",
        "evaluate_every": 1.0,
        "best_by": "held_out_loss",
        "held_out_answers": 8,
        "checkpoint_minutes": 10,
        "checkpoint_steps": None,
        **changes,
    }
