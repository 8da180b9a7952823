"""One server whose queue is computed instead of waited for: what a search finds can be checked."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.engines.load_generator import Batch, Sent, Traffic

Row = dict[str, Any]

TOKENS = 4


def row(start: float, e2el_ms: float | None = 100.0, **changes: Any) -> Row:
    """A request of four tokens spread evenly; failed where no time is given."""
    if e2el_ms is None:
        times: Row = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "output_tokens"))
    else:
        each = e2el_ms / TOKENS
        times = {"ttft_ms": each, "tpot_ms": each, "itl_ms": [each] * 3, "e2el_ms": e2el_ms}
        times["output_tokens"] = TOKENS
    ok = e2el_ms is not None
    known = {"start_s": start, "ok": ok, "error": None if ok else "503", "prompt_tokens": 8}
    return known | times | changes


def evenly(rate: float, times: Sequence[float | None]) -> list[Row]:
    """Requests at equal distances."""
    return [row(index / rate, time) for index, time in enumerate(times)]


@dataclass
class Queue:
    """What one server does, first come first served. Times in seconds, as `MockServer` has them."""

    service: float = 0.05
    exponential: bool = True
    error_share: float = 0.0
    drift: float = 0.0
    seed: int = 0
    drawn: random.Random = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.drawn = random.Random(self.seed)

    def arrivals(self, rate: float, count: int) -> list[float]:
        """Poisson, stretched to the asked rate, as vLLM's load generator does it."""
        gaps = [self.drawn.expovariate(1.0) for _ in range(count)]
        stretch = count / rate / sum(gaps)
        found, at = [], 0.0
        for gap in gaps:
            at += gap * stretch
            found.append(at)
        return found

    def answers(self, starts: list[float]) -> list[tuple[float, float] | None]:
        """Wait and service of each request; None for a failed one."""
        free = 0.0
        found: list[tuple[float, float] | None] = []
        for start in starts:
            if self.drawn.random() < self.error_share:
                found.append(None)
                continue
            time = self.service * (self.drawn.expovariate(1.0) if self.exponential else 1.0)
            time *= 1 + self.drift * (self.now + start)
            wait = max(0.0, free - start)
            free = start + wait + time
            found.append((wait, time))
        self.now += max(free, starts[-1])
        return found

    def rows(self, rate: float, count: int) -> list[Row]:
        starts = self.arrivals(rate, count)
        return [
            answered(start, answer)
            for start, answer in zip(starts, self.answers(starts), strict=True)
        ]

    def kept_below(self, limit: float, percent: float) -> float:
        """Of an M/M/1 queue: times in the system are exponential with rate 1 / service - rate."""
        return 1 / self.service + math.log(1 - percent / 100) / limit


@dataclass
class Watched:
    """Stands for what an `EngineWatch` has seen."""

    growth: dict[str, float] = field(default_factory=dict)
    samples: list[Row] = field(default_factory=list)

    def summary(self) -> dict[str, float | None]:
        return {"running_max": 1.0, "preemptions": 0.0}


@dataclass
class QueueBench:
    """Stands for a load generator and for the engine's watch: a queue that is computed."""

    queue: Queue
    hit_rate: float | None = 0.0
    lag_ms: float | None = None
    slowest_sending: float = 10_000.0
    """Requests/s that it can send at most."""
    sent: list[str] = field(default_factory=list)
    version: str = "computed"
    tool: str = "computed"

    def send(self, traffic: Traffic, batch: Batch, raw: Path) -> Sent:
        self.sent += [one["messages"][-1]["content"] for one in batch.rows]
        count = len(batch.rows)
        rate = min(batch.rate, self.slowest_sending) if batch.rate else None
        starts = self.queue.arrivals(rate, count) if rate else [1e-6 * i for i in range(count)]
        answers = self.queue.answers(starts)
        rows = []
        for asked, start, answer in zip(batch.rows, starts, answers, strict=True):
            known = {"request_id": asked["id"], "scenario": asked.get("scenario")}
            rows.append(answered(start, answer) | known)
        ends = [s + (sum(a) if a else 0) for s, a in zip(starts, answers, strict=True)]
        return Sent(rows, max(ends), self.lag_ms)

    @contextmanager
    def step(self) -> Iterator[Watched]:
        before, watched = len(self.sent), Watched()
        yield watched
        count = len(self.sent) - before
        if self.hit_rate is not None:
            watched.growth = {
                "vllm:prefix_cache_queries_total": 10.0 * count,
                "vllm:prefix_cache_hits_total": 10.0 * count * self.hit_rate,
            }
        watched.samples = [{"at_s": 0.0, "running": 1.0, "waiting": 0.0}]


def answered(start: float, answer: tuple[float, float] | None) -> Row:
    """A row from wait and service in seconds; failed where there is no answer."""
    if answer is None:
        return row(start, None)
    wait, time = (1000 * part for part in answer)
    each = time / TOKENS
    times = {"ttft_ms": wait + each, "tpot_ms": each, "itl_ms": [each] * 3}
    return row(start, wait + time, **times)
