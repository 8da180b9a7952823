"""The services of one machine: Prefect's server, a worker for each pool, MLflow's server.

Each runs on its own after the command that started it has ended: a session of its own, a log in
PILOTAGE_HOME/logs, a note below PILOTAGE_HOME/services. All listen on 127.0.0.1 only.

    up     server ─► workers (a pool is made by its first worker) ; MLflow beside them
    down   runs ─► workers ─► server, MLflow
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import psutil

from registry.errors import InfrastructureError, Problem, UserError
from registry.redaction import redacted, without_secrets
from registry.settings import CHECKOUT, settings
from tasks.deploy_file import POOLS
from tasks.engines.ports import listener, listens
from tasks.engines.subprocesses import (
    MARKER,
    end_leftovers,
    end_of,
    end_processes,
    identity,
    marked,
    wait_until,
)
from tasks.prefect_server import ORIGINS
from tasks.progress import LOG
from tasks.service_notes import (
    MLFLOW,
    SERVER,
    Note,
    database_alone,
    only_one,
    read_note,
    remove_note,
    write_note,
)
from tasks.worker_health import hangs, has_polled

HOST = "127.0.0.1"
START_SECONDS = 240.0
"""The first start of a server migrates a database; on two busy cores that took over a minute."""
_RETENTION = {
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(30 * 24 * 3600),
}
"""Runs that ended longer ago go, so that the database stays small (`maintain` looks)."""
_CSRF = "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED"
_DATABASE = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
_LOG_BYTES = 50 << 20
"""A log that is larger when its service starts goes aside, once."""


@dataclass(frozen=True)
class Service:
    """What to start, and how to see that it works."""

    name: str
    command: list[str]
    ready: Callable[[Note], bool]
    port: int | None = None
    url: str = ""
    setting: str = ""
    """The variable that moves its port."""
    env: Mapping[str, str] = field(default_factory=dict)
    with_secrets: bool = False
    """Only for workers: a flow run asks teachers and judges."""
    hangs: Callable[[], str] = lambda: ""
    """Since when a live process has not worked; empty where it works. Asked beside its server."""


@dataclass(frozen=True)
class Started:
    """One line of the answer of `up`."""

    name: str
    pid: int | None
    url: str
    log: str
    what: str


def up(own_api: str = "") -> list[Started]:
    """Start what does not run. What this call started is ended again where one of them fails.

    own_api: a Prefect server of the user's own (PREFECT_API_URL); then none is started, and the
    workers ask that one. Raises `UserError` for a port that somebody else has.
    """
    with only_one("up"), ExitStack() as alone:
        _end_crashed_runs()
        wanted = services(own_api)
        _check_addresses(wanted)
        # Every port is looked at before anything is started.
        before = {service.name: _found(service) for service in wanted}
        if SERVER in before and not before[SERVER][1]:
            alone.enter_context(database_alone())
        done: list[Started] = []
        fresh: list[str] = []
        try:
            for service in wanted:
                note, serves = before[service.name]
                since = service.hangs() if note is not None and serves else ""
                if note is not None and serves and not since:
                    done.append(_line(note, "runs already"))
                    continue
                was = "started" if note is None else "started again"
                if note is not None and since:
                    _kill_hung(note, since)
                    was = "hung, started again"
                fresh.append(service.name)
                done.append(_line(_start(service, note), was))
        except BaseException:
            for name in reversed(fresh):
                if (note := read_note(name)) is not None:
                    _end(note)
            raise
        if settings().mlflow_uri.startswith(("http:", "https:")):
            done.append(Started(MLFLOW, None, "", "", "is a server of your own; none was started"))
        if own_api:
            done.append(Started(SERVER, None, "", "", "is one of your own (PREFECT_API_URL)"))
        return done


def down() -> list[str]:
    """End what `up` started, with the flow runs and engines below it; what was ended, in words."""
    with only_one("down"):
        ended = []
        workers = [name for name in map(worker_name, POOLS) if read_note(name) is not None]
        ended += [f"{run} (flow run)" for run in _end_runs(workers)]
        for name in [*workers, SERVER, MLFLOW]:
            note = read_note(name)
            if note is None:
                continue
            was = "ended" if note.alive else "was not running any more; what it left was ended"
            _end(note)
            ended.append(f"{name}: {was}")
        leftovers = end_leftovers()
        if leftovers:
            ended.append(f"{len(leftovers)} processes of runs that had crashed")
        return ended


def services(own_api: str = "") -> list[Service]:
    """What belongs to this machine, in the order in which it is started."""
    api = own_api or server_url() + "/api"
    found = [] if own_api else [_server()]
    found += [_worker(pool, api) for pool in POOLS]
    if not settings().mlflow_uri.startswith(("http:", "https:")):
        found.append(_mlflow())
    return found


def server_url() -> str:
    return f"http://{HOST}:{settings().prefect_port}"


def worker_name(pool: str) -> str:
    return f"worker-{pool}"


def _server() -> Service:
    port, url = settings().prefect_port, server_url()
    words = ["server", "start", "--host", HOST, "--port", str(port)]
    return Service(
        SERVER,
        [sys.executable, "-m", "tasks.prefect_server", "--no-prompt", *words],
        lambda note: _answers(f"{url}/api/health"),
        port=port,
        url=url,
        setting="PILOTAGE_PREFECT_PORT",
        env={
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
            # The browser is told to ask the address in the settings, not that of the command.
            "PREFECT_SERVER_API_HOST": HOST,
            "PREFECT_SERVER_API_PORT": str(port),
            # Its own pages only: by default any page that a browser here shows may read it.
            ORIGINS: os.environ.get(ORIGINS, f"{url},http://localhost:{port}"),
            # A page of another site can send a request, and cannot know a token for it.
            _CSRF: os.environ.get(_CSRF, "true"),
            # A server that is started again knows which runs hold which slots.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
                "prefect.server.concurrency.lease_storage.filesystem"
            ),
            **{name: os.environ.get(name, value) for name, value in _RETENTION.items()},
            # Its own database may have a password, which nobody else of this machine gets.
            **{name: os.environ[name] for name in _DATABASE if name in os.environ},
        },
    )


def _worker(pool: str, api: str) -> Service:
    # Named by its machine: several machines may share a pool.
    name = f"{socket.gethostname()}-{pool}"
    words = ["worker", "start", "--pool", pool, "--type", "process", "--name", name]
    return Service(
        worker_name(pool),
        [sys.executable, "-m", "prefect", "--no-prompt", *words],
        lambda note: has_polled(api, pool, name, note),
        url=redacted(api),
        env={
            "PREFECT_API_URL": api,
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
            # Seen by the automation that marks a run Crashed whose process is gone.
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            # Our environments are pinned: nothing is installed because a run begins.
            "PREFECT_RUNNER_AUTO_INSTALL_DEPENDENCIES": "false",
            "PILOTAGE_HOME": str(settings().home),
            "PILOTAGE_CHECKOUT": str(CHECKOUT),
        },
        with_secrets=True,
        hangs=lambda: hangs(api, pool, name),
    )


def _mlflow() -> Service:
    port = settings().mlflow_port
    url = f"http://{HOST}:{port}"
    words = ["server", "--host", HOST, "--port", str(port), "--workers", "1"]
    words += ["--artifacts-destination", str(settings().mlartifacts_dir)]
    return Service(
        MLFLOW,
        [sys.executable, "-m", "mlflow", *words],
        lambda note: _answers(f"{url}/health"),
        port=port,
        url=url,
        setting="PILOTAGE_MLFLOW_PORT",
        env={
            # Not on the command line: the address of a database may hold a password.
            "MLFLOW_BACKEND_STORE_URI": settings().tracking_uri,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            # Its queues for prompts and judges: processes that nothing here asks for anything.
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        },
    )


def _check_addresses(wanted: list[Service]) -> None:
    """Raises `UserError` where something of ours runs, and not with the addresses of now.

    A worker that asks a server of yesterday's port takes no run and says nothing.
    """
    problems = []
    for service in wanted:
        note = read_note(service.name)
        if note is not None and note.alive and note.url != service.url:
            what = f"runs with {note.url or 'another address'}, and {service.url} is wanted now"
            where = f"{service.name} (process {note.pid})"
            problems.append(Problem(where, what, "`make down` (pilotage down) first"))
    if problems:
        raise UserError(problems)


def _found(service: Service) -> tuple[Note | None, bool]:
    """What is noted of a service, and whether it works. Its port is free where it does not."""
    note = read_note(service.name)
    if note is not None and note.alive and _serves(service, note):
        return note, True
    if service.port is not None:
        if note is not None:
            # A child may hold the port still. What a worker left is a run that goes on without it.
            _end(note)
        _check_port(service)
    return note, False


def _serves(service: Service, note: Note) -> bool:
    """Whether a live process still does its work; some patience, the machine may be busy.

    A worker that lives goes on by itself as soon as the server answers; then it is asked (`hangs`).
    """
    if service.port is None:
        return True
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and note.alive:
        if service.ready(note) and listens(note.pid, service.port):
            return True
        time.sleep(1)
    return False


def _line(note: Note, what: str) -> Started:
    return Started(note.name, note.pid, note.url, note.log, what)


def _start(service: Service, before: Note | None) -> Note:
    """Start a service and wait until it works. It keeps the mark of the one `before`, so that
    `down` finds the runs of both."""
    if service.name == MLFLOW:
        # Tables are made by whoever comes first, under the lock that every run takes too.
        from tasks.bundles import tracker

        _ = tracker().client
    log = settings().logs_dir / f"{service.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        log.replace(log.with_suffix(".old.log"))
    marker = before.marker if before is not None else uuid.uuid4().hex
    kept = dict(os.environ) if service.with_secrets else without_secrets(os.environ)
    kept.pop("PREFECT_API_URL", None)
    with log.open("ab") as out:
        process = subprocess.Popen(
            service.command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**kept, **service.env, MARKER: marker},
            cwd=CHECKOUT,
            start_new_session=True,
        )
    try:
        born = identity(process.pid)
        start = int(born["start"]) if born else 0
        note = Note(service.name, process.pid, start, marker, str(log.resolve()), service.url)
        write_note(note)
    except BaseException:
        # A full disk, or Ctrl-C: what is not noted would be found by no `down`, and keep its port.
        end_processes([psutil.Process(process.pid)], settings().stop_grace)
        raise
    LOG.info("%s: starting (its log is %s)", service.name, log)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise InfrastructureError(
                f"{service.name} ended with status {process.returncode}; {end_of(log)}"
            )
        if service.ready(note) and (service.port is None or listens(note.pid, service.port)):
            return note
        time.sleep(0.5)
    raise InfrastructureError(
        f"{service.name} did not answer within {START_SECONDS:.0f} s; {end_of(log)}"
    )


def _check_port(service: Service) -> None:
    assert service.port is not None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, service.port))
        except OSError as error:
            who = listener(service.port) or "a process that this user may not see"
            raise UserError.at(
                f"port {service.port}",
                f"{service.name} needs it, and {who} has it ({error.strerror})",
                f"end that process, or set {service.setting} to a free port",
            ) from None


def _kill_hung(note: Note, since: str) -> None:
    """End the process of a worker that hangs, and no run below it: they go on without it.

    By the hard signal: a polite one would have to be heard, and would end its runs as well.
    """
    LOG.warning("%s (process %d) hangs: no heartbeat since %s; killed", note.name, note.pid, since)
    with suppress(psutil.NoSuchProcess):
        front = psutil.Process(note.pid)
        front.kill()
    if not wait_until(lambda: not note.alive, settings().stop_grace, every=0.05):
        raise InfrastructureError(f"{note.name}: process {note.pid} outlives SIGKILL; reboot")


def _end(note: Note) -> None:
    """End a service with everything below it, and forget it."""
    for _ in range(2):  # the second time: what was started while the first went on
        end_processes(_tree(note), settings().stop_grace)
    remove_note(note.name)


def _tree(note: Note) -> list[psutil.Process]:
    found = {one.pid: one for one in marked(note.marker, note.pid, note.log)}
    if note.alive:
        try:
            front = psutil.Process(note.pid)
            found |= {one.pid: one for one in [front, *front.children(recursive=True)]}
        except psutil.NoSuchProcess:
            pass
    return list(found.values())


def _end_runs(workers: list[str]) -> list[int]:
    """Ask the flow runs of our workers to end, before anything else is: each ends its own engines
    and tells the server, which is there still. The process ids of the runs."""
    runs = []
    for name in workers:
        note = read_note(name)
        for process in _tree(note) if note is not None else []:
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if not {"prefect.engine", "prefect.runner._workspace_supervisor"}.isdisjoint(words):
                runs.append(process)
    end_processes(runs, 3 * settings().stop_grace)
    return [process.pid for process in runs]


def _end_crashed_runs() -> None:
    for pid in end_leftovers():
        LOG.warning("ended process %d, left behind by a run that crashed", pid)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False
