"""`pilotage prune --shared`: what some machine uses or refers to stays, whoever asks."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from registry.artifacts import Stage
from registry.errors import UserError
from registry.remote_store import RemoteStore
from registry.settings import settings
from registry.shared_store import SharedStore
from tasks import shared_pruning
from tasks.shared_pruning import orphans, prune_shared

pytest_plugins = ["tests.s3", "tests.postgres"]

MIN = datetime.min.replace(tzinfo=UTC)
LATER = datetime.now(UTC) + timedelta(days=40)
LEAF = Stage(
    name="quantize", version=1, label="leaf", parents={"student": Stage(name="distill", version=1)}
)
KEPT = Stage(name="model", version=1, label="kept")


class Clock(datetime):
    """Forty days from now: nobody has asked for anything since."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return LATER


@pytest.fixture(scope="module")
def registry_uri(postgres_server: str) -> str:
    """A registry that machines share: making MLflow's tables takes seconds, so one for all."""
    name = f"shared_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(f"{postgres_server}/postgres", autocommit=True) as asked:
        asked.execute(f"CREATE DATABASE {name}".encode())
    return f"{postgres_server}/{name}"


@pytest.fixture
def shelf(
    s3_url: str, registry_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SharedStore:
    monkeypatch.setenv("PILOTAGE_STORE_URL", s3_url)
    monkeypatch.setenv("PILOTAGE_MLFLOW_URI", registry_uri)
    settings.cache_clear()
    made = SharedStore(tmp_path / "store", RemoteStore(s3_url, 5.0))
    for stage in (LEAF.parents["student"], LEAF, KEPT):
        made.make(stage, lambda folder, key=stage.key: writing(folder, key), {})  # type: ignore[misc]
    return made


def writing(folder: Path, text: str) -> dict[str, Any]:
    (folder / "weights").write_text(text)
    return {}


def names(shelf: SharedStore) -> set[str]:
    return {stage for stage, _ in shelf.remote.objects()}


def test_what_was_asked_for_lately_stays_and_so_does_what_it_was_made_of(
    shelf: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = prune_shared(30, yes=True)
    assert (len(done.entries), done.removed, done.leftovers) == (3, [], {})
    monkeypatch.setattr(shared_pruning, "datetime", Clock)
    assert {one.stage for one in prune_shared(30).removed} == {"quantize", "distill", "model"}
    assert names(shelf) == {"quantize", "distill", "model"}
    # A machine asks for the leaf between the decision and the removal.
    decided = shared_pruning.plan

    def plan(*words: Any) -> Any:
        made = decided(*words)
        monkeypatch.setattr(
            RemoteStore, "used_at", lambda self, stage, key: LATER if stage == "quantize" else MIN
        )
        return made

    monkeypatch.setattr(shared_pruning, "plan", plan)
    done = prune_shared(30, yes=True)
    assert [stage for stage, _ in done.stayed] == ["quantize"]
    assert {one.stage for one in done.removed} == {"distill", "model"}
    assert names(shelf) == {"quantize"}
    # Who has a copy goes on with it, and shares it again.
    assert shelf.find(KEPT).reused
    assert names(shelf) == {"quantize", "model"}


def test_replaced_entries_and_uploads_that_never_ended_go_when_they_are_old(
    shelf: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shelf.find(KEPT).digest
    shelf.make(KEPT, lambda folder: writing(folder, "anew"), {}, fresh=lambda ref: False)
    remote = shelf.remote
    remote._fs.pipe_file(f"{remote._root}/model/{'f' * 64}/{'e' * 64}/half", b"half")
    assert prune_shared(30).leftovers == {}
    monkeypatch.setattr(shared_pruning, "datetime", Clock)
    done = prune_shared(365, yes=True)
    assert done.removed == []
    assert done.leftovers == {
        ("model", KEPT.key): ["000001.json", f"{first}/weights"],
        ("model", "f" * 64): [f"{'e' * 64}/half"],
    }
    assert prune_shared(365).leftovers == {}
    assert shelf.find(KEPT).reused


def test_all_of_a_key_whose_manifest_cannot_be_read_stays() -> None:
    old, now = MIN + timedelta(days=1), datetime.now(UTC)
    objects = {"000001.json": (9, old), "d/weights": (9, old), "used": (0, old)}
    # A newer pilotage may have written it: what it needs, nobody here knows.
    assert orphans(objects, 1, None, now) == []
    assert orphans({"d/weights": (9, old)}, 0, None, now) == ["d/weights"]
    assert orphans({"d/weights": (9, now)}, 0, None, now) == []


def test_a_registry_of_one_machine_is_not_asked_for_all(
    shelf: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for own in ("", "sqlite:///x.db", "sqlite+pysqlite:///x.db"):
        monkeypatch.setenv("PILOTAGE_MLFLOW_URI", own)
        settings.cache_clear()
        with pytest.raises(UserError, match="this machine's own registry"):
            prune_shared(30, yes=True)
    monkeypatch.delenv("PILOTAGE_STORE_URL")
    settings.cache_clear()
    with pytest.raises(UserError, match="there is no shared store"):
        prune_shared(30, yes=True)
    assert names(shelf) == {"quantize", "distill", "model"}
