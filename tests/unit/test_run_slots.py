"""A run outlives the loss of its concurrency slot."""

from __future__ import annotations

import ast
import inspect
import time
from typing import Self
from uuid import uuid4

import prefect.flow_engine as engine
import pytest
from prefect.concurrency import _leases

from registry.settings import CHECKOUT
from tasks.deploy_file import read_deploy_file
from tasks.run_slots import TRIES, outlive_lost_slot


def test_the_workaround_is_needed_still() -> None:
    """Prefect ends a run whose slot was lost; without that, tasks/run_slots.py can go."""
    source = inspect.getsource(engine.FlowRunEngine.setup_run_context)
    assert "raise_on_lease_renewal_failure=True" in source


def test_a_run_goes_on_when_its_slot_cannot_be_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class Away:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def renew_concurrency_lease(self, **asked: object) -> None:
            tried.append(asked)
            raise ConnectionError("nobody there")

    monkeypatch.setattr(_leases, "get_client", lambda **options: Away())
    monkeypatch.setattr(_leases, "exponential_backoff_with_jitter", lambda *numbers: 0.0)
    outlive_lost_slot()
    outlive_lost_slot()
    with engine.maintain_concurrency_lease(uuid4(), 300, raise_on_lease_renewal_failure=True):
        deadline = time.monotonic() + 30
        while len(tried) < TRIES and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
    assert len(tried) == TRIES


def test_every_flow_whose_deployment_has_a_limit_outlives_it() -> None:
    limited = [one for one in read_deploy_file().deployments if one.concurrency_limit]
    assert limited
    for one in limited:
        path = CHECKOUT / f"{one.entrypoint.rpartition('.')[0].replace('.', '/')}.py"
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert "outlive_lost_slot" in names, path
