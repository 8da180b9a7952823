"""Train an EAGLE3 draft with speculators: `python -m tasks.engines.speculators_train JOB RESULT`.

Job:    {"target": folder of the merged student, "prompts_file": JSONL rows {"id", "messages"},
         "out_dir", "num_layers", "draft_vocab_size" (null: the target's), "epochs",
         "learning_rate", "max_length", "response_tokens", "num_speculative_tokens", "seed",
         "threads", "held_out_share" (default 0.1)}
Result: see `train_draft`.

What it learns from is made in `draft_states`; the model, its loss and its training loop are
speculators' own.

The target answers in the dtype it is stored and served in. In float32 it would break its near
ties otherwise than the server does: with such answers a draft's expected acceptance length was
3.93 where vLLM measured 3.62 (3.57 expected with bfloat16 answers). A CPU without bf16
instructions emulates them, about ten times slower. The draft is trained in float32 on the CPU,
by speculators' own `Trainer` under `without_accelerator`. On CUDA its defaults hold: bf16, flex
attention, fused losses. The CUDA path has not been run.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from registry.errors import InfrastructureError, StageFailed, UserError
from tasks.engines.draft_states import (
    Sample,
    auxiliary_layers,
    own_answers,
    record_states,
    render_prompts,
    split,
)
from tasks.engines.draft_vocab import check_draft, end_of_turn_ids
from tasks.engines.subprocesses import job_main

PACK_TOKENS = 256
"""Tokens of one training step at least. Measured on the CPU (3M target, 135 answers, one epoch):
256, 512 and 1024 tokens took 6.1, 5.9 and 7.5 CPU seconds and left a held-out loss of 3.7, 5.7
and 8.0; attention over a pack is dense, and shorter packs are more optimizer steps. speculators'
`sdpa` and `eager` attention cost the same here."""

MIN_AGREEMENT = 0.9
"""Share of the target's own answer tokens that its recorded last states must reproduce through
the draft's copy of norm and head. Bfloat16's near ties cost about a percent; states of another
layer or behind another norm reproduce next to nothing."""


def train_draft(job: dict[str, Any]) -> dict[str, Any]:
    """Answers, states, training, evaluation, checkpoint in `out_dir` (config, safetensors).

    Result: counts of "prompts", "answers", "held_out", "truncated", "dropped"; "layer_ids";
    "draft_vocab_size", "vocab_coverage" (share of answer tokens that can be drafted);
    "target_agreement" (see `MIN_AGREEMENT`); "train_loss" and "held_out_loss" per epoch,
    "best_epoch" (from 0); "accuracy" per position given that the ones before were right,
    "acceptance" per position and "acceptance_length" as vLLM defines them, all on held-out
    prompts; "parameters" (trained ones); "seconds" per step.
    Raises `StageFailed` when nothing can be learned, when the states do not reproduce the
    target's answers, or when a loss is not finite.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    clock = Clock()
    torch.set_num_threads(int(job["threads"]))
    torch.manual_seed(int(job["seed"]))
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    target_dir, out_dir = Path(job["target"]), Path(job["out_dir"])
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype="auto").to(device).eval()
    stored_dtype = target.dtype
    end_ids = end_of_turn_ids(target_dir)
    clock.lap("load")

    prompts = render_prompts(Path(job["prompts_file"]), tokenizer)
    samples, dropped = own_answers(target, prompts, end_ids, job)
    if len(samples) < 2:
        raise StageFailed.at(
            job["prompts_file"],
            f"{len(samples)} of {len(prompts)} prompts gave an answer of two tokens or more",
            "give more draft prompts, or a larger `max_length`",
        )
    clock.lap("answers")
    layer_ids = auxiliary_layers(target.config.get_text_config().num_hidden_layers)
    record_states(target, samples, layer_ids)
    del target
    clock.lap("states")

    train, held_out = split(samples, float(job.get("held_out_share", 0.1)), int(job["seed"]))
    frequencies = Counter(token for sample in train for token in sample.answer)
    draft = new_draft(job, layer_ids, frequencies, end_ids, eager=not cuda).to(device)
    agreement = target_agreement(draft, samples)
    if agreement < MIN_AGREEMENT:
        raise StageFailed.at(
            target_dir,
            f"its recorded states give back {agreement:.3f} of its own answer tokens, "
            f"at least {MIN_AGREEMENT} is needed",
            "the model's final norm or head is not one that speculators' EAGLE3 knows",
        )
    with tempfile.TemporaryDirectory(prefix="draft-") as scratch:
        history = fit(draft, train, held_out, job, Path(scratch), dtype)
        clock.lap("train")
        best = read_draft(Path(scratch) / "checkpoint_best", target_dir).to(device)
    steps = int(job["num_speculative_tokens"])
    scores = score(best, held_out, steps)
    clock.lap("score")
    save(best, stored_dtype, out_dir)
    check_draft(out_dir, target_dir)
    clock.lap("save")
    draftable = set(draft_targets(best))
    answered = Counter(token for sample in samples for token in sample.answer)
    covered = sum(count for token, count in answered.items() if token in draftable)
    return {
        "prompts": len(prompts),
        "answers": len(samples),
        "held_out": len(held_out),
        "truncated": sum(not sample.finished for sample in samples),
        "dropped": dropped,
        "layer_ids": layer_ids,
        "draft_vocab_size": best.draft_vocab_size,
        "vocab_coverage": round(covered / answered.total(), 6),
        "target_agreement": round(agreement, 6),
        **history,
        **scores,
        "parameters": sum(p.numel() for p in draft.parameters() if p.requires_grad),
        "seconds": clock.laps,
    }


