"""SQLite, held by another process: MLflow's database and Prefect's, for a while and for long."""

from __future__ import annotations

import pytest

from tests.faults.audit import Holdings, check_not_moved, check_whole, holdings
from tests.faults.conftest import Tell
from tests.faults.locks import locked
from tests.faults.world import World

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("seconds", [15, 900])
def test_mlflow_locked(world: World, finished: Holdings, tell: Tell, seconds: int) -> None:
    """MLflow's SQLite database is held by another process"""
    world.unregister()
    run = world.start()
    run.wait_for(r"\] prompts demo: reused")
    assert world.database.exists()
    with locked(world.database, seconds):
        status = run.end()
    if seconds < 60:
        assert status == 0, run.text[-4000:]
    else:
        assert status == 4, run.text[-4000:]
        assert "failed in record: MLflow: " in run.text and "locked" in run.text
        assert "Traceback" not in run.text
        assert holdings(world).aliases == {}
        world.no_process_left()
        world.release()
    again = world.release()
    assert again.made == []
    check_whole(world, finished, releases=finished.releases)
    said = [line for line in run.text.splitlines() if "locked" in line]
    tell(
        fault=f"MLflow's database held for {seconds} s", caused="BEGIN EXCLUSIVE elsewhere",
        stage="record", seen=(said or ["waited"])[-1][:200], status=status,
        then="recorded and promoted once",
    )  # fmt: skip


@pytest.mark.parametrize("seconds", [5, 900])
def test_prefect_locked(world: World, finished: Holdings, tell: Tell, seconds: int) -> None:
    """Prefect's SQLite database is held by another process"""
    world.forget("accuracy", "bf16")
    # Each call of a server whose database is held takes a minute, and Prefect tries six times.
    run = world.start(env={"PREFECT_CLIENT_MAX_RETRIES": "1"} if seconds > 60 else None)
    run.wait_for(r"\] accuracy bf16: making")
    database = world.home / "prefect" / "prefect.db"
    with locked(database, seconds):
        status = run.end(1200)
    world.no_process_left()
    assert "Traceback" not in run.text, run.text[-4000:]
    if seconds < 60:
        assert status == 0, run.text[-4000:]
    else:
        assert status == 4, run.text[-4000:]
    check_not_moved(world, finished)
    again = world.release()
    world.release()
    check_whole(world, finished, releases=holdings(world).releases)
    said = [line for line in run.text.splitlines() if line.startswith("pilotage: ")]
    tell(
        fault=f"Prefect's database held for {seconds} s",
        caused="BEGIN EXCLUSIVE by another process", stage="accuracy bf16",
        seen=(said or ["waited"])[0][:200], status=status,
        then=f"made {', '.join(again.made) or 'nothing'}",
    )  # fmt: skip
