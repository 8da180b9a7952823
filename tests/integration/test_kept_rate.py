"""vLLM's own load generator against a queue that is known: what the search says must be so.

Arrivals are nearly even (burstiness 50) and service times fixed, so that an edge is sharp and
short steps show it: below the capacity nobody waits long (Kingman's bound), above it the wait
grows by (rate / capacity - 1) seconds per second. Random queues are computed in
tests/unit/test_kept_rate.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eval_suites.load import LoadProfile
from eval_suites.load_steps import StepResult, requests_at
from registry.evidence import LatencyEvidence, read_summary
from registry.outcome import Verdict
from tasks.bench_targets import probe
from tasks.benchmarking import Benchmark, document
from tasks.engines.engine_watch import EngineWatch
from tasks.engines.fixed_rates import Measuring
from tasks.engines.kept_rate import Found, KeptRateSearch
from tasks.engines.load_generator import Traffic
from tasks.engines.load_prompts import Prompts, from_file, synthetic, word_tokenizer
from tasks.engines.load_run import LoadRun
from tasks.engines.subprocesses import end_leftovers
from tasks.engines.vllm_bench import VllmBench
from tests.mock_server import MockServer, serving
from tests.unit.load_builders import profile

pytestmark = pytest.mark.alone

OF = Measuring(bundle="", profile="test", hardware="here", engine="mock")

CAPACITY = 20.0
SERVICE = 1 / CAPACITY


def short(start: float, **changes: Any) -> LoadProfile:
    """One look at an E2EL P90 of 0.2 s in steps of about four seconds."""
    search = {"start": start, "minutes": 5} | changes.pop("search", {})
    written: dict[str, Any] = {
        "search": search,
        "sla": ["e2el p90 200ms"],
        "looks": 1,
        "seconds_per_rate": 3.5,
        "warmup_requests": 8,
        "burstiness": 50,
        "request_timeout": 10,
        "scenarios": {"any": {"unit": "words", "input": 20}},
        "sustain": 1,
    }
    return profile(**written | changes)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBench]:
    """One for all tests: vLLM's import takes longer than a search."""
    log = tmp_path_factory.mktemp("generator") / "bench.log"
    with VllmBench("none", log=log) as bench:
        yield bench


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def supply(written: LoadProfile) -> Prompts:
    return synthetic(written.scenarios, written.seed)


def searching(
    generator: VllmBench, tokenizer: Path, folder: Path, url: str, written: LoadProfile,
    prompts: Prompts | None = None, **changes: Any,
) -> KeptRateSearch:  # fmt: skip
    say = changes.pop("say", lambda line: None)
    traffic = Traffic(
        url, "m", tokenizer, written.sampling.model_dump(), written.burstiness,
        written.request_timeout, exact_counts=False, **changes,
    )  # fmt: skip
    run = LoadRun(traffic, generator, EngineWatch(url), folder / "raw")
    return KeptRateSearch(written, run, prompts or supply(written), folder, OF, say=say)


def one_step(search: KeptRateSearch, rate: float) -> StepResult:
    """The step at one rate, without the search around it."""
    search._resume()
    return search._measure(rate).result


@dataclass
class TimedQueue(MockServer):
    """Knows how long each request really held its one slot: the machine is shared."""

    held: list[float] = field(default_factory=list)
    ended: float = 0.0

    async def _stream(self, body: Any, duration: float) -> AsyncIterator[str]:
        came = time.monotonic()
        async for event in super()._stream(body, duration):
            yield event
        now = time.monotonic()
        self.held.append(now - max(came, self.ended))
        self.ended = now

    def slowest(self) -> float:
        """Capacity over the 30 requests in a row that held the slot longest."""
        return min(30 / sum(self.held[i : i + 30]) for i in range(len(self.held) - 29))


class Stopped(Exception):
    pass


def stop_after(steps: int) -> Any:
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        if sum("requests, " in one or " requests (" in one for one in told) == steps:
            raise Stopped

    return say


