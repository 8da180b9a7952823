"""A full disk under the store, MLflow and the ledger, with no engine: seconds each.

How much is left decides which write fails: SQLite's journal, a page, an artifact, a manifest.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from registry.alias_moves import Aliases
from registry.artifacts import Stage
from registry.errors import InfrastructureError
from registry.ledger import Ledger
from registry.promotion import promote
from registry.store import Absent, Store
from registry.tracking import Tracker
from tests.faults.conftest import Tell
from tests.faults.disks import fill, make_room, mounted
from tests.promotion_builders import BY, MODEL, bundle, held, is_sound, passed, promoted, registered

pytest_plugins = ["tests.promotion_fixtures"]

LEFT = [0, 8 << 10, 32 << 10, 96 << 10]
"""Bytes."""


@pytest.fixture
def disk(tmp_path: Path, migrated: Path) -> Iterator[Path]:
    """16 MiB with an empty registry on them."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, 16):
        shutil.copy(migrated, folder / "mlflow.db")
        yield folder


@pytest.fixture
def tracker(disk: Path) -> Tracker:
    return Tracker(f"sqlite:///{disk}/mlflow.db", disk / "mlartifacts")


@pytest.mark.parametrize("when", ["before the ledger's line", "between line and alias"])
def test_promotion(
    disk: Path, tracker: Tracker, tell: Tell, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The disk is full when an alias is to be moved"""
    aliases = Aliases(tracker.client, Ledger(tracker.uri), MODEL)
    registered(tracker, 1, 2)
    promoted(aliases, 1)
    if when.startswith("before"):
        fill(disk)
    else:
        follow = Aliases._follow

        def filled(self: Aliases, *words: Any) -> None:
            fill(disk)
            follow(self, *words)

        monkeypatch.setattr(Aliases, "_follow", filled)
    with pytest.raises(InfrastructureError) as told:
        promote(aliases, 2, bundle(2).digest, BY, expected=1)
    monkeypatch.undo()
    make_room(disk)
    assert held(aliases)["champion"] == 1, "it had no room to move"
    # What a line decided is finished by whoever comes next; what none decided is not.
    decided = 2 if when.startswith("between") else 1
    state = aliases.settle()
    is_sound(aliases)
    assert (len(state.entries), held(aliases)["champion"]) == (decided, decided)
    promote(aliases, 2, bundle(2).digest, BY, expected=decided)
    is_sound(aliases)
    assert held(aliases)["champion"] == 2
    assert [entry.action for entry in aliases.ledger.entries(MODEL)] == ["promote", "promote"]
    tell(
        fault=f"disk full, a promotion, {when}", caused="tmpfs of 16 MiB, filled",
        stage="promote", seen=_short(told.value), status=4,
        then=f"the next command {'finished' if decided == 2 else 'promoted'} it; chain whole",
    )  # fmt: skip


@pytest.mark.parametrize("left", LEFT)
def test_recording(disk: Path, tracker: Tracker, tell: Tell, left: int) -> None:
    """The disk is full when candidates and weights go into MLflow"""
    weights = disk.parent / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(bytes(range(256)) * 2048)

    def record() -> str:
        parent = tracker.release_run(MODEL, "r1", "demo", texts={"recipe.json": "{}"})
        made = tracker.candidates(
            parent, [(passed(1), bundle(1))], measured_at=datetime(2030, 1, 2, tzinfo=UTC)
        )
        tracker.add_weights(made["c1"], bundle(1).digest, {"target": weights})
        return made["c1"]

    tracker.experiment(MODEL)
    fill(disk, left)
    with pytest.raises(InfrastructureError) as told:
        record()
    assert re.search("disk is full|No space left", str(told.value)), told.value
    make_room(disk)
    model = record()
    assert record() == model
    (experiment,) = [one for one in tracker.client.search_experiments() if one.name == MODEL]
    (only,) = tracker.client.search_logged_models([experiment.experiment_id])
    assert (only.model_id, only.status.name) == (model, "READY")
    assert len(tracker.client.search_runs([experiment.experiment_id])) == 1
    (stored,) = disk.glob("mlartifacts/*/models/*/artifacts/target/model.safetensors")
    assert stored.read_bytes() == (weights / "model.safetensors").read_bytes()
    for document in disk.glob("mlartifacts/*/models/*/artifacts/*.json"):
        json.loads(document.read_text())
    tell(
        fault=f"disk with {left >> 10} KiB left, recording", caused="tmpfs of 16 MiB, filled",
        stage="record", seen=_short(told.value), status=4,
        then="one run, one LoggedModel, its weights whole",
    )  # fmt: skip


@pytest.mark.parametrize("left", [0, 8 << 10, 300 << 10])
def test_store(disk: Path, tell: Tell, left: int) -> None:
    """The disk is full when a stage writes into the store"""
    shelf, stage = Store(disk / "store"), Stage(name="distill", version=1)
    shelf.root.mkdir()

    def produce(folder: Path) -> dict[str, Any]:
        (folder / "model.safetensors").write_bytes(bytes(1 << 20))
        return {}

    fill(disk, left)
    with pytest.raises(OSError, match="No space left") as told:
        shelf.make(stage, produce, {})
    with pytest.raises(Absent):
        shelf.find(stage)
    assert not list((disk / "store").glob(".incoming/*"))
    make_room(disk)
    assert (shelf.make(stage, produce, {}).path / "model.safetensors").stat().st_size == 1 << 20
    tell(
        fault=f"disk with {left >> 10} KiB left, the store", caused="tmpfs of 16 MiB, filled",
        stage="distill", seen=_short(told.value), status='-', then="made, whole",
    )  # fmt: skip


def _short(error: BaseException) -> str:
    """Without the test's own folder."""
    return re.sub(r"/[^ ':]*/(disk|weights)/", "", str(error))[:200]
