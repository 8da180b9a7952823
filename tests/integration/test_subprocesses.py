"""Whole process trees end, however stubborn, and only ours do. Real processes, no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tasks.engines.guards
import tasks.engines.subprocesses
from registry.errors import InfrastructureError
from registry.settings import CHECKOUT, settings
from tasks.engines.guards import SHORTEST_GRACE, grace
from tasks.engines.ports import free_port, listens
from tasks.engines.subprocesses import (
    ProcessTree,
    end_leftovers,
    last_lines,
    run_job,
    wait_until,
)

pytestmark = pytest.mark.alone

SERVER = """
import http.server, json, os, signal, subprocess, sys, time
port, pidfile = int(sys.argv[1]), sys.argv[2]
engine = '''
import pathlib, signal, sys, time
def refuse(*_):
    pathlib.Path(sys.argv[1] + ".sigterm").write_text(str(time.monotonic()))
signal.signal(signal.SIGTERM, refuse)
pathlib.Path(sys.argv[1] + ".up").touch()
while True:
    time.sleep(1)
'''
environment = {} if "--titled" in sys.argv else None
child = subprocess.Popen([sys.executable, "-c", engine, pidfile], env=environment)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
while not os.path.exists(pidfile + ".up"):
    time.sleep(0.01)
with open(pidfile + ".partial", "w") as out:
    json.dump({"front": os.getpid(), "engine": child.pid}, out)
os.rename(pidfile + ".partial", pidfile)
server.serve_forever()
"""
"""A front that serves HTTP and an engine that refuses SIGTERM and outlives its front.

With `--titled` the engine's environment is empty: vLLM's engine sets its process title, which
overwrites what /proc shows of it.
"""

GRACE = 1.0


class Stubborn:
    """One such server's files and process ids."""

    def __init__(self, folder: Path, *flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.pidfile = folder / "pids.json"
        self.log = folder / "server.log"
        script = folder / "server.py"
        script.write_text(SERVER)
        self.command = [sys.executable, str(script), str(self.port), str(self.pidfile), *flags]

    def wait(self) -> None:
        assert wait_until(self.pidfile.exists, 30, every=0.05), self.log.read_text()

    @property
    def pids(self) -> dict[str, int]:
        pids: dict[str, int] = json.loads(self.pidfile.read_text())
        return pids

    def alive(self) -> list[str]:
        return [name for name, pid in self.pids.items() if runs(pid)]

    @property
    def refused_at(self) -> float | None:
        """When the engine got the polite signal, on the monotonic clock."""
        note = self.pidfile.with_name(f"{self.pidfile.name}.sigterm")
        return float(note.read_text()) if note.exists() else None


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PILOTAGE_STOP_GRACE", str(GRACE))
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture(params=[(), ("--titled",)], ids=["plain", "titled"])
def stubborn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stubborn]:
    server = Stubborn(tmp_path / "ours", *request.param)
    yield server
    if server.pidfile.exists():
        for pid in server.pids.values():
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


def notes() -> list[Path]:
    return list(settings().run_dir.glob("*.json"))


def test_polite_first_then_hard_and_nothing_stays(stubborn: Stubborn) -> None:
    with ProcessTree(stubborn.command, log=stubborn.log) as tree:
        stubborn.wait()
        url = f"http://127.0.0.1:{stubborn.port}/health"
        assert urllib.request.urlopen(url, timeout=5).status == 200
        assert listens(tree.pid, stubborn.port)
        assert tree.memory_bytes() > 5e6
        assert len(notes()) == 1
        leaving = time.monotonic()
    left = time.monotonic()
    assert stubborn.alive() == []
    assert stubborn.refused_at is not None, "the engine was asked politely first"
    assert leaving <= stubborn.refused_at
    assert left - stubborn.refused_at >= GRACE * 0.9, "the hard signal came after the grace"
    assert notes() == []


def test_an_exception_inside_ends_the_tree(stubborn: Stubborn) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        ProcessTree(stubborn.command, log=stubborn.log),
    ):
        stubborn.wait()
        raise KeyboardInterrupt
    assert stubborn.alive() == []


def test_an_engine_whose_front_was_killed_is_found(stubborn: Stubborn) -> None:
    with ProcessTree(stubborn.command, log=stubborn.log) as tree:
        stubborn.wait()
        os.kill(stubborn.pids["front"], signal.SIGKILL)
        assert wait_until(lambda: tree.poll() is not None, 10, every=0.05)
        assert stubborn.alive() == ["engine"]
    assert stubborn.alive() == []


