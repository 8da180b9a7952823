"""Load by GuideLLM behind `load_generator.LoadGenerator`; it needs no serve environment.

    with GuidellmBench(api_key, log=...) as bench:
        sent = bench.send(traffic, batch, raw)

GuideLLM runs in a process of its own (`guidellm_bench_main.py`), with one worker. With more, each
worker draws its Poisson gaps from the same seed: they come in identical groups. One worker also
keeps the order of the rows. The file `raw` is GuideLLM's report with prompts and answers.

What differs from `vllm bench serve`: arrivals are Poisson only; `all at once` takes the worker 2 to
4 ms a request; times are of the wall clock; TTFT is that of the first text, and an answer without
any has failed, whatever tokens the server counted; E2EL ends with the stream (`[DONE]`), and a
stream without that mark has failed. `/health` is asked twice a batch, whatever that answers.

GuideLLM's own figures in `raw` are others: its TTFT and latency begin when the headers are written,
after connecting, ours before; its `time_per_output_token_ms` is (last token - start) / tokens; its
`inter_token_latency_ms` is a request's mean, (last token - first) / (tokens - 1), near our TPOT.

On two busy cores: 12 to 25 s until the first batch is sent, part of it while a server starts, and
1.7 to 2.5 s a batch beside the sending. A request of 200 ms to a mock was 204 ms long at the median
(`vllm bench serve`: 202 ms), up to 250 ms at the P99 (208).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from tasks.engines.job_process import JobProcess
from tasks.engines.load_generator import Batch, Row, Sent, Traffic

SCRIPT = Path(__file__).with_name("guidellm_bench_main.py")
GRACE = 300.0
"""Seconds for the start, and for what a batch takes beside the sending."""


class GuidellmBench(JobProcess):
    """The load generator's process, started at once, for batch after batch. A context manager."""

    def __init__(self, api_key: str, *, log: Path, python: Path | None = None) -> None:
        self._guidellm = ""
        super().__init__(
            "guidellm",
            python or Path(sys.executable),
            SCRIPT,
            log,
            env={
                "OPENAI_API_KEY": api_key,
                "GUIDELLM__MAX_WORKER_PROCESSES": "1",
                "GUIDELLM__MP_CONTEXT_TYPE": "forkserver",
                "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING",
            },
            # GuideLLM reads a whole benchmark from such variables, and from a `.env` where it runs.
            without=("GUIDELLM",),
            cwd=log.resolve().parent,
        )

    @property
    def version(self) -> str:
        return f"guidellm {self._guidellm}"

    def send(self, traffic: Traffic, batch: Batch, raw: Path) -> Sent:
        """One batch by one call of what `guidellm run` calls; see `LoadGenerator.send`.

        Raises `UserError` for a burstiness that GuideLLM does not have.
        """
        if batch.rate is not None and traffic.burstiness != 1:
            raise UserError.at(
                f"burstiness {traffic.burstiness:g}",
                "GuideLLM sends Poisson arrivals only, which is burstiness 1",
                "set burstiness to 1, or send with vllm bench serve",
            )
        job = {
            "url": traffic.url,
            "model": traffic.model,
            "sampling": traffic.sampling,
            "request_timeout": traffic.request_timeout,
            "rate": batch.rate,
            "concurrency": batch.concurrency,
            "seed": batch.seed,
            "raw": str(raw.resolve()),
            "rows": list(batch.rows),
        }
        raw.unlink(missing_ok=True)
        done = self.do(job, min(longest(traffic, batch), settings().stage_timeout))
        self._guidellm = done["guidellm"]
        report = json.loads(raw.read_text(encoding="utf-8"))
        return sent(traffic, batch, report, done["lag_ms"])


def longest(traffic: Traffic, batch: Batch) -> float:
    """Seconds that no batch takes, whatever the server does: afterwards GuideLLM has got stuck."""
    count = len(batch.rows)
    turns = math.ceil(count / (batch.concurrency or count or 1))
    # The sum of so many exponential gaps, and 10 standard deviations of it.
    arrivals = (count + 10 * math.sqrt(count)) / batch.rate if batch.rate is not None else 0.0
    return GRACE + arrivals + turns * traffic.request_timeout


