"""`pilotage bench`: the largest request rate at which an endpoint keeps its SLA, or fixed rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eval_suites.load import LoadProfile
from eval_suites.loader import load_profile
from eval_suites.rate_search import Answer, kept_rate
from recipes.loader import short_name
from registry.digests import digest_of
from registry.errors import UserError
from registry.evidence import (
    SUMMARY,
    LatencyEvidence,
    LoadPoint,
    note_transfer,
    read_summary,
    write_summary,
)
from registry.latency_plots import write_plots
from registry.outcome import Verdict
from tasks.bench_targets import Target
from tasks.engines.engine_watch import reset_prefix_cache
from tasks.engines.fixed_rates import Measuring, measure_rates
from tasks.engines.guidellm_bench import GuidellmBench
from tasks.engines.kept_rate import KeptRateSearch
from tasks.engines.load_prompts import FIRST_PROMPT, first_prompt, supply_of, word_tokenizer
from tasks.engines.load_run import LoadRun
from tasks.engines.vllm_bench import VllmBench
from tasks.hardware import price_of
from tasks.measured_folders import default_folder, prompts_digest, put_aside
from tasks.progress import LOG
from tasks.serving import check_times_count

GENERATORS: dict[str, Callable[[str, Path], Any]] = {
    "vllm": lambda key, log: VllmBench(key, log=log),
    "guidellm": lambda key, log: GuidellmBench(key, log=log),
}
"""Load generators by name: a context manager from an API key and a log file."""


@dataclass(frozen=True)
class Benchmark:
    """A finished measurement and where its evidence lies. `requests` counts the warm-up too."""

    verdict: Verdict
    evidence: LatencyEvidence
    folder: Path
    requests: int


def bench(
    opened: AbstractContextManager[Target],
    identity: str,
    load: str,
    *,
    prompts: Path | None = None,
    hardware: str | None = None,
    generator: str = "vllm",
    out: Path | None = None,
) -> Benchmark:
    """Measure one target. A search that was stopped in `out` goes on.

    `identity` tells targets apart where `out` is not named; `hardware` names the file with the
    price; `generator` is one of `GENERATORS`. Raises `UserError` for a wrong profile, prompt file
    or folder, and what opening the target raises; `InfrastructureError` when the endpoint or the
    generator fails.
    """
    profile = load_profile(load)
    if not profile.sla:
        raise UserError.at(f"load profile {load}", "has no `sla`", "e.g. `sla: [e2el p99 2s]`")
    if generator not in GENERATORS:
        raise UserError.at(f"--generator {generator}", "is none", f"one of {', '.join(GENERATORS)}")
    if generator == "guidellm" and profile.burstiness != 1:
        raise UserError.at(
            f"load profile {load}: burstiness", f"is {profile.burstiness:g}, GuideLLM sends 1 only",
            "set it to 1, or send with vllm",
        )  # fmt: skip
    # Here for its errors only: how many machines are paid the target says.
    price_of(hardware, profile)
    profile, prompts_name = _with_prompts(profile, load, prompts)
    told = {"profile": digest_of(profile), "target": identity}
    folder = (out or default_folder("bench", load, told)).resolve()
    with opened as target, _alone_in(folder):
        price, note = price_of(hardware, profile, target.gpus)
        check_times_count(target, profile.production)
        _make_room(folder)
        if profile.search is None:
            # Nothing is known of what a stopped one has sent: others are sent.
            (folder / FIRST_PROMPT).unlink(missing_ok=True)
        with GENERATORS[generator](target.api_key or "none", folder / "generator.log") as sender:
            tokenizer = target.tokenizer or word_tokenizer(folder / "tokenizer")
            supply = supply_of(profile, prompts, first_prompt(folder), target.tokenizer)
            run = LoadRun(
                target.traffic(profile, tokenizer),
                sender,
                target.watch(),
                folder / "raw",
                target.check_alive,
                lambda: reset_prefix_cache(target.url, target.api_key),
            )
            of = Measuring(
                target.bundle, short_name(load), target.hardware, target.engine, price,
                emulated=target.emulated,
            )  # fmt: skip
            if profile.search is not None:
                found = KeptRateSearch(
                    profile, run, supply, folder, of, say=LOG.info, prompts_name=prompts_name
                ).run()
                verdict = found.verdict
            else:
                evidence = measure_rates(profile, run, supply, folder, of, say=LOG.info)
                verdict = fixed_verdict(evidence.points)
                write_summary(folder, with_kept_rate(evidence))
        note_transfer(folder, target.transfer())
        evidence = _noted(folder, note)
        write_plots(folder)
    return Benchmark(decided(verdict, evidence), evidence, folder, supply.taken)


def decided(verdict: Verdict, evidence: LatencyEvidence) -> Verdict:
    """What the numbers say, or INFEASIBLE where they are of an emulated kernel in production."""
    return verdict if evidence.times_count else Verdict.INFEASIBLE


def with_kept_rate(evidence: LatencyEvidence) -> LatencyEvidence:
    """Fixed rates say between which two of them the SLA was lost.

    A closed loop does not: its rate comes of the server, and a busy one gives the same for all.
    """
    if any(point.concurrency is not None for point in evidence.points):
        return evidence
    answers: dict[float, Answer] = {
        point.rate: "undecided" if point.answer is None or point.answer == "void" else point.answer
        for point in evidence.points
    }
    found = kept_rate(answers)
    return evidence.model_copy(update={"kept_rate": (found.low, found.high)})


def fixed_verdict(points: list[LoadPoint]) -> Verdict:
    """Of fixed rates: PASS when all were kept, else the first of void, not kept and undecided."""
    answers = [point.answer for point in points]
    if "void" in answers:
        return Verdict.ANOMALOUS
    if "not kept" in answers:
        return Verdict.FAIL
    return Verdict.PASS if set(answers) == {"kept"} else Verdict.INCONCLUSIVE


def _with_prompts(profile: LoadProfile, load: str, prompts: Path | None) -> tuple[LoadProfile, str]:
    """The profile as it is sent, and what tells its prompts from others. Raises `UserError`."""
    digest = prompts_digest(profile, prompts)
    if prompts is None:
        return profile, digest
    of_one = [str(clause) for clause in profile.sla if clause.scenario is not None]
    if of_one:
        raise UserError.at(
            f"load profile {load}: sla",
            f"{', '.join(of_one)}: prompts of a file belong to no scenario",
            "name a profile whose lines are about all requests",
        )
    return profile.model_copy(update={"scenarios": {}}), digest


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Raises `UserError` where another measurement is running in the folder, or none could."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError("it is no folder")
        lock = FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0)
        lock.acquire()
    except Timeout:
        raise UserError.at(
            folder, "another measurement is running in it", "wait, or name another with --out"
        ) from None
    except OSError as error:
        raise UserError.at(folder, f"cannot be used: {error}", "name another with --out") from None
    try:
        yield
    finally:
        lock.release()


def _make_room(folder: Path) -> None:
    """The folder, empty or with a search that was stopped; a finished one is put aside."""
    try:
        put_aside(folder, SUMMARY)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError.at(folder, f"cannot be used: {error}", "name another with --out") from None


def _noted(folder: Path, note: str) -> LatencyEvidence:
    evidence = read_summary(folder)
    assert isinstance(evidence, LatencyEvidence)
    evidence = evidence.model_copy(update={"notes": [*evidence.notes, note]})
    write_summary(folder, evidence)
    return evidence


# -- what it says ----------------------------------------------------------------------------

POINT_VERDICTS = {
    "kept": "PASS",
    "not kept": "FAIL",
    "undecided": "INCONCLUSIVE",
    "void": "ANOMALOUS",
}


def document(done: Benchmark) -> dict[str, Any]:
    """What `pilotage bench --json` prints as its last line. Times in milliseconds."""
    evidence = done.evidence
    low, high = evidence.kept_rate or (None, None)
    return {
        "verdict": done.verdict.value,
        "kept_rate": [low, high],
        "sla": evidence.sla,
        "points": [_point(point) for point in evidence.points],
        "requests_total": done.requests,
        "evidence": str(done.folder),
        "emulated": evidence.emulated,
        "production": evidence.production,
        "notes": evidence.notes,
        **({"transfer": evidence.transfer.model_dump()} if evidence.transfer else {}),
        "unit": "ms",
    }


def _point(point: LoadPoint) -> dict[str, Any]:
    steady = next((name for name in point.bounds if name.startswith("e2el p99 ")), "")
    return {
        "rate": point.rate,
        "concurrency": point.concurrency,
        "verdict": POINT_VERDICTS[point.answer or "undecided"],
        "cause": point.cause,
        "n": point.total,
        "failed": point.failed,
        "truncated": point.truncated,
        "hit_rate": point.prefix_cache_hit_rate,
        "steady": point.steady,
        # Where the SLA asks for it, of the steady part, which the bound is of.
        "p99_e2el": point.values.get(steady, point.e2el_ms.get("p99")),
        "p99_e2el_bound": point.bounds.get(steady),
        "goodput": point.goodput,
        "output_tokens_per_s": point.output_tokens_per_s,
        "acceptance_length": point.acceptance_length,
        "cost": point.cost,
    }
