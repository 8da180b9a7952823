"""The doctor compares with the pinned lists, and names the command that repairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry.settings import settings
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
