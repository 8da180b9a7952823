"""speculators' own training loop on recorded samples, on the CPU too.

The draft is trained in float32 on the CPU, under `without_accelerator`. On CUDA the Trainer's
defaults hold: bf16, flex attention, fused losses.
"""

from __future__ import annotations

import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from registry.errors import InfrastructureError, StageFailed
from tasks.engines.draft_states import Sample

FLEX_BLOCK = 128
"""Flex attention takes whole blocks of tokens."""


def training_row(sample: Sample) -> dict[str, Any]:
    """One sample as speculators' collator takes it: shifted, with the answer's positions marked.

    Position i holds token i+1 beside the state after token i, and learns what follows token i+1.
    The answer's last token is no place to draft from: what follows it is never served.
    """
    import torch
    from speculators.models.eagle3 import shift_batch

    length = len(sample.tokens)
    states, last_states = sample.recorded()
    mask = torch.zeros(length, dtype=torch.bool)
    mask[sample.prompt_length : length - 1] = True
    row: dict[str, Any] = shift_batch(
        {
            "hidden_states": states,
            "input_ids": torch.tensor(sample.tokens),
            "verifier_last_hidden_states": last_states,
            "loss_mask": mask,
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    return row


class Rows:
    """Training rows, made when they are asked for: states may lie on a disk."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return training_row(self.samples[place])


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


def kept_epochs(losses: Sequence[float], count: int) -> list[int]:
    """Epochs, from 0, whose checkpoints are kept after the last of `losses`, at most `count`.

    That with the lowest held-out loss, and the last `count` - 1. What is dropped after one epoch
    is wanted after none.
    """
    best = min(range(len(losses)), key=lambda epoch: losses[epoch])
    last = range(max(0, len(losses) - count + 1), len(losses))
    return sorted({best, *last})


def fit(
    draft: Any,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    job: dict[str, Any],
    scratch: Path,
) -> dict[str, Any]:
    """Train `draft` in place with speculators' Trainer; losses per epoch.

    Leaves `scratch/N` (from 0) for each of `kept_epochs`. The Trainer writes weights in bfloat16.
    """
    import torch
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.trainer import Trainer, TrainerConfig
    from torch.utils.data import DataLoader

    cuda = draft.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    count = int(job["engine_checkpoints"])
    log = LossLog()

    class FewCheckpoints(Trainer):
        """The disk holds a few checkpoints with their optimizers, however many epochs."""

        def maybe_update_best(self, epoch: int, val_metrics: dict[str, float] | None) -> None:
            super().maybe_update_best(epoch, val_metrics)
            keep = {str(kept) for kept in kept_epochs(log.held_out, count)}
            for folder in scratch.iterdir():
                if folder.is_dir() and not folder.is_symlink() and folder.name not in keep:
                    shutil.rmtree(folder)

    longest = max(len(sample.tokens) for sample in [*train, *held_out])
    pack = max(longest, int(job["batch_tokens"]))
    if cuda:
        pack = math.ceil(pack / FLEX_BLOCK) * FLEX_BLOCK

    def loader(samples: Sequence[Sample]) -> Any:
        return DataLoader(
            Rows(samples),
            batch_sampler=MultipackDistributedBatchSamplerV2(
                batch_max_length=pack,
                lengths=[len(sample.tokens) - 1 for sample in samples],
                num_replicas=1,
                rank=0,
                seed=int(job["seed"]),
            ),
            collate_fn=CollateFn(pack, draft.hidden_size, dtype=dtype),
        )

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
        hidden_states_dtype=dtype,
    )
    metrics = logging.getLogger("speculators.metrics")
    metrics.setLevel(logging.INFO)
    metrics.addHandler(log)
    try:
        with nullcontext() if cuda else without_accelerator():
            FewCheckpoints(draft, config, loader(train), loader(held_out)).run_training()
    finally:
        metrics.removeHandler(log)
    if len(log.held_out) < config.num_epochs:
        # The Trainer answers SIGTERM by saving a checkpoint and returning as if it were done.
        raise InfrastructureError(f"training was interrupted in epoch {len(log.held_out) + 1}")
    return {
        "train_loss": [round(sum(steps) / len(steps), 6) for steps in log.train.values()],
        "held_out_loss": [round(loss, 6) for loss in log.held_out],
        "best_epoch": log.held_out.index(min(log.held_out)) + 1,
        "kept_epochs": [epoch + 1 for epoch in kept_epochs(log.held_out, count)],
    }
