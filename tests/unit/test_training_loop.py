"""When a run looks, logs and saves; which look is best; which checkpoint is whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from registry.errors import InfrastructureError
from tasks.engines import training_loop
from tasks.engines.training_loop import Schedule, best_by, best_look


def schedule(
    rows: int = 100, per_step: int = 8, epochs: float = 3.0, every: float = 0.5
) -> Schedule:
    return Schedule.of(rows, per_step, epochs, every, None, 10.0)


def test_steps_are_counted_as_the_trainer_counts_them() -> None:
    found = schedule()
    assert (found.steps_per_epoch, found.total, found.evaluate_every) == (13, 39, 6)
    assert (found.log_every, found.save_seconds) == (1, 600.0)
    assert schedule(epochs=0.1).total == 2
    assert schedule(rows=3).steps_per_epoch == 1
    assert schedule(rows=8000, epochs=20).log_every == 20
    assert schedule(every=0.01).evaluate_every == 1


def look(step: float, loss: float, **more: float) -> dict[str, float]:
    return {"step": step, "epoch": 0.0, "held_out_loss": loss, **more}


def test_the_best_look_is_the_earliest_of_the_best_and_never_the_one_before_training() -> None:
    by_loss = best_by("held_out_loss")
    looks = [look(0, 0.1), look(5, 0.9), look(10, 0.5), look(15, 0.5), look(20, math.nan)]
    assert best_look(looks, by_loss) == look(10, 0.5)
    assert best_look([look(0, 0.1)], by_loss) is None
    assert best_look([look(5, math.nan)], by_loss) is not None

    by_rate = best_by("hit_rate")
    rated = [
        look(0, 2.0, hit_rate=1.0),
        look(5, 0.9, hit_rate=0.5),
        look(10, 0.8, hit_rate=0.7),
        look(15, 0.6, hit_rate=0.7),
        look(20, 0.2, hit_rate=math.nan),
    ]
    assert best_look(rated, by_rate) == rated[3]
    by_divergence = best_by("held_out_kl")
    apart = [look(5, 0.9, held_out_kl=0.1), look(10, 0.1, held_out_kl=0.2)]
    assert best_look(apart, by_divergence) == apart[0]


def test_the_mean_loss_counts_every_step_once() -> None:
    history = [
        {"look": look(0, 2.0), "step": 0},
        {"loss": 3.0, "step": 2},
        {"loss": 1.0, "step": 3},
        {"train_runtime": 1.0, "step": 3},
    ]
    assert training_loop.curve(history) == [(2, 3.0), (3, 1.0)]
    assert training_loop.looks(history) == [look(0, 2.0)]
    assert training_loop.mean_loss([(2, 3.0), (3, 1.0)]) == pytest.approx(7 / 3)
    assert math.isnan(training_loop.mean_loss([]))


def checkpoint(work: Path, step: int, whole: bool = True) -> Path:
    folder = work / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"moments")
    (folder / "trainer_state.json").write_text("{}")
    if whole:
        training_loop.mark_whole(folder)
    return folder


def test_the_newest_whole_checkpoint_is_taken_and_torn_ones_go(tmp_path: Path) -> None:
    assert training_loop.newest_checkpoint(tmp_path) is None
    good = checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 2)
    cut = checkpoint(tmp_path, 10)
    (cut / "optimizer.pt").write_bytes(b"mom")
    lacking = checkpoint(tmp_path, 11)
    (lacking / "trainer_state.json").unlink()
    unmarked = checkpoint(tmp_path, 12, whole=False)
    garbled = checkpoint(tmp_path, 13)
    (garbled / training_loop.COMPLETE).write_text("{")
    assert training_loop.newest_checkpoint(tmp_path) == good  # 9 before 10 as numbers, not as text
    assert not any(folder.exists() for folder in (cut, lacking, unmarked, garbled))
    assert json.loads((good / training_loop.COMPLETE).read_text()).keys() == {
        "optimizer.pt",
        "trainer_state.json",
    }


def test_an_adapter_that_is_gone_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "best" / "step-7").mkdir(parents=True)
    assert training_loop.best_adapter(tmp_path, look(7, 0.1)).name == "step-7"
    with pytest.raises(InfrastructureError, match="step-8 is gone"):
        training_loop.best_adapter(tmp_path, look(8, 0.1))
