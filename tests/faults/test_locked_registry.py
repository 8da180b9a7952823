"""The registry's SQLite file, held by another process: a promotion waits, or ends. No engine."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

from registry.alias_moves import Aliases
from registry.errors import InfrastructureError
from registry.ledger import Ledger
from registry.promotion import promote
from registry.tracking import Tracker
from tests.faults.conftest import Tell
from tests.faults.locks import locked
from tests.promotion_builders import BY, MODEL, bundle, held, is_sound, promoted, registered

pytest_plugins = ["tests.promotion_fixtures"]


@pytest.fixture
def aliases(migrated: Path, tmp_path: Path) -> Aliases:
    database = tmp_path / "mlflow.db"
    shutil.copy(migrated, database)
    tracker = Tracker(f"sqlite:///{database}", tmp_path / "mlartifacts")
    made = Aliases(tracker.client, Ledger(tracker.uri), MODEL)
    registered(tracker, 1, 2)
    promoted(made, 1)
    return made


def test_held_for_a_while(aliases: Aliases, tmp_path: Path, tell: Tell) -> None:
    """The registry's database is held for three seconds during a promotion"""
    with locked(tmp_path / "mlflow.db", 3.0):
        promote(aliases, 2, bundle(2).digest, BY, expected=1)
    is_sound(aliases)
    assert held(aliases)["champion"] == 2
    tell(
        caused="BEGIN EXCLUSIVE by another process for 3 s", stage="promote", status=0,
        seen="it waited", then="promoted once",
    )  # fmt: skip


@pytest.mark.fault
def test_held_for_good(aliases: Aliases, tmp_path: Path, tell: Tell) -> None:
    """The registry's database is held for longer than anybody waits"""
    said: list[BaseException] = []

    def ask() -> None:
        try:
            promote(aliases, 2, bundle(2).digest, BY, expected=1)
        except InfrastructureError as error:
            said.append(error)

    with locked(tmp_path / "mlflow.db", 900.0):
        began = time.monotonic()
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(600)
        took = time.monotonic() - began
        assert not asking.is_alive(), "it waits for ever"
    assert len(said) == 1
    assert "locked" in str(said[0])
    is_sound(aliases)
    assert held(aliases)["champion"] == 1
    promote(aliases, 2, bundle(2).digest, BY, expected=1)
    is_sound(aliases)
    assert held(aliases)["champion"] == 2
    tell(
        caused="BEGIN EXCLUSIVE by another process until the command has ended", stage="promote",
        status=4, seen=f"after {took:.0f} s: {str(said[0])[-150:]}",
        then="nothing had moved; the next command promoted it",
    )  # fmt: skip
