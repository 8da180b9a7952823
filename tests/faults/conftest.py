"""One finished home for all faults, and the table of what came of each.

PILOTAGE_FAULTS_ROOT   folder to work in; its finished home is used again. Default: a new one.
PILOTAGE_FAULTS_TABLE  file to write the table to (`make faults`: docs/reliability.md)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.audit import Holdings, holdings
from tests.faults.table import Row, read_rows, write_row, write_table
from tests.faults.world import World

Tell = Callable[..., None]

_ROOT = pytest.StashKey[Path]()
_ALL = pytest.StashKey[list[tuple[str, str]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Before any is deselected: the table names what was not run.
    config.stash[_ALL] = [(item.nodeid, _first_line(item)) for item in items if _is_fault(item)]


def _is_fault(item: pytest.Item) -> bool:
    """All of this folder: the light ones run in `make test` too and carry no marker."""
    return Path(__file__).parent in item.path.parents


def _first_line(item: pytest.Item) -> str:
    text = (getattr(item, "obj", None) and item.obj.__doc__) or item.name
    return str(text).strip().splitlines()[0]


@pytest.fixture(scope="session")
def faults_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("PILOTAGE_FAULTS_ROOT")
    root = Path(named) if named else tmp_path_factory.mktemp("faults")
    root.mkdir(parents=True, exist_ok=True)
    request.config.stash[_ROOT] = root
    return root


@pytest.fixture(scope="session", autouse=True)
def _rows_of_all(faults_root: Path) -> None:
    """Tests that ask for nothing of this file are in the table too."""


@pytest.fixture(scope="session")
def finished(faults_root: Path) -> Holdings:
    """`ROOT/finished`: a home after its first release and a second one with nothing changed."""
    world = World(faults_root)
    kept = faults_root / "finished"
    if kept.exists():
        copy_home(kept, world.home)
    else:
        shutil.rmtree(world.home, ignore_errors=True)
        world.release()
    second = world.release()
    # A kept home of other sources or recipes is not the one that is wanted.
    assert second.made == [], f"{kept} is out of date ({second.made}): remove it"
    world.no_process_left()
    found = holdings(world)
    assert found.releases == 1, f"{kept} holds releases of other sources: remove it"
    shutil.rmtree(kept, ignore_errors=True)
    world.home.rename(kept)
    copy_home(kept, world.home)
    return found


@pytest.fixture
def world(finished: Holdings, faults_root: Path) -> Iterator[World]:
    """A copy of the finished home, at the place where it was made."""
    made = World(faults_root)
    copy_home(faults_root / "finished", made.home)
    yield made
    made.stop_all()


def copy_home(kept: Path, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(kept, home, symlinks=True)


@pytest.fixture
def tell(request: pytest.FixtureRequest, faults_root: Path) -> Tell:
    """Say what happened, for the table: caused, stage, seen, status, then."""

    def told(**words: Any) -> None:
        request.node.user_properties.append(("fault", words))

    return told


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if call.when != "call" or not _is_fault(item) or report.skipped:
        return
    words: dict[str, Any] = {}
    for name, value in item.user_properties:
        if name == "fault" and isinstance(value, dict):
            words |= value
    row = Row(
        test=item.nodeid,
        fault=str(words.pop("fault", _first_line(item))),
        passed=report.passed,
        seconds=round(call.duration),
        **{name: str(value) for name, value in words.items()},
    )
    root = item.config.stash.get(_ROOT, None)
    if root is not None:
        write_row(root / "rows", row)


def pytest_sessionfinish(session: pytest.Session) -> None:
    table, root = os.environ.get("PILOTAGE_FAULTS_TABLE"), session.config.stash.get(_ROOT, None)
    if table and root is not None:
        write_table(Path(table), read_rows(root / "rows"), session.config.stash.get(_ALL, []))
