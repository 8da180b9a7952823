"""Ask from several processes: Ray workers, each with a share of the open requests.

One process asks about 1000 times a second; more workers are for endpoints that answer faster than
that. The caller stays the only one who reads rows and keeps answers, so that budgets, outages and
a kill are its business alone. Requests and results travel in one call a worker at a time, which
begins what is new and returns, as soon as there is one result, all that there are: few calls where
much happens, no delay where little does. Nothing is held but the rows in flight.

A worker that ends is started anew, and the rows that were in flight on it are asked once more.

The package `ray` is imported here only, and only when a recipe asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from registry.errors import InfrastructureError, UserError
from registry.redaction import secrets_aside
from tasks.engines.chat_wire import ChatRequest, ChatResult
from tasks.engines.endpoints import Endpoint
from tasks.engines.openai_chat import WAITING, Asker

LOG = logging.getLogger("pilotage")

START_SECONDS = 300.0
"""A worker that is not there after so long: a cluster without a free core, or a broken one."""

OBJECT_STORE_BYTES = 100 * 2**20
"""Rows are small and travel in the calls themselves; Ray takes no less than 75 MiB."""

LONGEST_SCRATCH = 107 - len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.1")
"""Bytes of a path in which Ray can put its sockets: Linux allows 107 in all."""

LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Off a Mac and Windows too, Ray then binds its servers to 127.0.0.1. Read at its import.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""What Ray and its processes are told of a cluster on this machine."""

_TOKEN = secrets.token_hex(32)
"""Of the local clusters of this process: nobody else on the machine may run code in them."""


def ask_sharded(
    requests: Iterable[ChatRequest],
    endpoints: Sequence[Endpoint],
    on_done: Callable[[ChatResult], None],
    *,
    may_ask: Callable[[], bool],
    workers: int,
    address: str | None,
    scratch: Path,
    concurrency: int,
    **options: Any,
) -> None:
    """`ask_each` by `workers` processes, which share `concurrency` among them.

    `address` is a running cluster's, `auto` or ray://HOST:PORT; None starts one on this machine
    that listens to nobody outside, with its files under `scratch`. The other options are those of
    `Asker`; they and the endpoints' keys are sent to the workers.

    Raises `UserError` without the package, `InfrastructureError` where the cluster fails. A row
    whose worker ended twice is pending.
    """
    cluster = _local_cluster(workers, scratch) if address is None else _connection(address)
    with cluster as ray:
        shards = _Shards(ray, requests, endpoints, on_done, may_ask, options)
        try:
            asyncio.run(shards.ask_all(workers, concurrency))
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            raise InfrastructureError(f"Ray: {_reason(error)}") from error


def shares_of(concurrency: int, workers: int) -> list[int]:
    """Open requests of each worker; they add up."""
    each, rest = divmod(concurrency, workers)
    return [each + (number < rest) for number in range(workers)]


class ShardWorker:
    """What runs in a worker: begins what it is given, hands over what is finished."""

    def __init__(self, endpoints: Sequence[Endpoint], concurrency: int, options: Any) -> None:
        self._asker = Asker(endpoints, concurrency=concurrency, **options)
        self._open: set[asyncio.Task[ChatResult]] = set()
        self._finished: list[asyncio.Task[ChatResult]] = []
        self._any = asyncio.Event()

    async def ready(self) -> int:
        """Its process id."""
        return os.getpid()

    async def exchange(self, requests: list[ChatRequest]) -> list[ChatResult]:
        """Begin `requests`; then all that is finished, as soon as one is."""
        for request in requests:
            task = asyncio.create_task(self._asker.ask(request))
            self._open.add(task)
            task.add_done_callback(self._done)
        await self._any.wait()
        self._any.clear()
        finished, self._finished = self._finished, []
        return [task.result() for task in finished]

    async def stop(self) -> None:
        self._asker.stop()

    def _done(self, task: asyncio.Task[ChatResult]) -> None:
        self._open.discard(task)
        self._finished.append(task)
        self._any.set()


