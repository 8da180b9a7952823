"""The slot in Prefect of a device that is held by its file lock (`tasks/devices.py`).

Prefect leases a slot for a time and takes it back unless the lease is renewed. Its own context
manager gives up after three failed renewals; here a server that goes away and comes back is asked
again until the device is given back. A slot that is taken although the file lock is ours was left
by a run that was killed: it is freed at once instead of after its lease.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import httpx

from registry.errors import InfrastructureError
from tasks.progress import LOG

LEASE = 300.0
"""Seconds of a lease; Prefect takes at least 60."""
RENEW_EVERY = 60.0
"""Seconds. A server that is away for less than `LEASE` minus this never loses the slot."""
TRIES, AGAIN = 3, 1.0
"""A slot that is not given is asked for again after so many seconds, and then at every renewal."""
ANSWER = 15.0
"""Seconds for an answer; Prefect's own minute would be added to every stage where one hangs."""


class Slot:
    """One slot of each limit in `names`, limits that are created where they are missing."""

    def __init__(self, names: Sequence[str], left: Sequence[str]) -> None:
        """`left`: leases of holders that were killed, as their records have them."""
        self._names = list(names)
        self._left = leases(left)
        self._lease: UUID | None = None
        self._asking = threading.Lock()

    @contextmanager
    def taken(self, noted: Sequence[Callable[[str], None]]) -> Iterator[None]:
        """Hold the slot as well as Prefect allows; each of `noted` is told a new lease.

        The device is ours by its lock, so the work begins while the slot is still asked for: on
        SQLite, Prefect 3.9 refuses it whenever something was written meanwhile, and its client
        sleeps for two seconds after that. Raises `InfrastructureError` for a limit that a person
        set to none.
        """
        self._refuse_closed()
        stop = threading.Event()
        self._noted = noted
        keeping = threading.Thread(
            target=contextvars.copy_context().run, args=(self._keep, stop), daemon=True
        )
        keeping.start()
        try:
            yield
        finally:
            stop.set()
            with self._asking:
                self._give_back()

    def _keep(self, stop: threading.Event) -> None:
        failed = 0
        while not stop.is_set():
            with self._asking:
                if stop.is_set():
                    return
                fault = self._ask()
            failed = failed + 1 if fault else 0
            if failed == TRIES:
                LOG.warning(
                    "Prefect does not give the slot %s (%s); the device is held by its file lock",
                    ", ".join(self._names), fault,
                )  # fmt: skip
            stop.wait(AGAIN if 0 < failed < TRIES else RENEW_EVERY)

    def _refuse_closed(self) -> None:
        for name in self._names:
            # A limit that does not exist, and a server that does not tell, refuse nobody.
            with suppress(Exception), _client() as client:
                if client.read_global_concurrency_limit_by_name(name).limit == 0:
                    break
        else:
            return
        raise InfrastructureError(f"Prefect's limit {name} is set to no slot: raise it in the UI")

    def _ask(self) -> str:
        """Take the slot, or renew its lease. What was wrong; empty when it is held."""
        try:
            with _client() as client:
                if self._lease is not None and _renewed(client, self._lease):
                    return ""
                self._lease = self._take(client)
            for note in self._noted:
                note(str(self._lease))
        except Exception as error:
            # Whatever a server, or what answers in its place, says: no run dies of it.
            return f"{type(error).__name__}: {error}"
        return ""

    def _take(self, client: Any) -> UUID:
        from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate

        while self._left:
            client.release_concurrency_slots_with_lease(self._left.pop())
        for _ in range(3):
            try:
                answer = client.increment_concurrency_slots_with_lease(
                    self._names, 1, "concurrency", LEASE, _holder()
                ).json()
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.LOCKED:
                    raise
                for name in self._names:
                    LOG.info("%s: a slot that a killed run left is freed", name)
                    client.update_global_concurrency_limit(
                        name, GlobalConcurrencyLimitUpdate(active_slots=0)
                    )
                continue
            lease = UUID(answer["lease_id"])
            missing = set(self._names) - {limit["name"] for limit in answer["limits"]}
            if not missing:
                return lease
            # An increment passes over a limit that does not exist.
            client.release_concurrency_slots_with_lease(lease)
            for name in missing:
                _create(client, name)
        raise httpx.HTTPError("others take it as fast as it is freed")

    def _give_back(self) -> None:
        if self._lease is None:
            return
        try:
            with _client() as client:
                client.release_concurrency_slots_with_lease(self._lease)
        except Exception as error:
            LOG.warning(
                "Prefect was not told that %s is free (%s); its slot ends within %.0f s, and the "
                "next holder frees it at once",
                ", ".join(self._names), type(error).__name__, LEASE,
            )  # fmt: skip


def leases(written: Sequence[str]) -> list[UUID]:
    """Those that are some; everybody may write into a record. Pure."""
    found = set()
    for one in written:
        with suppress(ValueError):
            found.add(UUID(one))
    return sorted(found)


_clients: dict[str | None, tuple[Any, Any]] = {}
"""By address: settings, and a client of our own. To make both anew took four times as long as the
two requests that a stage needs."""


@contextmanager
def _client() -> Iterator[Any]:
    """A client that does not try again by itself: the file lock holds meanwhile, and a stage does
    not wait a minute for a server that is away."""
    from prefect.client.orchestration import get_client
    from prefect.context import SettingsContext, get_settings_context
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES

    now = get_settings_context()
    address = PREFECT_API_URL.value_from(now.settings)
    known = _clients.get(address)
    settings = known[0] if known else now.settings.copy_with_update({PREFECT_CLIENT_MAX_RETRIES: 0})
    with SettingsContext(profile=now.profile, settings=settings):
        if known is None:
            # With settings of its own it is not the flow's, which may be of another address and
            # waits a minute. Entered and never left: it is closed with the process.
            own = get_client(sync_client=True, httpx_settings={"timeout": ANSWER})
            known = _clients[address] = (settings, own.__enter__())
        yield known[1]


def _create(client: Any, name: str) -> None:
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectAlreadyExists

    try:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
    except ObjectAlreadyExists:
        pass
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.CONFLICT:
            raise


def _renewed(client: Any, lease: UUID) -> bool:
    """False when the server does not know the lease any more."""
    try:
        client.renew_concurrency_lease(lease, LEASE)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.GONE:
            return False
        raise
    return True


def _holder() -> Any:
    from prefect.client.schemas.objects import ConcurrencyLeaseHolder
    from prefect.context import FlowRunContext, TaskRunContext

    flow, task = FlowRunContext.get(), TaskRunContext.get()
    if flow is not None and flow.flow_run is not None:
        return ConcurrencyLeaseHolder(type="flow_run", id=flow.flow_run.id)
    return ConcurrencyLeaseHolder(type="task_run", id=task.task_run.id) if task else None
