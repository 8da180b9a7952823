"""Services that outlive the command which started them, on small servers of Python's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest

from flows import prefect_home
from flows.service_commands import own_api
from registry.errors import InfrastructureError, UserError
from registry.settings import CHECKOUT, settings
from tasks import services as module
from tasks.engines.ports import free_port, listener
from tasks.engines.subprocesses import identity
from tasks.service_notes import (
    MLFLOW,
    SERVER,
    Note,
    database_alone,
    read_note,
    services_dir,
    share_database,
    write_note,
)
from tasks.services import Service, down, up

WEB = """
import http.server, sys
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""
CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


SHARING = """
import time
from tasks.service_notes import share_database
share_database()
print("shared", flush=True)
time.sleep(600)
"""


def web(name: str, port: int) -> Service:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", WEB, str(port)]
    return Service(
        name, command, lambda note: module._answers(url), port, url, setting="PILOTAGE_MLFLOW_PORT"
    )


def worker(pool: str) -> Service:
    """With a child, and no port of its own."""
    command = [sys.executable, "-c", CHILD]
    return Service(module.worker_name(pool), command, lambda note: len(children(note.pid)) == 1)


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Service]]:
    """A server, a worker and MLflow, of which nothing is left after the test."""
    wanted = [web(SERVER, free_port()), worker("cpu"), web(MLFLOW, free_port())]
    monkeypatch.setattr(module, "services", lambda own_api="": wanted)
    monkeypatch.setattr("tasks.bundles.tracker", lambda: type("Tracker", (), {"client": None}))
    yield wanted
    down()


def test_up_starts_once_starts_again_what_died_and_down_ends_all(machine: list[Service]) -> None:
    first = {one.name: one for one in up()}
    assert [one.what for one in first.values()] == ["started"] * 3
    assert [one.what for one in up()] == ["runs already"] * 3
    grandchild = children(first["worker-cpu"].pid or 0)[0].pid

    os.kill(first["worker-cpu"].pid or 0, signal.SIGKILL)
    os.kill(first[SERVER].pid or 0, signal.SIGKILL)
    wait_for(lambda: not alive(first[SERVER].pid or 0))
    second = {one.name: one for one in up()}
    assert {name: one.what for name, one in second.items()} == {
        SERVER: "started again",
        "worker-cpu": "started again",
        MLFLOW: "runs already",
    }
    # A run goes on without the worker that started it, and `down` still knows it.
    assert alive(grandchild)

    pids = [one.pid or 0 for one in second.values()] + [grandchild]
    ended = down()
    assert not [pid for pid in pids if alive(pid)]
    assert [line.partition(":")[0] for line in ended] == ["worker-cpu", SERVER, MLFLOW]
    assert down() == []
    assert sorted(path.name for path in services_dir().iterdir()) == ["lock"]


def test_a_port_of_somebody_else_is_named_before_anything_is_started(
    machine: list[Service],
) -> None:
    with socket.socket() as somebody:
        port = machine[2].port
        somebody.bind(("127.0.0.1", port or 0))
        somebody.listen()
        with pytest.raises(UserError) as error:
            up()
    (problem,) = error.value.problems
    assert problem.where == f"port {port}"
    assert f"process {os.getpid()} (" in problem.what
    assert problem.remedy == "end that process, or set PILOTAGE_MLFLOW_PORT to a free port"
    assert read_note(SERVER) is None


def test_what_was_half_started_is_ended_again(machine: list[Service]) -> None:
    broken = [sys.executable, "-c", "print('no such table'); raise SystemExit(3)"]
    machine[2] = replace(machine[2], command=broken)
    with pytest.raises(
        InfrastructureError, match=r"mlflow ended with status 3(.|\n)*no such table"
    ):
        up()
    assert [read_note(one.name) for one in machine] == [None, None, None]
    assert listener(machine[0].port or 0) == ""