def test_a_server_started_by_hand_survives(stubborn: Stubborn, tmp_path: Path) -> None:
    foreign = Stubborn(tmp_path / "foreign")
    by_hand = subprocess.Popen(foreign.command, start_new_session=True)
    try:
        foreign.wait()
        with ProcessTree(stubborn.command, log=stubborn.log):
            stubborn.wait()
        assert stubborn.alive() == []
        assert end_leftovers() == []
        assert foreign.alive() == ["front", "engine"]
    finally:
        for pid in foreign.pids.values():
            os.kill(pid, signal.SIGKILL)
        by_hand.wait()


def owner_of(stubborn: Stubborn, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process of ours that starts a tree, handing it these variables, and does nothing more."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tasks.engines.subprocesses import ProcessTree\n"
        f"tree = ProcessTree({stubborn.command!r}, log=Path({str(stubborn.log)!r}), env={env!r})\n"
        "tree.start()\n"
        "time.sleep(600)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=CHECKOUT)


def guards() -> list[psutil.Process]:
    """The guards of this test's home."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if str(settings().run_dir) in " ".join(one.info["cmdline"] or [])
    ]


def killed_with_its_guard(stubborn: Stubborn, env: dict[str, str] | None = None) -> None:
    """An owner and the guard of its tree are killed while the tree runs."""
    owner = owner_of(stubborn, env)
    try:
        stubborn.wait()
        for guard in guards():
            guard.kill()
    finally:
        owner.kill()
        owner.wait()


def test_a_tree_ends_with_its_killed_owner(stubborn: Stubborn) -> None:
    owner = owner_of(stubborn)
    try:
        stubborn.wait()
        assert end_leftovers() == [], "the owner lives: nothing is a leftover"
        assert stubborn.alive() == ["front", "engine"]
        (guard,) = guards()
        assert guard.memory_info().rss < 4e6
        assert guard.pid not in {one.pid for one in psutil.Process(owner.pid).children(True)}
    finally:
        owner.kill()  # and nobody waits for it: a zombie is dead
    assert wait_until(lambda: stubborn.alive() == [], 60, every=0.05)
    assert stubborn.refused_at is not None, "the engine was asked politely first"
    assert wait_until(lambda: notes() == [] and guards() == [], 10, every=0.05)
    owner.wait()


def test_what_a_killed_owner_and_its_killed_guard_left_the_next_run_ends(
    stubborn: Stubborn,
) -> None:
    killed_with_its_guard(stubborn)
    assert stubborn.alive() == ["front", "engine"], "it outlived its owner"
    with pytest.MonkeyPatch.context() as patched:
        # As where the kernel keeps a process whose device hangs.
        patched.setattr(tasks.engines.subprocesses, "_signal", lambda process, hard: True)
        assert end_leftovers() == []
    assert stubborn.alive() == ["front", "engine"]
    assert len(notes()) == 1, "the next run tries again"
    assert set(end_leftovers()) == set(stubborn.pids.values())
    assert stubborn.alive() == []
    assert notes() == []
    assert end_leftovers() == []


KEYS = {"VLLM_API_KEY": "sk-handed/over+1", "NAMED_TOKEN": 'a-second "word"'}


def says_its_keys(stubborn: Stubborn) -> None:
    """As aiohttp's errors do, which show a request's headers."""
    script = Path(stubborn.command[1])
    names = f"{{name: os.environ[name] for name in {tuple(KEYS)!r}}}"
    script.write_text(f"import os\nprint('with', {names}, flush=True)\n{script.read_text()}")


def shows(log: Path) -> list[str]:
    return [value for value in KEYS.values() if value in log.read_text()]


def test_keys_in_the_log_of_a_killed_owner_are_blotted_out(stubborn: Stubborn) -> None:
    says_its_keys(stubborn)
    owner = owner_of(stubborn, KEYS)
    try:
        stubborn.wait()
        assert shows(stubborn.log) == list(KEYS.values()), "it did say them"
        (guard,) = guards()
        seen = " ".join([*guard.cmdline(), *guard.environ().values()])
        assert not [value for value in KEYS.values() if value in seen]
    finally:
        owner.kill()
    assert wait_until(lambda: notes() == [] and guards() == [], 60, every=0.05)
    assert shows(stubborn.log) == []
    assert f"with {{'VLLM_API_KEY': '{'*' * 16}', 'NAMED_TOKEN'" in stubborn.log.read_text()
    owner.wait()


def test_where_the_guard_was_killed_too_the_next_run_hides_the_keys_it_has_itself(
    stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    says_its_keys(stubborn)
    killed_with_its_guard(stubborn, KEYS)
    assert shows(stubborn.log) == list(KEYS.values())
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    assert set(end_leftovers()) == set(stubborn.pids.values())
    assert shows(stubborn.log) == []


def test_a_guard_is_dismissed_by_a_proper_end(stubborn: Stubborn) -> None:
    with ProcessTree(stubborn.command, log=stubborn.log):
        stubborn.wait()
        assert len(guards()) == 1
    assert wait_until(lambda: guards() == [], 10, every=0.05)


def test_a_stop_has_one_grace_for_all_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.engines.guards, "_stop_began", None)
    assert grace() == GRACE
    try:
        raise ValueError
    except ValueError:
        assert grace() == GRACE, "a fault is no stop"
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert 0 < grace() <= GRACE
        monkeypatch.setattr(tasks.engines.guards, "_stop_began", time.monotonic() - 60)
        assert grace() == SHORTEST_GRACE, "nothing is left of it"
    assert grace() == GRACE


def test_a_note_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    settings().run_dir.mkdir(parents=True)
    for name, content in {"a": "{", "b": "[]", "c": '{"owner": null}'}.items():
        (settings().run_dir / f"{name}.json").write_text(content)
    assert end_leftovers() == []
    assert notes() == []


def test_a_job_that_takes_too_long_is_ended_and_named(tmp_path: Path) -> None:
    module = tmp_path / "sleeper.py"
    module.write_text("import time; time.sleep(600)")
    log = tmp_path / "job.log"
    with pytest.raises(InfrastructureError, match="did not end within 1 s"):
        run_job("sleeper", {}, log=log, timeout=1.0, env={"PYTHONPATH": str(tmp_path)})
    assert notes() == []


def test_a_job_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    module = tmp_path / "dies.py"
    module.write_text("raise SystemExit('the disk is on fire')")
    with pytest.raises(InfrastructureError, match="the disk is on fire"):
        run_job("dies", {}, log=tmp_path / "job.log", env={"PYTHONPATH": str(tmp_path)})


def test_what_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    tree = ProcessTree([str(tmp_path / "no-such-python")], log=tmp_path / "log")
    with pytest.raises(FileNotFoundError):
        tree.start()
    assert notes() == []
    assert wait_until(lambda: guards() == [], 10, every=0.05)


def test_a_start_that_fails_halfway_ends_what_it_started(
    stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk when the running tree is noted: it would work on beside the next try."""
    write, written = tasks.engines.subprocesses._write_note, []

    def full_disk(*arguments: object) -> None:
        written.append(arguments)
        if len(written) == 2:
            stubborn.wait()
            raise OSError(28, "No space left on device")
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tasks.engines.subprocesses, "_write_note", full_disk)
    with (
        pytest.raises(OSError, match="No space left"),
        ProcessTree(stubborn.command, log=stubborn.log),
    ):
        pytest.fail("it was not noted")
    assert len(written) == 2
    assert stubborn.alive() == []
    assert notes() == []