# -- the draft -----------------------------------------------------------------------------------


def new_draft(
    job: dict[str, Any],
    layer_ids: list[int],
    frequencies: Counter[int],
    end_ids: list[int],
    *,
    eager: bool,
) -> Any:
    """speculators' Eagle3 draft model, fresh, float32, with the target's embeddings and head.

    `eager`: without flex attention, which is slow where it is not compiled.
    """
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    layers = int(job["num_layers"])
    config = create_transformer_layer_config(
        verifier_name_or_path=job["target"],
        num_layers=layers,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=0,
        full_attention_indices=list(range(layers)),
    )
    config.sliding_window = None
    size = int(job["draft_vocab_size"] or config.vocab_size)
    if size > config.vocab_size:
        raise UserError.at(
            "draft_vocab_size", f"{size} is more than the target's {config.vocab_size} tokens"
        )
    d2t = t2d = None
    if size < config.vocab_size:
        counts = dict(frequencies)
        # A draft that cannot propose the end of a turn loses a step at every answer's end.
        counts |= {token: 1 + max(counts.values()) for token in end_ids}
        d2t, t2d = build_vocab_mappings_from_distribution(counts, size, config.vocab_size)
    draft = Eagle3DraftModel.from_training_args(
        verifier_config=config,
        t2d=t2d,
        d2t=d2t,
        target_layer_ids=layer_ids,
        verifier_name_or_path=job["target"],
        draft_vocab_size=size,
        norm_before_residual=True,
        ttt_steps=int(job["num_speculative_tokens"]),
        draft_attn_impl="sdpa" if eager else "simple_flex_attention",
    )
    return draft.to(torch.float32)


