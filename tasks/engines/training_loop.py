"""One training run that can be killed: data order, checkpoints, looks at the held-out rows.

Everything that a step depends on is in a checkpoint (adapter, optimizer, scheduler, random
states, losses so far) or follows from seed and epoch (the order of rows), so a run that was killed
and started again gives the loss curve of one that was not. In the work folder:

    checkpoints/checkpoint-N/   as transformers writes it, and `complete.json`, written last: each
                                file's SHA-256. Without it, or with another file, it is torn
    best/step-N/                the adapter at the best look so far
"""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from registry.digests import digest_of_file
from registry.errors import InfrastructureError, Problem, StageFailed

COMPLETE = "complete.json"
CURVE_POINTS = 1000
"""Points of the loss curve that are kept at most; every step where there are fewer."""

Look = dict[str, float]
"""`step`, `epoch` and what was measured on the held-out rows then."""

Better = Callable[[Look, Look], bool]
"""Whether the first look is better than the second."""


@dataclass(frozen=True)
class Schedule:
    """When what happens, in optimizer steps."""

    steps_per_epoch: int
    total: int
    evaluate_every: int
    log_every: int
    save_every: int | None
    save_seconds: float

    @classmethod
    def of(
        cls,
        rows: int,
        rows_per_step: int,
        epochs: float,
        evaluate_every: float,
        save_every: int | None,
        save_minutes: float,
    ) -> Schedule:
        """`evaluate_every` is a share of an epoch, `rows_per_step` counts all processes."""
        per_epoch = max(1, math.ceil(rows / rows_per_step))
        total = math.ceil(epochs * per_epoch)
        return cls(
            steps_per_epoch=per_epoch,
            total=total,
            evaluate_every=max(1, round(evaluate_every * per_epoch)),
            log_every=max(1, total // CURVE_POINTS),
            save_every=save_every,
            save_seconds=save_minutes * 60,
        )


def arguments(job: Mapping[str, Any], schedule: Schedule, work: Path, bf16: bool) -> dict[str, Any]:
    """TrainingArguments that every method shares; the recipe's own stand among them."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "lr_scheduler_type": "cosine",
        **job["training"],
        "output_dir": str(work / "checkpoints"),
        "num_train_epochs": float(job["epochs"]),
        "learning_rate": float(job["learning_rate"]),
        "per_device_train_batch_size": int(job["batch_size"]),
        "warmup_steps": float(job["warmup_ratio"]),  # below 1 it is a share of all steps
        "seed": int(job["seed"]),
        "bf16": bf16,
        "use_cpu": not on_gpu,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": on_gpu,
        # "steps" with an interval out of reach: the keeper below says when.
        "save_strategy": "steps",
        "save_steps": 10**9,
        "save_total_limit": 2,
        "eval_strategy": "no",
        "logging_steps": schedule.log_every,
        # A loss that is no number is shown, not replaced by an average of earlier ones.
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        # The other processes wait while the first one looks at the held-out rows and merges.
        "ddp_timeout": 24 * 3600,
    }


@contextmanager
def of_training() -> Iterator[None]:
    """What transformers refuses of the recipe's `training` is a mistake of its writer."""
    try:
        yield
    except (TypeError, ValueError, ImportError, KeyError, NotImplementedError) as error:
        raise StageFailed(
            Problem("training", str(error), "these are transformers.TrainingArguments")
        ) from None


def check_optimizer(trainer: Any, steps: int) -> None:
    """Make the optimizer and its schedule once over nothing, before training makes its own."""
    import torch
    from transformers import get_scheduler

    given = trainer.args
    with of_training():
        kind, arguments = trainer.get_optimizer_cls_and_kwargs(given, trainer.model)
        names = inspect.signature(kind).parameters
        more = {"weight_decay": given.weight_decay} if "weight_decay" in names else {}
        place = torch.nn.Parameter(torch.zeros(1))
        optimizer = kind([place], **{**more, **arguments})
        get_scheduler(
            given.lr_scheduler_type,
            optimizer,
            given.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs=given.lr_scheduler_kwargs,
        )


def ordered(trainer_class: type, lengths: Sequence[int], rows_per_step: int, seed: int) -> type:
    """A trainer class that groups rows by length in an order that seed and epoch alone decide.

    transformers' own length-grouped sampler takes its order from the global random state, which
    after a resume is not what it was at the epoch's beginning.
    """
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    class Order(LengthGroupedSampler):
        def __init__(self, trainer: Any) -> None:
            super().__init__(rows_per_step, lengths=list(lengths), model_input_name="input_ids")
            self.trainer = trainer

        def __iter__(self) -> Iterator[int]:
            per_epoch = max(1, math.ceil(len(lengths) / rows_per_step))
            epoch = self.trainer.state.global_step // per_epoch
            self.generator = torch.Generator()
            self.generator.manual_seed(seed * 100_003 + epoch)
            found: Iterator[int] = super().__iter__()
            return found

    class Ordered(trainer_class):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Order(self)

    return Ordered


# -- checkpoints -----------------------------------------------------------------------------


def newest_checkpoint(work: Path) -> Path | None:
    """The last checkpoint that is whole; torn ones are removed."""
    folder = work / "checkpoints"
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    while found:
        newest = found.pop()
        if is_whole(newest):
            return newest
        print(f"{newest.name} was not finished or has changed; it is left out")
        shutil.rmtree(newest)
    return None


@cache  # torch orders what is registered, and cannot order it twice
def read_numbered_cpus() -> None:
    """Let `torch.load` put tensors on `cpu:1`, as it is asked for by several processes on a CPU.

    transformers 5.17 loads the optimizer onto accelerate's device, which carries the process's
    number, and torch 2.13 knows `cpu` only: no such run could go on.
    """
    import torch

    def placed(storage: Any, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(1000, lambda storage: None, placed)


def is_whole(checkpoint: Path) -> bool:
    try:
        noted: dict[str, str] = json.loads((checkpoint / COMPLETE).read_text())
    except (OSError, ValueError):
        return False
    try:
        return all(digest_of_file(checkpoint / name) == found for name, found in noted.items())
    except OSError:
        return False


def mark_whole(checkpoint: Path) -> None:
    """Note every file with its digest, and bring all of it to the disk first."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    noted = {
        str(path.relative_to(checkpoint)): digest_of_file(path)
        for path in files
        if path.name != COMPLETE
    }
    partial = checkpoint / f"{COMPLETE}.partial"
    partial.write_text(json.dumps(noted))
    partial.rename(checkpoint / COMPLETE)


# -- while it trains -------------------------------------------------------------------------


def keeper(
    schedule: Schedule,
    work: Path,
    look: Callable[[Any], dict[str, float]],
    keep: Callable[[Any, Path], None],
    better: Better,
) -> Any:
    """The callback that looks at the held-out rows, keeps the best adapter, and saves.

    `look(model)` measures, `keep(model, folder)` saves; only the first process is asked. Looks
    stand in the trainer's own log history, so that they are in its checkpoints.
    """
    import torch
    from transformers import TrainerCallback

    show_every = max(1, schedule.total // 50)

    class Keeper(TrainerCallback):
        def __init__(self) -> None:
            self.saved_at = time.monotonic()
            self.looking_seconds = self.looking_processor_seconds = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                self._look(state, kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            due = step % schedule.evaluate_every == 0 or step == schedule.total
            if due:
                self._look(state, kwargs["model"])
            # Only where the curve has a point too: what was summed up since is not in a checkpoint.
            if step % schedule.log_every == 0 or step == schedule.total:
                control.should_log = True
                control.should_save = due or self._save_due(step)

        def _save_due(self, step: int) -> bool:
            if schedule.save_every is not None:
                return step % schedule.save_every == 0
            due = time.monotonic() - self.saved_at >= schedule.save_seconds
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                from accelerate.utils import broadcast_object_list

                due = broadcast_object_list([due])[0]
            return due

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs.get("logs") or {}
            if (
                state.is_world_process_zero
                and "loss" in logs
                and state.global_step % show_every == 0
            ):
                print(
                    f"step {state.global_step}/{schedule.total}: loss {logs['loss']:.4f}, "
                    f"learning rate {logs['learning_rate']:.2e}",
                    flush=True,
                )

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.saved_at = time.monotonic()
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.barrier()
            if not state.is_world_process_zero:
                return
            mark_whole(work / "checkpoints" / f"checkpoint-{state.global_step}")
            best = best_look(looks(state.log_history), better)
            for folder in (work / "best").glob("step-*"):
                if best is None or folder.name != f"step-{best['step']:.0f}":
                    shutil.rmtree(folder, ignore_errors=True)

        def _look(self, state: Any, model: Any) -> None:
            if not state.is_world_process_zero:
                return
            began, used = time.monotonic(), time.process_time()
            plain = getattr(model, "module", model)
            earlier = best_look(looks(state.log_history), better)
            found: Look = {
                "step": float(state.global_step),
                "epoch": round(state.global_step / schedule.steps_per_epoch, 4),
                **look(plain),
            }
            state.log_history.append({"look": found, "step": state.global_step})
            measured = ", ".join(
                f"{name} {value:.4f}" for name, value in found.items() if name not in LOOK_PLACE
            )
            print(f"held-out rows at step {state.global_step}: {measured}", flush=True)
            if state.global_step and (earlier is None or better(found, earlier)):
                folder = work / "best" / f"step-{state.global_step}"
                shutil.rmtree(folder, ignore_errors=True)
                keep(plain, folder)
            plain.train()
            self.looking_seconds += time.monotonic() - began
            self.looking_processor_seconds += time.process_time() - used

    return Keeper()


LOOK_PLACE = ("step", "epoch")


def looks(log_history: Sequence[Mapping[str, Any]]) -> list[Look]:
    return [entry["look"] for entry in log_history if "look" in entry]


def curve(log_history: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, mean loss since the point before) of a run."""
    return [(int(entry["step"]), float(entry["loss"])) for entry in log_history if "loss" in entry]


def mean_loss(points: Sequence[tuple[int, float]]) -> float:
    """Over all steps; each point stands for the steps since the one before."""
    total, before = 0.0, 0
    for step, loss in points:
        total += loss * (step - before)
        before = step
    return total / before if before else math.nan


def best_look(found: Sequence[Look], better: Better) -> Look | None:
    """The best of the looks after training began; the earliest of equal ones."""
    best: Look | None = None
    for look in found:
        if look["step"] and (best is None or better(look, best)):
            best = look
    return best


def best_by(name: str) -> Better:
    """Whether one look is better than another; a loss should be low, a metric high.

    Equal metrics are told apart by the held-out loss. What is no number is never better.
    """

    def rank(look: Look) -> tuple[float, float]:
        loss = look["held_out_loss"] if math.isfinite(look["held_out_loss"]) else math.inf
        if name in ("held_out_loss", "held_out_kl"):
            value = look[name]
            return (value if math.isfinite(value) else math.inf, loss)
        return (-look[name] if math.isfinite(look[name]) else math.inf, loss)

    return lambda one, other: rank(one) < rank(other)


def best_adapter(work: Path, look: Look) -> Path:
    """Folder of the adapter of that look."""
    folder = work / "best" / f"step-{look['step']:.0f}"
    if not folder.is_dir():
        raise InfrastructureError(f"{folder} is gone; start the stage again")
    return folder


def watch(trainer: Any, callback: Any) -> None:
    """Add a callback; the lines that transformers prints of its own at every point go."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(callback)
