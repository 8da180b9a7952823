"""The teacher asked by Ray workers, on a real cluster of two: nothing lost, nothing asked twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipes.schema import TeacherRecipe
from registry.errors import UserError
from registry.settings import CHECKOUT, settings
from tasks.serving import RemoteTeacher
from tasks.stages import artifact_of, begin_run
from tasks.teacher_asking import ask_missing
from tasks.teacher_rows import AnswerFile
from tests.processes import gone
from tests.unit.teacher_builders import Teacher, made_prompts, recipe_for, teaching

pytestmark = pytest.mark.alone

WORKERS = 2
CONCURRENCY = 8
IN_FLIGHT = CONCURRENCY + 64


def recipe(url: str, **changes: Any) -> TeacherRecipe:
    return recipe_for(url, concurrency=CONCURRENCY, ray={"workers": WORKERS}, **changes)


def ask(asked: TeacherRecipe, count: int, path: Path) -> list[str]:
    """Texts by row; rows without an answer are left out."""
    begin_run(1)
    made_prompts(count)
    prompts = artifact_of(made_prompts(count)).path
    with AnswerFile(path, count) as answers:
        try:
            ask_missing(prompts, answers, count, asked, RemoteTeacher(asked))
        finally:
            found = [answer for row in range(count) for answer in answers.samples_of(row)]
    return [answer.text for answer in found]


def ray_processes() -> list[psutil.Process]:
    """Those that this process started, and theirs."""
    return psutil.Process().children(recursive=True)


def shard_workers() -> list[psutil.Process]:
    return [one for one in ray_processes() if "ShardWorker" in " ".join(_command(one))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def listening(processes: list[psutil.Process]) -> set[str]:
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def wait_until(true: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path for Ray's sockets, where a killed driver leaves them."""
    with tempfile.TemporaryDirectory(prefix="p-") as folder:
        yield Path(folder)


PLANTED = {"OTHER_TOOLS_TOKEN": "planted-word-of-a-token", "SOME_DB": "pg://me:planted-pass@h/d"}


def secrets_of(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with suppress(psutil.Error):
            words = " ".join(process.environ().values())
            found += [value for value in PLANTED.values() if value in words]
    return found


def test_a_worker_that_is_killed_costs_its_rows_in_flight_a_second_request(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    count = 400
    teacher = Teacher(seconds=0.03)
    seen: dict[str, Any] = {}
    before = signal.getsignal(signal.SIGTERM)

    def kill_one() -> None:
        wait_until(lambda: teacher.asked.total() > count // 3)
        workers = shard_workers()
        seen["secrets"] = secrets_of(ray_processes())
        seen["workers"] = len(workers)
        seen["addresses"] = listening([*ray_processes(), psutil.Process()])
        seen["environment"] = workers[0].environ().get("RAY_USAGE_STATS_ENABLED")
        seen["commands"] = [" ".join(_command(one)) for one in ray_processes()]
        workers[0].kill()

    with teaching(teacher) as url:
        killer = threading.Thread(target=kill_one)
        killer.start()
        texts = ask(recipe(url), count, tmp_path / "work" / "answers.jsonl")
        killer.join()
    assert texts == [f"«问 p{number}» 答" for number in range(count)]
    assert seen["workers"] == WORKERS
    assert {ip.removeprefix("::ffff:") for ip in seen["addresses"]} == {"127.0.0.1"}
    assert seen["environment"] == "0"
    assert seen["secrets"] == []
    assert os.environ["OTHER_TOOLS_TOKEN"] == PLANTED["OTHER_TOOLS_TOKEN"], "put back"
    times = Counter(teacher.asked.values())
    assert set(times) <= {1, 2} and 0 < times[2] <= IN_FLIGHT
    lines = (tmp_path / "work" / "answers.jsonl").read_bytes().splitlines()
    assert len(lines) == count, "each answer stands once"
    assert signal.getsignal(signal.SIGTERM) == before
    wait_until(lambda: not shard_workers())
    assert not list(settings().home.glob("ray-*"))


def test_the_cost_budget_is_kept_by_the_driver(home: Path, tmp_path: Path) -> None:
    teacher = Teacher(seconds=0.02)
    path = tmp_path / "work" / "answers.jsonl"
    with teaching(teacher) as url:
        prices = {
            "price_per_million_prompt_tokens": 500_000.0,
            "price_per_million_completion_tokens": 1_750_000.0,
            "currency": "EUR",
        }
        with pytest.raises(UserError, match=r"the budget of 500 EUR is spent \(\d+\)"):
            ask(recipe(url, max_cost=500.0, **prices), 400, path)
        # 10 EUR an answer: 50, those that were open, and those that were on their way.
        assert 50 <= teacher.asked.total() <= 50 + 3 * CONCURRENCY
        spent = teacher.asked.total()
        assert set(teacher.asked.values()) == {1}
        plain = recipe_for(url, concurrency=CONCURRENCY)
        assert len(ask(plain, 400, path)) == 400
    assert teacher.asked.total() == 400 and spent < 400, "answers of the workers are all there"


def test_kill_9_of_the_driver_costs_the_rows_in_flight_only(home: Path, short: Path) -> None:
    count = 300
    teacher = Teacher(seconds=0.03)
    changes = {"concurrency": CONCURRENCY, "ray": {"workers": WORKERS}}
    with teaching(teacher) as url:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.teacher_builders", url, str(count),
             json.dumps(changes)],
            cwd=CHECKOUT,
            env={**os.environ, "PILOTAGE_HOME": str(home), "TMPDIR": str(short)},
        )  # fmt: skip
        try:
            wait_until(lambda: teacher.asked.total() > count // 2 or driver.poll() is not None)
            assert driver.poll() is None
            cluster = psutil.Process(driver.pid).children(recursive=True)
        finally:
            driver.kill()
            driver.wait()
        (file,) = home.glob("bench/answers-*/answers.jsonl")
        kept = len(file.read_bytes().split(b"\n")) - 1
        # Ray ends its processes when the one that started them is gone; two agents, which ask
        # nobody anything, try for minutes to tell it so.
        agents = [one for one in cluster if "Agent" in " ".join(_command(one))]
        wait_until(lambda: all(gone(one) for one in cluster if one not in agents))
        for agent in agents:
            agent.kill()
        assert set(teacher.asked.values()) == {1}
        asked = teacher.asked.total()
        assert count // 4 < kept <= asked <= kept + IN_FLIGHT
        teacher.asked.clear()
        plain = recipe_for(url, concurrency=CONCURRENCY)
        assert len(ask(plain, count, file)) == count
        assert teacher.asked.total() == count - kept
        assert set(teacher.asked.values()) == {1}
