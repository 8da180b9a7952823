"""The requests of a log as columns: what is counted, without the texts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MICRO = 1_000_000
"""Microseconds of a second. Times and durations are whole microseconds: their sums are exact."""

CHUNK = 1_000_000
"""Times that are worked on at once: what is made of them on the way stays small."""

NO_TIME = -1
"""A duration that the log does not say."""


def binned(
    times: Ints, begin: int, step: int, weights: Ints | None = None, count: int = 0
) -> NDArray[np.float64]:
    """How many times lie in each step from `begin` on, or the sums of their weights.

    At least `count` steps. Sums of whole numbers are exact up to 2^53, so their order is none.
    """
    count = max(count, (int(times.max()) - begin) // step + 1)
    found = np.zeros(count)
    for at in range(0, len(times), CHUNK):
        part = (times[at : at + CHUNK] - begin) // step
        weighed = None if weights is None else weights[at : at + CHUNK].astype(float)
        found += np.bincount(part, weighed, minlength=count)
    return found


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