def test_the_edge_is_found_also_after_a_stop_in_the_middle(
    generator: VllmBench, tokenizer: Path, tmp_path: Path
) -> None:
    mock = TimedQueue(service=SERVICE, exponential=False)
    # 7.8, 15.6, 31.2, then 22.1 and 18.6: the last two are 10 % from the capacity.
    written = short(7.8)
    with serving(mock) as url:
        first = searching(generator, tokenizer, tmp_path, url, written, say=stop_after(3))
        with pytest.raises(Stopped):
            first.run()
        stored = {file: file.read_text() for file in (tmp_path / "points").iterdir()}
        assert len(stored) == 3
        assert mock.asked == len(mock.seen) == first.prompts.taken
        done = searching(generator, tokenizer, tmp_path, url, written).run()

    assert {file: file.read_text() for file in stored} == stored, "finished steps are kept"
    assert len(done.steps) > 3
    assert mock.asked == len(mock.seen), "no prompt was sent twice"
    assert mock.asked == done.requests == 8 + sum(step.result.n for step in done.steps)
    low, high, width = done.rates.low, done.rates.high, done.rates.width
    assert low is not None
    assert high is not None
    assert width is not None
    assert 0.9 * low <= CAPACITY
    assert 1.1 * high >= mock.slowest()
    # On a machine that held the queue up, the edge moved while it was searched.
    if mock.slowest() > 0.9 * CAPACITY:
        assert width <= 0.25
        assert done.verdict is Verdict.PASS
    for step in done.steps:
        result = step.result
        assert result.hit_rate == 0
        assert result.achieved_rate == pytest.approx(result.rate, rel=0.1)
        assert result.n == sum(requests_at(written, result.rate))
    summary = read_summary(tmp_path)
    assert isinstance(summary, LatencyEvidence)
    assert summary.harness.startswith("vllm bench serve 0.")
    assert all(point.client_lag_ms is not None for point in summary.points)
    busy = max(point.engine["running_max"] or 0 for point in summary.points)
    assert busy == 1, "one slot"
    as_json = document(Benchmark(done.verdict, summary, tmp_path, done.requests))
    assert as_json["kept_rate"] == [low, high]
    assert json.loads(json.dumps(as_json)) == as_json


def test_a_cache_of_prompts_fools_nobody(
    generator: VllmBench, tokenizer: Path, tmp_path: Path
) -> None:
    """Twenty times as fast for what was asked before, as a seeded benchmark sees it."""
    mock = MockServer(service=SERVICE, exponential=False, cached_share=0.05)
    written = short(50, seconds_per_rate=2)
    with serving(mock) as url:
        honest = one_step(searching(generator, tokenizer, tmp_path / "a", url, written), 50)
        assert (honest.void, honest.answer, honest.hit_rate) == ("", "not kept", 0)
        # The same seed in another folder sends the same prompts again.
        seeded = one_step(searching(generator, tokenizer, tmp_path / "b", url, written), 50)
    assert (seeded.void, seeded.answer, seeded.hit_rate) == ("cache", "undecided", 1)
    assert "prompts repeat what was asked before" in seeded.cause


