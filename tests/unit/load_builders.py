"""Load profiles of tests, and the queues that answer them in computed time."""

from __future__ import annotations

from typing import Any

from benchmarks.queues import Queue, QueueBench, Row, Watched, evenly, row
from eval_suites.load import LoadProfile

__all__ = ["Queue", "QueueBench", "Row", "Watched", "evenly", "profile", "row"]


def profile(**changes: Any) -> LoadProfile:
    """Two looks at an E2EL P99 of 2 s."""
    written: dict[str, Any] = {
        "kind": "load",
        "description": "for a test",
        "hardware": "any",
        "search": {"lowest": 0.5, "highest": 200, "minutes": 1000},
        "sla": ["e2el p99 2s"],
        "seconds_per_rate": 10,
        "scenarios": {"any": {"unit": "words", "input": 8}},
        "warmup_requests": 16,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "max_tokens": 64, "seed": 0},
        "seed": 500,
    } | changes
    return LoadProfile.model_validate(written)
