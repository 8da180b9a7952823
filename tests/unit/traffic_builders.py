"""Request logs of a few rows, and what a test needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from registry.traffic_requests import MICRO

HEADER = "arrived,prompt_tokens,output_tokens,latency_s"


def micro(seconds: Any) -> NDArray[np.int64]:
    return np.round(np.asarray(seconds, float) * MICRO).astype(np.int64)


def write_csv(path: Path, rows: Sequence[str], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def lengths(mean: float, p5: int, p95: int, most: int) -> dict[str, float]:
    return {
        "mean": mean, "min": 1, "p5": p5, "p50": mean, "p90": p95, "p95": p95, "p99": most,
        "max": most,
    }  # fmt: skip


def written_traffic(folder: Path, **changes: Any) -> Path:
    """A profile as `pilotage profile` writes it, with numbers of ours."""
    content: dict[str, Any] = {
        "kind": "traffic",
        "description": "made by hand",
        "requests": 1000,
        "prompt_tokens": lengths(900, 100, 2000, 12_000),
        "output_tokens": lengths(180, 20, 450, 2000),
        "main_range": {
            "percents": [5, 95], "prompt_tokens": [100, 2000], "output_tokens": [20, 450],
            "share_of_requests": 0.83, "share_of_prompt_tokens": 0.7,
            "share_of_output_tokens": 0.75,
        },
        "peak_concurrency": 310,
        "stable_peak_concurrency": 142.3,
        "mean_rate": 8.0, "peak_rate": 22.0, "peak_rate_at": None, "rate_by_hour": {9: 20.0},
        "hours": [],
        "burstiness": {"gap_cv": 1.2, "dispersion": 1.3, "load": 0.7, "load_from": "gaps"},
        "concurrency": {
            "definition": "d", "window_s": 60, "step_s": 10, "requests": 1000, "without_end": 0,
            "latency_from": "l",
        },
        "latency_s": None, "ttft_s": None, "shared_prefix": None, "segments": [], "scenarios": {},
        "period": {
            "first": "2026-01-01T00:00:00", "last": "2026-01-02T00:00:00", "span_s": 86400,
            "timezone": "UTC", "timezone_from": "x", "resolution_s": 1, "days": 1, "gap_days": 0,
        },
        "rows": {"read": 1000, "kept": 1000, "left_out": {}, "examples": []},
        "sources": [], "notes": [],
    }  # fmt: skip
    path = folder / "traffic.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path
