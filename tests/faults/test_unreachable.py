"""MLflow's server and Prefect's, gone for a minute in the middle of a release, and back."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from registry.settings import CHECKOUT
from tasks.engines.ports import free_port
from tests.faults.audit import Holdings, check_not_moved, check_whole, holdings
from tests.faults.conftest import Tell
from tests.faults.world import World, kill, until

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]

AWAY = 60.0


class Server:
    """A server as its own command starts it, on one port that it gets again."""

    def __init__(self, world: World, words: list[str], health: str) -> None:
        self.world, self.port = world, free_port()
        self.words = [word.format(port=self.port) for word in words]
        self.url = f"http://127.0.0.1:{self.port}"
        self.health = f"{self.url}{health}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = self.world.root / "logs" / f"server-{self.port}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # Its own home: it is no process of the release's.
        home = self.world.root / "of-the-server" / "prefect"
        home.mkdir(parents=True, exist_ok=True)
        env = {
            **self.world.environment,
            "PILOTAGE_HOME": str(home.parent),
            "PREFECT_HOME": str(home),
        }
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                self.words, cwd=CHECKOUT, env=env, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        assert until(self.answers, 180), log.read_text()[-3000:]

    def answers(self) -> bool:
        try:
            return httpx.get(self.health, timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            front = psutil.Process(self.process.pid)
            return [front, *front.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        for process in self.tree():
            kill(process)
        assert self.process is not None
        self.process.wait(30)
        assert not self.answers()

    def signal(self, number: signal.Signals) -> None:
        for process in self.tree():
            process.send_signal(number)


def goes_away(server: Server, how: str) -> None:
    """how: begins with `killed`, and it is started again; else it is stopped and goes on."""
    if how.startswith("killed"):
        server.kill()
        time.sleep(AWAY)
        server.start()
    else:
        server.signal(signal.SIGSTOP)
        time.sleep(AWAY)
        server.signal(signal.SIGCONT)


def mlflow_server(world: World) -> Server:
    words = [
        str(Path(sys.executable).with_name("mlflow")), "server", "--host", "127.0.0.1",
        "--port", "{port}", "--backend-store-uri", f"sqlite:///{world.database}",
        "--artifacts-destination", str(world.home / "mlartifacts"), "--workers", "1",
    ]  # fmt: skip
    return Server(world, words, "/health")


def prefect_server(world: World) -> Server:
    words = [
        str(Path(sys.executable).with_name("prefect")), "server", "start", "--host", "127.0.0.1",
        "--port", "{port}",
    ]  # fmt: skip
    return Server(world, words, "/api/health")


@pytest.mark.parametrize("how", ["killed and started again", "stopped and continued"])
def test_mlflow_away(world: World, finished: Holdings, tell: Tell, how: str) -> None:
    """The MLflow server is gone for a minute while a release is recorded"""
    world.unregister()
    server = mlflow_server(world)
    server.start()
    try:
        shared = {
            "PILOTAGE_MLFLOW_URI": server.url,
            "PILOTAGE_LEDGER_URI": f"sqlite:///{world.database}",
        }
        run = world.start(env=shared)
        assert until(lambda: next((world.home / "mlartifacts").rglob("config.json"), None), 600)
        assert "version 1 is bf16" not in run.text
        goes_away(server, how)
        status = run.end()
        assert "Traceback" not in run.text, run.text[-4000:]
        assert status in (0, 4), run.text[-4000:]
        again = world.release(env=shared)
        assert again.made == []
        world.release(env=shared)
    finally:
        server.kill()
    found = holdings(world)
    assert (found.twice, found.unfinished, found.chain) == ([], [], "")
    assert (found.versions, found.aliases) == (finished.versions, finished.aliases)
    assert found.ledger == finished.ledger
    said = [line for line in run.text.splitlines() if line.startswith("pilotage: ")]
    tell(
        fault=f"MLflow's server {how} after {AWAY:.0f} s", caused=how, stage="record",
        seen=(said or ["the release waited and went on"])[0][:200], status=status,
        then="recorded and promoted once",
    )  # fmt: skip


@pytest.mark.parametrize("how", ["killed and started again", "stopped and continued"])
def test_prefect_away(world: World, finished: Holdings, tell: Tell, how: str) -> None:
    """The Prefect server is gone for a minute in the middle of a stage"""
    world.forget("accuracy", "bf16")
    server = prefect_server(world)
    server.start()
    try:
        run = world.start(env={"PREFECT_API_URL": f"{server.url}/api"})
        run.wait_for(r"\] accuracy bf16: making")
        goes_away(server, how)
        status = run.end()
        assert "Traceback" not in run.text, run.text[-4000:]
        assert status in (0, 4), run.text[-4000:]
    finally:
        server.kill()
    check_not_moved(world, finished)
    again = world.release()
    world.release()
    check_whole(world, finished, releases=holdings(world).releases)
    said = [line for line in run.text.splitlines() if line.startswith("pilotage: ")]
    tell(
        fault=f"Prefect's server {how} after {AWAY:.0f} s", caused=how, stage="accuracy bf16",
        seen=(said or ["the release went on"])[0][:200], status=status,
        then=f"made {', '.join(again.made) or 'nothing'}",
    )  # fmt: skip
