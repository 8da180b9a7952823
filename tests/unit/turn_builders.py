"""A machine that serves bundles by queues that are computed, busy or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_suites.load import LoadProfile
from registry.bundle import Bundle, Part
from registry.errors import Infeasible, InfrastructureError
from tasks.engines.load_generator import Batch, Sent, Traffic
from tasks.engines.load_prompts import Prompts, synthetic
from tests.unit.load_builders import Queue, QueueBench, profile

RATE = 5.0


def bundle(name: str, tokens: int | None = None) -> Bundle:
    draft = Part(stage="draft", key="d", digest="d") if tokens else None
    return Bundle(
        name=name,
        target=Part(stage="distill", key="t", digest="t" if tokens else name),
        draft=draft,
        num_speculative_tokens=tokens,
        engine_version="0",
    )


@dataclass
class FakeServer:
    """What a managed server shows, counted from what its generator has sent."""

    bench: Recording
    url: str
    tokens: int
    answered_before: int
    served_name: str = "m"
    api_key: str = "k"
    emulated: bool | None = None
    quantized: bool = False
    start_requests: int = 2

    def metrics(self) -> dict[str, float]:
        count = len(self.bench.queue_bench.sent)
        shown = {"vllm:request_success_total": float(self.answered_before + count)}
        if self.tokens:
            shown["vllm:spec_decode_num_drafts_total"] = 2.0 * count
            shown["vllm:spec_decode_num_accepted_tokens_total"] = 2.0 * count * self.tokens / 2
        hit_rate = self.bench.queue_bench.hit_rate
        if hit_rate is not None:
            shown["vllm:prefix_cache_queries_total"] = 10.0 * count
            shown["vllm:prefix_cache_hits_total"] = 10.0 * count * hit_rate
        return shown


@dataclass
class Recording:
    """Notes each batch, and has the queue answer it."""

    queue_bench: QueueBench
    world: World
    version: str = "computed 1"
    tool: str = "computed"

    def send(self, traffic: Traffic, batch: Batch, raw: Path) -> Sent:
        if self.world.dies_after == len(self.world.batches):
            raise InfrastructureError("the generator died")
        self.world.batches.append(batch)
        return self.queue_bench.send(traffic, batch, raw)


@dataclass
class FakeServed:
    server: FakeServer
    load_generator: Recording


@dataclass
class World:
    """A machine: how long each bundle serves a request, and how busy it is at each start."""

    service: Mapping[str, float] = field(default_factory=dict)
    """Seconds by bundle name, or by name and tokens as in `eagle-3`."""
    busy: tuple[float, ...] = (1.0,)
    """Factors of all times; two starts in a row share one."""
    hit_rates: tuple[float, ...] = (0.0,)
    answered_before: int = 1
    infeasible: tuple[str, ...] = ()
    emulated: tuple[str, ...] | None = None
    """Names of bundles with an emulated kernel; None: the servers do not say."""
    error_share: Mapping[str, float] = field(default_factory=dict)
    dies_after: int | None = None
    url: str = "http://127.0.0.1:9"
    starts: list[str] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    @contextmanager
    def serve(self, one: Bundle) -> Iterator[FakeServed]:
        tokens = one.num_speculative_tokens or 0
        name = f"{one.name}-{tokens}" if tokens else one.name
        if name in self.infeasible:
            raise Infeasible(f"no kernel for {name}")
        start = len(self.starts)
        self.starts.append(name)
        factor = self.busy[start // 2 % len(self.busy)]
        queue = Queue(
            service=self.service.get(name, 0.05) * factor,
            error_share=self.error_share.get(name, 0.0),
            seed=start,
        )
        bench = Recording(QueueBench(queue, self.hit_rates[start % len(self.hit_rates)]), self)
        known = None if self.emulated is None else one.name in self.emulated
        server = FakeServer(bench, self.url, tokens, self.answered_before, emulated=known)
        yield FakeServed(server, bench)


def supply() -> Prompts:
    written = profile()
    return synthetic(written.scenarios, written.seed)


def written(**changes: Any) -> LoadProfile:
    return profile(**({"seconds_per_rate": 40} | changes))
