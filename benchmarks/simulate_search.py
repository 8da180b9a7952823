"""How often the search for the largest kept rate is right, on queues whose edge is known.

An M/M/1 queue (Poisson arrivals, exponential service times of mean s, one server) has times in the
system that are exponential with rate 1/s - rate (Kleinrock 1975, Queueing Systems 1, 3.2). So the
P99 is under T below 1/s - ln(100)/T. `make simulate-search` plays searches of a shipped profile
against such queues in computed time and prints what came of them, and what a scan would have cost.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.queues import Queue, QueueBench
from eval_suites.load import LoadProfile
from eval_suites.load_steps import requests_at
from eval_suites.loader import load_profile
from registry.outcome import Verdict
from tasks.engines.fixed_rates import Measuring
from tasks.engines.kept_rate import Found, KeptRateSearch
from tasks.engines.load_generator import Traffic
from tasks.engines.load_prompts import synthetic
from tasks.engines.load_run import LoadRun

LIMIT_S = 2.0
PERCENT = 99.0

WIDENED = 0.1
WIDEST = 0.25
"""A search is right when the edge lies in its interval widened so, and the interval is no wider."""


@dataclass(frozen=True)
class Played:
    """One search. Rates in requests/s, seconds of the queue's own time."""

    right: bool
    outside: bool
    verdict: Verdict
    requests: int
    seconds: float
    scan_all: int
    scan_to_first_loss: int


def search(queue: Queue, profile: LoadProfile, folder: Path) -> Found:
    """A search whose time is the queue's own."""
    bench = QueueBench(queue)
    traffic = Traffic(url="computed", model="queue", tokenizer=Path(), sampling={})
    run = LoadRun(traffic, bench, bench, folder / "raw")
    of = Measuring(bundle="", profile="computed", hardware="none", engine="computed")
    prompts = synthetic(profile.scenarios, profile.seed)
    return KeptRateSearch(profile, run, prompts, folder, of, clock=lambda: queue.now).run()


def scan(profile: LoadProfile, width: float) -> Iterator[float]:
    """Rates of a uniform scan of the profile's range, `width` apart."""
    assert profile.search is not None
    rate = profile.search.lowest
    while rate <= profile.search.highest:
        yield rate
        rate += width


def play(name: str, service: float, seed: int) -> Played:
    profile = load_profile(name)
    queue = Queue(service=service, seed=seed)
    edge = queue.kept_below(LIMIT_S, PERCENT)
    with tempfile.TemporaryDirectory() as folder:
        found = search(queue, profile, Path(folder))
    low, high = found.rates.low, found.rates.high
    width = found.rates.width
    inside = (
        low is not None and high is not None and (1 - WIDENED) * low <= edge <= (1 + WIDENED) * high
    )
    rates = list(scan(profile, high - low)) if low is not None and high is not None else []
    costs = [sum(requests_at(profile, rate)) for rate in rates]
    until = next((i + 1 for i, rate in enumerate(rates) if rate > edge), len(rates))
    return Played(
        right=inside and width is not None and width <= WIDEST,
        outside=found.verdict is Verdict.PASS and not inside,
        verdict=found.verdict,
        requests=found.requests,
        seconds=queue.now,
        scan_all=sum(costs),
        scan_to_first_loss=sum(costs[:until]),
    )


def table(name: str, services: Sequence[float], seeds: int) -> Iterator[str]:
    """A row of Markdown for each service time."""
    yield (
        "| s | edge, requests/s | PASS | right | PASS and wrong | minutes | requests "
        "| of a scan of the range | of a scan to its first loss |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    with ProcessPoolExecutor() as pool:
        for service in services:
            played = list(
                pool.map(play, [name] * seeds, [service] * seeds, range(1000, 1000 + seeds))
            )
            edge = Queue(service=service).kept_below(LIMIT_S, PERCENT)
            requests = sum(one.requests for one in played)
            decided = [one for one in played if one.scan_all]
            spent = sum(one.requests for one in decided)
            shares = (
                spent / sum(one.scan_all for one in decided),
                spent / sum(one.scan_to_first_loss for one in decided),
            )
            passed = sum(one.verdict is Verdict.PASS for one in played) / seeds
            yield (
                f"| {1000 * service:g} ms | {edge:.1f} | {passed:.2f} "
                f"| {sum(one.right for one in played) / seeds:.2f} "
                f"| {sum(one.outside for one in played) / seeds:.2f} "
                f"| {sum(one.seconds for one in played) / seeds / 60:.1f} "
                f"| {requests / seeds:.0f} | {shares[0]:.2f} | {shares[1]:.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", default="mock_smoke")
    parser.add_argument("--services", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.15])
    parser.add_argument("--seeds", type=int, default=60)
    chosen = parser.parse_args()
    for line in table(chosen.load, chosen.services, chosen.seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
