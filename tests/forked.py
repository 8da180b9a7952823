"""Real processes for tests, forked from a helper that has imported MLflow and opened nothing.

An import of MLflow takes seconds, a fork does not. With them the databases that they share: copies
of one that has MLflow's tables, in SQLite or on a PostgreSQL server.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psycopg

from registry.alias_moves import Aliases
from registry.ledger import Ledger
from registry.settings import settings
from registry.tracking import Tracker
from tests.promotion_builders import MODEL

PROCESSES = 8
FORKED = multiprocessing.get_context("forkserver")
# Of two threads: `start` also asks how the processes of the other one ended, an answer is there
# once, and who comes second is told 255 (Python 3.11, multiprocessing/popen_forkserver.py).
ONE_AT_A_TIME = threading.Lock()
FORKED.set_forkserver_preload(
    ["mlflow", "mlflow.store.tracking.sqlalchemy_store", "psycopg", "flows.promote",
     "flows.rollback", "tests.promotion_builders", "tests.pretend_smoke"]
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where MLflow, the ledger and the store are."""

    uri: str
    home: Path

    def open(self) -> Aliases:
        """As a process that works there has it: its settings are this place's from now on."""
        os.environ |= {"PILOTAGE_HOME": str(self.home), "PILOTAGE_MLFLOW_URI": self.uri}
        settings.cache_clear()
        return Aliases(self.tracker.client, Ledger(self.uri), MODEL)

    @property
    def tracker(self) -> Tracker:
        return Tracker(self.uri, self.home / "mlartifacts")

    def copy(self, home: Path) -> Place:
        """The same state at another place, while no process uses this one."""
        shutil.copytree(self.home, home)
        if self.uri.startswith("sqlite:"):
            return Place(f"sqlite:///{home / 'mlflow.db'}", home)
        server, _, name = self.uri.rpartition("/")
        with psycopg.connect(f"{server}/postgres", autocommit=True) as asked:
            asked.execute(f"CREATE DATABASE {home.name} TEMPLATE {name}".encode())
        return Place(f"{server}/{home.name}", home)


def empty(home: Path, server: str = "") -> Place:
    """MLflow's tables, and an experiment whose artifacts stay in `home`; on a server, if named."""
    home.mkdir()
    place = Place(f"sqlite:///{home / 'mlflow.db'}", home)
    if server:
        with psycopg.connect(f"{server}/postgres", autocommit=True) as asked:
            asked.execute(f"CREATE DATABASE {home.name}".encode())
        place = Place(f"{server}/{home.name}", home)
    run(_migrate, place)
    return place


def _migrate(place: Place) -> None:
    artifacts = (place.home / "mlartifacts").as_uri()
    place.open().client.create_experiment(MODEL, artifact_location=artifacts)


def run(work: Callable[..., Any], *words: Any) -> Any:
    """What `work` gives in a process of its own; the exit status, below 0, of one that was killed.

    A process that fails fails the test, with its traceback.
    """
    results = FORKED.SimpleQueue()
    process = FORKED.Process(target=_told, args=(work, words, results))
    with ONE_AT_A_TIME:
        process.start()
    assert wait([process.sentinel], 120), "still runs after two minutes"
    with ONE_AT_A_TIME:
        process.join()
    if process.exitcode:
        return process.exitcode
    text, answer = results.get()
    assert not text, text
    return answer


def _told(work: Callable[..., Any], words: tuple[Any, ...], results: Any) -> None:
    try:
        results.put(("", work(*words)))
    except BaseException:
        results.put((traceback.format_exc(), None))


def together(work: Callable[..., Any], *words: Any) -> list[Any]:
    """What `work` gives in eight processes, each called with its number and a barrier."""
    barrier, results = FORKED.Barrier(PROCESSES), FORKED.Queue()
    started = [
        FORKED.Process(target=_one_of_them, args=(work, words, number, barrier, results))
        for number in range(1, PROCESSES + 1)
    ]
    for one in started:
        one.start()
    found = [results.get(timeout=120) for _ in started]
    for one in started:
        one.join(60)
    assert not (failed := [text for text, _ in found if text]), "\n".join(failed)
    return [answer for _, answer in found]


def _one_of_them(
    work: Callable[..., Any], words: tuple[Any, ...], number: int, barrier: Any, results: Any
) -> None:
    try:
        results.put(("", work(*words, number, barrier)))
    except threading.BrokenBarrierError:
        results.put(("", None))
    except BaseException:
        barrier.abort()
        results.put((traceback.format_exc(), None))
