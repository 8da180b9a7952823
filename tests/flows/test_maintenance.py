"""Maintenance on real files: what goes, what stays, and a step that fails beside others."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
from prefect.states import Completed, Running

from flows.forms import MaintainRequest
from flows.maintenance import maintain
from registry.errors import InfrastructureError
from registry.settings import settings
from tasks import maintaining, mlflow_rubbish
from tasks.bundles import tracker
from tasks.database_files import compact
from tasks.maintaining import Freed, Job, Step, done, summary, table
from tasks.prefect_history import _vacuumed, forget, older_than
from tasks.pruning import alone

pytest_plugins = ["tests.promotion_fixtures"]


# -- steps -------------------------------------------------------------------------------------


def soon() -> float:
    return time.monotonic() + 60


def broken(days: int, deadline: float) -> Freed:
    raise InfrastructureError("another prune is running\nin this home")


def test_a_step_that_fails_is_told_and_stops_no_other() -> None:
    jobs = [
        Job("one", lambda days, deadline: Freed(f"older than {days}", 3 << 20)),
        Job("two", broken),
        Job("three", lambda days, deadline: Freed("a | b", 1 << 20)),
    ]
    steps = done(jobs, days=7, minutes=1)
    assert [(step.name, step.what, step.size, step.failed) for step in steps] == [
        ("one", "older than 7", 3 << 20, ""),
        ("two", "", 0, "another prune is running in this home"),
        ("three", "a | b", 1 << 20, ""),
    ]
    assert summary(steps) == "4.0 MiB freed; two failed: another prune is running in this home"
    assert "| two | **failed**: another prune is running in this home | 0.0 MiB |" in table(
        steps, 7
    )
    assert "| three | a \\| b | 1.0 MiB |" in table(steps, 7)


def leaks(days: int, deadline: float) -> Freed:
    raise OSError("postgresql://me:planted-word@db/mlflow is away")


def test_what_a_step_says_is_shown_without_its_secrets() -> None:
    (step,) = done([Job("one", leaks)], days=7, minutes=1)
    assert step.failed == "postgresql://me:***@db/mlflow is away"


def test_what_cannot_begin_in_time_is_told() -> None:
    steps = done([Job("late", broken)], days=7, minutes=0)
    assert steps == [Step("late", "", 0, 0.0, failed="no time was left")]


# -- databases ---------------------------------------------------------------------------------


def database(path: Path, rows: int) -> None:
    with sqlite3.connect(path) as made:
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("CREATE TABLE t (x TEXT)")
        made.executemany("INSERT INTO t VALUES (?)", [("x" * 1000,)] * rows)


def test_a_database_gives_its_free_pages_back_and_keeps_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    database(file, 2000)
    with sqlite3.connect(file) as made:
        made.execute("DELETE FROM t WHERE rowid > 100")
    made.close()
    freed = compact(file, soon())
    assert freed > 1_500_000 and file.stat().st_size < 300_000
    with sqlite3.connect(file) as again:
        assert again.execute("SELECT count(*), min(length(x)) FROM t").fetchone() == (100, 1000)


def test_a_database_that_somebody_writes_to_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.database_files.LOCK_WAIT", 0.1)
    file = tmp_path / "x.db"
    database(file, 100)
    monkeypatch.setattr("tasks.database_files.FREE_SHARE", 0.0)
    other = sqlite3.connect(file)
    other.execute("INSERT INTO t VALUES ('not committed')")
    with pytest.raises(InfrastructureError, match=r"x\.db was left as it is: .*locked"):
        compact(file, soon())
    other.commit()
    assert other.execute("SELECT count(*) FROM t").fetchone() == (101,)


# -- the store -----------------------------------------------------------------------------------


def test_stale_folders_go_and_fresh_ones_stay(home: Path) -> None:
    incoming = settings().store_dir / ".incoming"
    for name, age in (("distill-old", 2 * 86_400), ("distill-new", 60)):
        (incoming / name / "files").mkdir(parents=True)
        (incoming / name / "files" / "weights").write_bytes(b"x" * 1000)
        os.utime(incoming / name, (time.time() - age,) * 2)
    freed = maintaining._stale(30, soon())
    assert freed == Freed("1 folders", 1000)
    assert [path.name for path in incoming.iterdir()] == ["distill-new"]


def test_the_store_is_pruned_by_the_rules_of_prune(migrated: Path, home: Path) -> None:
    assert maintaining._store(30, soon()) == Freed("nothing was made yet")
    settings().store_dir.mkdir(parents=True)
    shutil.copy(migrated, home / "mlflow.db")
    assert maintaining._store(30, soon()) == Freed("0 of 0 entries")


def test_a_prune_that_hangs_is_ended_and_the_steps_after_it_are_done(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry takes the question and never answers it; MLflow's client waits two minutes."""
    settings().store_dir.mkdir(parents=True)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("PILOTAGE_MLFLOW_URI", uri)
        monkeypatch.setenv("PILOTAGE_LEDGER_URI", f"sqlite:///{home}/ledger.db")
        settings.cache_clear()
        jobs = [Job("store", maintaining._store), Job("after", lambda *_: Freed("done"))]
        steps = done(jobs, days=30, minutes=0.5)
        # It was asked: what hung was the question, not the start of the process.
        silent.settimeout(0)
        asked, _ = silent.accept()
        assert b"/api/2.0/mlflow/" in asked.recv(4096)
    assert steps[0].failed.startswith("prune was ended after 15 s, half of what was left")
    assert "`pilotage prune --days 30 --yes`" in steps[0].failed
    assert steps[1].what == "done"
    assert list(settings().run_dir.glob("*.json")) == []
    with alone():
        pass  # its lock went with it


