"""`kill -9` of a worker, of its flow run, of Prefect's server, in the middle of a deployment's run.

The services are those of `pilotage up`, the deployment is `release/manual` of prefect.yaml.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tasks.engines.ports import free_port
from tests.faults.audit import Holdings, check_not_moved, check_whole, holdings
from tests.faults.conftest import Tell
from tests.faults.world import RECIPE, World, ask_prefect, kill, until

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]

AWAY = 30.0


class Site:
    """A home with its services up and its deployments registered."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.extra = {
            "PILOTAGE_PREFECT_PORT": str(free_port()),
            "PILOTAGE_MLFLOW_PORT": str(free_port()),
        }
        self.api = f"http://127.0.0.1:{world.extra['PILOTAGE_PREFECT_PORT']}/api"

    def up(self) -> str:
        return self._done("up")

    def deploy(self) -> str:
        return self._done("deploy")

    def down(self) -> str:
        return self._done("down")

    def _done(self, word: str) -> str:
        run = self.world.command(word)
        assert run.end(600) == 0, run.text[-4000:]
        return run.text

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        return ask_prefect(self.api, method, path, body)

    def begin(self) -> str:
        """Start the deployment; the id of its flow run."""
        deployment = self.ask("GET", "/deployments/name/release/manual")
        body = {"parameters": {"request": {"recipe": RECIPE}}}
        path = f"/deployments/{deployment['id']}/create_flow_run"
        return str(self.ask("POST", path, body)["id"])

    def state(self, run: str) -> str:
        found = self.ask("GET", f"/flow_runs/{run}")["state"]
        return f"{found['name']}: {found['message'] or ''}".strip()

    def ended(self, run: str, seconds: float = 900.0) -> str:
        kinds = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
        done = until(
            lambda: self.ask("GET", f"/flow_runs/{run}")["state"]["type"] in kinds, seconds
        )
        assert done, f"{self.state(run)}\n{self.world.command_lines()}"
        return self.state(run)

    def pid(self, service: str) -> psutil.Process:
        note = self.world.home / "services" / f"{service}.json"
        return psutil.Process(json.loads(note.read_text())["pid"])

    def in_stage(self, sign: str) -> psutil.Process:
        return self.world.process(sign, seconds=600, settled=1.0)


@pytest.fixture
def site(world: World) -> Iterator[Site]:
    made = Site(world)
    made.up()
    made.deploy()
    yield made
    made.world.command("down").end(300)


KILLED = {
    "the worker": ["worker-gpu"],
    "the server": ["prefect-server"],
    "the worker and its flow run": ["worker-gpu", "run"],
}


@pytest.mark.parametrize("what", KILLED)
def test_killed(site: Site, finished: Holdings, tell: Tell, what: str) -> None:
    """A service of `pilotage up` is killed in the middle of a deployment's run"""
    world = site.world
    world.forget("accuracy", "bf16")
    run = site.begin()
    site.in_stage("lm_eval_run")
    for name in KILLED[what]:
        victim = site.in_stage("prefect.engine|flow-run execute") if name == "run" else None
        for process in reversed(tree(victim) if victim else [site.pid(name)]):
            kill(process)
    time.sleep(AWAY)
    said = site.up()
    assert "started again" in said, said
    state = site.ended(run)
    # Whatever became of the run that was hurt: the next one must not wait for it forever.
    again = site.begin()
    after = site.ended(again)
    # The bundle that was measured again is the one that the alias is at.
    assert after.startswith("Passed: PASS: tiny-assistant@champion is version 1 already"), after
    site.down()
    check_not_moved(world, finished)
    world.release()
    check_whole(world, finished, releases=holdings(world).releases)
    tell(
        fault=f"{what}, killed in a deployment's run", caused="`kill -9`; `pilotage up` after 30 s",
        stage="accuracy bf16", seen=state[:200], status="-", then=after[:120],
    )  # fmt: skip


def tree(process: psutil.Process) -> list[psutil.Process]:
    return [process]
