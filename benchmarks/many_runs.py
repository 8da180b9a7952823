"""How much the databases grow by a night in which nothing changed, and what maintenance frees.

Runs a finished release again, N times, in a copy of its home (`pilotage release`, its own Prefect
server on SQLite); measures both databases after each run, in pages that hold something; makes the
runs older than the limit by their own time stamps; then `pilotage maintain`.

    python -m benchmarks.many_runs HOME RECIPE [--runs 3] [--days 30]

Prints one JSON line: bytes per run, what 1,000 runs come to by multiplication, what is left after
maintenance. The first run is not counted: it may make tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

DATABASES = {"prefect": "prefect/prefect.db", "mlflow": "mlflow.db"}
RUNS = 1000


def used(file: Path) -> int:
    """Bytes of the pages that hold something."""
    with closing(sqlite3.connect(file, timeout=60)) as database:
        ask = {
            name: int(database.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        }
    return (ask["page_count"] - ask["freelist_count"]) * ask["page_size"]


def rows(file: Path, tables: tuple[str, ...]) -> dict[str, int]:
    with closing(sqlite3.connect(file, timeout=60)) as database:
        return {
            table: int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
            for table in tables
        }


def sizes(home: Path) -> dict[str, int]:
    return {name: used(home / below) for name, below in DATABASES.items()}


def on_disk(home: Path) -> dict[str, int]:
    return {name: (home / below).stat().st_size for name, below in DATABASES.items()}


def pilotage(home: Path, *words: str) -> tuple[int, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("pilotage")), *words],
        env={**env, "PILOTAGE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    return done.returncode, done.stdout.strip() or done.stderr.strip()


def make_older(home: Path, days: int) -> None:
    """Every run, log, page and event as if it had been `days` earlier."""
    with closing(sqlite3.connect(home / DATABASES["prefect"], timeout=60)) as database:
        for table, column in (("flow_run", "end_time"), ("events", "occurred")):
            database.execute(f"UPDATE {table} SET {column}=datetime({column}, '-{days} days')")
        database.execute(f"UPDATE event_resources SET occurred=datetime(occurred, '-{days} days')")
        database.commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path, help="a home in which the release is finished")
    parser.add_argument("recipe")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--days", type=int, default=30)
    given = parser.parse_args()
    tables = ("flow_run", "task_run", "log", "artifact", "events")
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "home"
        shutil.copytree(given.home, home)
        at, seconds = [], []
        for _ in range(given.runs + 1):
            began = time.monotonic()
            status, text = pilotage(home, "release", given.recipe)
            if status not in (0, 10, 11):
                raise SystemExit(f"the release ended with {status}: {text[-2000:]}")
            seconds.append(time.monotonic() - began)
            at.append(sizes(home))
        per_run = {name: (at[-1][name] - at[0][name]) / given.runs for name in DATABASES}
        prefect = home / DATABASES["prefect"]
        before = {"used": at[-1], "on_disk": on_disk(home), "rows": rows(prefect, tables)}
        make_older(home, given.days + 10)
        status, text = pilotage(home, "maintain", "--days", str(given.days), "--json")
        after = {"used": sizes(home), "on_disk": on_disk(home), "rows": rows(prefect, tables)}
    line = {
        "runs": given.runs,
        "seconds_per_run": [round(one, 1) for one in seconds],
        "bytes_per_run": {name: round(size) for name, size in per_run.items()},
        "mib_per_1000_runs": {
            name: round(size * RUNS / 2**20, 1) for name, size in per_run.items()
        },
        "before": before,
        "maintain": {"status": status, "steps": json.loads(text) if status in (0, 4) else text},
        "after": after,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
