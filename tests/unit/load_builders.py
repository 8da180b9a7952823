"""Load profiles and rows of load tests, from queues that are computed instead of waited for."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_suites.load import LoadProfile

Row = dict[str, Any]

TOKENS = 4


def profile(**changes: Any) -> LoadProfile:
    """Two looks at an E2EL P99 of 2 s."""
    written: dict[str, Any] = {
        "kind": "load",
        "description": "for a test",
        "hardware": "any",
        "search": {"lowest": 0.5, "highest": 200, "minutes": 1000},
        "sla": ["e2el p99 2s"],
        "seconds_per_rate": 10,
        "synthetic": {"input_words": 8},
        "warmup_requests": 16,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "max_tokens": 64, "seed": 0},
        "seed": 500,
    } | changes
    return LoadProfile.model_validate(written)


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
        rows = []
        for start, answer in zip(starts, self.answers(starts), strict=True):
            if answer is None:
                rows.append(row(start, None))
                continue
            wait, time = (1000 * part for part in answer)
            each = time / TOKENS
            times = {"ttft_ms": wait + each, "tpot_ms": each, "itl_ms": [each] * 3}
            rows.append(row(start, wait + time, **times))
        return rows

    def kept_below(self, limit: float, percent: float) -> float:
        """Of an M/M/1 queue: times in the system are exponential with rate 1 / service - rate."""
        return 1 / self.service + math.log(1 - percent / 100) / limit


@dataclass
class QueueBench:
    """Stands for `VllmBench`: the same files from a queue that is computed."""

    queue: Queue
    hit_rate: float | None = 0.0
    sent: list[str] = field(default_factory=list)

    def send(self, order: Mapping[str, Any], timeout: float | None = None) -> Row:
        (point,) = order["points"]
        self.sent += [one["messages"][-1]["content"] for one in point["rows"]]
        count = len(point["rows"])
        rate = point["rate"]
        starts = self.queue.arrivals(rate, count) if rate else [1e-6 * i for i in range(count)]
        answers = self.queue.answers(starts)
        ends = [s + (sum(a) if a else 0) for s, a in zip(starts, answers, strict=True)]
        raw = {
            "start_times": starts,
            "errors": ["" if answer else "503" for answer in answers],
            "input_lens": [8] * count,
            "output_lens": [TOKENS if answer else 0 for answer in answers],
            "ttfts": [a[0] + a[1] / TOKENS if a else 0.0 for a in answers],
            "itls": [[0.0, *[a[1] / TOKENS] * 3] if a else [] for a in answers],
            "latencies": [sum(a) if a else 0.0 for a in answers],
            "duration": max(ends),
        }
        folder = Path(order["raw_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "point0.json").write_text(json.dumps(raw))
        after = {}
        if self.hit_rate is not None:
            after = {
                "vllm:prefix_cache_queries_total": 10.0 * count,
                "vllm:prefix_cache_hits_total": 10.0 * count * self.hit_rate,
            }
        return {
            "vllm": "computed",
            "points": [{"raw": "point0.json", "before": {}, "after": after}],
        }
