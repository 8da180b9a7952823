"""A run goes on when Prefect's server was away, although it may have lost its concurrency slot.

A deployment with a concurrency limit gives its run a lease of 300 s, which the run renews every
225 s. Prefect 3.9.1 cancels the run when three tries in a row fail: about four seconds without a
server at that moment, or a restart of one that keeps leases in memory, end a release after hours.
Nothing here is right only because of such a slot: engines have the device's lock, a night's runs
their idempotency keys, the store one writer per key. So the run asks longer (until the lease is
over at the server too), and then goes on without.

Can go when `prefect.flow_engine` does not ask for `raise_on_lease_renewal_failure=True` any more;
tests/unit/test_run_slots.py tells.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

TRIES = 12
"""Prefect waits 1, 2, 4, 8 and then 10 s between them: 95 s, the lease has 75 s left."""


def outlive_lost_slot() -> None:
    """For the module of a flow whose deployment has a limit, when it is imported."""
    from prefect.concurrency import _leases

    engine: Any = import_module("prefect.flow_engine")

    if getattr(engine.maintain_concurrency_lease, "outlives", False):
        return
    _leases._RENEWAL_MAX_ATTEMPTS = TRIES
    engine.maintain_concurrency_lease = _outliving(engine.maintain_concurrency_lease)


def _outliving(
    maintain: Callable[..., AbstractContextManager[None]],
) -> Callable[..., AbstractContextManager[None]]:
    def kept(*arguments: Any, **options: Any) -> AbstractContextManager[None]:
        return maintain(*arguments, **{**options, "raise_on_lease_renewal_failure": False})

    kept.outlives = True  # type: ignore[attr-defined]
    return kept
