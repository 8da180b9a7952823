"""`pilotage serve` of a bundle with prefill and decode apart: all parts in the foreground."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from registry.bundle import Bundle
from registry.deploy_parts import PROXY_FILE, engines_of, part_arguments, part_env, side_channel
from registry.deployment import Deployment
from registry.errors import Infeasible, InfrastructureError, UserError
from registry.provenance import hardware
from registry.serve_words import served_env
from registry.settings import settings
from tasks.devices import devices
from tasks.engines.disaggregated_server import DisaggregatedServer, device_places
from tasks.engines.vllm_server import command
from tasks.progress import LOG

FIRST_PORT = 8100
"""Of the engines in what is printed; a server of ours takes ports that are free."""

WATCH = 5.0
"""Seconds between two looks at the parts."""

MOST_REVIVALS = 3
"""In a row, without `QUIET` seconds in between: a part that always dies is no accident."""
QUIET = 600.0


class Parts(Protocol):
    """What is watched, as `DisaggregatedServer` is."""

    def check_alive(self) -> None: ...
    def revive(self) -> list[str]: ...


class FrontedServer(DisaggregatedServer):
    """With its proxy on a port that was asked for."""

    def __init__(self, target: Path, *, front_port: int, **server: Any) -> None:
        super().__init__(target, **server)
        self._front_port = front_port

    def _choose_port(self) -> int:
        return self._front_port


def serve_in_parts(bundle: Bundle, reference: str, port: int) -> None:
    """Start every part, prove each pair by a transferred token, and watch until a signal comes.

    A part that dies is started again. Ending it by an exception ends all processes. Raises
    `UserError` without a key, and as `DisaggregatedServer` does.
    """
    key = os.environ.get("VLLM_API_KEY", "")
    if not key:
        raise UserError.at(
            "VLLM_API_KEY",
            "is not set, and the parts of this server need one key between them and for clients",
            "set it to a secret of yours and start again",
        )
    topology = bundle.topology
    assert topology is not None, "the bundle is served by one engine"
    name = reference.partition("@")[0]
    settings().logs_dir.mkdir(parents=True, exist_ok=True)
    log = settings().logs_dir / f"serve-{bundle.digest[:12]}-{os.getpid()}.log"
    server = FrontedServer(
        bundle.target.path,
        front_port=port,
        topology=topology,
        devices=devices(),
        log=log,
        served_name=name,
        engine_args=bundle.engine_args,
        env=bundle.env,
        draft=bundle.draft.path if bundle.draft else None,
        num_speculative_tokens=bundle.num_speculative_tokens or 0,
        where=reference,
        api_key=key,
    )
    LOG.info("starting %s; logs %s", topology.words, log.with_name(f"{log.stem}*"))
    with server:
        LOG.info("%s is served at %s", name, server.url)
        watch(server)


def watch(
    server: Parts,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Look at the parts until an exception comes, and start again what is dead.

    Raises `InfrastructureError` or `Infeasible` where parts die again and again.
    """
    in_a_row, last = 0, clock()
    while True:
        sleep(WATCH)
        try:
            server.check_alive()
        # A part that ran, and then ended for want of memory, has its reason from its log.
        except (Infeasible, InfrastructureError) as error:
            in_a_row = 1 if clock() - last > QUIET else in_a_row + 1
            if in_a_row > MOST_REVIVALS:
                raise
            LOG.warning("%s", error)
            LOG.info("started again: %s", ", ".join(server.revive()))
            last = clock()


def printed(bundle: Bundle, reference: str, port: int) -> str:
    """The command of each part, one line each, as `--print` shows them. Nothing is started."""
    return "\n".join(_lines(bundle, reference.partition("@")[0], port))


def _lines(bundle: Bundle, name: str, port: int) -> Iterator[str]:
    deployment = Deployment(model=name, bundle=bundle, hardware=hardware(), weights_bytes=0)
    assert bundle.topology is not None, "the bundle is served by one engine"
    places = device_places(bundle.topology, bundle.engine_args, devices())
    python = settings().serve_python
    front = [str(python), str(PROXY_FILE), "--port", str(port)]
    for number, (role, _, part) in enumerate(engines_of(deployment)):
        own = FIRST_PORT + number
        words = command(
            python,
            bundle.target.path,
            name,
            part_arguments(deployment, role),
            own,
            bundle.draft.path if bundle.draft else None,
            bundle.num_speculative_tokens or 0,
        )
        env = part_env(deployment, one_host=True) | served_env(bundle.env) | places[part]
        env |= side_channel("127.0.0.1", number)
        yield f"# {part}"
        yield shlex.join([*(f"{key}={value}" for key, value in env.items()), *words])
        front += [f"--{role}", f"http://127.0.0.1:{own}"]
    yield "# proxy"
    yield shlex.join(front)
