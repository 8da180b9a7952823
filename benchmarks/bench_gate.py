"""What `pilotage gate` costs: its start on a small table, and time and memory on a large one.

`make bench` prints the numbers, writes them into docs/benchmarks.md and exits with 1 where one is
over its limit. Tests assert no times; a shared machine would make them fail for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from benchmarks.written import write_between
from eval_suites.bootstrap import REPLICATES
from registry.evidence import ITEMS, AccuracyEvidence, write_summary

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
PILOTAGE = str(Path(sys.executable).with_name("pilotage"))
IMPORTS = [sys.executable, "-c", "import pandas, scipy"]

START_LIMIT_S = 1.0
"""Beyond what importing pandas and scipy alone costs."""
LARGE_LIMIT_S = 20.0
LARGE_LIMIT_MIB = 1024
LARGE_ITEMS = 100_000
GRADED = [f"score_{letter}" for letter in "abcde"]
SEED = 20_300_103


@dataclass(frozen=True)
class Run:
    """One child's wall time, processor time and peak memory."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    verdict: str


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    measured: str
    limit: str = ""
    within: bool = True


# -- runs ------------------------------------------------------------------------------------


def run(command: Sequence[str]) -> Run:
    """Run a child to its end. `wait4` tells of this child alone, whatever ran before."""
    started = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    last = child.stdout.read().strip().rpartition("\n")[2]
    complaint = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.monotonic() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)}: {child.returncode}: {last}{complaint[-2000:]}")
    verdict = json.loads(last)["verdict"] if last.startswith("{") else ""
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, verdict)


def gate_command(policy: str, folder: Path) -> list[str]:
    candidate, teacher = folder / "candidate", folder / "teacher"
    return [
        *(PILOTAGE, "gate", "--policy", policy, "--candidate", str(candidate)),
        *("--reference", f"teacher={teacher}", "--json"),
    ]


# -- evidence --------------------------------------------------------------------------------


def small_tables(folder: Path) -> None:
    """Two `items.csv` of 400 rows with `hit_rate`."""
    rng = np.random.default_rng(SEED)
    teacher = rng.random(400) < 0.8
    candidate = np.where(rng.random(400) < 0.03, ~teacher, teacher)
    for name, hits in (("candidate", candidate), ("teacher", teacher)):
        frame = pd.DataFrame({"item_id": [f"i{place}" for place in range(400)]})
        frame["hit_rate"] = hits.astype(int)
        (folder / name).mkdir(parents=True)
        frame.to_csv(folder / name / "items.csv", index=False)


def large_frames(items: int) -> dict[str, pd.DataFrame]:
    """Candidate and teacher: five graded scores, one of 0/1, output tokens, four segments."""
    rng = np.random.default_rng(SEED)
    label = pd.DataFrame({"item_id": [f"item-{place:07d}" for place in range(items)]})
    label["segment"] = rng.choice(["de", "en", "fr", "pl"], items)
    teacher, candidate = label.copy(), label.copy()
    for name in GRADED:
        scores = rng.beta(6, 2, items)
        teacher[name] = scores.round(6)
        candidate[name] = np.where(rng.random(items) < 0.97, scores, 0.0).round(6)
    hits = rng.random(items) < 0.8
    teacher["hit_rate"] = hits.astype(int)
    candidate["hit_rate"] = np.where(rng.random(items) < 0.02, False, hits).astype(int)
    tokens = rng.lognormal(5, 0.6, items)
    teacher["output_tokens"] = tokens.round().astype(int) + 1
    candidate["output_tokens"] = (tokens * rng.lognormal(0, 0.2, items)).round().astype(int) + 1
    return {"candidate": candidate, "teacher": teacher}


def write_tables(folder: Path, frames: dict[str, pd.DataFrame]) -> None:
    for name, frame in frames.items():
        (folder / name).mkdir(parents=True)
        frame.to_csv(folder / name / "items.csv", index=False)


def write_own(folder: Path, frames: dict[str, pd.DataFrame]) -> None:
    """The same as our own evidence: Parquet rows beside a summary."""
    for name, frame in frames.items():
        (folder / name).mkdir(parents=True)
        frame.to_parquet(folder / name / ITEMS, index=False)
        metrics = [*GRADED, "hit_rate", "output_tokens"]
        evidence = AccuracyEvidence(
            bundle=name,
            suite="bench",
            task="bench",
            task_version="1",
            engine="none",
            harness="none",
            items_digest="bench",
            settings={"sampling": {"temperature": 0.0}, "few_shot": 0},
            items_asked=len(frame),
            items_scored=len(frame),
            metrics={metric: float(frame[metric].mean()) for metric in metrics},
            measured_at=datetime(2030, 1, 2, tzinfo=UTC),
            seconds=1.0,
        )
        write_summary(folder / name, evidence)


