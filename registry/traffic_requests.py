"""The requests of a log as columns: what is counted, without the texts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MICRO = 1_000_000
"""Microseconds of a second. Times and durations are whole microseconds: their sums are exact."""

NO_TIME = -1
"""A duration that the log does not say."""


@dataclass(frozen=True, eq=False)
class Requests:
    """n requests in any order; every array has n values, None where the log has no such column."""

    arrived: Ints
    """Microseconds since 1970."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    latency: Ints | None = None
    """Microseconds from arrival to the last token, or `NO_TIME`."""

    ttft: Ints | None = None
    segment: NDArray[np.int16] | None = None
    """Index into `segments`."""

    segments: tuple[str, ...] = ()
    prefix_id: NDArray[np.uint64] | None = None
    """A hash; 0: none."""

    prefix_tokens: NDArray[np.int32] | None = None
    texts: list[Text] = field(default_factory=list)
    """A sample of the prompts, in the order of their hashes."""

    def __len__(self) -> int:
        return len(self.arrived)


@dataclass(frozen=True, order=True)
class Text:
    """A sampled prompt: its beginning, and how many characters and tokens all of it has."""

    rank: int
    begin: str
    characters: int
    tokens: int