def test_what_a_prune_in_its_own_process_says_is_told(migrated: Path, home: Path) -> None:
    settings().store_dir.mkdir(parents=True)
    shutil.copy(migrated, home / "mlflow.db")
    with alone(), pytest.raises(InfrastructureError, match="another prune is running in this home"):
        maintaining._store(30, soon())


# -- MLflow ------------------------------------------------------------------------------------


def deleted_run(name: str, *, days_ago: int) -> str:
    client = tracker().client
    experiment = client.get_experiment_by_name("e")
    number = experiment.experiment_id if experiment else client.create_experiment("e")
    run = client.create_run(number, run_name=name).info.run_id
    client.delete_run(run)
    at = int((time.time() - days_ago * 86_400) * 1000)
    with sqlite3.connect(settings().home / "mlflow.db") as file:
        file.execute("UPDATE runs SET deleted_time=? WHERE run_uuid=?", (at, run))
    return run


def test_runs_that_were_deleted_long_ago_are_removed_for_good(migrated: Path, home: Path) -> None:
    home.mkdir(exist_ok=True)
    shutil.copy(migrated, home / "mlflow.db")
    assert mlflow_rubbish.collect(30, soon()) == "none is deleted"
    deleted_run("old", days_ago=40)
    kept = deleted_run("new", days_ago=3)
    assert mlflow_rubbish.collect(30, soon()) == "1 of 2 that were deleted"
    assert tracker().client.get_run(kept).info.lifecycle_stage == "deleted"


def test_a_database_elsewhere_is_cleaned_as_well(
    migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "elsewhere.db"
    monkeypatch.setenv("PILOTAGE_MLFLOW_URI", f"sqlite:///{file}")
    settings.cache_clear()
    assert mlflow_rubbish.collect(30, soon()) == "there is no database yet"
    shutil.copy(migrated, file)
    assert mlflow_rubbish.collect(30, soon()) == "none is deleted"
    assert maintaining._databases(30, soon()).what.startswith("elsewhere.db ")


def test_a_run_that_a_version_refers_to_stays_though_somebody_deleted_it(
    migrated: Path, home: Path
) -> None:
    home.mkdir(exist_ok=True)
    shutil.copy(migrated, home / "mlflow.db")
    run = deleted_run("old", days_ago=40)
    client = tracker().client
    client.create_registered_model("m")
    client.create_model_version("m", source="file:///nowhere", run_id=run)
    with pytest.raises(InfrastructureError, match=f"m version 1 refers to run {run}"):
        mlflow_rubbish.collect(30, soon())
    assert client.get_run(run).info.lifecycle_stage == "deleted"


# -- Prefect -----------------------------------------------------------------------------------


@flow
def talking() -> None:
    get_run_logger().info("a line")
    create_markdown_artifact(key="page", markdown="x" * 100)


def put_back(run: UUID, at: datetime) -> None:
    """The server notes the time itself; so its own database says that this run is an old one."""
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    with sqlite3.connect(str(url).rpartition("sqlite+aiosqlite:///")[2]) as file:
        file.execute("UPDATE flow_run SET end_time=? WHERE id=?", (f"{at:%F %T}.0", str(run)))
        assert file.total_changes == 1


def test_old_runs_go_with_their_pages_and_others_stay(prefect: None) -> None:
    old = datetime.now(UTC) - timedelta(days=40)
    with get_client(sync_client=True) as client:
        ended = client.create_flow_run(talking, state=Running())
        client.set_flow_run_state(ended.id, Completed())
        put_back(ended.id, old)
        client.request(
            "POST", "/artifacts/", json={"key": "page", "data": "x", "flow_run_id": str(ended.id)}
        )
        goes_on = client.create_flow_run(talking, state=Running())
        recent = client.create_flow_run(talking, state=Completed())
        assert older_than(30) == 1
        with pytest.raises(InfrastructureError, match="the next maintenance goes on"):
            asyncio.run(_vacuumed(30, time.monotonic()))
        assert older_than(30) == 1
        with pytest.raises(InfrastructureError, match="keeps 1 runs that ended more than 30 days"):
            forget(30, soon())
        asyncio.run(_vacuumed(30, soon()))
        assert older_than(30) == 0
        assert forget(30, soon()) == "the server removes them itself; none is older"
        left = {run.id for run in client.read_flow_runs()}
        assert ended.id not in left and {goes_on.id, recent.id} <= left
        assert client.read_artifacts() == []


def test_the_flow_ends_as_failed_with_what_failed_and_shows_the_table(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = maintain(MaintainRequest(), return_state=True)
    assert state.type is StateType.COMPLETED, state.message
    steps = state.result()
    assert [step.name for step in steps] == [job.name for job in maintaining.jobs()]
    monkeypatch.setattr("flows.maintenance.jobs", lambda: [Job("two", broken)])
    state = maintain(MaintainRequest(), return_state=True)
    assert (state.type, state.message) == (
        StateType.FAILED,
        "0.0 MiB freed; two failed: another prune is running in this home",
    )
    with get_client(sync_client=True) as client:
        assert "maintenance" in {page.key for page in client.read_artifacts()}
