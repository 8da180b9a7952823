"""Latency of a served bundle: vLLM's own load generator, our prompts, several request rates.

The load is sent by `vllm_bench_main.py` in the serve environment. Its import takes long, so it is
started early and works while the server starts:

    server = VllmServer(...)
    with VllmBench(server.api_key, log=...) as bench, server:
        ...                            # accuracy, say
        result = bench.measure(job)

Job of `measure`:

    url, served_name      the server, with or without `/v1`
    tokenizer             folder of its tokenizer (vLLM's client insists on one; the token counts
                          in the rows are the server's)
    prompts_file          JSON lines `{"id", "prompt"}` or `{"id", "messages"}`
    rates                 requests/s, rising; one point each
    seconds_per_rate      sending time: `ceil(rate * seconds_per_rate)` requests are sent
    warmup_requests       sent first, all at once, and not measured
    sampling              {"temperature", "top_p", "max_tokens", "seed"}, sent explicitly
    burstiness, seed      arrivals (1: Poisson); point `i` is drawn with `seed + i`
    request_timeout?      seconds; a request that takes longer has failed (default 120)
    out_dir, bundle, profile, hardware, engine, smoke

No prompt is sent twice, across points and warm-up: equal prompts would measure the prefix cache.
Answers end where the model ends them. Written to `out_dir`: `requests.parquet`, `summary.json`
(`LatencyEvidence`), and vLLM's own result of each point in `raw/`, with the answers' texts.

Percentiles are nearest ranks over all requests, a failed one as infinitely slow. The ones in
`raw/` are numpy's linear interpolation over the answered ones alone: near, not equal.
"""

from __future__ import annotations

import glob
import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from registry.digests import digest_of
from registry.errors import InfrastructureError, Problem, UserError
from registry.evidence import REQUESTS, LatencyEvidence, LoadPoint, percentiles, write_summary
from registry.settings import settings
from tasks.engines.subprocesses import ProcessTree, wait_until

SCRIPT = Path(__file__).with_name("vllm_bench_main.py")

Row = dict[str, Any]


