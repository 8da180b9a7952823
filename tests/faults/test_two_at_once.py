"""Two releases of one model at once: in one home, and in two homes with one MLflow."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

from tests.faults.audit import Holdings, check_whole, holdings
from tests.faults.conftest import Tell
from tests.faults.world import World

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]


def test_one_home(world: World, finished: Holdings, tell: Tell) -> None:
    """Two releases of one model at once in one home, a stage to be made and all to be recorded"""
    world.unregister()
    world.forget("accuracy", "bf16")
    both = [world.start(), world.start()]
    statuses = [run.end() for run in both]
    assert statuses == [0, 0], "\n".join(run.text[-3000:] for run in both)
    made = Counter(name for run in both for name in run.made)
    assert made == {"accuracy bf16": 1}, "the second waits for the first and reuses what it made"
    assert {run.document["version"] for run in both} == {1}
    world.release()
    check_whole(world, finished)
    tell(
        caused="two processes started together", stage="accuracy bf16, record, promote",
        seen="the stage was made once; one version, one promotion", status="0, 0",
        then="nothing made, nothing recorded anew",
    )  # fmt: skip


def test_two_homes(world: World, finished: Holdings, tell: Tell) -> None:
    """Two releases of one model at once from two homes with one MLflow database"""
    world.unregister()
    other = world.root / "home-of-another-machine"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(world.home, other, symlinks=True)
    shared = {"PILOTAGE_MLFLOW_URI": f"sqlite:///{world.database}"}
    try:
        both = [
            world.start(env=shared),
            world.start(env=shared | {"PILOTAGE_HOME": str(other)}),
        ]
        statuses = [run.end() for run in both]
        assert statuses == [0, 0], "\n".join(run.text[-3000:] for run in both)
        found = holdings(world)
        assert found.twice == []
        assert found.versions == finished.versions
        assert found.ledger == finished.ledger
    finally:
        shutil.rmtree(other, ignore_errors=True)
    world.release(env=shared)
    check_whole(world, finished, releases=1)
    tell(
        caused="two processes started together, each with a store of its own",
        stage="record, promote", seen="one release run, one version, one promotion",
        status="0, 0", then="nothing recorded anew",
    )  # fmt: skip