def test_prompts_of_a_file_that_begin_alike_are_void(
    generator: VllmBench, tokenizer: Path, tmp_path: Path
) -> None:
    """A prefix cache sees through prompts that are different and yet begin alike."""

    class PrefixCache(MockServer):
        async def _chat(self, request: Any) -> Any:
            reply = await super()._chat(request)
            self.hits = max(0, self.asked - 1)
            return reply

    lines = [{"id": f"p{i}", "prompt": "the same long beginning " * 5 + str(i)} for i in range(60)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with serving(PrefixCache(service=0.02, exponential=False)) as url:
        search = searching(
            generator,
            tokenizer,
            tmp_path / "e",
            url,
            short(20, seconds_per_rate=2),
            from_file(file),
        )
        result = one_step(search, 20)
    assert result.void
    assert result.hit_rate is not None
    assert result.hit_rate > 0.9


def test_a_service_that_slows_keeps_nothing(
    generator: VllmBench, tokenizer: Path, tmp_path: Path
) -> None:
    """All times stay below the limit for as long as one looks: no steady state all the same."""
    mock = MockServer(service=0.02, exponential=False, drift=0.3)
    written = short(12, seconds_per_rate=6, sla=["e2el p90 2s"])
    with serving(mock) as url:
        result = one_step(searching(generator, tokenizer, tmp_path, url, written), 12)
    assert (result.answer, result.steady, result.void) == ("not kept", False, "")
    assert result.cause.startswith("no steady state: ")
    assert result.clauses[0].over == 0


def test_errors_of_1_5_percent_keep_no_p99(
    generator: VllmBench, tokenizer: Path, tmp_path: Path
) -> None:
    mock = MockServer(service=0.005, exponential=False, tokens=1, error_share=0.015, seed=2)
    written = short(60, sla=["e2el p99 2s"], seconds_per_rate=1)
    with serving(mock) as url:
        result = one_step(searching(generator, tokenizer, tmp_path, url, written), 60)
    assert result.failed > 0
    assert result.answer != "kept"
    assert result.clauses[0].over > 0
    assert (result.void, result.steady) == ("", True)


def test_an_endpoint_that_reports_no_usage_is_counted_in_words(
    generator: VllmBench, tokenizer: Path, tmp_path: Path
) -> None:
    class Silent(MockServer):
        async def _stream(self, body: Any, duration: float) -> AsyncIterator[str]:
            async for event in super()._stream(body, duration):
                if '"usage"' not in event:
                    yield event

    with serving(Silent(service=0.01, exponential=False)) as url:
        assert not probe(url, "m", "")
        written = short(
            30, seconds_per_rate=1, sla=["e2el p90 1s", "tpot p90 1s"],
            search={"highest": 30},
        )  # fmt: skip
        counted: Found = searching(
            generator, tokenizer, tmp_path / "words", url, written, count_words=True
        ).run()
        other = written.model_copy(update={"seed": 7})
        blind = one_step(searching(generator, tokenizer, tmp_path / "blind", url, other), 30)
    assert (counted.verdict, counted.rates.low, counted.rates.high) == (Verdict.PASS, 30, None)
    rows = [row for step in counted.steps for row in step.rows]
    assert {row["output_tokens"] for row in rows} == {4}
    assert {row["prompt_tokens"] for row in rows} == {20}
    assert (blind.failed, blind.answer) == (blind.n, "not kept"), "no count, no answer"


def test_a_generator_ends_with_the_process_that_started_it(tokenizer: Path, tmp_path: Path) -> None:
    """What goes on sending after a `kill -9` would be measured by the search that goes on."""
    program = f"""
from pathlib import Path
from tasks.engines.load_generator import Batch, Traffic
from tasks.engines.vllm_bench import VllmBench
import sys
asked = [[{{"role": "user", "content": f"word {{i}}"}}] for i in range(900)]
rows = [{{"id": str(i), "messages": messages}} for i, messages in enumerate(asked)]
sampling = {{"temperature": 0.0, "top_p": 1.0, "max_tokens": 8, "seed": 0}}
traffic = Traffic(sys.argv[1], "m", Path({str(tokenizer)!r}), sampling)
with VllmBench("none", log=Path({str(tmp_path)!r}) / "bench.log") as bench:
    bench.send(traffic, Batch(rows, seed=1, rate=10), Path({str(tmp_path)!r}) / "raw.json")
"""
    mock = MockServer(service=0.01, exponential=False, slots=20)
    with serving(mock) as url:
        driver = subprocess.Popen([sys.executable, "-c", program, url])
        try:
            until = time.monotonic() + 120
            while mock.asked < 5 and time.monotonic() < until:
                time.sleep(0.1)
            assert mock.asked >= 5
        finally:
            driver.kill()
            driver.wait()
        time.sleep(3)
        asked = mock.asked
        time.sleep(3)
        assert mock.asked == asked
    assert end_leftovers() == [], "nothing of it is left"
