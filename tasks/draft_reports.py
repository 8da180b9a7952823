"""What a person reads of a draft: how it was trained, and what the engine accepted of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_suites.draft_checkpoints import Acceptance, MeasuredCheckpoint
from registry.whole_files import write_whole


def write_report(folder: Path, text: str, document: Mapping[str, Any]) -> None:
    write_whole(folder / "report.md", text)
    write_whole(folder / "report.json", json.dumps(document, ensure_ascii=False, indent=1))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_training_report(folder: Path, result: Mapping[str, Any]) -> None:
    """`result`: of `speculators_train.train_draft`."""
    epochs = [
        (epoch, f"{train:.3f}", f"{held_out:.3f}", _kept(result, epoch))
        for epoch, (train, held_out) in enumerate(
            zip(result["train_loss"], result["held_out_loss"], strict=True), 1
        )
    ]
    best = result["expected"][str(result["best_epoch"])]
    segments = [
        (
            segment or "(none)",
            f"{share:.2%}",
            f"{best['by_segment'][segment]:.2f}" if segment in best["by_segment"] else "",
        )
        for segment, share in result["vocab_coverage_by_segment"].items()
    ]
    errors = result.get("state_errors")
    text = [
        "# Draft: training",
        f"{result['answers']} own answers of the target to {result['prompts']} prompts, "
        f"{result['held_out']} of them held out, {result['truncated']} cut, "
        f"{result['dropped']} dropped. {result['draft_vocab_size']} tokens can be proposed, "
        f"{result['vocab_coverage']:.2%} of the answers' tokens are among them. Norm and head "
        f"give back {result['target_agreement']:.2%} of the held-out answers from the states of "
        f"layers {', '.join(map(str, result['layer_ids']))}.",
        *(
            [
                "States are vLLM's; relative error against transformers on one prompt: "
                + ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
                + "."
            ]
            if errors
            else []
        ),
        table(("epoch", "loss", "held-out loss", ""), epochs),
        f"Expected of epoch {result['best_epoch']} on the held-out answers: acceptance length "
        f"{best['acceptance_length']:.2f}, accepted by position "
        f"{', '.join(f'{share:.2f}' for share in best['acceptance'])}. The engine's own numbers "
        "are in the report of the choice.",
        table(("segment", "vocabulary covers", "expected acceptance length"), segments),
    ]
    write_report(folder, "\n\n".join(text) + "\n", result)


def _kept(result: Mapping[str, Any], epoch: int) -> str:
    if epoch == result["best_epoch"]:
        return "kept, best"
    return "kept" if epoch in result["kept_epochs"] else ""


def choice_text(
    measured: Sequence[MeasuredCheckpoint],
    chosen: MeasuredCheckpoint,
    prompts: int,
    agreement: str,
    judged: str,
) -> str:
    """Markdown about a choice. `agreement` and `judged` are sentences."""
    rows = [
        (
            f"**{one.epoch}**" if one.epoch == chosen.epoch else one.epoch,
            f"{one.held_out_loss:.3f}",
            f"{one.expected:.3f}",
            f"{one.engine.length:.3f}",
            f"{one.gap:+.3f}",
            one.engine.drafts,
            *(f"{share:.3f}" for share in one.engine.shares),
        )
        for one in measured
    ]
    positions = [f"position {place}" for place in range(1, len(chosen.engine.shares) + 1)]
    head = ("epoch", "held-out loss", "expected", "engine", "gap", "drafts", *positions)
    segments = [_segment(name, counts) for name, counts in chosen.by_segment.items()]
    return "\n\n".join(
        [
            "# Draft: the checkpoint that the engine accepts most of",
            f"Acceptance length (tokens per step of the target), greedy, one request at a time, on "
            f"{prompts} held-out prompts: expected by training and counted by the engine.",
            table(head, rows),
            f"Epoch {chosen.epoch} is served. {judged}",
            table(("segment", "acceptance length", "drafts", *positions), segments),
            f"With and without the draft: {agreement}.",
        ]
    )


def _segment(name: str, counts: Acceptance) -> tuple[object, ...]:
    shares = (f"{share:.3f}" for share in counts.shares)
    return (name or "(none)", f"{counts.length:.3f}", counts.drafts, *shares)
