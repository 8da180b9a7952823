"""Cancelled from the UI in each stage: nothing of the run is left after 15 s, and the next goes on.

The real server and workers of `pilotage up`, in a home of its own; a cancel is the call that the
UI's button makes.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.engines.ports import free_port
from tests.faults.conftest import Tell
from tests.faults.world import RECIPE, WHOLE, World, ask_prefect, until
from tests.processes import gone

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(3600)]

LEFT = 15.0
"""Seconds after which nothing may be left."""

GOES_ON = "the next run goes on"

FRONT, CORE = r"vllm\.entrypoints\.cli\.main serve", r"VLLM::EngineCor|EngineCore"

CANCELLED = {
    # The stage, a process of it, how long that has lived.
    "pre-training the demo model": ("model teacher", "tiny_llama", 2.0),
    "the teacher's server starts": ("teacher_data", FRONT, 3.0),
    "the teacher is scored": ("accuracy teacher", "lm_eval_run", 2.0),
    "distillation": ("distill", r"engines\.lora", 6.0),
    "a bundle's server starts": ("serving bf16", CORE, 1.0),
    "a bundle is scored": ("accuracy bf16", "lm_eval_run", 2.0),
    "load on a bundle": ("latency bf16", "vllm_bench_main", 1.0),
    "quantization": ("quantize w8a8_tiny", r"engines\.compressor", 5.0),
    "draft training": ("draft w8a8_tiny", "speculators_train", 3.0),
}


@dataclass
class Station:
    """A home with its services, and runs of its deployments."""

    world: World
    port: int
    before: set[int] = field(default_factory=set)

    def up(self) -> None:
        for words in (["up"], ["deploy"]):
            run = self.world.command(*words)
            assert run.end(600) == 0, run.text
        self.before = {process.pid for process in self.world.processes()}

    def down(self) -> None:
        run = self.world.command("down")
        assert run.end(300) == 0, run.text

    def ask(self, method: str, path: str, **body: Any) -> Any:
        return ask_prefect(f"http://127.0.0.1:{self.port}/api", method, path, body or None)

    def start(self, **env: str) -> str:
        """A run of the tiny release, as the form starts it; its id."""
        found = self.ask("GET", "/deployments/name/release/manual")
        body = {
            "parameters": {"request": {"recipe": RECIPE}},
            "state": {"type": "SCHEDULED"},
            "job_variables": {"env": env},
        }
        return str(self.ask("POST", f"/deployments/{found['id']}/create_flow_run", **body)["id"])

    def state(self, run: str) -> tuple[str, str, str]:
        state = self.ask("GET", f"/flow_runs/{run}")["state"]
        return state["type"], state["name"], state["message"] or ""

    def cancel(self, run: str) -> float:
        """As the button does; when, on the monotonic clock."""
        at = time.monotonic()
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.ask("POST", f"/flow_runs/{run}/set_state", state=state)
        return at

    def ends_as(self, run: str, wanted: str, seconds: float = WHOLE) -> tuple[str, str, str]:
        final = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        assert until(lambda: self.state(run)[0] in final, seconds), self.state(run)
        assert self.state(run)[0] == wanted, self.state(run)
        return self.state(run)

    def log(self) -> str:
        return (self.world.home / "logs" / "worker-gpu.log").read_text(errors="replace")

    def said(self, pattern: str, since: int, seconds: float = WHOLE) -> str:
        """What the worker's log says of its runs after position `since`."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [hit[0] for hit in re.finditer(pattern, self.log()[since:])]
            return bool(found)

        assert until(look, seconds), f"no {pattern!r}:\n{self.log()[since:][-3000:]}"
        return found[-1]

    def others(self) -> list[psutil.Process]:
        """What runs in this home and is none of its services."""
        return [one for one in self.world.processes() if one.pid not in self.before]

    def nothing_left(self, at: float) -> float:
        """Seconds from `at` until nothing of the run was left."""
        assert until(lambda: not self.others(), LEFT - (time.monotonic() - at)), [
            " ".join(one.cmdline())[:150] for one in self.others()
        ]
        return time.monotonic() - at


@pytest.fixture(scope="module")
def station(faults_root: Path) -> Iterator[Station]:
    ports = {"PILOTAGE_PREFECT_PORT": free_port(), "PILOTAGE_MLFLOW_PORT": free_port()}
    world = World(faults_root, extra={name: str(port) for name, port in ports.items()})
    shutil.rmtree(world.home, ignore_errors=True)
    made = Station(world, ports["PILOTAGE_PREFECT_PORT"])
    made.up()
    yield made
    made.down()
    world.stop_all()


