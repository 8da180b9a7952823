"""Batches of requests, sent while the engine is watched, put together to steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tasks.engines.load_generator import Batch, LoadGenerator, Row, Traffic


class Watched(Protocol):
    """What an `EngineWatch` has seen of one batch."""

    growth: dict[str, float]
    samples: list[dict[str, Any]]

    def summary(self) -> dict[str, float | None]: ...


class Watch(Protocol):
    """An `EngineWatch`, or what stands for it."""

    def step(self) -> AbstractContextManager[Watched]: ...


@dataclass
class Seen:
    """All of a step so far. `batches` hold the same rows as `rows`, in order of sending.

    `start_s` of a row and `at_s` of a sample count from the step's first request, `duration` is
    the sum of the batches' seconds.
    """

    batches: list[list[Row]] = field(default_factory=list)
    duration: float = 0.0
    growth: dict[str, float] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    engine: dict[str, float | None] = field(default_factory=dict)
    client_lag_ms: float | None = None
    expected_hits: float | None = None

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]


def _nobody_looks() -> None:
    pass


class LoadRun:
    """One generator on one endpoint, watched. Raises as `LoadGenerator.send` and the watch do.

    `check_alive` is called after every batch and raises where the endpoint is gone: what a dead
    server did not answer says nothing about its rates. `check_answers` is called after a batch that
    got no answer at all, and raises where the endpoint hangs. `reset_cache` is called before every
    step until it says that the engine's prefix cache cannot be emptied; prompts are fresh all the
    same.
    """

    def __init__(
        self,
        traffic: Traffic,
        generator: LoadGenerator,
        watch: Watch,
        raw_dir: Path,
        check_alive: Callable[[], None] = _nobody_looks,
        reset_cache: Callable[[], bool] = lambda: False,
        check_answers: Callable[[], None] = _nobody_looks,
    ) -> None:
        self.traffic, self.generator, self.watch, self.raw_dir = traffic, generator, watch, raw_dir
        self.check_alive, self.reset_cache = check_alive, reset_cache
        self.check_answers = check_answers
        self._resets = True
        self._began: dict[int, float] = {}

    def send(self, seen: Seen, step: int, batch: Batch, expected_hits: float | None = None) -> None:
        """Send one batch of a step and add it to what was seen."""
        self.raw_dir.mkdir(parents=True, exist_ok=True)
        if not seen.batches and self._resets:
            self._resets = self.reset_cache()
        raw = self.raw_dir / f"step{step:03d}-{len(seen.batches) + 1}.json"
        now = time.monotonic()
        later = now - self._began.setdefault(step, now)
        with self.watch.step() as watched:
            sent = self.generator.send(self.traffic, batch, raw)
        self.check_alive()
        if not any(row["ok"] for row in sent.rows):
            self.check_answers()
        seen.batches.append([row | {"start_s": row["start_s"] + later} for row in sent.rows])
        seen.duration += sent.duration
        for name, grown in watched.growth.items():
            seen.growth[name] = seen.growth.get(name, 0.0) + grown
        seen.samples += [row | {"at_s": row["at_s"] + later} for row in watched.samples]
        for name, value in watched.summary().items():
            # Counts add up over batches, peaks do not.
            join = sum if name == "preemptions" else max
            known = [one for one in (seen.engine.get(name), value) if one is not None]
            seen.engine[name] = join(known) if known else None
        lags = [one for one in (seen.client_lag_ms, sent.client_lag_ms) if one is not None]
        seen.client_lag_ms = max(lags) if lags else None
        hits = [one for one in (seen.expected_hits, expected_hits) if one is not None]
        seen.expected_hits = max(hits) if hits else None
