"""The quantize stage beside a bare llmcompressor script: the same model, recipe and texts.

    python -m benchmarks.compare_quantization [--model DIR] [--recipe w4a16_gptq] [--texts FILE]
                                              [--pairs 3]

Both run in processes of their own, in turn, the order turned round from pair to pair. Two things
are compared apart: llmcompressor itself (oneshot and saving; memory up to its end), which should
cost the same, and the whole process, where the stage also measures the unquantized model, reads
the files back, and judges them. Without `--model` it is a Llama of 3.5M random weights, without
`--texts` sentences about orders. Prints the ratios of the medians, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.side_by_side import python, random_model, ratios_of_medians, take_turns
from recipes import loader
from recipes.schema import QuantizeRecipe
from tasks.engines import quantization_plan

HELD_OUT = 32
MEASURED = (
    "quantize_seconds",
    "quantize_cpu_seconds",
    "quantize_peak_bytes",
    "seconds",
    "cpu_seconds",
    "peak_bytes",
)
SMALL = {
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""3.5M parameters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--recipe", default="w4a16_gptq", help="A quantize recipe, by name.")
    parser.add_argument("--texts", type=Path, help='JSONL of {"messages": [...]}.')
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotage-compare-") as name:
        folder = Path(name)
        model = asked.model or random_model(folder / "model", **SMALL)
        job = job_of(folder, model, asked.recipe, asked.texts)
        runs = take_turns(bare, stage, folder, job, asked.pairs)
    result = {"recipe": asked.recipe, "pairs": asked.pairs, **ratios_of_medians(runs, MEASURED)}
    print(
        f"llmcompressor itself: {result['quantize_seconds']:.3f} of the bare script's time, "
        f"{result['quantize_cpu_seconds']:.3f} of its CPU time, "
        f"{result['quantize_peak_bytes']:.3f} of its memory\n"
        f"whole process with checks: {result['seconds']:.3f} of its time, "
        f"{result['cpu_seconds']:.3f} of its CPU time, "
        f"{result['peak_bytes']:.3f} of its memory"
    )
    print(json.dumps(result))


def job_of(folder: Path, model: Path, name: str, texts: Path | None) -> dict[str, Any]:
    """The stage's job; its recipe, resolved for the model, is what the bare script gets too."""
    from tasks.engines.model_modules import module_list

    recipe = loader.load(name, "quantize", QuantizeRecipe)
    if recipe.recipe is None:
        raise SystemExit(f"recipe {name!r} quantizes nothing")
    resolved, _ = quantization_plan.resolve(recipe.recipe, module_list(model))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False))
    lines = texts.read_text(encoding="utf-8").splitlines() if texts else invented()
    (folder / "held.jsonl").write_text("\n".join(lines[-HELD_OUT:]) + "\n")
    samples = min(recipe.calibration.samples if recipe.calibration else 16, len(lines) - HELD_OUT)
    (folder / "texts.jsonl").write_text("\n".join(lines[:samples]) + "\n")
    return {
        "model": str(model),
        "recipe": resolved,
        "calibration_file": str(folder / "texts.jsonl"),
        "held_out_file": str(folder / "held.jsonl"),
        "samples": samples,
        "max_length": recipe.calibration.max_length if recipe.calibration else 512,
        "max_size_ratio": recipe.max_size_ratio,
        "max_perplexity_ratio": 100.0,
        "threads": os.cpu_count() or 1,
        "seed": 0,
    }


def bare(out: Path, job: dict[str, Any]) -> dict[str, Any]:
    texts = Path(job["calibration_file"])
    command = [job["model"], str(texts.with_name("recipe.yaml")), str(texts), str(out)]
    for option in ("samples", "max_length", "threads"):
        command += [f"--{option.replace('_', '-')}", str(job[option])]
    said = python("benchmarks.bare_quantization", *command)
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return {**result, "quantize_peak_bytes": result["peak_bytes"]}


def stage(out: Path, job: dict[str, Any]) -> dict[str, Any]:
    job_file, result_file = out.with_suffix(".job.json"), out.with_suffix(".result.json")
    job_file.write_text(json.dumps({**job, "out_dir": str(out)}))
    python("tasks.engines.compressor", str(job_file), str(result_file))
    result = json.loads(result_file.read_text())
    if "error" in result:
        raise SystemExit(f"the stage failed: {result['error']}")
    return {name: result[name] for name in (*MEASURED, "perplexity")}


def invented() -> list[str]:
    """160 short conversations of one trade, one JSON object each."""
    return [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"Where is order {n}? " * (1 + n % 12)},
                    {"role": "assistant", "content": f"Order {n} left us on day {n % 31}. " * 4},
                ]
            }
        )
        for n in range(4000, 4160)
    ]


if __name__ == "__main__":
    main()