@pytest.mark.parametrize("when", CANCELLED)
def test_cancelled_in_a_stage(station: Station, tell: Tell, when: str) -> None:
    """Cancelled in the UI during a stage"""
    stage, pattern, settled = CANCELLED[when]
    tell(
        fault=f"{when}, cancelled", caused="cancel of the flow run, as the UI does it", stage=stage
    )
    since, run = len(station.log()), station.start()
    station.said(rf"\] {re.escape(stage)}: making", since)
    victim = station.world.process(pattern, settled=settled)
    at = station.cancel(run)
    seconds = station.nothing_left(at)
    assert gone(victim)
    assert not re.search(rf"\] {re.escape(stage)}: done", station.log()[since:]), "it came too late"
    station.ends_as(run, "CANCELLED", 120)
    tell(
        seen=f"no process left after {seconds:.1f} s",
        status="Cancelled",
        then="the next run goes on",
    )


def test_cancelled_while_it_waits_for_the_device(station: Station, tell: Tell) -> None:
    """Cancelled while another run has the device"""
    tell(caused="cancel of a run that waits", stage="draft w8a8_tiny")
    with (station.world.root / "device-locks" / "pilotage-cpu.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        since, run = len(station.log()), station.start()
        line = station.said("waiting for cpu: .* holds it", since)
        seconds = station.nothing_left(station.cancel(run))
    station.ends_as(run, "CANCELLED", 120)
    tell(
        seen=f"{line}; left after {seconds:.1f} s", status="Cancelled", then="the next run goes on"
    )


def test_a_killed_flow_leaves_no_engine(station: Station, tell: Tell) -> None:
    """`kill -9` of the flow's process while its worker lives"""
    tell(caused="`kill -9` of the flow's process", stage="draft w8a8_tiny")
    since, run = len(station.log()), station.start()
    station.said(r"\] draft w8a8_tiny: making", since)
    engine = station.world.process("speculators_train", settled=2.0)
    flow = next(
        one for one in psutil.Process(engine.pid).parents() if "prefect" in str(one.cmdline())
    )
    at = time.monotonic()
    flow.send_signal(signal.SIGKILL)
    seconds = station.nothing_left(at)
    assert gone(engine)
    _, _, message = station.ends_as(run, "CRASHED", 120)
    seen = f"{message[:80]}; nothing left after {seconds:.1f} s"
    tell(seen=seen, status="Crashed", then=GOES_ON)


def test_a_cancelled_release_cancels_the_runs_of_its_candidates(
    station: Station, tell: Tell
) -> None:
    """Cancelled while its candidates have runs of their own"""
    tell(caused="cancel of the parent run", stage="draft w8a8_tiny, in a child run")
    expected = {"w8a8_int8-eagle3": "Measured", "refused": "Infeasible"}
    if not station.world.entries("latency", "bf16"):
        # Where not all of the cancels ran before.
        expected["bf16"] = "Measured"
    since = len(station.log())
    run = station.start(PILOTAGE_CANDIDATE_DEPLOYMENT="candidate/one")
    station.said(r"\] draft w8a8_tiny: making", since)
    link = station.said(r"candidate w8a8_int8-eagle3: measured by a run of its own: \S+", since)
    trainer = station.world.process("speculators_train", settled=2.0)
    seconds = station.nothing_left(station.cancel(run))
    assert gone(trainer)
    station.ends_as(run, "CANCELLED", 120)
    station.ends_as(link.rpartition("/")[2], "CANCELLED", 120)
    tell(seen=f"no process left after {seconds:.1f} s", status="Cancelled", then=GOES_ON)


def test_ctrl_c_on_a_terminal(station: Station, tell: Tell) -> None:
    """Ctrl-C while a stage works"""
    tell(caused="SIGINT to `pilotage release`", stage="draft w8a8_tiny")
    run = station.world.start()
    run.wait_for(r"\] draft w8a8_tiny: making")
    trainer = station.world.process("speculators_train", settled=2.0)
    at = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    seconds = station.nothing_left(at)
    assert run.end(60) == 128 + signal.SIGINT
    assert gone(trainer)
    assert "pilotage: stopped; finished stages are kept and reused" in run.text
    tell(seen=f"no process left after {seconds:.1f} s", status="130", then=GOES_ON)


def test_after_all_of_it_a_run_ends_well(station: Station, tell: Tell) -> None:
    """The run after all these cancels, its candidates in runs of their own, ends well"""
    # What a child had made before its release was cancelled needs no child again.
    for stage in ("serving", "accuracy"):
        if station.world.entries(stage, "refused"):
            station.world.forget(stage, "refused")
    expected = {"w8a8_int8-eagle3": "Measured", "refused": "Infeasible"}
    if not station.world.entries("latency", "bf16"):
        # Where not all of the cancels ran before.
        expected["bf16"] = "Measured"
    since = len(station.log())
    run = station.start(PILOTAGE_CANDIDATE_DEPLOYMENT="candidate/one")
    _, name, message = station.ends_as(run, "COMPLETED")
    assert message.startswith("PASS: tiny-assistant@champion is version 1"), message
    said = station.log()[since:]
    children = re.findall(r"candidate (\S+): its run \S+ ended as (\w+)", said)
    assert dict(children) == expected
    assert not station.others() or until(lambda: not station.others(), LEFT)
    tell(caused="nothing", stage="", seen=message[:120], status=name, then="")
