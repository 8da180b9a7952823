"""Files that are there as a whole or not at all."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from registry.whole_files import write_whole

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
