"""Temporary folders of `pilotage profile`: of a killed one, of one that works, on a full disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.errors import InfrastructureError
from tasks.profiling import profile_logs
from tasks.traffic_scratch import PREFIX, scratch
from tests.faults.disks import mounted
from tests.unit.traffic_builders import write_csv

HOLD = """
import sys, time
from tasks.traffic_scratch import scratch
with scratch() as folder:
    (folder / "spilled").mkdir()
    (folder / "spilled" / "data").write_text("x")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary folder."""
    import tempfile

    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield place


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_a_killed_one_is_swept_by_the_next_and_a_living_one_is_not(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None
        theirs = Path(held.stdout.readline().strip())
        with scratch() as ours:
            assert names(place) == {theirs.name, ours.name}
        assert names(place) == {theirs.name}
        held.kill()
    # The kill ran no line of it: the folder is there with all that it held.
    assert (theirs / "spilled" / "data").is_file()
    with scratch() as ours:
        assert names(place) == {ours.name}
    assert names(place) == set()


def test_what_is_not_ours_is_left(place: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    (place / f"{PREFIX}file").write_text("x")
    (place / "other").mkdir()
    with scratch():
        pass
    assert names(place) == {f"{PREFIX}link", f"{PREFIX}file", "other"}
    assert elsewhere.is_dir()


def test_no_place_for_a_folder_is_the_machines(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(place / "none"))
    with (
        pytest.raises(InfrastructureError, match=r"none: no temporary folder .*TMPDIR"),
        scratch(),
    ):
        pass


def test_a_disk_that_is_full_is_the_machines_and_leaves_nothing(
    place: Path, tmp_path: Path
) -> None:
    """UTF-16 is written anew for DuckDB, and needs more than the disk has."""
    log = write_csv(tmp_path / "log.csv", [f"{1_760_000_400 + n},10,100,5" for n in range(60_000)])
    log.write_bytes(log.read_text().encode("utf-16"))
    with mounted(place, 1):
        with pytest.raises(InfrastructureError, match=rf"{PREFIX}\w+: the disk is full; .*TMPDIR"):
            profile_logs([log])
        assert names(place) == set()
    assert profile_logs([log]).profile.requests == 60_000
