"""Prefect's own server and a worker of its, as `pilotage up` starts them: who is let in, who hangs.

In a process of its own, as Prefect keeps the first server that it was told. One pool, no MLflow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from registry.redaction import without_secrets
from registry.settings import CHECKOUT
from tasks.engines.ports import free_port
from tests.processes import gone

BEGIN = """
import json, sys
from dataclasses import asdict
from flows.prefect_home import prepare_prefect
prepare_prefect(runs=False)
from tasks import services, worker_health
services.POOLS, worker_health.SLACK = ("cpu",), 2.0
"""
UNTIL_OFFLINE = """
import socket, time
api, name = services.server_url() + "/api", socket.gethostname() + "-cpu"
until = time.monotonic() + 120
while worker_health._worker(api, "cpu", name).status.value == "ONLINE":
    assert time.monotonic() < until
    time.sleep(0.5)
"""
UP = "print(json.dumps([asdict(one) for one in services.up()]))"
DOWN = "services.down()"
CLIENT = """
import time
from uuid import uuid4
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.events import emit_event
with get_client(sync_client=True) as client:
    client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="a", limit=1))
    event = emit_event("pilotage.test", resource={"prefect.resource.id": "pilotage.test.1"})
    wanted = {"filter": {"event": {"name": ["pilotage.test"]}}}
    for _ in range(100):
        time.sleep(0.2)
        found = client._client.post("/events/filter", json=wanted).json()["events"]
        if found:
            break
    print(json.dumps([one["id"] for one in found] == [str(event.id)]))
"""


@dataclass
class Site:
    env: dict[str, str]
    port: int
    said: str = ""
    """By the last one that ran, on stderr."""

    def run(self, *words: str) -> Any:
        """The last line that it prints, which is JSON."""
        done = subprocess.run(
            [sys.executable, "-c", "\n".join([BEGIN, *words])],
            env=self.env, cwd=CHECKOUT, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        self.said = done.stderr
        return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/api{path}"
        return httpx.request(method, url, timeout=60, trust_env=False, **more)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    port = free_port()
    env = {
        name: value for name, value in without_secrets(os.environ).items() if "PREFECT" not in name
    }
    env |= {
        "PILOTAGE_HOME": str(tmp_path_factory.mktemp("site")),
        "PILOTAGE_PREFECT_PORT": str(port),
        "PILOTAGE_MLFLOW_URI": "http://127.0.0.1:9",
        "PREFECT_WORKER_HEARTBEAT_SECONDS": "1",
    }
    made = Site(env, port)
    try:
        yield made
    finally:
        made.run(DOWN)


def socket_of(site: Site, origin: str) -> int | str:
    """What a page of that origin gets that wants the log lines: a refusal, or the first word."""
    url = f"ws://127.0.0.1:{site.port}/api/logs/out"
    try:
        with connect(
            url, origin=Origin(origin), subprotocols=[Subprotocol("prefect")], proxy=None
        ) as socket:
            socket.send(json.dumps({"type": "auth", "token": None}))
            return str(json.loads(socket.recv(timeout=60))["type"])
    except InvalidStatus as refused:
        return refused.response.status_code


def test_what_another_sites_page_can_send_is_refused_and_our_clients_are_not(site: Site) -> None:
    started = site.run(UP)
    assert [one["what"] for one in started[:2]] == ["started", "started"]
    there = {"Origin": "https://elsewhere.example"}
    made_up = {"Prefect-Csrf-Token": "0" * 64, "Prefect-Csrf-Client": "elsewhere"}
    body = {"name": "planted", "type": "process"}
    for headers in ({}, there, there | made_up):
        for method, path in (("POST", "/work_pools/"), ("DELETE", "/work_pools/cpu")):
            assert site.ask(method, path, headers=headers, json=body).status_code == 403
    assert site.ask("GET", "/work_pools/planted").status_code == 404
    assert site.ask("GET", "/work_pools/cpu").status_code == 200, "made by the worker, and there"
    # A page may have a token made, and its browser does not show it.
    given = site.ask("GET", "/csrf-token?client=elsewhere", headers=there)
    assert given.status_code == 200
    assert "access-control-allow-origin" not in given.headers
    assert socket_of(site, "https://elsewhere.example") == 403
    assert socket_of(site, f"http://127.0.0.1:{site.port}") == "auth_success"
    assert site.run(CLIENT) is True
    # A page whose own name is made to mean this machine is of the same origin as itself.
    rebound = {"Host": f"elsewhere.example:{site.port}"}
    foreign = site.ask("GET", "/health", headers=rebound)
    assert foreign.status_code == 421 and "PREFECT_SERVER_API_CORS" in foreign.text
    assert site.ask("POST", "/work_pools/", headers=rebound, json=body).status_code == 421
    for name in ("localhost:1", "LOCALHOST", "[::1]:4200"):
        assert site.ask("GET", "/health", headers={"Host": name}).status_code == 200


def test_a_worker_that_hangs_is_found_and_started_again(site: Site) -> None:
    _, before = site.run(UP)[:2]
    assert (before["name"], before["what"]) == ("worker-cpu", "runs already")
    hung = psutil.Process(before["pid"])
    hung.send_signal(signal.SIGSTOP)
    _, after = site.run(UNTIL_OFFLINE, UP)[:2]
    assert (after["name"], after["what"]) == ("worker-cpu", "hung, started again")
    assert after["pid"] != before["pid"]
    assert gone(hung)
    assert f"worker-cpu (process {hung.pid}) hangs: no heartbeat since " in site.said
    assert site.run(UP)[1]["what"] == "runs already"
