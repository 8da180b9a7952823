"""`kill -9` of the flow's process in every stage, one after the other, in one home.

Each rung kills the run in one stage, starts the next run, and sees that it makes this stage again
and nothing that was made before. The last run ends the release; what the home then holds is what
an undisturbed one holds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.audit import Holdings, check_whole, holdings
from tests.faults.conftest import Tell, copy_home
from tests.faults.world import Run, World, until

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]

SERVER = r"vllm\.entrypoints\.cli\.main serve"


@dataclass
class Ladder:
    """A home and the run in it that is to be killed next."""

    world: World
    run: Run | None = None

    def next(self) -> Run:
        """The run that is to be killed next, or that ends the release."""
        self.run = self.run or self.world.start()
        return self.run

    def check_end(self, finished: Holdings) -> None:
        """The last run ends the release, and the home is as if nothing had happened."""
        run = self.next()
        assert run.end() == 0, run.text[-5000:]
        assert run.document["champion"]["version"] == 1
        assert self.world.release().made == []
        check_whole(self.world, finished)


@pytest.fixture(scope="module")
def ladder(finished: Holdings, faults_root: Path) -> Iterator[Ladder]:
    """From an empty home, stage by stage."""
    world = World(faults_root)
    shutil.rmtree(world.home)
    yield Ladder(world)
    world.stop_all()


@pytest.fixture(scope="module")
def publishing(finished: Holdings, faults_root: Path) -> Iterator[Ladder]:
    """Every stage is there, and nothing is recorded."""
    world = World(faults_root)
    copy_home(faults_root / "finished", world.home)
    world.unregister()
    yield Ladder(world)
    world.stop_all()


@dataclass(frozen=True)
class Rung:
    """What to wait for before the kill, and what must not be there yet."""

    stage: str
    wait: Callable[[World, Run], object]
    not_yet: str
    again: str = ""
    """What the next run says when it is past this."""


def in_stage(title: str, process: str = "", settled: float = 1.0) -> Rung:
    """While the stage is being made and, where it has one, its own process runs."""

    def wait(world: World, run: Run) -> None:
        run.wait_for(rf"\] {re.escape(title)}: making")
        if process:
            world.process(process, settled=settled)

    begin = rf"\] {re.escape(title)}: "
    return Rung(title, wait, f"{begin}done", f"{begin}(done|reused)")


def when_there(stage: str, pattern: str, not_yet: str) -> Rung:
    """As soon as a file of the home exists."""

    def wait(world: World, run: Run) -> None:
        assert until(lambda: next(world.home.glob(pattern), None) or run.process.poll(), 900)

    return Rung(stage, wait, not_yet)


def served_after(stage: str, line: str, not_yet: str) -> Rung:
    """While a server runs that was started after a line of the log."""

    def wait(world: World, run: Run) -> None:
        run.wait_for(line)
        world.process(SERVER, settled=1.0)

    return Rung(stage, wait, not_yet)


REGISTERED = "version 1 is bf16"
ANSWERS = "tiny-assistant@1 answers: "
THROUGH = "tiny-assistant@champion answers: "

RUNGS = {
    "prompts": in_stage("prompts demo"),
    "model": in_stage("model teacher", "tiny_llama"),
    "teacher_data": in_stage("teacher_data", SERVER),
    "accuracy-teacher": in_stage("accuracy teacher", "lm_eval_run"),
    "distill": in_stage("distill", r"engines\.lora"),
    "serving": in_stage("serving bf16", SERVER),
    "accuracy": in_stage("accuracy bf16", "lm_eval_run"),
    "latency": in_stage("latency bf16", "vllm_bench_main", 8.0),
    "quantize": in_stage("quantize w8a8_tiny", r"engines\.compressor"),
    "draft": in_stage("draft w8a8_tiny", "speculators_train|vllm_states"),
}

RECORDING = {
    "record-stages": when_there(
        "record: stage runs", "mlartifacts/tiny-assistant/*/artifacts/*", REGISTERED
    ),
    "record-candidates": when_there(
        "record: candidates",
        "mlartifacts/tiny-assistant/models/*/artifacts/outcome.json",
        REGISTERED,
    ),
    "record-weights": when_there(
        "record: weights",
        "mlartifacts/tiny-assistant/models/*/artifacts/target/*",
        REGISTERED,
    ),
    "promote-before": served_after("promote: smoke prompt", REGISTERED, ANSWERS),
    "promote-after": served_after("promote: alias moved", ANSWERS, THROUGH),
    "conclude": when_there("conclude: report", "reports/*", r'"verdict":'),
}


@pytest.mark.parametrize("name", RUNGS)
def test_killed_in_a_stage(ladder: Ladder, tell: Tell, name: str) -> None:
    """`kill -9` of the flow in a stage"""
    kill_flow(ladder, RUNGS[name], name, tell)


def test_after_the_kills_in_all_stages(ladder: Ladder, finished: Holdings, tell: Tell) -> None:
    """The release that was killed in every stage ends as an undisturbed one"""
    ladder.check_end(finished)
    tell_of_all(tell, RUNGS, finished)


@pytest.mark.parametrize("name", RECORDING)
def test_killed_while_recorded(publishing: Ladder, tell: Tell, name: str) -> None:
    """`kill -9` of the flow while it records and promotes"""
    world, run, rung = publishing.world, publishing.next(), RECORDING[name]
    tell(fault=f"flow killed in {name}", caused="`kill -9` of the flow's process", stage=rung.stage)
    status = kill_at(world, run, rung)
    # The next run finishes this in moments, so it is the next rung's to kill.
    publishing.run = None
    found = holdings(world)
    assert (found.chain, found.twice) == ("", [])
    assert found.aliases.get("champion", 0) in (0, 1)
    if "champion" in found.aliases:
        assert "promote" in [action for action, _ in found.ledger], "an alias without its line"
    tell(
        seen=f"process gone; versions {sorted(found.versions)}, aliases {found.aliases}, "
        f"{len(found.ledger)} ledger lines, {sum(found.models.values())} LoggedModels",
        status=status,
        then="finished by the run after the last of these kills",
    )


def test_after_the_kills_while_recorded(publishing: Ladder, finished: Holdings, tell: Tell) -> None:
    """The release that was killed while it recorded and promoted ends as an undisturbed one"""
    publishing.check_end(finished)
    tell_of_all(tell, RECORDING, finished)


def kill_at(world: World, run: Run, rung: Rung) -> int:
    rung.wait(world, run)
    status = run.kill()
    assert not re.search(rung.not_yet, run.text), f"the kill came too late:\n{run.text[-2000:]}"
    return status


def kill_flow(ladder: Ladder, rung: Rung, name: str, tell: Tell) -> None:
    """Kill the run there, start the next one, and see it do what the first one did not."""
    world, run = ladder.world, ladder.next()
    tell(fault=f"flow killed in {name}", caused="`kill -9` of the flow's process", stage=rung.stage)
    status = kill_at(world, run, rung)
    before = run.text
    left = len(world.processes())
    done = set(re.findall(r"\] (.+?): (?:done|reused)", before))
    ladder.run = world.start()
    ladder.run.wait_for(rung.again)
    after = ladder.run.text
    # What was whole is not made again.
    assert not done & set(re.findall(r"\] (.+?): making", after)), after[-3000:]
    ended = after.count("left behind by a run that crashed")
    again = "made again" if re.search(rf"\] {re.escape(rung.stage)}: making", after) else "finished"
    tell(
        seen=f"process gone, {left} processes orphaned",
        status=status,
        then=f"{again} by the next run; {len(done)} stages reused, {ended} orphans ended by it",
    )


def tell_of_all(tell: Tell, rungs: dict[str, Rung], finished: Holdings) -> None:
    tell(
        caused=f"the {len(rungs)} kills above, one home",
        stage="all",
        seen="one of everything: " + str(dict(finished.models)),
        status=0,
        then="nothing was made again",
    )
