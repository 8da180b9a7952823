"""`pilotage validate`: what was not looked at never counts as valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.rendering import validate_files, yaml_below
from recipes.loader import RECIPES_DIR
from registry.errors import UserError
from tests.unit.bad_input.cases import run


def test_both_endings_are_read(tmp_path: Path) -> None:
    whole = (RECIPES_DIR / "serve" / "vllm_cpu_2core.yaml").read_text()
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.yaml").write_text(whole)
    (tmp_path / "inner" / "b.yml").write_text(whole)
    assert validate_files([tmp_path]) == 2
    (tmp_path / "inner" / "b.yml").write_text("kind: serv")
    with pytest.raises(UserError, match=r"inner/b\.yml: kind: is 'serv'"):
        validate_files([tmp_path])


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: cannot be read \(No such file"):
        yaml_below(tmp_path / "gone")


def test_a_message_holds_nothing_that_a_terminal_obeys() -> None:
    said = run(["validate", "\x1b[31mred\u202e.yaml"])
    assert said.err.startswith(r"pilotage: \x1b[31mred\u202e.yaml: cannot be read")


def test_a_full_log_takes_the_words_and_not_the_status() -> None:
    with Path("/dev/full").open("wb") as full:
        words = [sys.executable, "-m", "flows.cli", "validate", "nope.yaml"]
        assert subprocess.run(words, stderr=full, check=False, timeout=60).returncode == 2


def test_a_full_memory_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("flows.cli.app", full)
    said = run(["recipes"])
    assert (said.status, said.err) == (4, "pilotage: MemoryError: there is not enough of it\n")
