"""Prefect with a temporary server of the module's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.testing.utilities import prefect_test_harness


@pytest.fixture(scope="module")
def prefect() -> Iterator[None]:
    # The first start migrates a database; the default of 30 s was missed on two busy cores.
    with prefect_test_harness(server_startup_timeout=180):
        yield
