"""The largest request rate at which an endpoint keeps its SLA, as an interval.

A ramp and a bisection over steps that are measured to a planned certainty, then a longer run at the
rate that was kept. Every finished step lies in `points/` of the evidence folder; a search that was
killed goes on from there, with prompts that were not sent before.

Times are milliseconds, rates requests per second.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eval_suites.load import LoadProfile
from eval_suites.load_steps import StepResult, judge_step, requests_at
from eval_suites.rate_search import Answer, KeptRate, RatePlan, kept_rate, next_rate
from registry.digests import digest_of
from registry.errors import UserError
from registry.evidence import REQUESTS, LatencyEvidence, LoadPoint, write_summary
from registry.outcome import Verdict
from tasks.engines.load_prompts import Prompts
from tasks.engines.vllm_bench import Row, VllmBench, load_point, request_rows, write_requests

POINTS = "points"
STATE = "search.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Endpoint:
    """What is asked. `tokenizer`: a folder, used for counting where the server does not count."""

    url: str
    model: str
    tokenizer: Path
    count_words: bool = False
    bundle: str = ""
    engine: str = "openai"
    hardware: str = ""


@dataclass
class Step:
    """One measured rate."""

    result: StepResult
    point: LoadPoint
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """What a search ends with."""

    verdict: Verdict
    rates: KeptRate
    steps: list[Step]
    notes: list[str]
    requests: int


class KeptRateSearch:
    """One search in one folder, from its first step or from where it was stopped."""

    def __init__(
        self,
        profile: LoadProfile,
        profile_name: str,
        endpoint: Endpoint,
        bench: VllmBench,
        prompts: Prompts,
        folder: Path,
        say: Say = lambda line: None,
    ) -> None:
        assert profile.search is not None, "the profile has no search"
        self.profile, self.name, self.search = profile, profile_name, profile.search
        self.endpoint, self.bench, self.prompts = endpoint, bench, prompts
        self.folder, self.say = folder, say
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.harness = "vllm bench serve"
        self.start: float | None = None
        self.started = time.monotonic()
        self.spent_before = 0.0

    def run(self) -> Found:
        """Search, write the evidence. Raises `InfrastructureError`, `UserError`."""
        start = self.start = self._resume() or self._warm_up()
        plan = RatePlan(
            start, self.search.factor, self.search.tolerance, self.search.lowest,
            self.search.highest,
        )  # fmt: skip
        sustained = False
        while not sustained:
            while (rate := next_rate(plan, self._answers())) is not None and self._in_time(rate):
                self._measure(rate)
            low = kept_rate(self._answers()).low
            if low is None or not self._in_time(low):
                break
            # What is not kept a second time is a point like any other: the search goes on.
            sustained = self._sustain(low)
        rates = kept_rate(self._answers())
        found = Found(
            verdict=self._verdict(rates, sustained),
            rates=rates,
            steps=self.steps,
            notes=self.notes,
            requests=self.prompts.taken,
        )
        self._write(found)
        return found

    # -- before the first step -----------------------------------------------------------------

    def _resume(self) -> float | None:
        """The start of a search that was stopped, with its points; None where none is known."""
        identity = {
            "profile": digest_of(self.profile),
            "url": self.endpoint.url,
            "model": self.endpoint.model,
        }
        state_file = self.folder / STATE
        (self.folder / POINTS).mkdir(parents=True, exist_ok=True)
        if not state_file.exists():
            self._identity = identity
            return None
        state = json.loads(state_file.read_text(encoding="utf-8"))
        if state["identity"] != identity:
            raise UserError.at(
                state_file, "belongs to another search", "name another folder with --out"
            )
        self._identity = identity
        for file in sorted((self.folder / POINTS).glob("*.json")):
            stored = json.loads(file.read_text(encoding="utf-8"))
            self.steps.append(_restored(stored))
            self.say(f"{self.steps[-1].result.rate:.4g} requests/s: from before the stop")
        # What was sent in the step that was cut off is not known: its prompts are left out too.
        self.prompts.skip(state["taken"])
        self.spent_before = state["seconds"]
        self.harness = state["harness"]
        start = state["start"]
        return None if start is None else float(start)

    def _warm_up(self) -> float:
        """Wake the server, and see about how much it does: the start of the ramp."""
        count = max(self.profile.warmup_requests, 8)
        self._note_state(count)
        rows, _, duration = self._send(None, count)
        answered = sum(row["ok"] for row in rows)
        burst = answered / duration if duration > 0 else self.search.lowest
        start = self.search.start or burst / 2
        start = min(max(start, self.search.lowest), self.search.highest)
        self.start = start
        self._note_state()
        self.say(f"warmed up: {burst:.3g} requests/s in a burst; starting at {start:.3g}")
        return start

    # -- steps ---------------------------------------------------------------------------------

    def _measure(self, rate: float) -> Step:
        batches: list[list[Row]] = []
        grown: Counter[str] = Counter()
        duration = 0.0
        for count in requests_at(self.profile, rate):
            # Prompts count as used before they are sent: a kill in between must not repeat them.
            self._note_state(count)
            rows, counters, seconds = self._send(rate, count)
            batches.append(rows)
            grown.update(counters)
            duration += seconds
            result = judge_step(self.profile, rate, batches, grown)
            if result.void or result.answer != "undecided":
                break
        rows = [row for batch in batches for row in batch]
        point = _point(result, rows, duration, grown)
        step = Step(result, point, rows)
        self.steps.append(step)
        self._store(step)
        words = "void" if result.void else result.answer
        self.say(
            f"{rate:.4g} requests/s: {words}, {result.n} requests ({result.cause or 'all well'})"
        )
        return step

    def _send(self, rate: float | None, count: int) -> tuple[list[Row], dict[str, float], float]:
        """Rows in order of sending, growth of the engine's counters, and seconds."""
        rows = self.prompts.take(count)
        raw_dir = self.folder / "raw"
        order = {
            "url": self.endpoint.url.rstrip("/").removesuffix("/v1"),
            "served_name": self.endpoint.model,
            "tokenizer": str(self.endpoint.tokenizer),
            "raw_dir": str(raw_dir.resolve()),
            "sampling": self.profile.sampling.model_dump(mode="json"),
            "burstiness": self.profile.burstiness,
            "request_timeout": self.profile.request_timeout,
            "count_words": self.endpoint.count_words,
            "warmup": None,
            "points": [
                {"rate": rate, "seed": self.profile.seed + self.prompts.taken, "rows": rows}
            ],
        }
        done = self.bench.send(order)
        self.harness = f"vllm bench serve {done['vllm']}"
        (point,) = done["points"]
        raw = json.loads((raw_dir / point["raw"]).read_text(encoding="utf-8"))
        found = request_rows(rate or 0.0, [row["id"] for row in rows], raw, max_tokens=None)
        found.sort(key=lambda row: row["start_s"])
        before, after = point["before"], point["after"]
        return found, {name: after[name] - before.get(name, 0.0) for name in after}, raw["duration"]

    def _in_time(self, rate: float) -> bool:
        """Whether a step at this rate ends before the search must."""
        wanted = sum(requests_at(self.profile, rate)) / rate
        left = self.search.minutes * 60 - self._spent()
        if wanted <= left:
            return True
        self.notes.append(
            f"{rate:.4g} requests/s was not measured: it takes {wanted:.0f} s, and of the search's "
            f"{self.search.minutes:g} minutes {max(left, 0):.0f} s were left"
        )
        return False

    def _sustain(self, rate: float) -> bool:
        """A second run at the rate that was kept, on fresh prompts."""
        step = self._measure(rate)
        if step.result.answer != "kept":
            self.notes.append(
                f"{rate:.4g} requests/s was kept once and {step.result.answer} the second "
                f"time ({step.result.cause})"
            )
        return step.result.answer == "kept"

    # -- what it comes to ----------------------------------------------------------------------

    def _answers(self) -> dict[float, Answer]:
        """By rate; of two steps at one rate the worse one."""
        worst: tuple[Answer, ...] = ("not kept", "undecided", "kept")
        found: dict[float, Answer] = {}
        for step in self.steps:
            rate, answer = step.result.rate, step.result.answer
            found[rate] = min(found.get(rate, answer), answer, key=worst.index)
        return found

    def _verdict(self, rates: KeptRate, sustained: bool) -> Verdict:
        self.notes += rates.contradictions
        if rates.low is None and rates.high is None:
            void = self.steps and all(step.result.void for step in self.steps)
            return Verdict.ANOMALOUS if void else Verdict.INCONCLUSIVE
        if rates.low is None:
            # Below the lowest rate that was not kept, one may be undecided.
            answers = self._answers()
            lost = answers[min(answers)] == "not kept"
            return Verdict.FAIL if lost else Verdict.INCONCLUSIVE
        narrow = rates.width is not None and rates.width <= self.search.tolerance * 1.01
        reached = rates.high is None and rates.low >= self.search.highest
        if not narrow and not reached:
            self.notes.append("the interval is wider than asked for")
        if not sustained or rates.contradictions or not (narrow or reached):
            return Verdict.INCONCLUSIVE
        return Verdict.PASS

    def _spent(self) -> float:
        return self.spent_before + time.monotonic() - self.started

    # -- files ---------------------------------------------------------------------------------

    def _note_state(self, coming: int = 0) -> None:
        state = {
            "identity": self._identity,
            "start": self.start,
            "taken": self.prompts.taken + coming,
            "seconds": self._spent(),
            "harness": self.harness,
        }
        _write_json(self.folder / STATE, state)

    def _store(self, step: Step) -> None:
        name = f"{len(self.steps):03d}.json"
        content = {
            "rows": step.rows,
            "point": step.point.model_dump(mode="json"),
            "rate": step.result.rate,
            "answer": step.result.answer,
            "void": step.result.void,
            "cause": step.result.cause,
        }
        _write_json(self.folder / POINTS / name, content)

    def _write(self, found: Found) -> None:
        rows = [row for step in self.steps for row in step.rows]
        write_requests(self.folder / REQUESTS, rows)
        settings = {
            "endpoint": "/v1/chat/completions",
            "sampling": self.profile.sampling.model_dump(mode="json"),
            "burstiness": self.profile.burstiness,
            "seed": self.profile.seed,
            "request_timeout": self.profile.request_timeout,
            "confidence": self.profile.confidence,
            "looks": self.profile.looks,
        }
        evidence = LatencyEvidence(
            bundle=self.endpoint.bundle,
            profile=self.name,
            hardware=self.endpoint.hardware,
            engine=self.endpoint.engine,
            harness=self.harness,
            settings=settings,
            points=[step.point for step in self.steps],
            sla=[str(clause) for clause in self.profile.sla],
            kept_rate=(found.rates.low, found.rates.high),
            notes=found.notes,
            smoke=self.profile.smoke,
            measured_at=datetime.now(UTC),
            seconds=round(self._spent(), 3),
        )
        write_summary(self.folder, evidence)


def _point(
    result: StepResult, rows: list[Row], duration: float, grown: Mapping[str, float]
) -> LoadPoint:
    """The step's summary: percentiles over all its requests, bounds over the steady ones."""
    plain = load_point(result.rate, rows, duration, {}, grown)
    return plain.model_copy(
        update={
            "achieved_rate": result.achieved_rate,
            "answer": "void" if result.void else result.answer,
            "cause": result.cause,
            "steady": result.steady,
            "cropped": result.cropped,
            "values": {str(one.clause): one.value for one in result.clauses},
            "bounds": {str(one.clause): one.bound for one in result.clauses},
        }
    )


def _restored(stored: Mapping[str, Any]) -> Step:
    point = LoadPoint.model_validate(stored["point"])
    result = StepResult(
        rate=stored["rate"],
        answer=stored["answer"],
        void=stored["void"],
        cause=stored["cause"],
        n=point.total,
        failed=point.failed,
        cropped=point.cropped,
        steady=bool(point.steady),
        hit_rate=point.prefix_cache_hit_rate,
        achieved_rate=point.achieved_rate,
    )
    return Step(result, point, stored["rows"])


def _write_json(path: Path, content: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    partial.replace(path)
