"""Request logs of a few rows, and what a test needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from registry.traffic_requests import MICRO

HEADER = "arrived,prompt_tokens,output_tokens,latency_s"


def micro(seconds: Any) -> NDArray[np.int64]:
    return np.round(np.asarray(seconds, float) * MICRO).astype(np.int64)


def write_csv(path: Path, rows: Sequence[str], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path