def test_what_outlives_the_hard_signal_is_named_within_the_grace(
    stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel keeps a process whose device hangs: no signal reaches it."""
    monkeypatch.setattr(tasks.engines.subprocesses, "_signal", lambda process, hard: True)
    with ProcessTree(stubborn.command, log=stubborn.log) as tree:
        stubborn.wait()
        with pytest.raises(InfrastructureError, match=rf"{tree.pid}.* outlives SIGKILL"):
            tree.stop()
        assert stubborn.alive() == ["front", "engine"]
        assert len(notes()) == 1, "a later run tries again"
        monkeypatch.undo()
        monkeypatch.setenv("PILOTAGE_STOP_GRACE", str(GRACE))
    assert stubborn.alive() == []


def test_a_log_that_cannot_be_read_has_no_last_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path) == ""
    assert last_lines(tmp_path / "none") == ""


def test_a_job_that_is_done_and_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of a library keeps the process: its work is not thrown away after six hours."""
    (tmp_path / "hangs.py").write_text(
        "import os, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "open(sys.argv[2] + '.partial', 'w').write('{\"pid\": %d}' % os.getpid())\n"
        "os.rename(sys.argv[2] + '.partial', sys.argv[2])\n"
    )
    monkeypatch.setattr(tasks.engines.subprocesses, "EXIT_WAIT", 0.5)
    log = tmp_path / "job.log"
    made = run_job("hangs", {}, log=log, timeout=60.0, env={"PYTHONPATH": str(tmp_path)})
    assert not runs(made["pid"])
    assert notes() == []


def test_the_status_of_what_was_ended_is_its_own(tmp_path: Path) -> None:
    with ProcessTree(["sleep", "600"], log=tmp_path / "log") as tree:
        assert tree.poll() is None
    assert tree.poll() == -signal.SIGTERM


def test_a_process_that_wrote_nothing_ends_without_an_empty_place(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError) as told:
        run_job("signal", {}, log=tmp_path / "quiet.log", python=sys.executable)
    said = str(told.value)
    assert (
        said == f"signal ended with status 0 and no result; nothing stands in {tmp_path}/quiet.log"
    )
