"""The largest request rate at which an endpoint keeps its SLA, as an interval.

A ramp and a bisection over steps that are measured to a planned certainty, then a longer run at the
rate that was kept. Every finished step lies in `points/` of the evidence folder; a search that was
killed goes on from there, with prompts that were not sent before.

Times are milliseconds, rates requests per second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eval_suites.load import LoadProfile
from eval_suites.load_steps import Around, StepResult, judge_step, requests_at
from eval_suites.rate_search import Answer, KeptRate, RatePlan, kept_rate, next_rate
from registry.digests import digest_of
from registry.errors import UserError
from registry.evidence import REQUESTS, TIMELINE, LatencyEvidence, LoadPoint, write_summary
from registry.outcome import Verdict
from registry.whole_files import write_whole
from tasks.engines.fixed_rates import Measuring, Say, settings_of, warm_up
from tasks.engines.load_evidence import load_point, write_requests, write_timeline
from tasks.engines.load_generator import Batch, Row
from tasks.engines.load_prompts import Prompts
from tasks.engines.load_run import LoadRun, Seen

POINTS = "points"
STATE = "search.json"

BURST = 8
"""Fewest requests of the warm-up's burst: fewer say little about what the server does."""

BURST_SHARE = 0.75
"""Of what the burst showed, where the ramp starts: a server that was busy with few requests at
once does more with many, and one that was at its capacity keeps no SLA there."""

VOID_STEPS = 2
"""So many steps in a row that the cache voided end the search: more would be void too."""

MOST_OF_THE_REST = 0.9
"""Of the time that is left for the confirming run: its last answers take time too."""


@dataclass
class Step:
    """One measured rate."""

    result: StepResult
    point: LoadPoint
    rows: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """What a search ends with."""

    verdict: Verdict
    rates: KeptRate
    steps: list[Step]
    notes: list[str]
    requests: int
    sustained: bool


