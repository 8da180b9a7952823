"""Promotions that disturb each other, or are killed, on SQLite and on PostgreSQL: consistent.

Every process is a real one, forked from a helper that has imported MLflow and opened nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from registry.alias_moves import Aliases, AliasMoved
from registry.ledger import Ledger
from registry.promotion import Backing, plan_rollback, promote, roll_back
from registry.settings import settings
from registry.tracking import Tracker
from registry.versions import CANDIDATE, CHAMPION, PREVIOUS, PromotionRefused
from tests.promotion_builders import MODEL, bundle, held, is_sound, judged, registered

pytest_plugins = ["tests.postgres"]

PROCESSES = 8
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["mlflow", "mlflow.store.tracking.sqlalchemy_store", "psycopg", "flows.promote",
     "flows.rollback", "tests.integration.test_promotion_races"]
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where MLflow, the ledger and the store are."""

    uri: str
    home: Path

    def open(self) -> Aliases:
        """As a process that works there would; the settings are the process's own."""
        os.environ |= {"PILOTAGE_HOME": str(self.home), "PILOTAGE_MLFLOW_URI": self.uri}
        settings.cache_clear()
        return Aliases(self.tracker.client, Ledger(self.uri), MODEL)

    @property
    def tracker(self) -> Tracker:
        return Tracker(self.uri, self.home / "mlartifacts")


@pytest.fixture(scope="module")
def empty_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables: making them takes seconds, copying them does not."""
    database = tmp_path_factory.mktemp("mlflow") / "migrated.db"
    assert Tracker(f"sqlite:///{database}", database.parent).client.search_experiments()
    return database


@pytest.fixture(scope="module")
def empty_postgres(postgres_server: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same on the server; a database is copied by its name."""
    with psycopg.connect(f"{postgres_server}/postgres", autocommit=True) as asked:
        asked.execute("CREATE DATABASE migrated")
    # By a process that ends: a database with connections is not copied.
    place = Place(f"postgresql://{postgres_server.partition('://')[2]}/migrated",
                  tmp_path_factory.mktemp("migrated"))  # fmt: skip
    assert ended(FORKED.Process(target=migrate, args=(place,))) == 0
    return postgres_server


def migrate(place: Place) -> None:
    place.open().client.search_experiments()


Make = Callable[[str], Place]


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A fresh place of a kind, `sqlite` or `postgresql`; the test's own settings follow it."""

    def made(kind: str) -> Place:
        home = tmp_path / uuid.uuid4().hex[:8]
        home.mkdir()
        if kind == "sqlite":
            shutil.copy(request.getfixturevalue("empty_sqlite"), home / "mlflow.db")
            place = Place(f"sqlite:///{home / 'mlflow.db'}", home)
        else:
            server, name = request.getfixturevalue("empty_postgres"), f"test_{home.name}"
            with psycopg.connect(f"{server}/postgres", autocommit=True) as asked:
                asked.execute(f"CREATE DATABASE {name} TEMPLATE migrated".encode())
            place = Place(f"{server}/{name}", home)
        monkeypatch.setenv("PILOTAGE_HOME", str(home))
        monkeypatch.setenv("PILOTAGE_MLFLOW_URI", place.uri)
        settings.cache_clear()
        if kind == "postgresql":
            # MLflow would write into ./mlruns.
            place.tracker.client.create_experiment(
                MODEL, artifact_location=(home / "mlartifacts").as_uri()
            )
        return place

    return made


def ended(process: Any) -> int:
    """Start a process and wait for it; its exit status, minus the signal that ended it."""
    process.start()
    process.join(120)
    assert process.exitcode is not None, "still runs after two minutes"
    return int(process.exitcode)


def together(work: Callable[..., Any], *words: Any) -> list[Any]:
    """What `work` gives in eight processes, each called with its number and a barrier."""
    barrier, results = FORKED.Barrier(PROCESSES), FORKED.Queue()
    started = [
        FORKED.Process(target=one_of_them, args=(work, words, number, barrier, results))
        for number in range(1, PROCESSES + 1)
    ]
    for one in started:
        one.start()
    found = [results.get(timeout=120) for _ in started]
    for one in started:
        one.join(60)
    assert not (failed := [text for text, _ in found if text]), "\n".join(failed)
    return [answer for _, answer in found]


