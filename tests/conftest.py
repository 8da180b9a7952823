"""Every test gets a home of its own; nothing reaches the checkout's `.pilotage`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from registry.settings import settings

# Tests assert no times: hypothesis' limit of 200 ms an example is one.
hypothesis.settings.register_profile("pilotage", deadline=None)
hypothesis.settings.load_profile("pilotage")

# Before Prefect or MLflow is imported by any test.
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def home(tmp_path: Path) -> Iterator[Path]:
    """A fresh `PILOTAGE_HOME`, and nothing of what a command that ran in this process has set.

    Without `monkeypatch`, so that this is what is undone last.
    """
    before = dict(os.environ)
    folder = tmp_path / "pilotage-home"
    os.environ["PILOTAGE_HOME"] = str(folder)
    # A test waits for no release of this machine, nor for another test.
    os.environ["PILOTAGE_DEVICE_LOCKS"] = str(tmp_path)
    settings.cache_clear()
    yield folder
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    settings.cache_clear()