class KeptRateSearch:
    """One search in one folder, from its first step or from where it was stopped."""

    def __init__(
        self,
        profile: LoadProfile,
        run: LoadRun,
        prompts: Prompts,
        folder: Path,
        of: Measuring,
        say: Say = lambda line: None,
        prompts_name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert profile.search is not None, "the profile has no search"
        self.profile, self.search = profile, profile.search
        self.load, self.prompts, self.of = run, prompts, of
        self.folder, self.say = folder, say
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.harness = ""
        self.start: float | None = None
        self.clock, self.started = clock, clock()
        self.spent_before = 0.0
        self._identity = {
            "profile": digest_of(profile),
            "url": "" if of.bundle else run.traffic.url,
            "model": run.traffic.model,
            "bundle": of.bundle,
            "prompts": prompts_name,
            "generator": run.generator.tool,
        }

    def run(self) -> Found:
        """Search, write the evidence. Raises `InfrastructureError`, `UserError`."""
        start = self.start = self._resume() or self._warm_up()
        plan = RatePlan(
            start, self.search.factor, self.search.tolerance, self.search.lowest,
            self.search.highest,
        )  # fmt: skip
        sustained = False
        while not sustained and not self._cached():
            while (rate := self._next(plan)) is not None and self._in_time(rate):
                step = self._measure(rate)
                if step.result.void == "generator" and self._in_time(rate):
                    # The machine may have been busy with something else for a moment.
                    step = self._measure(rate)
                if self._cached():
                    break
            low = kept_rate(self._answers()).low
            if low is None or self._cached() or not self._in_time(low):
                break
            # What is not kept a second time is a point like any other: the search goes on.
            sustained = self._sustain(low)
        rates = kept_rate(self._answers())
        verdict = self._verdict(rates, sustained)
        found = Found(verdict, rates, self.steps, self.notes, self.prompts.taken, sustained)
        self._write(found)
        return found

    # -- before the first step -----------------------------------------------------------------

    def _resume(self) -> float | None:
        """The start of a search that was stopped, with its points; None where none is known."""
        state_file = self.folder / STATE
        (self.folder / POINTS).mkdir(parents=True, exist_ok=True)
        if not state_file.exists():
            return None
        try:
            state = json.loads(state_file.read_text(encoding="utf-8"))
            known, taken, spent = state["identity"], int(state["taken"]), float(state["seconds"])
            harness, start = str(state["harness"]), state["start"] and float(state["start"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _unreadable(state_file, error) from None
        if known != self._identity:
            raise UserError.at(
                state_file, "belongs to another search", "name another folder with --out"
            )
        for file in sorted((self.folder / POINTS).glob("*.json")):
            try:
                self.steps.append(_restored(json.loads(file.read_text(encoding="utf-8"))))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _unreadable(file, error) from None
            self.say(f"{self.steps[-1].result.rate:.4g} requests/s: from before the stop")
        # What was sent in the step that was cut off is not known: its prompts are left out too.
        self.prompts.skip(taken)
        self.spent_before, self.harness = spent, harness
        return start

    def _warm_up(self) -> float:
        """Wake the server, and see about how much it does: the start of the ramp."""
        count = max(self.profile.warmup_requests, BURST)
        self._note_state(count)
        seen = warm_up(self.load, self.prompts, self.profile, count)
        answered = sum(row["ok"] for row in seen.rows)
        burst = answered / seen.duration if seen.duration > 0 else self.search.lowest
        start = self.search.start or BURST_SHARE * burst
        start = min(max(start, self.search.lowest), self.search.highest)
        self.start = start
        self._note_state()
        self.say(f"warmed up: {burst:.3g} requests/s in a burst; starting at {start:.3g}")
        return start

    # -- steps ---------------------------------------------------------------------------------

    def _measure(self, rate: float, longer: float = 1.0) -> Step:
        seen = Seen()
        number = len(self.steps) + 1
        for count in requests_at(self.profile, rate, longer):
            # Prompts count as used before they are sent: a kill in between must not repeat them.
            self._note_state(count)
            taken = self.prompts.take(count)
            batch = Batch(taken, self.profile.seed + self.prompts.taken, rate)
            self.load.send(seen, number, batch, self.prompts.expected_hits)
            around = Around(seen.growth, seen.expected_hits, seen.client_lag_ms)
            result = judge_step(self.profile, rate, seen.batches, around)
            if result.void or result.answer != "undecided":
                break
        self.harness = self.load.generator.version
        point = load_point(self.profile, result, seen, self.of.price_per_hour)
        step = Step(result, point, seen.rows, seen.samples)
        self.steps.append(step)
        self._store(step)
        words = "void" if result.void else result.answer
        self.say(
            f"{rate:.4g} requests/s: {words}, {result.n} requests ({result.cause or 'all well'})"
        )
        return step

    def _next(self, plan: RatePlan) -> float | None:
        """The rate to measure next; none above one that the generator could not send."""
        answers = self._answers()
        last = {step.result.rate: step.result.void for step in self.steps}
        too_fast = min((rate for rate in last if last[rate] == "generator"), default=None)
        if too_fast is None:
            return next_rate(plan, answers)
        if kept_rate(answers) == KeptRate(None, None):
            lower = max(min(answers) / plan.factor, plan.lowest)
            return lower if lower not in answers else None
        return next_rate(replace(plan, highest=min(plan.highest, too_fast)), answers)

    def _in_time(self, rate: float) -> bool:
        """Whether a step at this rate ends before the search must, and has prompts enough."""
        count = sum(requests_at(self.profile, rate))
        wanted, left = count / rate, self._left()
        prompts = self.prompts.left
        if prompts is not None and count > prompts:
            why = f"it takes {count} prompts, and {prompts} were left"
        elif wanted > left:
            why = (
                f"it takes {wanted:.0f} s, and of the search's {self.search.minutes:g} minutes "
                f"{max(left, 0):.0f} s were left"
            )
        else:
            return True
        self.notes.append(f"{rate:.4g} requests/s was not measured: {why}")
        return False

    def _sustain(self, rate: float) -> bool:
        """Longer runs at the rate that was kept, on fresh prompts; as long as the time allows.

        A queue near its capacity takes longer to fill than a step of the search lasts.
        """
        for _ in range(self.profile.repeats):
            if not self._in_time(rate):
                return False
            shortest = sum(requests_at(self.profile, rate)) / rate
            seconds = min(self.profile.sustain * shortest, MOST_OF_THE_REST * self._left())
            if self.prompts.left is not None:
                seconds = min(seconds, self.prompts.left / rate)
            step = self._measure(rate, seconds / self.profile.seconds_per_rate)
            if step.result.answer != "kept":
                self.notes.append(
                    f"{rate:.4g} requests/s was kept once and {step.result.answer} when it ran "
                    f"longer ({step.result.cause})"
                )
                return False
        return True

    def _cached(self) -> bool:
        """Whether the last steps were all voided by the cache."""
        last = self.steps[-VOID_STEPS:]
        return len(last) == VOID_STEPS and all(step.result.void == "cache" for step in last)

    # -- what it comes to ----------------------------------------------------------------------

    def _answers(self) -> dict[float, Answer]:
        """By rate; of two steps at one rate the worse one. A void step says nothing."""
        worst: tuple[Answer, ...] = ("not kept", "undecided", "kept")
        found: dict[float, Answer] = {}
        for step in self.steps:
            rate, answer = step.result.rate, step.result.answer
            if not step.result.void:
                found[rate] = min(found.get(rate, answer), answer, key=worst.index)
        void: dict[float, Answer] = {step.result.rate: "undecided" for step in self.steps}
        return void | found

    def _verdict(self, rates: KeptRate, sustained: bool) -> Verdict:
        self.notes += rates.contradictions
        void = [step for step in self.steps if step.result.void]
        if void and (self._cached() or len(void) == len(self.steps)):
            self.notes.append(f"{len(void)} of {len(self.steps)} steps are void")
            return Verdict.ANOMALOUS
        if rates.low is None and rates.high is None:
            return Verdict.INCONCLUSIVE
        if rates.low is None:
            # Below the lowest rate that was not kept one may be undecided, or not have been tried.
            answers = self._answers()
            slowest = min(answers)
            lost = answers[slowest] == "not kept" and slowest <= self.search.lowest * (1 + 1e-9)
            return Verdict.FAIL if lost else Verdict.INCONCLUSIVE
        narrow = rates.width is not None and rates.width <= self.search.tolerance * 1.01
        reached = rates.high is None and rates.low >= self.search.highest
        if not narrow and not reached:
            self.notes.append("the interval is wider than asked for")
        if not sustained or rates.contradictions or not (narrow or reached):
            return Verdict.INCONCLUSIVE
        return Verdict.PASS

    def _spent(self) -> float:
        return self.spent_before + self.clock() - self.started

    def _left(self) -> float:
        return self.search.minutes * 60 - self._spent()

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
            "samples": step.samples,
            "point": step.point.model_dump(mode="json"),
            "rate": step.result.rate,
            "answer": step.result.answer,
            "void": step.result.void,
            "cause": step.result.cause,
        }
        _write_json(self.folder / POINTS / name, content)

    def _write(self, found: Found) -> None:
        rows = [row | {"rate": step.result.rate} for step in self.steps for row in step.rows]
        numbered = list(enumerate(self.steps, start=1))
        write_requests(self.folder / REQUESTS, rows)
        write_timeline(
            self.folder / TIMELINE,
            [(number, step.result.rate, step.samples) for number, step in numbered],
        )
        evidence = LatencyEvidence(
            bundle=self.of.bundle,
            profile=self.of.profile,
            hardware=self.of.hardware,
            engine=self.of.engine,
            harness=self.harness or self.load.generator.version,
            settings=settings_of(self.profile, self.prompts),
            points=[step.point for step in self.steps],
            sla=[str(clause) for clause in self.profile.sla],
            kept_rate=(found.rates.low, found.rates.high),
            sustained=found.sustained,
            notes=found.notes,
            smoke=self.profile.smoke,
            emulated=self.of.emulated,
            production=self.profile.production,
            measured_at=datetime.now(UTC),
            seconds=round(self._spent(), 3),
        )
        write_summary(self.folder, evidence)


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError.at(file, f"cannot be read: {error!r}", "remove the folder, or name another")


def _restored(stored: Mapping[str, Any]) -> Step:
    point = LoadPoint.model_validate(stored["point"])
    result = StepResult(
        rate=stored["rate"],
        answer=stored["answer"],
        void=stored["void"],
        cause=stored["cause"],
        n=point.total,
        failed=point.failed,
        truncated=point.truncated,
        cropped=point.cropped,
        steady_window_s=point.steady_window_s,
        steady=bool(point.steady),
        hit_rate=point.prefix_cache_hit_rate,
        achieved_rate=point.achieved_rate,
    )
    return Step(result, point, stored["rows"], stored["samples"])


def _write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, ensure_ascii=False))
