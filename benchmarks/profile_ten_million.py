"""What `pilotage profile` costs on ten million requests, as CSV, JSONL and Parquet.

    python -m benchmarks.profile_ten_million [--rows 10000000] [--folder DIR]

Makes the log, then starts a bare read and the command anew for each format and prints seconds, the
ratio of the two, and the largest resident memory of the process. The bare read is DuckDB summing
the two token columns of the same file with the command's threads and memory limit. Three days of
arrivals with a daily rhythm, lognormal lengths, four segments, ids. Needs 2.3 GiB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAKE = """
copy (
  select 'req-' || i as request_id,
    round(1760000000 + 86400 * 3 * (i / {rows} + 0.04 * sin(6 * pi() * i / {rows}))
          + random() * 0.05, 3) as created,
    (50 + exp(random() * 6))::int as prompt_tokens,
    (10 + exp(random() * 5))::int as completion_tokens,
    round(0.2 + random() * 8, 3) as latency_s,
    'segment' || (random() * 3)::int as segment
  from range({rows}) made(i)
) to '{folder}/log.parquet'
"""
CSV = "copy (from '{folder}/log.parquet') to '{folder}/log.csv' (header)"
JSONL = """
copy (
  select request_id, created, latency_s, segment,
    {{'prompt_tokens': prompt_tokens, 'completion_tokens': completion_tokens,
      'total_tokens': prompt_tokens + completion_tokens}} as usage
  from '{folder}/log.parquet'
) to '{folder}/log.jsonl' (format json)
"""
BARE = """
import duckdb, sys
from tasks.traffic_scan import MEMORY_MB
connection = duckdb.connect(config={"threads": 2, "memory_limit": f"{MEMORY_MB}MB"})
print(connection.execute(sys.argv[1]).fetchall())
"""
READS = {
    "csv": "select sum(prompt_tokens::double), sum(completion_tokens::double) from "
    "read_csv('{path}', header = true, all_varchar = true)",
    "jsonl": "select sum(x[1]::double), sum(x[2]::double) from (select json_extract_string(json, "
    "['$.usage.prompt_tokens', '$.usage.completion_tokens']) as x "
    "from read_ndjson_objects('{path}'))",
    "parquet": "select sum(prompt_tokens), sum(completion_tokens) from read_parquet('{path}')",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="Keep the log here, and use it again.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotage-ten-million-") as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["PILOTAGE_HOME"] = temporary
        make(folder, asked.rows)
        print(f"{asked.rows} requests, {os.cpu_count()} cores, {platform.machine()}")
        print(f"{'format':8} {'MiB':>6} {'bare s':>7} {'s':>7} {'ratio':>6} {'peak MiB':>9}  load")
        for kind, read in READS.items():
            measure(folder / f"log.{kind}", read, asked.rows, Path(temporary))


def make(folder: Path, rows: int) -> None:
    import duckdb

    if all((folder / f"log.{kind}").exists() for kind in READS):
        return
    connection = duckdb.connect(config={"threads": 2, "memory_limit": "1GB"})
    for statement in (MAKE, CSV, JSONL):
        connection.execute(statement.format(folder=folder, rows=rows))


def measure(path: Path, read: str, rows: int, out: Path) -> None:
    load = os.getloadavg()[0]
    bare, _, _ = timed([sys.executable, "-c", BARE, read.format(path=path)])
    words = ["profile", str(path), "--json", "--out", str(out / "traffic.yaml"),
             "--write-load", str(out / "load.yaml"), "--plots", str(out / "plots")]  # fmt: skip
    seconds, peak, said = timed([sys.executable, "-m", "flows.cli", *words])
    assert json.loads(said.splitlines()[-1])["requests"] == rows
    size = path.stat().st_size >> 20
    print(f"{path.suffix[1:]:8} {size:6} {bare:7.1f} {seconds:7.1f} {seconds / bare:6.1f} "
          f"{peak >> 10:9}  {load:.1f}", flush=True)  # fmt: skip


def timed(command: list[str]) -> tuple[float, int, str]:
    """(seconds, KiB of this process's peak, what it said), its start included."""
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return time.monotonic() - began, usage.ru_maxrss, said


if __name__ == "__main__":
    main()
