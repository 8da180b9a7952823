"""Fixtures of the flows promote and rollback on a real MLflow, with no engine.

A test module asks for them with `pytest_plugins = ["tests.promotion_fixtures"]`: `engine`, a smoke
prompt that answers or does not, beside an empty registry, and `aliases`, of that registry.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from registry.alias_moves import Aliases
from registry.tracking import Tracker
from tasks.bundles import aliases_of_model
from tests.pretend_smoke import Engine
from tests.promotion_builders import (
    MODEL,
)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, to be copied: making them takes seconds, a copy does not."""
    database = tmp_path_factory.mktemp("mlflow") / "migrated.db"
    assert Tracker(f"sqlite:///{database}", database.parent).client.search_experiments()
    return database


@pytest.fixture
def tracker(migrated: Path, tmp_path: Path) -> Tracker:
    """An empty registry beside this test's home."""
    database = tmp_path / "mlflow.db"
    shutil.copy(migrated, database)
    return Tracker(f"sqlite:///{database}", tmp_path / "mlartifacts")


@pytest.fixture
def engine(migrated: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An empty registry in a home of its own, and what stands for the engine."""
    home.mkdir(exist_ok=True)
    shutil.copy(migrated, home / "mlflow.db")
    made = Engine()
    monkeypatch.setattr("flows.promote.ask_smoke", made)
    monkeypatch.setattr("flows.rollback.ask_smoke", made)
    monkeypatch.setenv("PILOTAGE_ACTOR", "mei")
    return made


@pytest.fixture
def aliases(engine: Engine) -> Aliases:
    return aliases_of_model(MODEL)