def test_what_could_not_be_noted_does_not_run_on(
    machine: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No `down` would find it, and its port would be taken for somebody else's."""
    started: list[int] = []

    def full(note: Note) -> None:
        started.append(note.pid)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_note", full)
    with pytest.raises(OSError, match="No space left"):
        up()
    assert len(started) == 1 and not alive(started[0])


def test_what_runs_with_another_address_is_named_and_left_as_it_is(
    machine: list[Service],
) -> None:
    """A worker that asks the server of another port would take no run, and say nothing."""
    first = up()
    machine[1] = replace(machine[1], url="http://127.0.0.1:4201/api")
    with pytest.raises(UserError) as error:
        up()
    (problem,) = error.value.problems
    assert problem.where == f"worker-cpu (process {first[1].pid})"
    assert problem.what.endswith("http://127.0.0.1:4201/api is wanted now")
    assert problem.remedy == "`make down` (pilotage down) first"
    assert [alive(one.pid or 0) for one in first] == [True] * 3
    down()
    assert [one.what for one in up()] == ["started"] * 3


def test_a_command_waits_while_up_starts_the_server(
    machine: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note is written before it answers: who used it at once would find nobody there."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for name in ("PREFECT_HOME", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    (server, *_) = up()
    command = Thread(target=prefect_home.prepare_prefect)
    with database_alone():
        command.start()
        command.join(1)
        assert command.is_alive() and "PREFECT_API_URL" not in os.environ
    command.join(20)
    assert os.environ["PREFECT_API_URL"] == f"{server.url}/api"
    # It uses that server, so it holds up nobody.
    with database_alone():
        pass


def test_a_server_that_is_open_to_other_machines_is_ended_and_told(machine: list[Service]) -> None:
    wide = WEB.replace("127.0.0.1", "0.0.0.0")
    port = machine[2].port
    machine[2] = replace(machine[2], command=[sys.executable, "-c", wide, str(port)])
    with pytest.raises(InfrastructureError, match=rf"listens on 0\.0\.0\.0:{port}, open to other"):
        up()
    assert [read_note(one.name) for one in machine] == [None, None, None]
    assert listener(port or 0) == ""


def test_down_leaves_the_process_that_has_the_id_now(machine: list[Service]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        try:
            found = identity(stranger.pid)
            assert found is not None
            log = str(settings().logs_dir / "x.log")
            write_note(Note(SERVER, stranger.pid, int(found["start"]) - 1, "0" * 32, log))
            assert down() == [f"{SERVER}: was not running any more; what it left was ended"]
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_commands_use_the_server_that_runs(
    machine: list[Service], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for name in ("PREFECT_HOME", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    assert prefect_home.running_server() == ""
    server = next(one for one in up() if one.name == SERVER)
    prefect_home.prepare_prefect()
    assert os.environ["PREFECT_API_URL"] == f"{server.url}/api"

    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    prefect_home.prepare_prefect()
    assert os.environ["PREFECT_API_URL"] == "https://prefect.example/api"

    monkeypatch.delenv("PREFECT_API_URL")
    os.kill(server.pid or 0, signal.SIGKILL)
    wait_for(lambda: not alive(server.pid or 0))
    said: list[str] = []
    monkeypatch.setattr(
        prefect_home.LOG, "warning", lambda text, *values: said.append(text % values)
    )
    prefect_home.prepare_prefect(runs=False)
    assert "PREFECT_API_URL" not in os.environ
    assert f"(process {server.pid}) has died: not used" in said[0]


def test_up_waits_for_no_temporary_server_and_names_who_has_one(
    machine: list[Service], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    words = [sys.executable, "-c", SHARING]
    with subprocess.Popen(words, cwd=CHECKOUT, stdout=subprocess.PIPE) as command:
        try:
            assert command.stdout is not None and command.stdout.readline()
            with pytest.raises(UserError) as error:
                up()
        finally:
            command.kill()
    assert f"process {command.pid} (" in str(error.value)
    assert "temporary Prefect server on this database" in str(error.value)
    assert [one.what for one in up()] == ["started"] * 3
    # With the server there, the next command needs none of its own: nobody waits.
    share_database()


def test_secrets_reach_workers_only(
    machine: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_TEACHER_API_KEY", "planted-key")
    machine[1] = replace(machine[1], with_secrets=True)
    for one in up():
        environment = psutil.Process(one.pid).environ()
        assert ("planted-key" in environment.values()) == (one.name == "worker-cpu")


def test_the_real_services_listen_here_only_and_name_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PILOTAGE_MLFLOW_URI", "postgresql://me:planted-word@db/mlflow")
    settings.cache_clear()
    found = {one.name: one for one in module.services()}
    assert list(found) == [SERVER, "worker-cpu", "worker-gpu", MLFLOW]
    for name in (SERVER, MLFLOW):
        words = found[name].command
        assert words[words.index("--host") + 1] == "127.0.0.1"
    assert not [word for one in found.values() for word in one.command if "planted-word" in word]
    assert not [one.name for one in found.values() if one.with_secrets and one.port]


def test_a_server_has_the_retention_and_the_database_that_somebody_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The remedy that `maintain` names has to help; and no server falls back to SQLite silently."""
    retention = "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD"
    database = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
    monkeypatch.delenv(retention, raising=False)
    monkeypatch.delenv(database, raising=False)
    server = module.services()[0]
    assert (server.env[retention], database in server.env) == (str(30 * 86_400), False)
    monkeypatch.setenv(retention, str(7 * 86_400))
    monkeypatch.setenv(database, "postgresql+asyncpg://me:planted-word@db/prefect")
    server = module.services()[0]
    assert server.env[retention] == str(7 * 86_400)
    assert server.env[database].endswith(":planted-word@db/prefect")
    assert not [one.name for one in module.services()[1:] if database in one.env]


def test_no_page_of_somebody_else_may_ask_our_server(monkeypatch: pytest.MonkeyPatch) -> None:
    origins = "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"
    monkeypatch.delenv(origins, raising=False)
    port = settings().prefect_port
    wanted = f"http://127.0.0.1:{port},http://localhost:{port}"
    assert module.services()[0].env[origins] == wanted
    monkeypatch.setenv(origins, "https://prefect.example.com")
    assert module.services()[0].env[origins] == "https://prefect.example.com"
    tokens = "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED"
    monkeypatch.delenv(tokens, raising=False)
    assert module.services()[0].env[tokens] == "true"
    monkeypatch.setenv(tokens, "false")
    assert module.services()[0].env[tokens] == "false"


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("", ""),
        ("http://127.0.0.1:4200/api", ""),
        ("http://localhost:4200/api/", ""),
        ("http://127.0.0.1:4201/api", "http://127.0.0.1:4201/api"),
    ],
)
def test_the_address_of_our_own_server_is_nobody_elses(
    url: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert own_api() == own


def test_servers_of_the_users_own_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_MLFLOW_URI", "http://mlflow.example")
    settings.cache_clear()
    found = {one.name: one for one in module.services("https://prefect.example/api")}
    assert list(found) == ["worker-cpu", "worker-gpu"]
    assert found["worker-gpu"].env["PREFECT_API_URL"] == "https://prefect.example/api"


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)
