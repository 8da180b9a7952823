"""One process at a time holds a device, whoever dies how. Real processes, no model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from registry.artifacts import Stage
from registry.errors import InfrastructureError
from registry.settings import CHECKOUT, settings
from registry.store import Busy
from tasks.devices import HELD, exclusive, is_held, lock_file
from tasks.engines.subprocesses import wait_until
from tasks.stages import adopt, begin_run, make, stages_of_run
from tests.processes import gone

HOLD = """
import sys, time
from datetime import UTC, datetime
from pathlib import Path
from tasks.devices import exclusive
from tasks.progress import configure_logging
configure_logging()
with exclusive(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
print("given back", flush=True)
"""

ENGINE = """
import os, signal, sys, time
from datetime import UTC, datetime
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""

HOLD_WITH_ENGINE = f"""
import sys, time
from datetime import UTC, datetime
from pathlib import Path
from tasks.devices import exclusive
from tasks.engines.subprocesses import ProcessTree
folder = Path(sys.argv[1])
with exclusive("serving bf16"):
    words = [sys.executable, "-c", {ENGINE!r}, str(folder / "pid")]
    with ProcessTree(words, log=folder / "engine.log"):
        time.sleep(600)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started: list[subprocess.Popen[str]] = []

    def begin(
        code: str, *words: str, home: Path | None = None, ours: bool = True
    ) -> subprocess.Popen[str]:
        env = {**os.environ, **({"PILOTAGE_HOME": str(home)} if home else {})}
        if not ours:  # as one that was started by somebody else
            env.pop(HELD, None)
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
            env=env,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str], text: str) -> bool:
    """Whether the next line it prints is this."""
    assert process.stdout is not None
    return process.stdout.readline().strip() == text


def limit_waiting(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setenv("PILOTAGE_DEVICE_WAIT", str(seconds))
    settings.cache_clear()


def test_the_second_waits_and_says_for_whom(start: Start, tmp_path: Path) -> None:
    first = start(HOLD, "latency bf16", home=tmp_path / "one")
    assert said(first, "held")
    second = start(HOLD, "training", home=tmp_path / "another")
    assert second.stderr is not None and first.stdin is not None
    line = second.stderr.readline()
    assert f"waiting for cpu: process {first.pid} of" in line and "(latency bf16, since" in line
    first.stdin.write("\n")
    first.stdin.flush()
    assert said(first, "given back")
    assert said(second, "held")


def test_a_wait_has_a_limit_and_names_the_holder(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(HOLD, "training")
    assert said(first, "held")
    limit_waiting(monkeypatch, 0.5)
    with (
        pytest.raises(InfrastructureError, match=rf"process {first.pid} of .*\(training, since"),
        exclusive("latency"),
    ):
        pytest.fail("two held it")
    assert not is_held()


OFTEN = """
import sys, time
from pathlib import Path
from tasks.devices import exclusive
name, times, told = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
with exclusive("start"):
    pass
print("begins", flush=True)
for _ in range(times):
    with exclusive("a short stage"), told.open("a") as out:
        out.write(name)
        out.flush()
        time.sleep(0.05)
print("done", flush=True)
"""


def test_one_that_wants_it_again_at_once_starves_nobody(start: Start, tmp_path: Path) -> None:
    """Without turns the greedy one had it 315 times in 15 s, and the other once."""
    told = tmp_path / "told"
    greedy = start(OFTEN, "g", "100000", str(told))
    assert said(greedy, "begins")
    other = start(OFTEN, "o", "5", str(told))
    assert said(other, "begins") and said(other, "done")
    assert greedy.poll() is None
    between = told.read_text()
    between = between[between.index("o") : between.rindex("o")]
    assert between.count("o") == 4
    assert 0 < between.count("g") < 100, between


def test_a_killed_next_one_holds_up_nobody(start: Start) -> None:
    first = start(HOLD, "training")
    assert said(first, "held")
    second = start(HOLD, "latency bf16")
    assert second.stderr is not None and "waiting for cpu" in second.stderr.readline()
    third = start(HOLD, "quantization")
    assert third.stderr is not None
    # For the device, though it is the second one that it has to wait for first.
    assert f"waiting for cpu: process {first.pid} of" in third.stderr.readline()
    second.kill()
    second.wait()
    assert first.stdin is not None
    first.stdin.write("\n")
    first.stdin.flush()
    assert said(first, "given back") and said(third, "held")


def test_a_killed_holder_holds_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(HOLD, "training")
    assert said(first, "held")
    first.kill()
    first.wait()
    limit_waiting(monkeypatch, 60)
    with exclusive("latency"):
        assert is_held()
    assert lock_file("cpu").read_text() == "", "who ends properly leaves no record"


def test_the_engine_of_a_killed_holder_ends_and_holds_the_device_until_then(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_STOP_GRACE", "2")
    settings.cache_clear()
    owner = start(HOLD_WITH_ENGINE, str(tmp_path))
    assert wait_until(lambda: (tmp_path / "pid").exists(), 60, every=0.05)
    assert wait_until(lambda: (tmp_path / "pid").read_text() != "", 10, every=0.05)
    engine = psutil.Process(int((tmp_path / "pid").read_text()))
    limit_waiting(monkeypatch, 0.0)
    owner.kill()
    owner.wait()
    with pytest.raises(InfrastructureError, match="serving bf16"), exclusive("latency"):
        pytest.fail("the device was given away while an engine was on it")
    assert engine.is_running(), "it refuses the polite signal for two seconds"
    limit_waiting(monkeypatch, 60)
    with exclusive("latency"):
        assert gone(engine)


def test_a_holder_and_its_children_enter_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_waiting(monkeypatch, 0.0)
    with exclusive("release"):
        with exclusive("latency"):
            assert is_held()
        assert is_held()
        child = start(HOLD, "a child's stage")
        assert said(child, "held")
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert said(child, "given back")
        assert is_held(), "it was not the child's to give back"
    assert not is_held()


def test_nobody_waits_at_a_lock_file_that_was_removed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes lock files lets in one more (docs/devices.md), and no second one."""
    first = start(HOLD, "training")
    assert said(first, "held")
    second = start(HOLD, "latency")
    assert second.stderr is not None and "waiting for cpu" in second.stderr.readline()
    lock_file("cpu").unlink()
    assert said(second, "held"), "at a new file"
    limit_waiting(monkeypatch, 0.0)
    with pytest.raises(InfrastructureError, match=f"process {second.pid} "), exclusive("third"):
        pytest.fail("two held it")


def test_a_stop_ends_the_wait(start: Start) -> None:
    first = start(HOLD, "training")
    assert said(first, "held")
    second = start(HOLD, "latency")
    assert second.stderr is not None and "waiting for cpu" in second.stderr.readline()
    second.send_signal(signal.SIGINT)
    assert second.wait(30) != 0
    assert lock_file("cpu").read_text() != "", "the holder's record stays"


MAKE = """
from registry.artifacts import Stage
from tasks.progress import configure_logging
from tasks.stages import make
configure_logging()
def produce(folder):
    (folder / "made").write_text("by the child")
    return {}
stage = Stage(name="latency", label="bf16", version=1)
print(make(stage, produce, heavy=True).reused, flush=True)
"""


def test_who_waits_for_the_device_locks_no_key(start: Start) -> None:
    """Two releases of one recipe: one has the device, the other came first to the next stage."""

    def produce(folder: Path) -> dict[str, str]:
        (folder / "made").write_text("by the holder")
        return {}

    with exclusive("release"):
        other = start(MAKE, ours=False)
        assert other.stderr is not None
        assert any("waiting for cpu" in line for line in other.stderr)
        ref = make(Stage(name="latency", label="bf16", version=1), produce, heavy=True)
        assert not ref.reused
    assert said(other, "True"), "it found what the holder made meanwhile"
    assert (ref.path / "made").read_text() == "by the holder"


def test_what_is_found_takes_no_device(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def produce(folder: Path) -> dict[str, str]:
        assert is_held()
        (folder / "made").write_text("")
        return {}

    stage = Stage(name="latency", label="bf16", version=1)
    assert not make(stage, produce, heavy=True).reused
    assert not is_held()
    begin_run(1)
    holder = start(HOLD, "training")
    assert said(holder, "held")
    limit_waiting(monkeypatch, 0.0)
    assert make(stage, produce, heavy=True).reused


def test_what_a_run_of_its_own_measured_is_taken_as_it_is() -> None:
    """Not asked whether it is fresh, and told as made by this release."""

    def produce(folder: Path) -> dict[str, str]:
        (folder / "made").write_text("")
        return {}

    stage = Stage(name="serving", label="bf16", version=1)
    begun = datetime.now(UTC)
    ref = make(stage, produce)
    begin_run(1)
    adopt([stage, Stage(name="latency", label="never made", version=1)], begun)
    assert [(one.name, one.reused) for one in stages_of_run()] == [("serving bf16", False)]
    again = make(stage, produce, fresh=lambda ref: False, heavy=True)
    assert (again.key, again.made_at) == (ref.key, ref.made_at)
    assert len(stages_of_run()) == 1


def test_who_leaves_last_gives_the_device_back(start: Start) -> None:
    """Two servers of one process: the one that came first may end first."""
    first, second = exclusive("serving a"), exclusive("serving b")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_held()
    other = start(HOLD, "another release", ours=False)
    assert other.stderr is not None
    assert "waiting for cpu" in other.stderr.readline()
    second.__exit__(None, None, None)
    assert not is_held()
    assert said(other, "held")


def test_a_server_that_a_stage_leaves_running_keeps_the_device(start: Start) -> None:
    """The teacher's: the stage of the answers starts it, its accuracy is measured afterwards."""
    running = ExitStack()

    def produce(folder: Path) -> dict[str, str]:
        running.enter_context(exclusive("serving teacher"))
        (folder / "made").write_text("")
        return {}

    make(Stage(name="teacher_data", version=1), produce, heavy=True)
    assert is_held()
    other = start(HOLD, "another release", ours=False)
    assert other.stderr is not None
    assert "waiting for cpu" in other.stderr.readline()
    running.close()
    assert said(other, "held")


@pytest.mark.parametrize(
    "record", ["", "nonsense", "[" * 4096, "[]", '{"pid": 1, "lease": ["x"]}', "\0" * 100]
)
def test_whatever_stands_in_the_record_the_lock_is_taken(
    record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on the host may write into it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lock_file("cpu").write_text(record)
    with exclusive("latency"):
        assert str(os.getpid()) in lock_file("cpu").read_text()
    assert lock_file("cpu").read_text() == ""


def test_a_day_of_waiting_for_another_writer_is_not_waited_twice() -> None:
    tries = []

    def produce(folder: Path) -> dict[str, str]:
        tries.append(folder)
        raise Busy("another process has been making it for 86400 s")

    with pytest.raises(Busy):
        make(Stage(name="latency", label="bf16", version=1), produce)
    assert len(tries) == 1
