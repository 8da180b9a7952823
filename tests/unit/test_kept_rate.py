"""A whole search over queues that are computed: what it ends with, and what a stop leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eval_suites.load import LoadProfile
from eval_suites.load_steps import requests_at
from registry.errors import UserError
from registry.evidence import LatencyEvidence, read_summary
from registry.outcome import Verdict
from tasks.engines.fixed_rates import Measuring
from tasks.engines.kept_rate import STATE, Found, KeptRateSearch
from tasks.engines.load_generator import Batch, Sent, Traffic
from tasks.engines.load_prompts import from_file, synthetic
from tasks.engines.load_run import LoadRun
from tests.unit.load_builders import Queue, QueueBench, Watched, profile

TRAFFIC = Traffic(url="http://here", model="m", tokenizer=Path(), sampling={})
OF = Measuring(bundle="", profile="test", hardware="here", engine="computed")


def search(
    folder: Path,
    bench: Any,
    written: LoadProfile,
    say: Callable[[str], None] = lambda line: None,
    traffic: Traffic = TRAFFIC,
) -> Found:
    """A search whose time is the queue's own."""
    prompts = synthetic(written.scenarios, written.seed)
    run = LoadRun(traffic, bench, bench, folder / "raw")
    return KeptRateSearch(
        written, run, prompts, folder, OF, say=say, clock=lambda: bench.queue.now
    ).run()


def test_the_edges_of_queueing_theory_are_found(tmp_path: Path) -> None:
    """Each search may err; of 20 M/M/1 queues most edges lie in the interval widened by 10 %."""
    found, passed = 0, 0
    for seed in range(20):
        queue = Queue(service=0.02, seed=seed)
        edge = queue.kept_below(2.0, 99)
        done = search(tmp_path / str(seed), QueueBench(queue), profile(seconds_per_rate=30))
        passed += done.verdict is Verdict.PASS
        low, high = done.rates.low, done.rates.high
        assert low is not None
        assert high is not None
        found += 0.9 * low <= edge <= 1.1 * high and 2 * (high - low) / (high + low) <= 0.25
    assert found >= 17
    assert passed >= 18


def test_a_sharp_edge_is_always_found(tmp_path: Path) -> None:
    """Far above the capacity of 20 requests/s the queue grows, far below nobody waits long."""
    for seed in range(10):
        queue = Queue(service=0.05, exponential=False, seed=seed)
        done = search(tmp_path / str(seed), QueueBench(queue), profile(seconds_per_rate=60))
        assert done.rates.low is not None
        assert done.rates.high is not None
        assert 0.9 * done.rates.low <= 20 <= 1.1 * done.rates.high
        assert done.verdict is Verdict.PASS
        assert done.requests == sum(step.result.n for step in done.steps) + 16


def test_errors_of_1_5_percent_keep_no_p99_anywhere(tmp_path: Path) -> None:
    for seed in range(10):
        queue = Queue(service=0.002, error_share=0.015, seed=seed)
        done = search(tmp_path / str(seed), QueueBench(queue), profile())
        assert done.rates.low is None
        assert done.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)
        assert all(step.result.steady for step in done.steps)


def test_a_service_that_slows_is_not_kept(tmp_path: Path) -> None:
    """Half as slow again every 20 s: no rate is steady, however low the times still are."""
    queue = Queue(service=0.02, exponential=False, drift=0.025)
    written = profile(
        seconds_per_rate=60, sla=["e2el p99 20s"], search={"start": 5, "factor": 1.5, "minutes": 99}
    )
    first = search(tmp_path, QueueBench(queue), written).steps[0].result
    assert first.answer == "not kept"
    assert first.cause.startswith("no steady state: ")


def test_a_cache_that_answers_is_no_kept_rate(tmp_path: Path) -> None:
    done = search(tmp_path, QueueBench(Queue(), hit_rate=0.56), profile())
    assert done.verdict is Verdict.ANOMALOUS
    assert (done.rates.low, done.rates.high) == (None, None)
    assert all(step.result.void for step in done.steps)
    assert {step.result.n for step in done.steps} >= {requests_at(profile(), 1)[0]}
    assert {step.point.answer for step in done.steps} == {"void"}


def test_everything_kept_ends_at_the_highest_rate(tmp_path: Path) -> None:
    written = profile(search={"highest": 30, "minutes": 99})
    done = search(tmp_path, QueueBench(Queue(service=0.001)), written)
    assert (done.verdict, done.rates.low, done.rates.high) == (Verdict.PASS, 30, None)


