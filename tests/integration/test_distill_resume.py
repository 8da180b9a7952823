"""A training process that is killed and started again ends with the curve of an unbroken one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.engines import lora, training_loop
from tests.integration.distill_builders import job, questions, student, write


def settings(base: Path, rows: Path, out: Path) -> dict[str, Any]:
    # Dropout takes from the random state at every step; three epochs have three orders of rows.
    adapter = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.2, "target_modules": "all-linear"}
    return job(
        base,
        rows,
        out,
        lora=adapter,
        batch_size=2,
        epochs=3,
        checkpoint_steps=3,
        evaluate_every=0.5,
    )


@pytest.mark.alone
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    base = student(tmp_path / "base")
    rows = write(tmp_path / "rows.jsonl", questions())
    whole = lora.run(settings(base, rows, tmp_path / "whole"))

    asked = settings(base, rows, tmp_path / "killed")
    work = Path(asked["work_dir"])
    killed_at = kill_once_saved(asked, tmp_path, steps=18)  # in the second of three epochs
    assert killed_at < whole["steps"]
    # The newest checkpoint was torn by the kill: half a file. The one before is taken.
    newest = training_loop.newest_checkpoint(work)
    assert newest is not None
    torn = newest.with_name(f"checkpoint-{killed_at + 1}")
    shutil.copytree(newest, torn)
    optimizer = torn / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:100])

    result = lora.run(asked)
    assert result["resumed_from"] == int(newest.name.split("-")[1]) > 0
    assert result["curve"] == whole["curve"]
    assert result["looks"] == whole["looks"]
    assert result["train_loss"] == whole["train_loss"]
    one, two = (
        (tmp_path / name / "merged" / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    )
    assert one == two

    # Killed after the last step, while merging: nothing is trained again.
    shutil.rmtree(tmp_path / "killed")
    again = lora.run(asked)
    assert again["resumed_from"] == whole["steps"]
    assert again["curve"] == whole["curve"] and again["chosen"] == whole["chosen"]


def kill_once_saved(asked: dict[str, Any], folder: Path, steps: int) -> int:
    """SIGKILL the real process once it has saved `steps` steps; the last step it had saved."""
    files = [folder / "job.json", folder / "result.json"]
    files[0].write_text(json.dumps(asked))
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.engines.lora", *map(str, files)], stdout=log, stderr=log
    )
    saved = Path(asked["work_dir"]) / "checkpoints"
    wanted = saved / f"checkpoint-{steps}" / training_loop.COMPLETE
    deadline = time.monotonic() + 120
    while not wanted.exists():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not files[1].exists(), "it ended before it was killed"
    return max(int(path.name.split("-")[1]) for path in saved.glob("checkpoint-*"))


@pytest.mark.alone
def test_two_processes_train_as_one_with_twice_the_rows(tmp_path: Path) -> None:
    base = student(tmp_path / "base")
    # 28 rows to train: 7 steps of 4 rows, whoever takes them.
    rows = write(tmp_path / "rows.jsonl", questions(11)[:32])
    adapter = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    shared = {"lora": adapter, "epochs": 2, "held_out_share": 0.125}
    one = lora.run(job(base, rows, tmp_path / "one", batch_size=4, **shared))
    assert one["train_rows"] == 28

    asked = job(base, rows, tmp_path / "two", batch_size=2, processes=2, **shared)
    two = lora.run(asked)
    assert two["steps"] == one["steps"] == 14
    assert "accelerate" in two["launch"] and "--num_processes 2" in two["launch"]
    for (step, loss), (same_step, wanted) in zip(two["curve"], one["curve"], strict=True):
        assert step == same_step
        assert loss == pytest.approx(wanted, rel=1e-4)
    assert two["held_out_loss_after"] == pytest.approx(one["held_out_loss_after"], rel=1e-4)

    # Killed in its second epoch, both processes go on.
    shutil.rmtree(Path(asked["work_dir"]) / "checkpoints" / "checkpoint-14")
    (tmp_path / "two").rename(tmp_path / "unbroken")
    again = lora.run(asked)
    assert again["resumed_from"] == 7
    assert again["curve"] == two["curve"] and again["looks"] == two["looks"]
    weights = "merged/model.safetensors"
    found = (tmp_path / "two" / weights).read_bytes()
    assert found == (tmp_path / "unbroken" / weights).read_bytes()
