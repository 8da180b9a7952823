"""One engine of a server in parts: a vLLM server with a side channel for its KV cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from registry.errors import InfrastructureError
from registry.topology import Disaggregated, Role, transfer_config
from tasks.engines.disaggregated_transfer import Transfer, transfer_of
from tasks.engines.ports import free_ports
from tasks.engines.vllm_server import PORT_TRIES, VllmServer


class EnginePart(VllmServer):
    """A prefill or a decode engine, `prefill-0` for example. Not ready by itself: see `ready`.

    Its ports stay its own when it is started again, so that the proxy and the other engines find
    it. An engine that answers says nothing of its transfers: only `DisaggregatedServer`, which asks
    for a token through all parts, says that one is fit for use.
    """

    def __init__(
        self,
        target: Path,
        *,
        role: Role,
        number: int,
        topology: Disaggregated,
        on_cpu: bool,
        engine_args: Mapping[str, Any],
        env: Mapping[str, str],
        **server: Any,
    ) -> None:
        self.role: Role = role
        self.part = f"{role}-{number}"
        self._ports: Sequence[int] = (0, 0)
        """For requests, and for what the other side asks of its KV cache."""
        buffer = "cpu" if on_cpu else None
        transfer = {"kv-transfer-config": transfer_config(topology, role, buffer)}
        own = topology.arguments(role, engine_args) | transfer
        super().__init__(target, engine_args=own, env=env, **server)

    def place(self, variables: Mapping[str, str], ports: Sequence[int]) -> None:
        """Its devices and two ports, before its first start; a further one leaves them."""
        self._env |= variables
        self._ports = ports

    def begin(self) -> None:
        """Start its process; returns at once."""
        self._check_python()
        self._start()

    def ready(self, deadline: float) -> None:
        """Wait until it takes requests. Raises as entering a `VllmServer` does."""
        began = time.monotonic()
        for tries_left in reversed(range(PORT_TRIES)):
            if self._wait_until_listening(deadline, retry_port=tries_left > 0):
                break
            self.stop()
            self._ports = free_ports(2)
            self._start()
        self.startup_seconds = round(time.monotonic() - began, 3)
        self._read_engine(self._own_log())

    def has_ended(self) -> bool:
        """Whether its first process has, which tells at once what a health check may not."""
        return self._tree is None or self._started.poll() is not None

    def lives(self) -> bool:
        return not self.has_ended() and self._healthy()

    def transfer(self) -> Transfer:
        """What it has counted since it started. Raises `InfrastructureError` without counters,
        and as `check_alive` does where it is dead."""
        try:
            page = self._get("/metrics").text
        except httpx.HTTPError as error:
            self.check_alive()
            raise InfrastructureError(f"{self.part} gives no metrics: {error!r}") from None
        return transfer_of(page)

    def _choose_port(self) -> int:
        port, side = self._ports
        self._env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side)
        return port