def test_time_that_ended_above_the_lowest_rate_is_no_fail(tmp_path: Path) -> None:
    """Between the last rate measured and the lowest one nobody looked."""
    written = profile(search={"start": 40, "lowest": 0.5, "minutes": 4})
    done = search(tmp_path, QueueBench(Queue(service=0.4, exponential=False)), written)
    assert done.rates.low is None
    assert done.rates.high is not None
    assert done.verdict is Verdict.INCONCLUSIVE
    assert any("were left" in note for note in done.notes)


def test_nothing_kept_is_a_fail(tmp_path: Path) -> None:
    written = profile(search={"start": 4, "lowest": 1, "minutes": 99})
    done = search(tmp_path, QueueBench(Queue(service=3.0, exponential=False)), written)
    assert (done.verdict, done.rates.low, done.rates.high) == (Verdict.FAIL, None, 1)


def test_a_search_without_time_says_what_it_did_not_measure(tmp_path: Path) -> None:
    written = profile(search={"start": 10, "minutes": 0.5})
    done = search(tmp_path, QueueBench(Queue()), written)
    assert (done.verdict, done.steps) == (Verdict.INCONCLUSIVE, [])
    (note,) = done.notes
    assert note.startswith("10 requests/s was not measured: it takes 44 s, and of the search's 0.5")


class Scripted(QueueBench):
    """A server with one answer per step: the times of all its requests, in ms."""

    def __init__(self, answers: Mapping[float, Sequence[float | str]]) -> None:
        super().__init__(Queue(service=0.001, exponential=False))
        self.answers = {rate: list(times) for rate, times in answers.items()}

    def send(self, traffic: Traffic, batch: Batch, raw: Path) -> Sent:
        done = super().send(traffic, batch, raw)
        if batch.rate is not None:
            left = self.answers[round(batch.rate, 1)]
            wanted = left.pop(0) if len(left) > 1 else left[0]
            count = len(done.rows)
            # Undecided: as many over as a P99 allows, at equal distances.
            over = set(range(50, count, 100)) if wanted == "open" else set()
            base = 100.0 if wanted == "open" else float(wanted)
            for index, one in enumerate(done.rows):
                one["e2el_ms"] = 3000.0 if index in over else base
        return done


def scripted(**changes: Any) -> LoadProfile:
    return profile(looks=1, search={"start": 4, "lowest": 1, "minutes": 99}, **changes)


def test_a_rate_that_fails_the_second_time_is_a_point_like_any_other(tmp_path: Path) -> None:
    server = Scripted(
        {4: [100], 8: [3000], 5.7: [100], 6.7: [100, 3000], 6.2: [100], 4.8: [100], 5.9: [100]}
    )
    done = search(tmp_path, server, scripted())
    assert done.rates.low is not None
    assert (round(done.rates.low, 1), round(done.rates.high or 0, 1)) == (5.7, 6.7)
    assert done.verdict is Verdict.PASS, "after a second run at the lower rate"
    assert done.notes[0].startswith("6.727 requests/s was kept once and not kept when")
    rates = [round(step.result.rate, 1) for step in done.steps]
    assert rates == [4, 8, 5.7, 6.7, 6.7, 5.7]


def test_no_rate_kept_and_the_lowest_undecided_is_no_fail(tmp_path: Path) -> None:
    done = search(tmp_path, Scripted({4: [3000], 2: [3000], 1: ["open"]}), scripted())
    assert [step.result.answer for step in done.steps] == ["not kept", "not kept", "undecided"]
    assert (done.rates.low, done.rates.high) == (None, 2)
    assert done.verdict is Verdict.INCONCLUSIVE


def test_a_contradiction_is_named_and_promotes_nothing(tmp_path: Path) -> None:
    # 8 is kept, and then neither 16 nor, the second time, what lies below 8.
    server = Scripted({4: [100], 8: [100, 3000], 16: [3000], 11.3: [3000], 9.5: [3000],
                       5.7: [100], 6.7: [100], 7.3: [100]})  # fmt: skip
    done = search(tmp_path, server, scripted())
    assert any("8 requests/s was kept once and not kept when" in n for n in done.notes)
    assert done.rates.high == 8


# -- the evidence ----------------------------------------------------------------------------


