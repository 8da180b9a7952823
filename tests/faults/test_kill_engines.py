"""`kill -9` of each process that a release starts, once each, in one run: it goes on by itself.

A second kill in the same stage ends the run with status 4 and a reason; the next run goes on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.audit import Holdings, check_not_moved, check_whole
from tests.faults.conftest import Tell
from tests.faults.world import Run, World, kill

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]

FRONT = r"vllm\.entrypoints\.cli\.main serve"
CORE = r"VLLM::EngineCor|EngineCore"
AGAIN = "trying again in"

KILLED = {
    # What is killed, in which stage, how long it has lived.
    "maker of the demo model": ("model teacher", "tiny_llama", 2.0),
    "vLLM's engine core, answering": ("teacher_data", CORE, 1.0),
    "vLLM's HTTP front, scoring": ("accuracy teacher", FRONT, 1.0),
    "trainer": ("distill", r"engines\.lora", 6.0),
    "vLLM's HTTP front, starting": ("serving bf16", FRONT, 3.0),
    "the harness that scores": ("accuracy bf16", "lm_eval_run", 3.0),
    "vLLM's engine core, measured": ("latency bf16", CORE, 0.5),
    "quantizer": ("quantize w8a8_tiny", r"engines\.compressor", 5.0),
    "draft trainer": ("draft w8a8_tiny", "speculators_train", 3.0),
    "vLLM's engine core, scoring": ("accuracy w8a8_int8-eagle3", CORE, 1.0),
    "the load generator": ("latency w8a8_int8-eagle3", "vllm_bench_main", 0.5),
}


@pytest.fixture(scope="module")
def bare(finished: Holdings, faults_root: Path) -> Iterator[World]:
    world = World(faults_root)
    shutil.rmtree(world.home)
    yield world
    world.stop_all()


@pytest.fixture(scope="module")
def run(bare: World) -> Run:
    return bare.start()


@pytest.mark.parametrize("what", KILLED)
def test_killed_once(bare: World, run: Run, tell: Tell, what: str) -> None:
    """`kill -9` of a process of a stage"""
    stage, pattern, settled = KILLED[what]
    title = rf"\] {re.escape(stage)}: "
    tell(fault=f"{what}, killed", caused=f"`kill -9` of `{pattern}`", stage=stage)
    run.wait_for(f"{title}making")
    if stage.startswith("latency"):
        # The generator starts while the engine does; after the first rate both are at work.
        run.wait_for(rf"{title}making[\s\S]*?requests/s: measured")
    victim = bare.process(pattern, settled=settled)
    warned = run.text.count(AGAIN)
    kill(victim)
    assert not re.search(f"{title}done", run.text), "the kill came too late"
    run.wait_for(f"{title}done")
    warnings = [line for line in run.text.splitlines() if AGAIN in line]
    assert len(warnings) == warned + 1, run.text[-3000:]
    assert stage in warnings[-1]
    tell(
        seen=f"pid {victim.pid} gone; {warnings[-1][10:170]}",
        status="goes on",
        then="the same run made the stage again and went on",
    )


def test_after_all_kills(bare: World, run: Run, finished: Holdings, tell: Tell) -> None:
    """The release whose every process was killed once ends as an undisturbed one"""
    assert run.end() == 0, run.text[-5000:]
    assert bare.release().made == []
    check_whole(bare, finished)
    tell(
        caused=f"all {len(KILLED)} kills above, one run", stage="all", seen="promoted", status=0,
        then="nothing was made again",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "label", "title", "pattern"),
    [
        ("quantize", "w8a8_tiny", "quantize w8a8_tiny", r"engines\.compressor"),
        ("latency", "bf16", "latency bf16", CORE),
        ("accuracy", "teacher", "accuracy teacher", FRONT),
    ],
)
def test_killed_twice(
    world: World, finished: Holdings, tell: Tell, stage: str, label: str, title: str, pattern: str
) -> None:
    """`kill -9` of a process of a stage, and of the one that took its place"""
    world.forget(stage, label)
    run = world.start()
    run.wait_for(rf"\] {title}: making")
    kill(world.process(pattern, settled=1.0))
    run.wait_for(f"{title}: {AGAIN}")
    kill(world.process(pattern, settled=1.0))
    status = run.end()
    assert status == 4, run.text[-3000:]
    assert "Traceback" not in run.text
    said = [line for line in run.text.splitlines() if line.startswith("pilotage: ")]
    assert said, run.text[-3000:]
    check_not_moved(world, finished)
    again = world.release()
    assert again.document["champion"]["version"] == 1
    tell(
        fault=f"{pattern} killed twice in {title}",
        caused="`kill -9`, and again after the retry",
        stage=title,
        seen=said[0][:200],
        status=status,
        then=f"made {', '.join(again.made)}; champion is version 1",
    )
