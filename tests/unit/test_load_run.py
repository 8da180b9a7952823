"""Batches put together to a step: what adds up, what is a peak, and whose clock counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from registry.errors import InfrastructureError
from tasks.engines.load_generator import Batch, Traffic
from tasks.engines.load_run import LoadRun, Seen
from tests.unit.load_builders import Queue, QueueBench

TRAFFIC = Traffic(url="http://here", model="m", tokenizer=Path(), sampling={})


def batch(count: int, rate: float = 100.0) -> Batch:
    rows = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": f"{i}"}]} for i in range(count)
    ]
    return Batch(rows, seed=1, rate=rate)


def run(folder: Path, bench: QueueBench, **looks: Callable[[], bool | None]) -> LoadRun:
    return LoadRun(TRAFFIC, bench, bench, folder / "raw", **looks)  # type: ignore[arg-type]


def test_batches_of_a_step_are_put_together(tmp_path: Path) -> None:
    bench = QueueBench(Queue(service=0.001), hit_rate=0.5, lag_ms=3.0)
    sending, seen = run(tmp_path, bench), Seen()
    sending.send(seen, 1, batch(20), expected_hits=0.1)
    bench.lag_ms = 2.0
    sending.send(seen, 1, batch(30), expected_hits=0.2)
    assert [len(one) for one in seen.batches] == [20, 30]
    assert len(seen.rows) == 50
    assert seen.growth["vllm:prefix_cache_queries_total"] == 500
    assert seen.growth["vllm:prefix_cache_hits_total"] == 250
    assert seen.engine == {"running_max": 1.0, "preemptions": 0.0}
    assert (seen.client_lag_ms, seen.expected_hits) == (3.0, 0.2), "the worst of them"
    assert seen.duration > 0.4
    # The second batch starts later on the step's clock, and so do its samples.
    assert seen.batches[0][0]["start_s"] < seen.batches[1][0]["start_s"] or (
        seen.samples[1]["at_s"] > seen.samples[0]["at_s"]
    )


def test_the_cache_is_emptied_before_every_step_for_as_long_as_that_works(tmp_path: Path) -> None:
    answers = [True, True, False, True]
    asked: list[int] = []

    def reset() -> bool:
        asked.append(len(asked))
        return answers[len(asked) - 1]

    sending = run(tmp_path, QueueBench(Queue(service=0.001)), reset_cache=reset)
    for step in range(1, 6):
        seen = Seen()
        sending.send(seen, step, batch(5))
        sending.send(seen, step, batch(5))
    assert asked == [0, 1, 2], "once per step, and not again where it is not possible"


def test_a_batch_of_a_dead_endpoint_is_not_seen(tmp_path: Path) -> None:
    def gone() -> None:
        raise InfrastructureError("http://here is gone")

    seen = Seen()
    with pytest.raises(InfrastructureError, match="is gone"):
        run(tmp_path, QueueBench(Queue()), check_alive=gone).send(seen, 1, batch(5))
    assert seen.batches == []


def test_an_endpoint_that_answers_nothing_is_asked_for_a_token(tmp_path: Path) -> None:
    def hangs() -> None:
        raise InfrastructureError("http://here generates no token")

    seen = Seen()
    run(tmp_path, QueueBench(Queue(service=0.001)), check_answers=hangs).send(seen, 1, batch(5))
    assert len(seen.rows) == 5, "one that answers is not asked again"
    silent = QueueBench(Queue(service=0.001, error_share=1.0))
    with pytest.raises(InfrastructureError, match="generates no token"):
        run(tmp_path, silent, check_answers=hangs).send(seen, 1, batch(5))
    assert len(seen.rows) == 5
