"""A server in parts: prefill engines, decode engines, and a proxy in front of them.

Used as a `VllmServer` is. It is ready when a token has come through the proxy from every pair of a
prefill and a decode engine, and the decode engine's own counters say that the prompt was
transferred: one that computes the prompt again gives the same token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, Self

import httpx

from registry.engine_memory import MeasuredMemory
from registry.errors import InfrastructureError, UserError
from registry.json_files import json_object
from registry.provenance import hardware
from registry.settings import settings
from registry.topology import ROLES, Disaggregated, Role, cpu_env, engine_gpus
from registry.transfer import Transfer, untransferred
from tasks.engines.disaggregated_part import EnginePart
from tasks.engines.disaggregated_transfer import keeps_whole_prompts
from tasks.engines.engine_memory import measured_memory
from tasks.engines.ports import free_ports
from tasks.engines.subprocesses import wait_until
from tasks.engines.vllm_server import VllmServer

PROXY = Path(__file__).parent / "in_server" / "disaggregated_proxy.py"

PROXY_PART = "proxy"

CPU = "cpu"
"""The device of a machine without a GPU."""

SETTLE = 30.0
"""Seconds for the engines' counters to say what was answered: they are written between steps."""


class DisaggregatedServer(VllmServer):
    """x prefill engines, y decode engines and the proxy, on free loopback ports with one key.

    Entering raises as `VllmServer` does, `UserError` where there are fewer GPUs than its engines
    need, and `InfrastructureError` where a prompt is not transferred. Its own process is the proxy:
    `url`, `port`, `pid`, `log` and `metrics` are those of it; each engine writes a log beside it,
    `...-prefill-0.log`. What the proxy shows as metrics is told in its file.
    """

    name = "disaggregated"

    def __init__(
        self,
        target: Path,
        *,
        topology: Disaggregated,
        log: Path,
        devices: Sequence[str] = (CPU,),
        engine_args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **server: Any,
    ) -> None:
        """`devices`: what CUDA_VISIBLE_DEVICES may name, or `cpu` alone."""
        super().__init__(target, log=log, engine_args=engine_args, env=env, **server)
        self.topology = topology
        self.block_bytes = 0
        # One by way of every pair of engines.
        self.start_requests = topology.prefill * topology.decode
        self._devices = tuple(devices)
        on_cpu = self._devices == (CPU,)
        self.parts = [
            EnginePart(
                target,
                role=role,
                number=number,
                topology=topology,
                on_cpu=on_cpu,
                engine_args=engine_args or {},
                env=part_env(topology, env or {}, on_cpu=on_cpu),
                log=log.with_name(f"{log.stem}-{role}-{number}{log.suffix}"),
                **{**server, "api_key": self.api_key},
            )
            for role in ROLES
            for number in range(topology.engines(role))
        ]
        config = self.target / "config.json"
        self.whole_prompts = keeps_whole_prompts(json_object(config) if config.is_file() else {})

    @property
    def command(self) -> list[str]:
        words = [str(self._python), str(PROXY), "--port", str(self.port)]
        for part in self.parts:
            words += [f"--{part.role}", part._root]
        return words

    def of(self, role: Role) -> list[EnginePart]:
        return [part for part in self.parts if part.role == role]

    # -- start, watch, end -----------------------------------------------------------------

    def __enter__(self) -> Self:
        self._check_python()
        places = device_places(self.topology, self._engine_args, self._devices)
        started = time.monotonic()
        deadline = started + settings().engine_start_timeout
        try:
            ports = free_ports(2 * len(self.parts))
            for number, part in enumerate(self.parts):
                part.place(places[part.part], ports[2 * number : 2 * number + 2])
                part.begin()
            for part in self.parts:
                part.ready(deadline)
            self._start_proxy(deadline)
            self._prove(deadline)
        except BaseException:
            self.stop()
            raise
        self.startup_seconds = round(time.monotonic() - started, 3)
        self._read_engine("")
        return self

    def revive(self) -> list[str]:
        """Start what is dead again at its place, and prove it; what was started.

        A prefill engine that comes again has another cache at another place. vLLM 0.32's decode
        engines were seen to go on with it; one that ends itself at the first fetch all the same is
        started again too. Raises as entering does.
        """
        deadline = time.monotonic() + settings().engine_start_timeout
        revived: list[str] = []
        while dead := self._dead():
            revived += dead
            places = [part.url for part in self.parts]
            for part in self.parts:
                if part.part in dead:
                    part.stop()
                    part.begin()
            for part in self.parts:
                if part.part in dead:
                    part.ready(deadline)
            # Where another process took the port of a part, the proxy would ask that one.
            moved = places != [part.url for part in self.parts]
            if PROXY_PART in dead or moved:
                super().stop()
                self._start_proxy(deadline)
            try:
                self._prove(deadline)
            except InfrastructureError:
                if set(self._dead()) <= set(revived):
                    raise
        return revived

    def _dead(self) -> list[str]:
        dead = [part.part for part in self.parts if not part.lives()]
        return dead + ([PROXY_PART] if self._started.poll() is not None else [])

    def stop(self) -> None:
        """End every process, the proxy first. Safe to call twice."""
        super().stop()
        # Each has its grace: side by side they have one.
        with ThreadPoolExecutor(max(1, len(self.parts))) as pool:
            for ended in [pool.submit(part.stop) for part in self.parts]:
                ended.result()

    def check_alive(self) -> None:
        """Raise when a part of it cannot answer any more, with its name and reason."""
        for part in self.parts:
            try:
                part.check_alive()
            except InfrastructureError as error:
                raise InfrastructureError(f"{part.part}: {error}") from None
        super().check_alive()

    @property
    def pids(self) -> list[int]:
        return [self.pid, *(part.pid for part in self.parts)]

    def memory(self) -> MeasuredMemory:
        """Of all processes now; what the logs say of a start is the first decode engine's."""
        return measured_memory(self.pids, self.of("decode")[0]._own_log())

    def memory_bytes(self) -> int:
        return sum((part.memory_bytes() for part in self.parts), super().memory_bytes())

    def _read_engine(self, log: str) -> None:
        """What the engines said of themselves; the KV cache is a decode engine's, the smallest."""
        self.engine_version = self.parts[0].engine_version
        self.quantized = any(part.quantized for part in self.parts)
        self.kernels = _together([part.kernels for part in self.parts])
        self.emulated_kernels = _together([part.emulated_kernels for part in self.parts])
        sizes = [part.kv_cache_tokens for part in self.of("decode")]
        known = [size for size in sizes if size is not None]
        self.kv_cache_tokens = min(known) if len(known) == len(sizes) else None

    def _start_proxy(self, deadline: float) -> None:
        self._start()
        self._wait_until_listening(deadline, retry_port=False)

    # -- what proves a transfer ------------------------------------------------------------

    def transfer(self) -> Transfer:
        """What all decode engines have counted since they started."""
        first, *others = [part.transfer() for part in self.of("decode")]
        for other in others:
            first = first.plus(other)
        return first.model_copy(update={"block_bytes": self.block_bytes})

    def transferred(self, before: Transfer) -> Transfer:
        """What was counted since `before`, once the engines are at rest."""
        last = self.transfer()
        deadline = time.monotonic() + SETTLE
        # The bytes are counted at a step, one after the token that they brought.
        while True:
            time.sleep(0.5)
            now = self.transfer()
            if now == last or time.monotonic() > deadline:
                return now.since(before, self.block_bytes)
            last = now

    def check_transferred(self, before: Transfer) -> Transfer:
        """What was counted since `before`. Raises `InfrastructureError` where a prompt was not
        transferred: nothing that was measured is then of this arrangement."""
        found = self.transferred(before)
        # Where nothing was answered there is nothing to say: an overload, or a hang.
        if found.prompt_tokens and (
            reasons := untransferred(found, whole_prompts=self.whole_prompts)
        ):
            raise InfrastructureError(
                f"{self!r} did not transfer its prompts: {'; '.join(reasons)} ({found.words})"
            )
        return found

    def _generate_one_token(self, deadline: float) -> None:
        self._prove(deadline)

    def _prove(self, deadline: float) -> None:
        """A token by way of every pair of engines, with its prompt transferred.

        The first fetch of a pair takes a handshake and may outlive the lease of its blocks (30 s),
        so it is asked again until the deadline.
        """
        for prefill, decode in product(self.of("prefill"), self.of("decode")):
            while True:
                self._raise_dead()
                reason = self._probe(prefill, decode, deadline)
                if not reason:
                    break
                if time.monotonic() > deadline:
                    self._raise_dead()
                    raise InfrastructureError(
                        f"{self!r}: no token came from {prefill.part} by way of {decode.part}: "
                        f"{reason}; their logs are {prefill.log} and {decode.log}"
                    )
                time.sleep(0.5)

    def _raise_dead(self) -> None:
        for part in self.parts:
            if part.has_ended():
                part.check_alive()
        if self._started.poll() is not None:
            self._raise_death("ended")

    def _probe(self, prefill: EnginePart, decode: EnginePart, deadline: float) -> str:
        """Why no token came; empty: one came, and its prompt was transferred.

        Raises `InfrastructureError` where a token came of a prompt that was computed again.
        """
        before = decode.transfer()
        # Of a prompt that nobody has seen, so that no prefix cache has it: a block and a token.
        prompt = [32 + secrets.randbelow(192) for _ in range(before.block_size + 1)]
        body = {"model": self.served_name, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        try:
            reply = self._client.post(
                f"{self.url}/completions",
                json=body,
                headers={"X-Disaggregated-Parts": f"{prefill.part} {decode.part}"},
                timeout=max(1.0, deadline - time.monotonic()),
            )
        except httpx.HTTPError as error:
            return repr(error)
        if reply.status_code != 200:
            return f"HTTP {reply.status_code}: {reply.text[:500]}"
        blocks = 2
        found, reasons = before, [""]

        def counted() -> bool:
            nonlocal found, reasons
            found = decode.transfer().since(before, self.block_bytes)
            if not self.block_bytes and found.transferred_tokens == len(prompt):
                found = found.model_copy(update={"block_bytes": found.bytes_moved // blocks})
            reasons = untransferred(found, whole_prompts=self.whole_prompts)
            if found.computed_tokens > 0:
                return True
            # Clients of a server that is started again are answered beside the probe: what a block
            # has is known by then. Where it is not, the next probe may be alone.
            others = found.prompt_tokens > len(prompt) and not self.block_bytes
            return others or (found.prompt_tokens >= len(prompt) and not reasons)

        wait_until(counted, SETTLE, every=0.2)
        words = f"{'; '.join(reasons)} ({found.words})"
        if found.computed_tokens:
            raise InfrastructureError(
                f"{decode.part} gave a token, but did not fetch its prompt from {prefill.part}: "
                f"{words}"
            )
        if reasons:
            return f"a token, but no proof that its prompt was fetched: {words}"
        self.block_bytes = found.block_bytes
        return ""


def part_env(topology: Disaggregated, env: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """The variables of every engine. Pure but for the number of cores.

    Of GPUs nothing is said: there UCX finds its own way, not run yet.
    """
    found = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    if on_cpu:
        found |= cpu_env(topology, int(hardware()["cores"]), one_host=True)
    return {**found, **env}


def device_places(
    topology: Disaggregated, engine_args: Mapping[str, Any], devices: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Variables by part: which devices are its own, prefill engines first. Pure.

    Raises `UserError` where there are too few.
    """
    wanted = {
        f"{role}-{number}": engine_gpus(topology.arguments(role, engine_args))
        for role in ROLES
        for number in range(topology.engines(role))
    }
    if tuple(devices) == (CPU,):
        return {part: {} for part in wanted}
    needed = sum(wanted.values())
    if needed > len(devices):
        words = ", ".join(f"{part} {count}" for part, count in wanted.items())
        raise UserError.at(
            "serve recipe: topology",
            f"needs {needed} GPUs ({words}), and there are {len(devices)} here",
            "fewer engines, a smaller tensor-parallel-size, or a machine with more GPUs",
        )
    found, first = {}, 0
    for part, count in wanted.items():
        found[part] = {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + count])}
        first += count
    return found


def _together(lists: Sequence[list[str] | None]) -> list[str] | None:
    """All names of several engines; None where one of them does not tell. Pure."""
    if any(one is None for one in lists):
        return None
    return sorted({name for one in lists for name in one or []})