class _Shards:
    def __init__(
        self,
        ray: Any,
        requests: Iterable[ChatRequest],
        endpoints: Sequence[Endpoint],
        on_done: Callable[[ChatResult], None],
        may_ask: Callable[[], bool],
        options: dict[str, Any],
    ) -> None:
        self._ray = ray
        self._rest = iter(requests)
        self._endpoints = list(endpoints)
        self._on_done = on_done
        self._may_ask = may_ask
        self._options = options
        self._remote = ray.remote(num_cpus=1)(ShardWorker)
        self._workers: dict[int, Any] = {}
        self._stopped = False

    async def ask_all(self, workers: int, concurrency: int) -> None:
        shares = enumerate(shares_of(concurrency, workers))
        ahead = max(1, WAITING // workers)
        tasks = [asyncio.create_task(self._tend(name, share, ahead)) for name, share in shares]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            for worker in self._workers.values():
                self._ray.kill(worker)

    async def _tend(self, name: int, share: int, ahead: int) -> None:
        """Keep one worker busy: rows for its share and `ahead`, which may wait in it."""
        await self._start(name, share)
        asked: dict[str, ChatRequest] = {}
        lost: set[str] = set()
        new: list[ChatRequest] = []
        while True:
            while len(asked) < share + ahead and (request := next(self._rest, None)) is not None:
                asked[request.id] = request
                new.append(request)
            if not asked:
                return
            try:
                results = await self._workers[name].exchange.remote(new)
            except self._ray.exceptions.RayActorError as error:
                LOG.warning(
                    "Ray worker %d ended with %d prompts in flight, which are asked again: %s",
                    name, len(asked), _reason(error),
                )  # fmt: skip
                for request in asked.values():
                    if request.id in lost or self._stopped:
                        self._keep(_lost(request))
                new = [one for one in asked.values() if one.id not in lost and not self._stopped]
                asked = {request.id: request for request in new}
                lost = set(asked)
                await self._start(name, share)
                continue
            new = []
            for result in results:
                del asked[result.id]
                lost.discard(result.id)
                self._keep(result)

    def _keep(self, result: ChatResult) -> None:
        self._on_done(result)
        if not self._stopped and not self._may_ask():
            self._stopped = True
            for worker in self._workers.values():
                worker.stop.remote()

    async def _start(self, name: int, share: int) -> None:
        worker = self._remote.remote(self._endpoints, share, self._options)
        try:
            async with asyncio.timeout(START_SECONDS):
                await worker.ready.remote()
        except TimeoutError:
            raise InfrastructureError(
                f"Ray worker {name} did not start within {START_SECONDS:.0f} s: each needs one "
                "free CPU of the cluster"
            ) from None
        self._workers[name] = worker


def _reason(error: Exception) -> str:
    """What happened, and on the last line of Ray's pages the exception behind it."""
    lines = str(error).strip().splitlines()
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__


def _lost(request: ChatRequest) -> ChatResult:
    return ChatResult(id=request.id, state="pending", reason="the Ray worker that asked it ended")


# -- the cluster -----------------------------------------------------------------------------


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError.at(
            "teacher recipe: ray",
            "the package `ray` is not installed in this environment",
            "pip install --no-deps ray==2.60.0, or take `ray` out of the recipe",
        ) from None
    return ray


@contextmanager
def _local_cluster(workers: int, scratch: Path) -> Iterator[Any]:
    """A cluster of this process alone; gives the package. It ends with this process.

    After a kill -9 of this process too: its workers within seconds, two agents of Ray's within
    about a minute; the folder of its logs stays then.

    Its servers bind to 127.0.0.1 and ask for a token, and nothing is reported to Ray's makers.
    """
    # Ray takes SIGTERM for itself and does not give it back.
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    short = len(os.fsencode(scratch / "ray-12345678")) <= LONGEST_SCRATCH
    if short:
        scratch.mkdir(parents=True, exist_ok=True)
    with (
        _environment(LOCAL | {"RAY_AUTH_TOKEN": _TOKEN}),
        tempfile.TemporaryDirectory(
            prefix="ray-", dir=scratch if short else None, ignore_cleanup_errors=True
        ) as folder,
    ):
        ray = _imported()
        # It warns that the token is asked for, which is what we want.
        quiet = logging.getLogger("ray._private.authentication.authentication_token_setup")
        quiet.setLevel(logging.ERROR)
        try:
            # Its processes start their own with what they see now; the keys that workers need
            # come with their endpoints.
            with secrets_aside(but="RAY_"):
                ray.init(
                    address="local",
                    num_cpus=workers,
                    num_gpus=0,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    configure_logging=False,
                    log_to_driver=False,
                    _temp_dir=folder,
                )
        except (ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            raise InfrastructureError(f"Ray does not start on this machine: {error}") from error
        try:
            yield ray
        finally:
            ray.shutdown()
            if main:
                signal.signal(signal.SIGTERM, before)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set while Ray runs, and as before afterwards: other programs that we start use Ray too."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _connection(address: str) -> Iterator[Any]:
    """To a running cluster; gives the package."""
    ray = _imported()
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except ImportError as error:
        raise UserError.at(
            "teacher recipe: ray.address",
            f"{address} needs a package that is not installed here: {error}",
            "pip install --no-deps grpcio, or use `auto` on a node of the cluster",
        ) from None
    except (ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
        raise InfrastructureError(f"no Ray cluster at {address}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()
