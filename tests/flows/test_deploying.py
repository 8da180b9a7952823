"""`pilotage deploy` on a real Prefect server: what it says that it did stands there afterwards."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness

from flows.gate import gate_evidence
from recipes.loader import read_yaml
from registry.errors import InfrastructureError
from tasks import deploying
from tasks.deploy_file import DEPLOY_FILE
from tasks.deploying import deploy

NAME = "gate/ci"


@pytest.fixture(scope="module")
def client() -> Iterator[SyncPrefectClient]:
    with prefect_test_harness(server_startup_timeout=180), get_client(sync_client=True) as asked:
        for pool in ("cpu", "gpu"):
            asked.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        yield asked


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The checkout's file with one deployment alone, which is registered in no time."""
    content = read_yaml(DEPLOY_FILE)
    content["deployments"] = [one for one in content["deployments"] if one["name"] == "ci"]
    path = tmp_path / "prefect.yaml"
    path.write_text(json.dumps(content))
    return path


def api() -> str:
    return str(PREFECT_API_URL.value())


def test_a_registering_that_changed_nothing_is_no_success(
    client: SyncPrefectClient, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(deploying, "_register", asked.append)
    with pytest.raises(InfrastructureError, match=rf"{NAME}: .* the server has another entrypoint"):
        deploy(api(), file)
    assert [one["name"] for one in asked[0]["deployments"]] == ["ci"]


def test_what_somebody_paused_goes_on_and_the_second_deploy_changes_nothing(
    client: SyncPrefectClient, file: Path
) -> None:
    client.create_deployment(client.create_flow(gate_evidence), "ci", paused=True)
    done = deploy(api(), file)
    assert "paused" in done.changed[NAME]
    assert client.read_deployment_by_name(NAME).paused is False
    again = deploy(api(), file)
    assert (again.changed, NAME in again.unchanged) == ({}, True)


def test_prefect_deploy_sees_no_secret_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def run(words: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        seen.update(given["env"])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr("tasks.deploying.subprocess.run", run)
    monkeypatch.setenv("PILOTAGE_TEACHER_API_KEY", "planted")
    monkeypatch.setenv("PILOTAGE_MLFLOW_URI", "postgresql://me:planted@db/mlflow")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:pass")
    deploying._register({"name": "pilotage", "deployments": []})
    assert seen["PREFECT_API_AUTH_STRING"] == "admin:pass"
    assert seen["PATH"]
    assert "planted" not in " ".join(seen.values())