def read_draft(folder: Path, target: Path) -> Any:
    """A saved draft of `target` in float32, ready to propose for sequences of any length."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = str(target)
    # Not stored in the config; the default (flex attention) takes whole blocks of tokens only.
    config.transformer_layer_config._attn_implementation = "sdpa"
    return Eagle3DraftModel.from_pretrained(folder, config=config).to(torch.float32).eval()


def draft_targets(draft: Any) -> list[int]:
    """Target token id of each draft token id."""
    if draft.d2t is None:
        return list(range(draft.draft_vocab_size))
    return [token + offset for token, offset in enumerate(draft.d2t.tolist())]


def training_row(sample: Sample) -> dict[str, Any]:
    """One sample as speculators' collator takes it: shifted, with the answer's positions marked.

    Position i holds token i+1 beside the state after token i, and learns what follows token i+1.
    The answer's last token is no place to draft from: what follows it is never served.
    """
    import torch
    from speculators.models.eagle3 import shift_batch

    length = len(sample.tokens)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[sample.prompt_length : length - 1] = True
    row: dict[str, Any] = shift_batch(
        {
            "hidden_states": sample.states,
            "input_ids": torch.tensor(sample.tokens),
            "verifier_last_hidden_states": sample.last_states,
            "loss_mask": mask,
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    return row


def target_agreement(draft: Any, samples: Sequence[Sample]) -> float:
    """Share of answer tokens that the draft's copy of the target's norm and head gives back."""
    import torch

    targets = torch.tensor(draft_targets(draft))
    same = asked = 0
    for sample in samples:
        states = sample.last_states[sample.prompt_length - 1 : -1].to(draft.device, draft.dtype)
        with torch.inference_mode():
            best = draft.verifier_lm_head(draft.verifier_norm(states)).argmax(-1).cpu()
        answer = torch.tensor(sample.answer)
        draftable = torch.isin(answer, targets)
        same += int((targets[best] == answer)[draftable].sum())
        asked += int(draftable.sum())
    return same / asked if asked else 0.0


# -- training ------------------------------------------------------------------------------------


class LossLog(logging.Handler):
    """Reads the metrics that speculators' Trainer logs; stops it at the first loss that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.train: dict[int, list[float]] = {}
        self.held_out: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        metrics = record.msg
        if not isinstance(metrics, dict):
            return
        epoch = int(metrics["epoch"])
        if "train" in metrics:
            loss = float(metrics["train"]["loss"])
            self.train.setdefault(epoch, []).append(loss)
        else:
            loss = float(metrics["val"]["loss_epoch"])
            self.held_out.append(loss)
            steps = self.train[epoch]
            print(
                f"epoch {epoch + 1}: loss {sum(steps) / len(steps):.4f}, held out {loss:.4f}",
                flush=True,
            )
        if not math.isfinite(loss):
            raise StageFailed.at(
                "learning_rate",
                f"the draft's loss became {loss} in epoch {epoch + 1}",
                "lower it, or look for NaN in the target's weights",
            )


@contextmanager
def without_accelerator() -> Iterator[None]:
    """Let speculators' Trainer run where there is no accelerator.

    speculators 0.9.0 moves the model to `get_local_rank()` (an int: an accelerator's index) and
    calls `torch.accelerator.synchronize()` to time its steps; both fail on the CPU. A test fails
    when neither is needed any longer.
    """
    with (
        mock.patch("speculators.train.trainer.get_local_rank", lambda: "cpu"),
        mock.patch("torch.accelerator.synchronize", lambda: None),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="CUDA is not available")
        yield


