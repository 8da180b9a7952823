"""The ledger on real databases: processes that disturb each other, kills, MLflow beside it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

from flows.ledger_commands import ledger as command
from registry.errors import InfrastructureError
from registry.ledger import EMPTY, Draft, Entry, Head, Ledger, LedgerMoved, Move, verify
from registry.settings import CHECKOUT
from registry.tracking import Tracker

pytest_plugins = ["tests.postgres"]

MODEL = "freight-assistant"
PROCESSES = 8
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=["sqlite", "postgresql"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tracking.db'}"
    found: str = request.getfixturevalue("postgres_uri")
    return found


def draft(actor: str, number: int = 1) -> Draft:
    return Draft(actor=actor, action="promote", moves={"champion": Move(before=None, after=number)})


def end(entry: Entry) -> Head:
    return Head(entry.sequence, entry.hash)


# -- many processes --------------------------------------------------------------------------


def race(uri: str, rounds: int, name: str, barrier: Any, results: Any) -> None:
    """All expect the same end, `rounds` times; the hashes of the lines that this one won."""
    ledger = Ledger(uri)
    won: list[str] = []
    expected = EMPTY
    for _ in range(rounds):
        barrier.wait(120)
        try:
            won.append(ledger.append(MODEL, draft(name), expected).hash)
        except LedgerMoved as moved:
            assert moved.head.length == expected.length + 1
        barrier.wait(120)
        expected = ledger.head(MODEL)
    results.put((name, won))


def insist(uri: str, lines: int, name: str, barrier: Any, results: Any) -> None:
    """Add `lines` lines, each after whatever end there is by then."""
    ledger = Ledger(uri)
    won: list[str] = []
    barrier.wait(120)
    expected = EMPTY
    while len(won) < lines:
        try:
            entry = ledger.append(MODEL, draft(name, len(won) + 1), expected)
            won.append(entry.hash)
            expected = end(entry)
        except LedgerMoved as moved:
            expected = moved.head
    results.put((name, won))


def together(work: Callable[..., None], uri: str, count: int) -> dict[str, list[str]]:
    """Run `work` in eight processes; what each one won."""
    barrier, results = SPAWN.Barrier(PROCESSES), SPAWN.Queue()
    names = [f"process {number}" for number in range(PROCESSES)]
    started = [
        SPAWN.Process(target=work, args=(uri, count, name, barrier, results)) for name in names
    ]
    for one in started:
        one.start()
    won = dict(results.get(timeout=300) for _ in names)
    for one in started:
        one.join(60)
        assert one.exitcode == 0
    return won


def test_of_eight_that_expect_the_same_end_one_adds_its_line(uri: str) -> None:
    rounds = 6
    won = together(race, uri, rounds)
    lines = Ledger(uri).entries(MODEL)
    assert len(lines) == rounds
    assert sorted(hash for hashes in won.values() for hash in hashes) == sorted(
        line.hash for line in lines
    )
    assert all(line.hash in won[line.actor] for line in lines)
    assert verify(lines, end(lines[-1])) is None


def test_eight_that_insist_lose_no_line(uri: str) -> None:
    won = together(insist, uri, 10)
    ledger = Ledger(uri)
    lines = ledger.entries(MODEL)
    assert len(lines) == 10 * PROCESSES
    for name, hashes in won.items():
        assert [line.hash for line in lines if line.actor == name] == hashes
    assert ledger.check(MODEL, end(lines[-1])) is None


def counting(uri: str, lines: int, name: str, barrier: Any, results: Any) -> None:
    """Read, add one, write, under the lock only: one that gets in between loses a number."""
    ledger = Ledger(uri)
    file = Path(os.environ["COUNTED"])
    barrier.wait(120)
    for _ in range(lines):
        with ledger.lock(MODEL, 120):
            seen = int(file.read_text())
            time.sleep(0.001)
            file.write_text(str(seen + 1))
    results.put((name, []))


def test_the_lock_is_held_by_one_process_at_a_time(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "counted"
    file.write_text("0")
    monkeypatch.setenv("COUNTED", str(file))
    together(counting, uri, 5)
    assert file.read_text() == str(5 * PROCESSES)


# -- kills -----------------------------------------------------------------------------------

HOLDER = """
import sys, time
from registry.ledger import Ledger
with Ledger(sys.argv[1]).lock(sys.argv[2], 10):
    print("held", flush=True)
    time.sleep(600)
