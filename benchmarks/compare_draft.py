"""The draft's training beside a bare speculators script: the same target, prompts and settings.

    python -m benchmarks.compare_draft [--target DIR] [--prompts FILE] [--epochs 3] [--pairs 3]

Both run in processes of their own, in turn, the order turned round from pair to pair. Compared are
speculators' training itself, and the whole process, where the stage also checks states and map,
scores the checkpoints on held-out answers and saves them. CPU seconds hardly change with other
work on the machine. Without `--target` it is a Llama of 6M
random weights, without `--prompts` questions about orders. Prints the ratios of the medians, one
JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import python, random_model, ratios_of_medians, take_turns
from recipes.schema import DraftRecipe

SMALL = {
    "vocab_size": 512,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""6M parameters; its answers are noise, and as long as they may be."""
NAMES = ("train", "seconds", "cpu_seconds", "peak_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path)
    parser.add_argument("--prompts", type=Path, help='JSONL of {"id", "messages"}.')
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotage-compare-") as name:
        folder = Path(name)
        target = asked.target or random_model(folder / "target", **SMALL)
        prompts = asked.prompts or invented(folder / "prompts.jsonl")
        job = job_of(target, prompts, asked.epochs)
        runs = take_turns(bare, stage, folder, job, asked.pairs)
    result = {"epochs": asked.epochs, "pairs": asked.pairs, **ratios_of_medians(runs, NAMES)}
    print(
        f"speculators' training: {result['train']:.3f} of the bare script's time\n"
        f"whole process with checks: {result['seconds']:.3f} of its time, "
        f"{result['cpu_seconds']:.3f} of its CPU time, "
        f"{result['peak_bytes']:.3f} of its memory"
    )
    print(json.dumps(result))


def job_of(target: Path, prompts: Path, epochs: int) -> dict[str, Any]:
    recipe = DraftRecipe(kind="draft", description="", epochs=epochs, learning_rate=1e-3)
    return {
        **recipe.model_dump(mode="json", exclude={"kind", "description"}),
        "target": str(target),
        "prompts_file": str(prompts),
        "samples_dir": None,
        "threads": os.cpu_count() or 1,
    }


def bare(out: Path, job: dict[str, Any]) -> dict[str, Any]:
    command = [job["target"], job["prompts_file"], str(out)]
    for option in ("epochs", "learning_rate", "batch_tokens", "response_tokens", "threads"):
        command += [f"--{option.replace('_', '-')}", str(job[option])]
    said = json.loads(python("benchmarks.bare_draft", *command).splitlines()[-1])
    return {name: said[name] for name in NAMES}


def stage(out: Path, job: dict[str, Any]) -> dict[str, Any]:
    out.mkdir()
    job_file, result_file = out / "job.json", out / "result.json"
    job_file.write_text(json.dumps({**job, "out_dir": str(out)}))
    said = python("benchmarks.compare_draft", "--job", str(job_file), str(result_file))
    result = json.loads(result_file.read_text())
    if "error" in result:
        raise SystemExit(f"the stage failed: {result['error']}")
    whole = json.loads(said.splitlines()[-1])
    return {"train": result["seconds"]["train"], **whole}


def measured_job(job_file: str, result_file: str) -> None:
    """The stage's process, with its time and memory as the bare script takes its own."""
    import time

    started = time.monotonic()
    from tasks.engines.speculators_train import train_draft

    result = train_draft(json.loads(Path(job_file).read_text()))
    Path(result_file).write_text(json.dumps(result))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    whole = {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_bytes": peak,
    }
    print(json.dumps(whole))


def invented(file: Path) -> Path:
    rows = [
        {
            "id": str(n),
            "segment": "order",
            "messages": [{"role": "user", "content": f"Where is order {n}? " * (1 + n % 5)}],
        }
        for n in range(4000, 4200)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        measured_job(*sys.argv[2:4])
    else:
        main()
