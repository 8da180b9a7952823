"""Train an EAGLE3 draft with speculators: `python -m tasks.engines.speculators_train JOB RESULT`.

Job:    {"target": folder of the model that the draft is for, quantized or not,
         "prompts_file": JSONL rows {"id", "segment", "messages"[, "tools"]},
         "samples_dir": what `vllm_states` left (null: transformers answers and gives the states),
         "out_dir", "init_from" (null: from scratch), "num_layers", "draft_vocab_size" (null: the
         target's), "epochs", "learning_rate", "batch_tokens", "max_length", "response_tokens",
         "response_temperature", "num_speculative_tokens", "held_out_share", "engine_checkpoints",
         "seed", "threads"}
Result: see `train_draft`.

Where states come from is told in `draft_states` and `vllm_states`; the model, its loss and its
training loop are speculators' own (`draft_model`, `draft_fit`).

The target answers in the dtype it is stored and served in. In float32 it would break its near
ties otherwise than the server does: with such answers a draft's expected acceptance length was
3.93 where vLLM measured 3.62 (3.57 expected with bfloat16 answers). A CPU without bf16
instructions emulates them, about ten times slower.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from registry.errors import StageFailed
from tasks.engines.draft_fit import fit
from tasks.engines.draft_model import (
    Job,
    draft_targets,
    new_draft,
    read_draft,
    save,
    target_agreement,
)
from tasks.engines.draft_score import coverage, score
from tasks.engines.draft_states import (
    Sample,
    layer_ids_for,
    load_target,
    own_answers,
    record_states,
    render_prompts,
    split,
)
from tasks.engines.draft_vocab import check_draft, end_of_turn_ids
from tasks.engines.published_draft import check_start, start_from
from tasks.engines.sample_files import read_samples
from tasks.engines.subprocesses import job_main

HELD_OUT = "held_out.jsonl"
CHECKPOINTS = "checkpoints"

MIN_AGREEMENT = 0.9
"""Share of the target's own answer tokens that its recorded last states must reproduce through
the draft's copy of norm and head. Bfloat16's near ties cost about a percent; states of another
layer or behind another norm reproduce next to nothing."""


def train_draft(job: Job) -> dict[str, Any]:
    """Answers, states, training, expected acceptance.

    In `out_dir`: `checkpoints/epoch-N` (N from 1; config and safetensors) for each epoch that
    `draft_fit.kept_epochs` names, and `held_out.jsonl` with the prompts that were not trained on
    (`{"id", "segment", "messages"[, "tools"]}`).

    Result: counts of "prompts", "answers", "held_out", "truncated", "dropped"; "layer_ids";
    "draft_vocab_size", "vocab_coverage" (share of answer tokens that can be drafted) of all and
    by segment; "target_agreement" (see `MIN_AGREEMENT`); "train_loss" and "held_out_loss" per
    epoch, "best_epoch" and "kept_epochs" (from 1); "expected": for each kept epoch what
    `draft_score.score` says on the held-out answers; that of the best epoch once more as
    "accuracy", "acceptance", "acceptance_length"; "parameters" (trained ones); "seconds" per step.
    Raises `StageFailed` when nothing can be learned, when the states do not reproduce the
    target's answers, or when a loss is not finite.
    """
    import torch

    clock = Clock()
    torch.set_num_threads(int(job["threads"]))
    torch.manual_seed(int(job["seed"]))
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    target_dir, out_dir = Path(job["target"]), Path(job["out_dir"])
    start = Path(job["init_from"]) if job.get("init_from") else None
    end_ids = end_of_turn_ids(target_dir)
    if start is not None:
        # Before minutes of answers that nothing could be trained on.
        check_start(start, target_dir, job)
    layer_ids = layer_ids_for(target_dir, start)
    asked = prompts_of(job, clock, layer_ids, end_ids, device)
    train, held_out = asked.train, asked.held_out
    frequencies = Counter(token for sample in train for token in sample.answer)

    with tempfile.TemporaryDirectory(prefix="scratch-", dir=out_dir) as folder:
        scratch = Path(folder)
        if start is None:
            draft = new_draft(job, layer_ids, frequencies, end_ids, eager=not cuda)
        else:
            draft = start_from(start, target_dir, job, scratch, eager=not cuda)
        draft = draft.to(device)
        agreement = target_agreement(draft, held_out)
        if agreement < MIN_AGREEMENT:
            raise StageFailed.at(
                target_dir,
                f"its recorded states give back {agreement:.3f} of its own answer tokens, "
                f"at least {MIN_AGREEMENT} is needed",
                "the model's final norm or head is not one that speculators' EAGLE3 knows",
            )
        clock.lap("draft")
        epochs = scratch / "epochs"
        epochs.mkdir()
        history = fit(draft, train, held_out, job, epochs)
        clock.lap("train")
        steps = int(job["num_speculative_tokens"])
        expected = {}
        for epoch in history["kept_epochs"]:
            kept = read_draft(epochs / str(epoch - 1), target_dir).to(device)
            expected[str(epoch)] = score(kept, held_out, steps)
            out = out_dir / CHECKPOINTS / f"epoch-{epoch}"
            save(kept, asked.dtype, out)
            check_draft(out, target_dir)
        clock.lap("score")
    write_rows(out_dir / HELD_OUT, asked.held_out_rows)
    samples = [*train, *held_out]
    best = expected[str(history["best_epoch"])]
    return {
        "prompts": asked.prompts,
        "answers": len(samples),
        "held_out": len(held_out),
        "truncated": sum(not sample.finished for sample in samples),
        "dropped": asked.prompts - len(samples),
        "layer_ids": layer_ids,
        "draft_vocab_size": draft.draft_vocab_size,
        **coverage(samples, set(draft_targets(draft))),
        "target_agreement": round(agreement, 6),
        **history,
        "expected": expected,
        **{name: best[name] for name in ("accuracy", "acceptance", "acceptance_length")},
        "parameters": sum(p.numel() for p in draft.parameters() if p.requires_grad),
        "seconds": clock.laps,
    }


class Asked:
    """The target's answers with their states, split; what they came from."""

    def __init__(self, train: list[Sample], held_out: list[Sample], prompts: int) -> None:
        self.train, self.held_out, self.prompts = train, held_out, prompts
        self.held_out_rows: list[dict[str, Any]] = []
        self.dtype: Any = None