def test_the_evidence_has_every_request_and_the_answers(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    done = search(tmp_path, QueueBench(Queue(service=0.02)), profile())
    rows = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert len(rows) == sum(step.result.n for step in done.steps)
    assert len({row["request_id"] for row in rows}) == len(rows)
    summary = read_summary(tmp_path)
    assert isinstance(summary, LatencyEvidence)
    assert summary.kept_rate == (done.rates.low, done.rates.high)
    assert summary.sla == ["e2el p99 2000ms"]
    assert summary.harness == "computed"
    assert [point.answer for point in summary.points] == [s.result.answer for s in done.steps]
    for point, step in zip(summary.points, done.steps, strict=True):
        (clause,) = step.result.clauses
        assert point.bounds == {"e2el p99 2000ms": clause.bound}
        if point.answer == "kept":
            assert clause.bound is not None
            assert clause.bound <= 2000


# -- stopped and started again ---------------------------------------------------------------


class Stopped(Exception):
    pass


@dataclass
class Breaks:
    """A generator that dies when it is asked once too often."""

    bench: QueueBench
    after: int

    version: str = "computed"

    tool: str = "computed"

    @property
    def queue(self) -> Queue:
        return self.bench.queue

    def step(self) -> AbstractContextManager[Watched]:
        return self.bench.step()

    def send(self, traffic: Traffic, batch: Batch, raw: Path) -> Sent:
        if self.after == 0:
            # The prompts are gone: perhaps they were sent, perhaps not.
            self.bench.sent += [row["messages"][-1]["content"] for row in batch.rows]
            raise Stopped
        self.after -= 1
        return self.bench.send(traffic, batch, raw)


@pytest.mark.parametrize("after", range(7))
def test_a_search_stopped_anywhere_goes_on_with_fresh_prompts(tmp_path: Path, after: int) -> None:
    bench = QueueBench(Queue(service=0.02, seed=1))
    written = profile(seconds_per_rate=30)
    with pytest.raises(Stopped):
        search(tmp_path, Breaks(bench, after), written)
    stored = sorted((tmp_path / "points").glob("*.json"))
    before = [(file.name, file.read_text()) for file in stored]
    sent = len(bench.sent)
    said: list[str] = []
    done = search(tmp_path, bench, written, said.append)
    assert sum("from before the stop" in line for line in said) == len(stored)
    assert sum("warmed up" in line for line in said) == (after == 0)
    for name, text in before:
        assert (tmp_path / "points" / name).read_text() == text
    assert len(done.steps) > len(stored)
    assert len(bench.sent) > sent
    assert len(set(bench.sent)) == len(bench.sent), "no prompt twice, not even one perhaps sent"
    assert done.requests == len(bench.sent)
    assert done.verdict is Verdict.PASS
    summary = read_summary(tmp_path)
    assert isinstance(summary, LatencyEvidence)
    assert len(summary.points) == len(done.steps)


def test_a_stop_costs_no_finished_step(tmp_path: Path) -> None:
    """The same rates as without the stop, but for the one that was cut off."""
    server: dict[float, list[float]] = {4: [100], 8: [3000], 5.7: [100], 6.7: [3000], 6.2: [100]}
    whole = search(tmp_path / "whole", Scripted(server), scripted())

    def stop(line: str) -> None:
        if line.startswith("5.657 "):
            raise Stopped

    with pytest.raises(Stopped):
        search(tmp_path / "cut", Scripted(server), scripted(), stop)
    again = search(tmp_path / "cut", Scripted(server), scripted())
    rates = [step.result.rate for step in whole.steps]
    assert [step.result.rate for step in again.steps] == rates
    assert (again.rates, again.verdict) == (whole.rates, whole.verdict)
    assert again.requests == whole.requests
    assert again.steps[0].rows == json.loads(
        (tmp_path / "cut" / "points" / "001.json").read_text()
    )["rows"]  # fmt: skip


def test_the_time_before_a_stop_counts(tmp_path: Path) -> None:
    written = profile(search={"start": 10, "minutes": 5})
    with pytest.raises(Stopped):
        search(tmp_path, Breaks(QueueBench(Queue()), 3), written)
    state = json.loads((tmp_path / STATE).read_text())
    (tmp_path / STATE).write_text(json.dumps(state | {"seconds": 290}))
    done = search(tmp_path, QueueBench(Queue()), written)
    assert done.verdict is Verdict.INCONCLUSIVE
    assert "were left" in done.notes[0]


def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        search(tmp_path, Breaks(QueueBench(Queue()), 2), profile())
    others = [
        (profile(seed=7), TRAFFIC),
        (profile(), replace(TRAFFIC, url="http://there")),
        (profile(), replace(TRAFFIC, model="n")),
    ]
    for written, traffic in others:
        with pytest.raises(UserError, match="belongs to another search"):
            search(tmp_path, QueueBench(Queue()), written, traffic=traffic)


# -- what the search makes of void steps -----------------------------------------------------


def test_a_generator_at_its_limit_ends_the_ramp(tmp_path: Path) -> None:
    """It cannot send 32 requests/s, not when asked again either, and would not send 64."""
    bench = QueueBench(Queue(service=0.001, exponential=False), slowest_sending=20)
    written = profile(search={"start": 4, "lowest": 1, "minutes": 99})
    done = search(tmp_path, bench, written)
    assert [step.result.rate for step in done.steps] == [4, 8, 16, 32, 32, 16]
    assert done.steps[3].result.void == done.steps[4].result.void == "generator"
    assert (done.rates.low, done.rates.high) == (16, None)
    assert done.verdict is Verdict.INCONCLUSIVE


def test_a_start_that_the_generator_cannot_send_goes_down(tmp_path: Path) -> None:
    bench = QueueBench(Queue(service=0.001, exponential=False), slowest_sending=20)
    written = profile(search={"start": 64, "lowest": 1, "minutes": 99})
    done = search(tmp_path, bench, written)
    assert [step.result.rate for step in done.steps] == [64, 64, 32, 32, 16, 16]
    assert (done.rates.low, done.rates.high) == (16, None)


def test_a_generator_that_was_disturbed_once_is_asked_again(tmp_path: Path) -> None:
    class Disturbed(QueueBench):
        def send(self, traffic: Traffic, batch: Batch, raw: Path) -> Sent:
            self.lag_ms = 900.0 if batch.rate == 8 and not self.disturbed else 1.0
            self.disturbed = self.disturbed or batch.rate == 8
            return super().send(traffic, batch, raw)

        disturbed = False

    written = profile(looks=1, search={"start": 4, "lowest": 1, "minutes": 99})
    done = search(tmp_path, Disturbed(Queue(service=0.05, exponential=False)), written)
    assert [(step.result.rate, step.result.void) for step in done.steps[1:3]] == [
        (8, "generator"),
        (8, ""),
    ]
    assert done.verdict is Verdict.PASS
    assert done.rates.low is not None
    assert done.rates.low > 8


def test_two_steps_that_the_cache_voided_are_enough(tmp_path: Path) -> None:
    bench = QueueBench(Queue(), hit_rate=0.56)
    done = search(tmp_path, bench, profile())
    assert [step.result.void for step in done.steps] == ["cache", "cache"]
    assert done.verdict is Verdict.ANOMALOUS
    assert "2 of 2 steps are void" in done.notes


def test_the_confirming_run_is_longer_and_its_answer_counts(tmp_path: Path) -> None:
    done = search(tmp_path, QueueBench(Queue(service=0.02)), profile(seconds_per_rate=30))
    assert done.sustained
    last = done.steps[-1].result
    assert last.rate == done.rates.low
    before = [step.result.n for step in done.steps[:-1] if step.result.rate == last.rate]
    assert last.n == pytest.approx(3 * before[0], rel=0.02)
    summary = read_summary(tmp_path)
    assert isinstance(summary, LatencyEvidence)
    assert summary.sustained is True


def test_prompts_that_are_used_up_end_the_search_with_what_it_knows(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(1500)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    bench = QueueBench(Queue(service=0.02))
    written = profile(scenarios={}, looks=1, search={"start": 4, "lowest": 1, "minutes": 99})
    run = LoadRun(TRAFFIC, bench, bench, tmp_path / "raw")
    done = KeptRateSearch(
        written, run, from_file(file), tmp_path, OF, clock=lambda: bench.queue.now
    ).run()
    assert done.rates.low is not None
    assert done.verdict is Verdict.INCONCLUSIVE
    assert any("prompts, and" in note and "were left" in note for note in done.notes)
    assert len(bench.sent) == len(set(bench.sent)) <= 1500


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("search.json", "{"),
        ("search.json", "{}"),
        ("search.json", None),
        ("points/001.json", "{}"),
        ("points/001.json", "[1, 2"),
        ("points/001.json", '{"rate": 3, "answer": "maybe"}'),
        ("points/001.json", "[" * 100_000),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, file: str, content: str | None
) -> None:
    with pytest.raises(Stopped):
        search(tmp_path, Breaks(QueueBench(Queue(service=0.02)), 3), profile())
    if content is None:
        state = json.loads((tmp_path / STATE).read_text())
        content = json.dumps(state | {"taken": "many"})
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=file) as error:
        search(tmp_path, QueueBench(Queue(service=0.02)), profile())
    assert "remove the folder" in str(error.value)


def test_another_generator_does_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        search(tmp_path, Breaks(QueueBench(Queue(service=0.02)), 3), profile())
    with pytest.raises(UserError, match="belongs to another search"):
        search(tmp_path, QueueBench(Queue(), tool="another"), profile())
