"""The doctor compares with the pinned lists, and names the command that repairs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from registry.settings import settings
from registry.whole_files import write_whole
from tasks import doctor


def test_reads_pins_and_nothing_else(tmp_path: Path) -> None:
    listing = tmp_path / "driver-cpu.txt"
    listing.write_text(
        "# Made by `make lock`; do not edit.\n"
        "Lm_Eval==0.4.13\n"
        "ray[default]==2.9.0 ; python_version < '4'\n"
        "torch==2.13.0 \\\n"
        "    --hash=sha256:abc\n"
        "-e .\n"
        "loose>=1\n"
    )
    assert doctor.pinned(listing) == {"lm-eval": "0.4.13", "ray": "2.9.0", "torch": "2.13.0"}
    assert doctor.pinned(tmp_path / "absent.txt") == {}


def test_names_what_differs() -> None:
    wanted = {"torch": "2.13.0", "vllm": "0.32.0+cpu", "pandas": "3.1.1", "numba": "0.66.0"}
    installed = {"torch": "2.13.0+cpu", "vllm": "0.32.0", "pandas": "3.1.0"}
    assert doctor.differences(installed, wanted) == [
        "numba 0.66.0 is missing",
        "pandas is 3.1.0, pinned 3.1.1",
        "vllm is 0.32.0, pinned 0.32.0+cpu",
    ]
    assert doctor.differences(wanted, wanted) == []


def test_a_missing_serve_environment_is_a_problem_with_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_SERVE_PYTHON", str(tmp_path / "python"))
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "not" / "there" / "yet"))
    settings.cache_clear()
    try:
        checks = doctor.examine()
    finally:
        settings.cache_clear()
    serve = [check for check in checks if check.area == "serve"]
    assert [(check.state, check.name) for check in serve] == [("problem", "python")]
    assert "make env" in serve[0].remedy
    assert {"CPU", "GPU", "memory", "disk"} <= {check.name for check in checks}
    assert all(check.remedy for check in checks if check.state == "problem")
    assert not any(check.remedy for check in checks if check.state != "problem")


def test_what_a_broken_installation_left_is_no_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "~orch-2.13.0.dist-info"
    left.mkdir()
    (left / "METADATA").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "torch" in doctor.this_environment().distributions


@pytest.mark.parametrize("said", ["[]", "{}", "null", "a banner\n{}", '{"python": 3}'])
def test_a_serve_python_that_answers_something_else_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ -z \"$SOME_API_KEY\" ] || exit 9\ncat <<'END'\n{said}\nEND\n")
    python.chmod(0o755)
    monkeypatch.setenv("SOME_API_KEY", "planted-secret")
    monkeypatch.setenv("PILOTAGE_SERVE_PYTHON", str(python))
    settings.cache_clear()
    found = doctor.serve_environment()
    assert isinstance(found, str) and "does not run" in found and "status 9" not in found


def test_two_that_write_one_file_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    texts = [letter * 500_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: write_whole(file, text), texts * 5))
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]


def test_a_home_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (disk,) = [check for check in doctor._machine() if check.name == "disk"]
    assert disk.state == "problem" and disk.found.endswith("which cannot be written")
    assert disk.remedy == "export PILOTAGE_HOME=/a/folder/of/your/own"
