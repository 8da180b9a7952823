"""The disk fills up: while a checkpoint is written, evidence, what is published, a promotion."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.audit import Holdings, check_not_moved, check_whole, holdings
from tests.faults.conftest import Tell
from tests.faults.disks import fill, make_room, small_disk
from tests.faults.world import Run, World, until

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]

SIZE = 200


def run_out(world: World, run: Run, left: int) -> int:
    """Fill the disk now, and return what the run then ends with."""
    fill(world.home, left)
    assert run.process.poll() is None, "the disk filled up too late"
    return run.end()


@pytest.mark.parametrize(
    ("stage", "label", "sign"),
    [
        ("distill", "", r"engines\.lora"),
        ("latency", "bf16", "vllm_bench_main"),
        ("accuracy", "bf16", "lm_eval_run"),
    ],
)
def test_disk_full_in_a_stage(
    world: World, finished: Holdings, tell: Tell, stage: str, label: str, sign: str
) -> None:
    """The disk fills up while a stage writes"""
    title = f"{stage} {label}".strip()
    with small_disk(world.home, SIZE):
        world.forget(stage, label or None)
        run = world.start()
        run.wait_for(rf"\] {title}: making")
        world.process(sign, settled=2.0)
        status = run_out(world, run, left=0)
        said = told(run)
        assert status == 4, run.text[-4000:]
        assert "No space left" in run.text or "disk is full" in run.text, run.text[-4000:]
        assert "make room" in run.text, run.text[-3000:]
        assert not world.entries(stage, label or None), "a half-written entry counts as whole"
        make_room(world.home)
        check_not_moved(world, finished)
        again = world.release()
        assert title in again.made
        assert world.release().made == []
        check_whole(world, finished, releases=holdings(world).releases)
    tell(
        fault=f"disk full in {title}", caused="tmpfs filled to the last page", stage=title,
        seen=said, status=status, then=f"after making room: made {', '.join(again.made)}",
    )  # fmt: skip


WHEN = {
    "publishing": ("mlartifacts/tiny-assistant/*/artifacts/*", ""),
    "weights go into MLflow": ("mlartifacts/tiny-assistant/models/*/artifacts/bundle.json", ""),
    "promotion": ("", "version 1 is bf16"),
    "the alias has moved": ("", "tiny-assistant@1 answers: "),
}


@pytest.mark.parametrize("when", WHEN)
def test_disk_full_while_published(world: World, finished: Holdings, tell: Tell, when: str) -> None:
    """The disk fills up while a release is recorded and promoted"""
    pattern, line = WHEN[when]
    with small_disk(world.home, SIZE):
        world.unregister()
        run = world.start()
        if line:
            run.wait_for(line)
        else:
            assert until(lambda: next(Path(world.home).glob(pattern), None), 600)
        status = run_out(world, run, left=0)
        said = told(run)
        assert status == 4, run.text[-4000:]
        assert "make room" in run.text, run.text[-3000:]
        make_room(world.home)
        world.no_process_left()
        between = holdings(world)
        assert between.chain == ""
        # An alias without its line in the ledger would be a promotion that nobody decided.
        assert len(between.ledger) >= len(between.aliases) - 1
        again = world.release()
        assert again.made == []
        world.release()
        check_whole(world, finished)
    tell(
        fault=f"disk full while {when}", caused="tmpfs filled to the last page", stage=when,
        seen=f"{said}; champion then: {between.aliases.get('champion', 'none')}", status=status,
        then="after making room: recorded and promoted once",
    )  # fmt: skip


def told(run: Run) -> str:
    lines = [line for line in run.text.splitlines() if line.startswith("pilotage: ")]
    return " ".join(lines)[-300:]
