"""What a person reads of a distillation: `report.md`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

POINTS = 12
"""Lines of the loss curve that are shown; all of it is in report.json."""


def page(config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The page of one trained student from the stage's config and the engine's result."""
    chosen = result["chosen"]
    lines = [
        "# Distillation",
        "",
        *_table(("", ""), _facts(config, result)),
        "",
        f"## Held-out rows ({result['held_out_rows']})",
        "",
        f"Chosen by `{config['best_by']}`: step {chosen['step']:.0f}, marked with `*`.",
        "",
        *_looks(result["looks"], chosen),
        "",
        "## Training loss",
        "",
        *_table(("step", "loss since the line before"), _thinned(result["curve"], result["steps"])),
        "",
        "## Merge",
        "",
        *_merge(config, result["merge"]),
        "",
        "## Answers of the adapter (their first 32 tokens)",
        "",
    ]
    for sample in result["samples"]:
        for name in ("prompt", "answer", "expected"):
            lines += [f"{name}:", "", *_quoted(sample[name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _facts(config: Mapping[str, Any], result: Mapping[str, Any]) -> list[tuple[str, str]]:
    memory = f"{result['peak_memory_gib']:.2f} GiB"
    if result["peak_gpu_memory_gib"] is not None:
        memory += f", on the GPU {result['peak_gpu_memory_gib']:.2f} GiB"
    facts = [
        ("method", config["method"]),
        ("rows", f"{result['rows']}, trained {result['train_rows']}"),
        ("left out, longer than max_length", str(result["too_long"])),
        ("answers cut at a token limit, no end learned", str(result["truncated"])),
        ("steps", str(result["steps"])),
        ("tokens", f"{result['tokens']}, learned per epoch {result['supervised_tokens']}"),
        ("precision", f"{result['compute_dtype']} ({result['compute_dtype_why']})"),
        ("trainable parameters", str(result["trainable_parameters"])),
        ("seconds", f"{result['seconds']:.0f}, training {result['training_seconds']:.0f}"),
        ("tokens per second", f"{result['tokens_per_second']:.0f}"),
        ("peak memory", memory),
    ]
    if result["own_turns"]:
        facts.append(("earlier turns learned by themselves", str(result["own_turns"])))
    if result.get("packed_rows"):
        facts.append(("packed rows", str(result["packed_rows"])))
    if result["resumed_from"]:
        facts.append(("went on from step", str(result["resumed_from"])))
    if result["launch"]:
        facts.append(("launched by", f"`{result['launch']}`"))
    return facts


def _looks(looks: Sequence[Mapping[str, float]], chosen: Mapping[str, float]) -> list[str]:
    names = [name for name in looks[0] if name not in ("step", "epoch")]
    rows = [
        (
            f"{look['step']:.0f}{' *' if look['step'] == chosen['step'] else ''}",
            f"{look['epoch']:.2f}",
            *(f"{look[name]:.4f}" for name in names),
        )
        for look in looks
    ]
    return _table(("step", "epoch", *names), rows)


def _thinned(curve: Sequence[Sequence[float]], steps: int) -> list[tuple[str, str]]:
    """The curve in at most `POINTS` lines, each the mean over its steps."""
    found: list[tuple[str, str]] = []
    total, before, last = 0.0, 0, 0
    for step, loss in curve:
        total += loss * (step - last)
        last = int(step)
        if step * POINTS >= steps * (len(found) + 1) or step == steps:
            found.append((f"{last}", f"{total / (last - before):.4f}"))
            total, before = 0.0, last
    return found


def _merge(config: Mapping[str, Any], merge: Mapping[str, Any]) -> list[str]:
    lines = _table(
        ("compared with the adapter", "mean difference", "largest", "same greedy token"),
        [
            (
                name,
                f"{merge[key]['mean_relative']:.2e}",
                f"{merge[key]['max_relative']:.2e}",
                f"{merge[key]['token_agreement']:.4f}",
            )
            for name, key in (("merged, float32", "float32"), ("as stored", "stored"))
        ],
    )
    losses = merge["losses"]
    note = [
        "",
        f"Differences in standard deviations of the logits; stored as {merge['stored_dtype']}.",
        f"Loss of {merge['loss_rows']} held-out rows: {losses['trained']:.4f} in training, "
        f"{losses['applied']:.4f} with the adapter read back, {losses['stored']:.4f} as stored.",
    ]
    if config["quantize_base"]:
        note.append(
            f"Trained over the base in {config['quantize_base']}; the adapter is merged into the "
            "unquantized base and was compared on it."
        )
    return lines + note


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def _quoted(text: str) -> list[str]:
    return [f"    {line}" for line in text.split("\n")]