def large_policy() -> dict[str, Any]:
    """Ten gates, nine of which need the bootstrap."""
    versus = {"reference": "teacher"}
    retention = [
        {"name": f"keeps_{name}", "metric": name, "kind": "retention", "margin": 0.95, **versus}
        for name in GRADED
    ]
    loss = {"kind": "non_inferiority", "margin": 0.05, **versus}
    return {
        "kind": "policy",
        "description": "Ten gates for the benchmark.",
        "gates": [
            *retention,
            {"name": "loss_graded", "metric": GRADED[0], **loss},
            {"name": "loss_hits", "metric": "hit_rate", **loss},
            {"name": "floor", "metric": GRADED[1], "kind": "floor", "margin": 0.5},
            {"name": "slices", "metric": GRADED[2], "kind": "slice", "margin": 0.05, **versus},
            {"name": "length", "kind": "length", "margin": 1.2, **versus},
        ],
    }


# -- measurements ----------------------------------------------------------------------------


def measure_start(folder: Path, runs: int) -> list[Line]:
    """Median wall times, the two commands taking turns."""
    small_tables(folder)
    command = gate_command("retention_hit_rate", folder)
    times: dict[str, list[float]] = {"imports": [], "gate": []}
    run(IMPORTS), run(command)  # the first of each fills the file cache
    for turn in range(runs):
        progress(f"start: {turn + 1} of {runs}")
        times["imports"].append(run(IMPORTS).wall_s)
        times["gate"].append(run(command).wall_s)
    imports, gate = (statistics.median(times[name]) for name in ("imports", "gate"))
    return [
        Line("`import pandas, scipy` alone", f"{imports:.2f} s"),
        Line("`pilotage gate` on 400 rows of `items.csv`", f"{gate:.2f} s"),
        Line(
            "difference (ratio)",
            f"{gate - imports:.2f} s ({gate / imports:.2f})",
            f"{START_LIMIT_S:g} s",
            gate - imports <= START_LIMIT_S,
        ),
    ]


def measure_large(folder: Path, items: int) -> list[Line]:
    """Ten gates on the same items as CSV and as our own evidence."""
    policy = folder / "ten_gates.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    policy.write_text(yaml.safe_dump(large_policy()), encoding="utf-8")
    progress(f"writing {items} items")
    frames = large_frames(items)
    lines = []
    for form, write in (("items.csv", write_tables), ("items.parquet", write_own)):
        write(folder / form, frames)
        progress(f"10 gates on {items} items of {form}")
        done = run(gate_command(str(policy), folder / form))
        what = f"10 gates, {items:,} items (`{form}`), {REPLICATES:,} replicates"
        limit = f"{LARGE_LIMIT_S:g} s"
        measured = f"{done.wall_s:.1f} s ({done.cpu_s:.1f} s of processor), {done.verdict}"
        lines.append(Line(what, measured, limit, done.wall_s <= LARGE_LIMIT_S))
        fits = done.peak_mib <= LARGE_LIMIT_MIB
        lines.append(
            Line("its peak memory", f"{done.peak_mib:.0f} MiB", f"{LARGE_LIMIT_MIB} MiB", fits)
        )
    return lines


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(lines: Sequence[Line]) -> str:
    rows = ["| What | Measured | Limit |", "| --- | --- | --- |"]
    for line in lines:
        over = "" if line.within else " **over**"
        rows.append(f"| {line.what} | {line.measured} | {line.limit}{over} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="starts of each kind")
    parser.add_argument("--items", type=int, default=LARGE_ITEMS)
    parser.add_argument("--no-write", action="store_true", help="leave docs/benchmarks.md alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        lines = measure_start(Path(place) / "start", options.runs)
        lines += measure_large(Path(place) / "large", options.items)
    print(table(lines))
    if options.items == LARGE_ITEMS and not options.no_write:
        write_between(DOCUMENT, table(lines))
    return int(not all(line.within for line in lines))


if __name__ == "__main__":
    sys.exit(main())
