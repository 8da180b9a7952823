"""What comparisons of a stage with its bare tool share: turns, processes, a model to work on."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.settings import CHECKOUT

TIMEOUT = 3600.0

Run = Callable[[Path, dict[str, Any]], dict[str, Any]]
"""A run into a folder of its own, by the stage's job; what it measured."""

Runs = dict[str, list[dict[str, Any]]]


def take_turns(bare: Run, stage: Run, folder: Path, job: dict[str, Any], pairs: int) -> Runs:
    """Both in turn, the order turned round from pair to pair; each run is printed as it ends."""
    runs: Runs = {"bare": [], "stage": []}
    for pair in range(pairs):
        both = [("bare", bare), ("stage", stage)]
        for what, run in both if pair % 2 == 0 else reversed(both):
            runs[what].append(run(folder / f"{what}-{pair}", job))
            print(what, json.dumps(runs[what][-1]), flush=True)
    return runs


def ratios_of_medians(runs: Mapping[str, Sequence[Mapping[str, Any]]], names: Iterable[str]) -> Any:
    """Stage over bare, by name."""

    def median(what: str, name: str) -> float:
        return statistics.median(one[name] for one in runs[what])

    return {name: round(median("stage", name) / median("bare", name), 4) for name in names}


def python(module: str, *arguments: str) -> str:
    """What a module prints in a process of its own; its failure ends the comparison."""
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=CHECKOUT,
        # As the stages do it: threads that spin while they wait time the machine's other work.
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    if ran.returncode:
        raise SystemExit(f"{module} ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
    return ran.stdout


def random_model(folder: Path, **config: Any) -> Path:
    """A Llama of random weights, 256 wide, with a byte-level tokenizer of ours."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from tasks.engines import random_llama

    random_llama.make({"out": str(folder), "seed": 0})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    known = {"hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": 2048}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**known, **ends, **config))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