def prompts_of(
    job: Job, clock: Clock, layer_ids: list[int], end_ids: list[int], device: str
) -> Asked:
    """Answers and states from `samples_dir`, or from the target in transformers.

    Raises `StageFailed` where nothing is left to train on, or to hold out.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["target"], trust_remote_code=False)
    prompts = render_prompts(Path(job["prompts_file"]), tokenizer)
    chosen, kept_back = split(prompts, float(job["held_out_share"]), int(job["seed"]))
    clock.lap("load")
    if job.get("samples_dir"):
        samples = read_samples(Path(job["samples_dir"]))
        apart = {prompt.id for prompt in kept_back}
        asked = Asked(
            [sample for sample in samples if sample.id not in apart],
            [sample for sample in samples if sample.id in apart],
            len(prompts),
        )
        asked.dtype = asked.held_out[0].recorded()[1].dtype if asked.held_out else torch.bfloat16
    else:
        target = load_target(job["target"], device)
        limits = {name: int(job[name]) for name in ("max_length", "response_tokens")}
        temperature = float(job["response_temperature"])
        asked = Asked(
            own_answers(target, chosen, end_ids, **limits, temperature=temperature),
            own_answers(target, kept_back, end_ids, **limits),
            len(prompts),
        )
        asked.dtype = target.dtype
        clock.lap("answers")
        record_states(target, [*asked.train, *asked.held_out], layer_ids)
        del target
        clock.lap("states")
    if not asked.train or not asked.held_out:
        raise StageFailed.at(
            job["prompts_file"],
            f"of {len(prompts)} prompts {len(asked.train)} to train on and "
            f"{len(asked.held_out)} held out gave an answer of two tokens or more",
            "give more draft prompts, or a larger `max_length`",
        )
    rows = {prompt.id: prompt for prompt in kept_back}
    asked.held_out_rows = [
        {"id": sample.id, "segment": sample.segment, **rows[sample.id].row}
        for sample in asked.held_out
    ]
    return asked


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8")


class Clock:
    """Seconds per step, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 2)
        self._last = now
        print(f"{name}: {self.laps[name]:.1f} s", flush=True)


if __name__ == "__main__":
    job_main(train_draft)