def one_of_them(
    work: Callable[..., Any], words: tuple[Any, ...], number: int, barrier: Any, results: Any
) -> None:
    try:
        results.put(("", work(*words, number, barrier)))
    except threading.BrokenBarrierError:
        results.put(("", None))
    except BaseException:
        barrier.abort()
        results.put((traceback.format_exc(), None))


# -- at the same moment ----------------------------------------------------------------------


def race(place: Place, digests: list[str], number: int, barrier: Any) -> list[Any]:
    """Each round register one bundle that all have, and promote a version that nobody else has."""
    from tasks.recorded import recorded
    from tasks.registering import make_version

    aliases = place.open()
    done: list[tuple[int, int | None, str]] = []
    for digest in digests:
        now = aliases.settle().aliases.get(CHAMPION)
        version = number if number != now else PROCESSES + 1
        found = recorded(digest)
        barrier.wait(120)
        made = make_version(
            MODEL, found.outcome, found.bundle, found.facts, model_id=found.model_id,
            run_id=found.run_id, actor=f"process {number}", startup_seconds=4.0,
        )  # fmt: skip
        try:
            promote(
                aliases, version, bundle(version).digest, Backing(f"process {number}"), expected=now
            )
            done.append((made, version, ""))
        except AliasMoved as lost:
            done.append((made, None, str(lost)))
        barrier.wait(120)
    return done


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_of_eight_promotions_one_wins_and_a_bundle_is_one_version(make: Make, kind: str) -> None:
    place = make(kind)
    before = PROCESSES + 1
    registered(place.tracker, *range(1, before + 1))
    digests = [judged(place.tracker, 30 + each)[0].digest for each in range(3)]
    rounds = list(zip(*together(race, place, digests), strict=True))
    won = []
    for each, answers in enumerate(rounds):
        assert {made for made, _, _ in answers} == {before + each + 1}, "one version for all"
        winners = [version for _, version, _ in answers if version is not None]
        assert len(winners) == 1
        told = [why for _, _, why in answers if why]
        assert len(told) == PROCESSES - 1
        assert all(f"points to version {winners[0]}" in why for why in told)
        won += winners
    aliases = place.open()
    lines = aliases.ledger.entries(MODEL)
    assert [line.moves[CHAMPION].after for line in lines if line.action == "promote"] == won
    assert [line.moves[CANDIDATE].after for line in lines if line.action == "register"] == [
        before + 1, before + 2, before + 3
    ]  # fmt: skip
    assert held(aliases) == {CHAMPION: won[-1], PREVIOUS: won[-2], CANDIDATE: before + 3}
    is_sound(aliases)


def disturb(place: Place, seconds: float, number: int, barrier: Any) -> tuple[list[str], int]:
    """Promote, repeat and roll back at random; what was written, and how often it was refused."""
    aliases, chance = place.open(), random.Random(number)
    written, refused = [], 0
    barrier.wait(120)
    until = time.monotonic() + seconds
    who = Backing(f"process {number}", "at random")
    version = number
    while time.monotonic() < until:
        what = chance.choice(["promote", "promote", "repeat", "back", "back to"])
        try:
            if what in ("promote", "repeat"):
                version = version if what == "repeat" else chance.randint(1, PROCESSES)
                now = aliases.settle().aliases.get(CHAMPION)
                moved = promote(aliases, version, bundle(version).digest, who, expected=now)
            else:
                to = chance.randint(1, PROCESSES) if what == "back to" else None
                plan = plan_rollback(aliases, to, who.actor, who.reason)
                if plan.done is not None:
                    continue
                moved = roll_back(aliases, plan, who)
            if moved.changed and moved.entry is not None:
                written.append(moved.entry.hash)
        except (AliasMoved, PromotionRefused):
            refused += 1
    return written, refused


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_eight_that_promote_and_roll_back_at_random_end_consistent(make: Make, kind: str) -> None:
    place = make(kind)
    registered(place.tracker, *range(1, PROCESSES + 1))
    found = together(disturb, place, 4.0)
    aliases = place.open()
    lines = aliases.ledger.entries(MODEL)
    assert Counter(hash for hashes, _ in found for hash in hashes) == Counter(
        line.hash for line in lines
    ), "what a process was told stands in the ledger, once, and nothing else"
    assert len(lines) >= 3
    for before, after in pairwise(lines):
        assert after.moves[CHAMPION].before == before.moves[CHAMPION].after
    is_sound(aliases)