"""

WRITER = """
import sys
from registry.ledger import Draft, Head, Ledger
ledger = Ledger(sys.argv[1])
end = ledger.head(sys.argv[2])
while True:
    line = ledger.append(sys.argv[2], Draft(actor="writer", action="adopt", moves={}), end)
    end = Head(line.sequence, line.hash)
    print(line.hash, flush=True)
"""


def python(script: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *words], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )


def test_the_lock_of_a_killed_process_is_free(uri: str) -> None:
    holder = python(HOLDER, uri, MODEL)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        ledger = Ledger(uri)
        with (
            pytest.raises(InfrastructureError, match=f"holds the ledger of {MODEL}; waited 0.3 s"),
            ledger.lock(MODEL, 0.3),
        ):
            pass
        with ledger.lock("another model", 0):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with ledger.lock(MODEL, 10):
        pass


def test_a_lock_is_given_back_when_what_it_guards_fails(uri: str) -> None:
    ledger = Ledger(uri)
    with pytest.raises(OSError, match="as it came"), ledger.lock(MODEL, 0):
        raise OSError("as it came")
    with ledger.lock(MODEL, 0):
        pass


def test_a_writer_that_is_killed_leaves_whole_lines(uri: str) -> None:
    ledger = Ledger(uri)
    told: list[str] = []
    for wait in (0.0, 0.011, 0.023):
        writer = python(WRITER, uri, MODEL)
        assert writer.stdout is not None
        told.append(writer.stdout.readline().strip())
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.read().split()
        writer.wait()
    lines = ledger.entries(MODEL)
    assert verify(lines, None) is None
    hashes = [line.hash for line in lines]
    # A line may have been added and not been told of: one for each kill.
    assert set(told) <= set(hashes)
    assert len(told) <= len(hashes) <= len(told) + 3
    entry = ledger.append(MODEL, draft("after"), ledger.head(MODEL))
    assert ledger.check(MODEL, end(entry)) is None


# -- append-only -----------------------------------------------------------------------------


ROW_2 = "FROM pilotage_ledger WHERE sequence = 2"
REFUSED = {
    "sqlite": [
        "UPDATE pilotage_ledger SET body = '{}' WHERE sequence = 1",
        f"DELETE {ROW_2}",
        "DELETE FROM pilotage_ledger",
        f"INSERT OR REPLACE INTO pilotage_ledger SELECT model, 1, hash, at, action, body {ROW_2}",
        f"INSERT INTO pilotage_ledger SELECT model, 9, hash, at, action, body {ROW_2}",
    ],
    "postgresql": [
        "UPDATE pilotage_ledger SET body = '{}' WHERE sequence = 1",
        f"DELETE {ROW_2}",
        "DELETE FROM pilotage_ledger",
        "TRUNCATE pilotage_ledger",
    ],
}


def test_the_database_refuses_to_change_what_is_written(uri: str) -> None:
    ledger = Ledger(uri)
    first = ledger.append(MODEL, draft("a"), EMPTY)
    second = ledger.append(MODEL, draft("b"), end(first))
    engine = create_engine(uri)
    for statement in REFUSED[uri.partition(":")[0]]:
        with pytest.raises(DBAPIError, match="is append-only"), engine.begin() as asked:
            asked.execute(text(statement))
    engine.dispose()
    assert ledger.entries(MODEL) == [first, second]


def test_who_drops_the_guards_is_found_by_the_chain(uri: str) -> None:
    ledger = Ledger(uri)
    entry = ledger.append(MODEL, draft("a"), EMPTY)
    ledger.append(MODEL, draft("b"), end(entry))
    engine = create_engine(uri)
    guard = {
        "sqlite": "DROP TRIGGER pilotage_ledger_no_update",
        "postgresql": "DROP TRIGGER pilotage_ledger_append_only ON pilotage_ledger",
    }
    with engine.begin() as asked:
        asked.execute(text(guard[uri.partition(":")[0]]))
        asked.execute(
            text(
                'UPDATE pilotage_ledger SET body = replace(body, \'"actor":"b"\', :other) '
                "WHERE sequence = 2"
            ),
            {"other": '"actor":"c"'},
        )
    engine.dispose()
    broken = ledger.check(MODEL, None)
    assert broken is not None and broken.sequence == 2


# -- the tracking database -------------------------------------------------------------------


@pytest.mark.parametrize("first", ["mlflow", "ledger"])
def test_mlflow_opens_and_upgrades_a_database_with_a_ledger(
    uri: str, first: str, tmp_path: Path
) -> None:
    ledger = Ledger(uri)
    if first == "ledger":
        ledger.append(MODEL, draft("a"), EMPTY)
    client = Tracker(uri, tmp_path / "artifacts").client
    client.create_registered_model(MODEL)
    entry = ledger.append(MODEL, draft("b"), ledger.head(MODEL))
    client.set_registered_model_tag(MODEL, "pilotage.ledger.length", str(entry.sequence))
    assert client.get_registered_model(MODEL).tags == {
        "pilotage.ledger.length": str(entry.sequence)
    }
    upgraded = subprocess.run(
        [sys.executable, "-m", "mlflow", "db", "upgrade", uri], capture_output=True, text=True
    )
    assert upgraded.returncode == 0, upgraded.stderr
    again = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, mlflow\n"
            "client = mlflow.MlflowClient(sys.argv[1], sys.argv[1])\n"
            "print(client.get_registered_model(sys.argv[2]).name)",
            uri,
            MODEL,
        ],
        capture_output=True,
        text=True,
    )
    assert again.stdout == f"{MODEL}\n", again.stderr
    assert ledger.check(MODEL, end(entry)) is None


def test_a_line_waits_for_another_writer_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tracking.db"
    ledger = Ledger(f"sqlite:///{file}")
    first = ledger.append(MODEL, draft("a"), EMPTY)
    holding = threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            holding.set()
            time.sleep(0.7)
            other.execute("CREATE TABLE experiments (id INTEGER)")
            other.execute("COMMIT")

    thread = threading.Thread(target=write)
    thread.start()
    holding.wait()
    began = time.monotonic()
    ledger.append(MODEL, draft("b"), end(first))
    assert time.monotonic() - began > 0.5
    thread.join()


def test_a_server_that_is_away_is_no_persons_mistake_and_its_password_no_secret_told() -> None:
    ledger = Ledger("postgresql://user:secret@127.0.0.1:1/tracking")
    with pytest.raises(InfrastructureError, match="could not open the ledger") as raised:
        ledger.entries(MODEL)
    assert "secret" not in str(raised.value)
    with pytest.raises(InfrastructureError, match="could not lock"), ledger.lock(MODEL, 1):
        pass


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tracking.db"
    file.write_text("this is no database, but a text that is long enough to be one\n" * 20)
    with pytest.raises(InfrastructureError, match=r"tracking\.db: could not .* not a database"):
        Ledger(f"sqlite:///{file}").entries(MODEL)


# -- the command, with a real registry -------------------------------------------------------

APP = typer.Typer()
APP.command()(command)


def test_the_command_takes_the_anchor_from_mlflow(home: Path) -> None:
    uri = f"sqlite:///{home / 'mlflow.db'}"
    client = Tracker(uri, home / "mlartifacts").client
    client.create_registered_model(MODEL)
    ledger = Ledger(uri)
    first = ledger.append(MODEL, draft("a"), EMPTY)
    second = ledger.append(MODEL, draft("b"), end(first))
    client.set_registered_model_tag(MODEL, "pilotage.ledger.head", second.hash)
    client.set_registered_model_tag(MODEL, "pilotage.ledger.length", "2")
    answer = CliRunner().invoke(APP, [MODEL, "--verify", "--json"])
    assert answer.exit_code == 0
    shown = json.loads(answer.stdout.splitlines()[-1])
    assert shown["anchor"] == {"length": 2, "hash": second.hash}
    with closing(sqlite3.connect(home / "mlflow.db")) as asked:
        asked.execute("DROP TRIGGER pilotage_ledger_no_delete")
        asked.execute("DELETE FROM pilotage_ledger WHERE sequence = 2")
        asked.commit()
    answer = CliRunner().invoke(APP, [MODEL, "--verify"])
    assert answer.exit_code == 10
    assert "line 2 is missing: the ledger was cut off" in answer.stdout
    missing = CliRunner().invoke(APP, ["another"])
    assert "no such model" in str(missing.exception)
