"""Files that are there as a whole or not at all."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from registry.whole_files import unwritable, write_whole

LIMIT = 64 * 1024


def test_what_does_not_fit_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "note.json"
    write_whole(file, "old")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses as for a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        with pytest.raises(OSError):
            write_whole(file, "x" * (2 * LIMIT))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"note.json": "old"}


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for there in ("new.yaml", "file", "folder/below/new.yaml"):
        assert unwritable(tmp_path / there) == ""
    assert unwritable(tmp_path / "file" / "new.yaml") == "Not a directory"
    assert unwritable(tmp_path / f"{'x' * 300}.yaml") == "File name too long"
    # Nobody makes files there, whoever asks.
    assert unwritable(Path("/proc/new.yaml")) != ""
    assert {path.name for path in tmp_path.iterdir()} == {"file"}