class VllmBench:
    """The load generator's process, started at once, for job after job. A context manager."""

    def __init__(self, api_key: str, *, log: Path, python: Path | None = None) -> None:
        self._base = log.with_suffix("")
        self._jobs = 0
        self._tree = ProcessTree(
            [str(python or settings().serve_python), str(SCRIPT), str(self._base)],
            log=log,
            env={
                "OPENAI_API_KEY": api_key,
                # Our modules beside the script must not stand in for vLLM's imports.
                "PYTHONSAFEPATH": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )

    def __enter__(self) -> Self:
        self._remove_jobs()
        self._tree.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tree.stop()
        self._remove_jobs()

    def _remove_jobs(self) -> None:
        for kind in ("job", "result"):
            for file in self._base.parent.glob(f"{glob.escape(self._base.name)}.*.{kind}.json"):
                file.unlink(missing_ok=True)

    def measure(self, job: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Send the load, write the evidence; `{"points": [...], "seconds"}`.

        Raises `UserError` for too few prompts, `InfrastructureError` when the generator fails or
        no warm-up request is answered. Requests that fail under load are evidence, no error.
        """
        started = time.monotonic()
        counts = [request_count(rate, job["seconds_per_rate"]) for rate in job["rates"]]
        warmup, parts = share_out(Path(job["prompts_file"]), job["warmup_requests"], counts)
        out_dir = Path(job["out_dir"])
        raw_dir = out_dir / "raw"
        raw_dir.mkdir(parents=True, exist_ok=True)
        order = {
            "url": job["url"].rstrip("/").removesuffix("/v1"),
            "served_name": job["served_name"],
            "tokenizer": str(job["tokenizer"]),
            "raw_dir": str(raw_dir.resolve()),
            "sampling": job["sampling"],
            "burstiness": job["burstiness"],
            "request_timeout": job.get("request_timeout", 120.0),
            "count_words": False,
            "warmup": {"rate": None, "seed": job["seed"], "rows": warmup} if warmup else None,
            "points": [
                {"rate": rate, "seed": job["seed"] + index, "rows": rows}
                for index, (rate, rows) in enumerate(zip(job["rates"], parts, strict=True))
            ],
        }
        result = self.send(order, timeout)
        points: list[LoadPoint] = []
        requests: list[Row] = []
        for point, asked in zip(result["points"], order["points"], strict=True):
            raw = json.loads((raw_dir / point["raw"]).read_text(encoding="utf-8"))
            ids = [row["id"] for row in asked["rows"]]
            rows = request_rows(asked["rate"], ids, raw, job["sampling"]["max_tokens"])
            requests += rows
            duration = raw["duration"]
            points.append(
                load_point(asked["rate"], rows, duration, point["before"], point["after"])
            )
        evidence = LatencyEvidence(
            bundle=job["bundle"],
            profile=job["profile"],
            hardware=job["hardware"],
            engine=job["engine"],
            harness=f"vllm bench serve {result['vllm']}",
            settings={
                "endpoint": "/v1/chat/completions",
                "sampling": job["sampling"],
                "seconds_per_rate": job["seconds_per_rate"],
                "warmup_requests": job["warmup_requests"],
                "burstiness": job["burstiness"],
                "seed": job["seed"],
                "request_timeout": order["request_timeout"],
                "prompts_digest": digest_of([warmup, parts]),
            },
            points=points,
            smoke=job.get("smoke", False),
            measured_at=datetime.now(UTC),
            seconds=round(time.monotonic() - started, 3),
        )
        write_requests(out_dir / REQUESTS, requests)
        write_summary(out_dir, evidence)
        return {
            "points": [point.model_dump(mode="json") for point in points],
            "seconds": evidence.seconds,
        }

    def send(self, order: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Have one job of `vllm_bench_main` done; its result. Raises `InfrastructureError`."""
        job, result_file = (
            Path(f"{self._base}.{self._jobs}.{kind}.json") for kind in ("job", "result")
        )
        self._jobs += 1
        partial = job.with_suffix(".partial")
        partial.write_text(json.dumps(order, ensure_ascii=False), encoding="utf-8")
        partial.rename(job)
        limit = timeout or settings().stage_timeout
        wait_until(lambda: result_file.exists() or self._tree.poll() is not None, limit, every=0.05)
        if not result_file.exists():
            status = self._tree.poll()
            how = (
                f"ended with status {status}" if status is not None else f"gave none in {limit:g} s"
            )
            raise InfrastructureError(
                f"vllm bench serve {how}; the end of {self._tree.log}:\n{self._tree.last_lines()}"
            )
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
        return result


# -- what is sent ----------------------------------------------------------------------------


def request_count(rate: float, seconds: float) -> int:
    """Requests at `rate` per second during `seconds`; 0.1 * 30 is 3, not 4 by rounding."""
    return max(1, math.ceil(round(rate * seconds, 6)))


def read_prompts(path: Path) -> list[Row]:
    """Rows `{"id", "messages"}` in file order, each once. Raises `UserError` naming bad lines."""
    rows: dict[str, Row] = {}
    problems: list[Problem] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError.at(path, f"cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            rows.setdefault(digest_of(messages), {"id": str(row["id"]), "messages": messages})
        except (ValueError, KeyError, AttributeError) as error:
            problems.append(Problem(f"{path}:{number}", f"no id with prompt or messages: {error}"))
    if problems:
        raise UserError(problems)
    return list(rows.values())


def share_out(path: Path, warmup: int, counts: Sequence[int]) -> tuple[list[Row], list[list[Row]]]:
    """Rows `{"id", "messages"}` for the warm-up and each point, in file order, none of them twice.

    A prompt that the file holds twice is used once. Raises `UserError` naming every bad line, or
    how many different prompts are needed.
    """
    rows = read_prompts(path)
    needed = warmup + sum(counts)
    if len(rows) < needed:
        raise UserError.at(
            path,
            f"holds {len(rows)} different prompts, {needed} are needed ({warmup} to warm up, "
            f"{' + '.join(map(str, counts))} at the rates)",
            f"raise the size of the load part to {needed}, or lower rates or seconds_per_rate",
        )
    left = iter(rows)

    def take(count: int) -> list[Row]:
        return [next(left) for _ in range(count)]

    return take(warmup), [take(count) for count in counts]


# -- what comes back -------------------------------------------------------------------------


def request_rows(
    rate: float, ids: Sequence[str], raw: Mapping[str, Any], max_tokens: int | None
) -> list[Row]:
    """One row of `REQUEST_COLUMNS` per request asked, from vLLM's detailed result of a point.

    vLLM's times are in seconds, in the order of the prompts. TPOT is (E2EL - TTFT) / (output
    tokens - 1), as vLLM has it; null for one-token answers. Raises `InfrastructureError` when
    the result does not hold what was asked. `max_tokens` None: an endpoint that is not ours
    counts its tokens as it likes.
    """
    lists = ("start_times", "errors", "input_lens", "output_lens", "ttfts", "itls", "latencies")
    odd = {name: len(raw[name]) for name in lists if len(raw[name]) != len(ids)}
    if odd:
        raise InfrastructureError(f"{len(ids)} requests were asked, vLLM's result holds {odd}")
    first = min(raw["start_times"], default=0.0)
    rows: list[Row] = []
    for index, identity in enumerate(ids):
        error = raw["errors"][index]
        row: Row = {
            "rate": rate,
            "request_id": identity,
            "start_s": raw["start_times"][index] - first,
            "ok": not error,
            "error": error or None,
            "prompt_tokens": None,
            "output_tokens": None,
            "ttft_ms": None,
            "tpot_ms": None,
            "itl_ms": None,
            "e2el_ms": None,
        }
        rows.append(row)
        if error:
            continue
        ttft, e2el = raw["ttfts"][index], raw["latencies"][index]
        tokens = raw["output_lens"][index]
        counted = max_tokens is None or (tokens <= max_tokens and raw["input_lens"][index] > 0)
        if not (counted and tokens > 0 and 0 < ttft <= e2el):
            raise InfrastructureError(
                f"request {identity}: {raw['input_lens'][index]} prompt tokens, {tokens} of at "
                f"most {max_tokens} output tokens, TTFT {ttft} s, E2EL {e2el} s cannot be right"
            )
        row |= {
            "prompt_tokens": raw["input_lens"][index],
            "output_tokens": tokens,
            "ttft_ms": ttft * 1000,
            "tpot_ms": (e2el - ttft) / (tokens - 1) * 1000 if tokens > 1 else None,
            # vLLM's chat endpoint sends an empty chunk with the role together with the first
            # token's: the first interval is the client's own microseconds, not the engine's.
            "itl_ms": [interval * 1000 for interval in raw["itls"][index][1:]],
            "e2el_ms": e2el * 1000,
        }
    return rows


def load_point(
    rate: float,
    rows: Sequence[Row],
    duration: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> LoadPoint:
    """The summary of one point; `duration` in seconds, `before` and `after` engine counters."""
    answered = [row for row in rows if row["ok"]]
    failed = len(rows) - len(answered)
    intervals = [interval for row in answered for interval in row["itl_ms"]]
    # A failed request has no intervals to count; it weighs as many as an answered one has.
    lost = math.ceil(failed * len(intervals) / len(answered)) if answered else failed
    starts = sorted(row["start_s"] for row in rows)
    spread = starts[-1] - starts[0] if len(starts) > 1 else 0.0
    tokens = sum(row["output_tokens"] for row in answered)
    drafts = _grown("vllm:spec_decode_num_drafts_total", before, after)
    accepted = _grown("vllm:spec_decode_num_accepted_tokens_total", before, after)
    queries = _grown("vllm:prefix_cache_queries_total", before, after)
    hits = _grown("vllm:prefix_cache_hits_total", before, after)
    return LoadPoint(
        rate=rate,
        achieved_rate=(len(starts) - 1) / spread if spread > 0 else None,
        total=len(rows),
        ok=len(answered),
        failed=failed,
        duration_s=duration,
        ttft_ms=percentiles([row["ttft_ms"] for row in answered], failed),
        tpot_ms=percentiles(
            [row["tpot_ms"] for row in answered if row["tpot_ms"] is not None], failed
        ),
        itl_ms=percentiles(intervals, lost),
        e2el_ms=percentiles([row["e2el_ms"] for row in answered], failed),
        output_tokens_per_s=tokens / duration if duration > 0 else None,
        # The same as vLLM's own `spec_decode_acceptance_length`: each draft is one target step
        # that yields its accepted tokens and one of its own.
        acceptance_length=1 + accepted / drafts if drafts else None,
        prefix_cache_hit_rate=hits / queries if queries else None,
    )


def _grown(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def write_requests(path: Path, rows: Sequence[Row]) -> None:
    """`requests.parquet`: rows of `REQUEST_COLUMNS`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("rate", pa.float64()),
            ("request_id", pa.string()),
            ("start_s", pa.float64()),
            ("ok", pa.bool_()),
            ("error", pa.string()),
            ("prompt_tokens", pa.int64()),
            ("output_tokens", pa.int64()),
            ("ttft_ms", pa.float64()),
            ("tpot_ms", pa.float64()),
            ("itl_ms", pa.list_(pa.float64())),
            ("e2el_ms", pa.float64()),
        ]
    )
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