def fit(
    draft: Any,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    job: dict[str, Any],
    scratch: Path,
    dtype: Any,
) -> dict[str, Any]:
    """Train `draft` in place with speculators' Trainer; losses per epoch.

    The epoch with the lowest held-out loss is left in `scratch/checkpoint_best`.
    """
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.trainer import Trainer, TrainerConfig
    from torch.utils.data import DataLoader

    longest = max(len(sample.tokens) for sample in [*train, *held_out])
    pack = max(longest, PACK_TOKENS)

    def loader(samples: Sequence[Sample]) -> Any:
        return DataLoader(
            [training_row(sample) for sample in samples],
            batch_sampler=MultipackDistributedBatchSamplerV2(
                batch_max_length=pack,
                lengths=[len(sample.tokens) - 1 for sample in samples],
                num_replicas=1,
                rank=0,
                seed=int(job["seed"]),
            ),
            collate_fn=CollateFn(pack, draft.hidden_size, dtype=dtype),
        )

    cuda = draft.device.type == "cuda"
    train_kwargs, val_kwargs = draft.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="fused" if cuda else "eager",
        ttt_steps=int(job["num_speculative_tokens"]),
        ttt_step_loss_decay=1.0,
    )
    config = TrainerConfig(
        lr=float(job["learning_rate"]),
        num_epochs=int(job["epochs"]),
        save_path=str(scratch),
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs,
        scheduler_type="cosine",
        scheduler_warmup_ratio=0.05,
        save_best=True,
        hidden_states_dtype=dtype,
    )
    log = LossLog()
    metrics = logging.getLogger("speculators.metrics")
    metrics.setLevel(logging.INFO)
    metrics.addHandler(log)
    try:
        with nullcontext() if cuda else without_accelerator():
            Trainer(draft, config, loader(train), loader(held_out)).run_training()
    finally:
        metrics.removeHandler(log)
    if len(log.held_out) < config.num_epochs:
        # The Trainer answers SIGTERM by saving a checkpoint and returning as if it were done.
        raise InfrastructureError(f"training was interrupted in epoch {len(log.held_out) + 1}")
    return {
        "train_loss": [round(sum(steps) / len(steps), 6) for steps in log.train.values()],
        "held_out_loss": [round(loss, 6) for loss in log.held_out],
        "best_epoch": log.held_out.index(min(log.held_out)),
    }


# -- what came of it -----------------------------------------------------------------------------


def score(draft: Any, samples: Sequence[Sample], steps: int) -> dict[str, Any]:
    """What a server would accept of `steps` greedy proposals at a time on `samples`.

    "accuracy"[k]: share of right tokens at proposal k among all places to draft from where the
    proposals before it were right. "acceptance"[k] and "acceptance_length": the answers walked as
    the server walks them, each draft starting after the tokens of the one before; accepted at
    position k over all drafts, and 1 + accepted / drafts (vLLM's mean acceptance length).
    A proposal behind the end of an answer counts as wrong.
    """
    import torch

    to_target = torch.tensor(draft_targets(draft))
    right, asked, accepted, drafts = [0] * steps, [0] * steps, [0] * steps, 0
    for sample in samples:
        row = training_row(sample)
        with torch.inference_mode():
            proposals = draft(
                hidden_states=row["hidden_states"][None].to(draft.device, draft.dtype),
                input_ids=row["input_ids"][None].to(draft.device),
                document_ids=torch.zeros_like(row["input_ids"])[None].to(draft.device),
                position_ids=row["position_ids"][None].to(draft.device),
                ttt_steps=steps,
            )
        # Row i holds token i+1; its proposal k is for token i+2+k.
        proposed = [to_target[step[0].cpu()].tolist() for step in proposals]
        length = len(sample.tokens)
        runs = {}
        for start in range(sample.prompt_length - 1, length - 2):
            run = 0
            for step in range(min(steps, length - 2 - start)):
                asked[step] += 1
                if proposed[step][start] != sample.tokens[start + 2 + step]:
                    break
                right[step] += 1
                run += 1
            runs[start] = run
        start = sample.prompt_length - 1
        while start in runs:
            drafts += 1
            for step in range(runs[start]):
                accepted[step] += 1
            start += runs[start] + 1
    return {
        "accuracy": [round(r / a, 6) if a else None for r, a in zip(right, asked, strict=True)],
        "acceptance": [round(count / drafts, 6) for count in accepted],
        "acceptance_length": round(1 + sum(accepted) / drafts, 6),
    }


def save(draft: Any, dtype: Any, out_dir: Path) -> None:
    """Write config.json and model.safetensors in the target's own dtype, and nothing else.

    Two things that speculators adds are left out. The path of the target would make the same
    draft another artifact on every machine; vLLM is given target and draft side by side and does
    not ask for it, speculators does (see `read_draft`). A copy of the config class's source
    (with `auto_map`) is code, which no server of ours runs.
    """
    draft.config.speculators_config.verifier.name_or_path = None
    draft.to(dtype).save_pretrained(out_dir)
    for code in out_dir.glob("*.py"):
        code.unlink()
    config_file = out_dir / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
