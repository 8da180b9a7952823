"""vLLM that hangs without dying: stopped (SIGSTOP) while it starts, answers, is measured."""

from __future__ import annotations

import signal

import pytest

from tests.faults.audit import Holdings, check_whole, holdings
from tests.faults.conftest import Tell
from tests.faults.world import World, until

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]

FRONT = r"vllm\.entrypoints\.cli\.main serve"
CORE = r"VLLM::EngineCor|EngineCore"
LIMIT = 150
"""Seconds; a healthy start or measurement on a machine that others use must fit."""
START = {"PILOTAGE_ENGINE_START_TIMEOUT": str(LIMIT)}
WORK = {"PILOTAGE_STAGE_TIMEOUT": str(LIMIT)}

HANGS = {
    "the HTTP front, starting": (
        ("serving", "bf16"), FRONT, FRONT, START, f"was not ready after {LIMIT} s",
    ),
    "the engine core, starting": (
        ("serving", "bf16"), CORE, CORE, START,
        f"was not ready after {LIMIT} s|answered /health but generated no token",
    ),
    "the engine core, scored": (
        ("accuracy", "bf16"), "lm_eval_run", CORE, WORK, f"did not end within {LIMIT} s",
    ),
    "the HTTP front, scored": (
        ("accuracy", "bf16"), "lm_eval_run", FRONT, WORK, f"did not end within {LIMIT} s",
    ),
    # The generator starts while the engine does: measured is what its first rate came back from.
    "the engine core, measured": (
        ("latency", "bf16"), r"requests/s: measured", CORE, WORK, f"in {LIMIT} s|no token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HANGS)
def test_vllm_hangs(world: World, finished: Holdings, tell: Tell, what: str) -> None:
    """A vLLM process that is there and does nothing"""
    (stage, label), sign, pattern, limits, message = HANGS[what]
    title = f"{stage} {label}"
    world.forget(stage, label)
    run = world.start(env=limits)
    run.wait_for(rf"\] {title}: making")
    if "measured" in sign:
        run.wait_for(sign)
    else:
        world.process(sign, settled=1.0)
    victim = world.process(pattern)
    victim.send_signal(signal.SIGSTOP)
    assert until(lambda: victim.status() == "stopped", 10)
    assert f"{title}: done" not in run.text, "the stop came too late"
    run.wait_for(message)
    # What hangs is ended, hard: a stopped process does not hear SIGTERM.
    assert until(lambda: not victim.is_running(), 60)
    assert run.end() == 0, run.text[-4000:]
    assert run.made == [title]
    check_whole(world, finished, releases=holdings(world).releases)
    assert world.release().made == []
    tell(
        fault=f"{what}, hangs", caused=f"SIGSTOP of pid {victim.pid}", stage=title,
        seen=f"limit of {LIMIT} s ({next(iter(limits))}): {run.wait_for(message)}", status=0,
        then="the same run ended it and went on with a new server",
    )  # fmt: skip
