"""The plots of a load test on a computed example, for docs/images/.

Nothing is measured: two M/M/1 queues (Poisson arrivals, exponential service of mean 16 and 20 ms,
one server) stand for two candidates, and `KeptRateSearch` asks them as it would ask a server, in
computed time. The rate at which the P99 of such a queue is 2 s is known: 1 / service - ln(100) / 2,
which is 60.2 and 47.7 requests/s. Run from the checkout: `python -m benchmarks.plot_example`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.queues import Queue, QueueBench, Watched
from eval_suites.loader import load_profile
from registry.latency_plots import BY_RATE, compare_plots, write_plots
from registry.settings import CHECKOUT
from tasks.engines.fixed_rates import Measuring
from tasks.engines.kept_rate import KeptRateSearch
from tasks.engines.load_generator import Traffic
from tasks.engines.load_prompts import synthetic
from tasks.engines.load_run import LoadRun

IMAGES = CHECKOUT / "docs" / "images"
QUEUES = {
    "16 ms per request": Queue(service=0.016, seed=2),
    "20 ms per request": Queue(service=0.02, seed=4),
}


class UnwatchedBench(QueueBench):
    """Shows no engine's queue, as an endpoint without `/metrics` shows none."""

    @contextmanager
    def step(self) -> Iterator[Watched]:
        with super().step() as watched:
            yield watched
        watched.samples = []


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pilotage-") as work:
        folders = {name: search(queue, Path(work) / name) for name, queue in QUEUES.items()}
        first = next(iter(folders))
        drawn = {path.name: path for path in write_plots(folders[first])}
        lost = next(path for name, path in reversed(drawn.items()) if name.startswith("timeline"))
        compared = compare_plots(folders, Path(work) / "compared")
        for name, path in {
            "example_latency_by_rate.png": drawn[BY_RATE],
            "example_timeline.png": lost,
            "example_compared.png": compared[0],
        }.items():
            shutil.copyfile(path, IMAGES / name)
            print(f"{IMAGES / name}: {path.stat().st_size / 1000:.0f} kB")


def search(queue: Queue, folder: Path) -> Path:
    """A whole search over a queue, whose time is the queue's own; its evidence folder."""
    folder.mkdir(parents=True)
    # One look: the second batch of a step would begin in the real clock, which stands still here.
    written = load_profile("mock_smoke", {"seconds_per_rate": 30, "looks": 1})
    bench = UnwatchedBench(queue)
    traffic = Traffic(url="http://computed", model="queue", tokenizer=Path(), sampling={})
    run = LoadRun(traffic, bench, bench, folder / "raw")
    of = Measuring(bundle="", profile="M/M/1 queue", hardware="none", engine="computed")
    prompts = synthetic(written.scenarios, written.seed)
    KeptRateSearch(written, run, prompts, folder, of, clock=lambda: queue.now).run()
    return folder


if __name__ == "__main__":
    main()
