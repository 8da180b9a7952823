"""Is the server in a steady state? On TTFT, TPOT and requests in flight.

Never on E2EL: it is known only when a request ends, so a queue that grows shows there last. The
start of a step is left out by a share fixed beforehand. A cut that is chosen by looking for the
calmest rest (MSER and its kin) would also cut off the slow requests that a percentile is about.
What still drifts after that has no steady state: a percentile over it would only say how long one
looked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Array = NDArray[np.float64]

START_SHARE = 0.1
"""First requests of a step that belong to its start."""

WINDOWS = 10
GROWTH = 0.4
"""A change over the steady window of more than this share of its middle is a drift."""

LEVEL = 0.01
"""Error of the trend test: the drift must be sure as well as large."""


@dataclass(frozen=True)
class Trend:
    """Change over the whole window, relative to the window's middle, and whether it is one."""

    change: float
    drifts: bool


def trend(values: Array) -> Trend:
    """Mann-Kendall's test on the medians of ten windows, and Theil and Sen's slope through them."""
    if len(values) < WINDOWS:
        return Trend(0.0, False)
    medians = np.array([float(np.median(part)) for part in np.array_split(values, WINDOWS)])
    n = len(medians)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    signs = sum(np.sign(medians[j] - medians[i]) for i, j in pairs)
    slope = float(np.median([(medians[j] - medians[i]) / (j - i) for i, j in pairs]))
    middle = float(np.median(medians))
    change = slope * (n - 1) / middle if middle > 0 else (math.inf if slope > 0 else 0.0)
    z = (abs(signs) - 1) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    sure = z >= -float(ndtri(LEVEL / 2))
    return Trend(change, bool(sure and abs(change) > GROWTH))


def in_flight(starts: Sequence[float], ends: Sequence[float]) -> Array:
    """Requests that had started and not ended when each request started, in order of starts."""
    begun, ended = np.sort(np.asarray(starts, float)), np.sort(np.asarray(ends, float))
    return np.arange(1, len(begun) + 1) - np.searchsorted(ended, begun, side="right").astype(float)