def sent(
    traffic: Traffic, batch: Batch, report: Mapping[str, Any], lag_ms: float | None = None
) -> Sent:
    """What became of a batch, from GuideLLM's report of it.

    Rows and requests are matched by the row's number, which is the `conversation_id`. Raises
    `InfrastructureError` when the report does not hold what was asked.
    """
    found = _by_row(batch, report)
    starts = {number: _start(one) for number, one in found.items()}
    ends = [_end(one) for one in found.values()]
    first = min(starts.values(), default=0.0)
    rows = []
    for number in sorted(found, key=lambda number: starts[number]):
        asked = batch.rows[number]
        row: Row = {
            "rate": batch.rate,
            "request_id": asked["id"],
            "start_s": starts[number] - first,
            "ok": False,
            "error": None,
            "prompt_tokens": None,
            "output_tokens": None,
            "ttft_ms": None,
            "tpot_ms": None,
            "itl_ms": None,
            "e2el_ms": None,
            "scenario": asked.get("scenario"),
        }
        row |= _answer(traffic, asked, found[number])
        rows.append(row)
    return Sent(rows, max(ends, default=0.0) - first, lag_ms)


def _by_row(batch: Batch, report: Mapping[str, Any]) -> dict[int, Row]:
    """GuideLLM's requests by the number of the row that each is about."""
    count = len(batch.rows)
    found: dict[int, Row] = {}
    for benchmark in report["benchmarks"]:
        for group in ("successful", "errored", "incomplete"):
            for one in benchmark["requests"][group]:
                number = int(one["info"]["conversation_id"])
                if number in found or number >= count:
                    raise InfrastructureError(
                        f"{count} requests were asked, GuideLLM's report holds one about row "
                        f"{number} that was not"
                    )
                found[number] = one
    if len(found) < count:
        missing = [row["id"] for number, row in enumerate(batch.rows) if number not in found]
        raise InfrastructureError(
            f"{len(missing)} of {count} requests are missing in GuideLLM's report, the first is "
            f"{missing[0]}"
        )
    return found


def _start(one: Row) -> float:
    """Before connecting, which `request_start` leaves out: a full backlog is the server's too."""
    return float(one["info"]["timings"]["resolve_start"])


def _end(one: Row) -> float:
    timings = one["info"]["timings"]
    return float(timings["request_end"] or timings["resolve_end"])


def _answer(traffic: Traffic, asked: Row, one: Row) -> Row:
    """The columns from `ok` on; of a request that failed only why."""
    info = one["info"]
    if info["status"] != "completed":
        return {"error": info["error"] or f"failed without a reason ({info['status']})"}
    body = json.loads(one["request_args"])["body"]
    if body["messages"] != asked["messages"] or body.get("tools") != asked.get("tools"):
        raise InfrastructureError(f"request {asked['id']}: GuideLLM sent other messages or tools")
    kept = one["response_metrics"]["pilotage"]
    usage, exactly = kept["usage"] or {}, asked.get("output_tokens")
    tokens = usage.get("completion_tokens")
    if not tokens and traffic.count_words:
        tokens = len((one["output"] or "").split())
    if not tokens:
        return {"error": "the stream ended without a token count"}
    if traffic.exact_counts and exactly not in (None, tokens):
        return {"error": f"{tokens} of exactly {exactly} tokens came"}
    start, arrived = _start(one), kept["arrived"]
    ttft = info["timings"]["first_token_iteration"] - start
    e2el = _end(one) - start
    prompt = usage.get("prompt_tokens")
    limit = exactly or traffic.sampling["max_tokens"]
    fits = not traffic.exact_counts or (tokens <= limit and prompt)
    if not (fits and 0 < ttft <= e2el):
        raise InfrastructureError(
            f"request {asked['id']}: {prompt} prompt tokens, {tokens} of at most {limit} output "
            f"tokens, TTFT {ttft} s, E2EL {e2el} s cannot be right"
        )
    return {
        "ok": True,
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "ttft_ms": ttft * 1000,
        "tpot_ms": (e2el - ttft) / (tokens - 1) * 1000 if tokens > 1 else None,
        "itl_ms": [1000 * (later - before) for before, later in pairwise(arrived)],
        "e2el_ms": e2el * 1000,
    }
