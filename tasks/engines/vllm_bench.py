"""Load by vLLM's own generator: `vllm bench serve` behind `load_generator.LoadGenerator`.

It runs in the serve environment (`vllm_bench_main.py`). Its import takes long, so it is started
early and works while the server starts:

    server = VllmServer(...)
    with VllmBench(server.api_key, log=...) as bench, server:
        ...                            # accuracy, say
        sent = bench.send(traffic, batch, raw)

The file `raw` is vLLM's own result with the answers' texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from registry.errors import InfrastructureError
from registry.settings import settings
from tasks.engines.job_process import JobProcess
from tasks.engines.load_generator import Batch, Row, Sent, Traffic

SCRIPT = Path(__file__).with_name("vllm_bench_main.py")


class VllmBench(JobProcess):
    """The load generator's process, started at once, for job after job. A context manager."""

    def __init__(self, api_key: str, *, log: Path, python: Path | None = None) -> None:
        self._vllm = ""
        super().__init__(
            "vllm bench serve",
            python or settings().serve_python,
            SCRIPT,
            log,
            env={"OPENAI_API_KEY": api_key, "TOKENIZERS_PARALLELISM": "false"},
        )

    @property
    def version(self) -> str:
        return f"vllm bench serve {self._vllm}"

    def send(self, traffic: Traffic, batch: Batch, raw: Path) -> Sent:
        """One batch by one call of what `vllm bench serve` calls; see `LoadGenerator.send`."""
        job = {
            "url": traffic.url,
            "model": traffic.model,
            "tokenizer": str(traffic.tokenizer),
            "sampling": traffic.sampling,
            "burstiness": traffic.burstiness,
            "request_timeout": traffic.request_timeout,
            "count_words": traffic.count_words,
            "rate": batch.rate,
            "concurrency": batch.concurrency,
            "seed": batch.seed,
            "raw": str(raw.resolve()),
            "rows": list(batch.rows),
        }
        done = self.do(job, settings().stage_timeout)
        self._vllm = done["vllm"]
        result = json.loads(raw.read_text(encoding="utf-8"))
        limit = traffic.sampling["max_tokens"] if traffic.exact_counts else None
        rows = request_rows(batch, result, limit)
        return Sent(rows, result["duration"], done["lag_ms"])


def request_rows(batch: Batch, raw: Mapping[str, Any], max_tokens: int | None) -> list[Row]:
    """One row of `REQUEST_COLUMNS` per request asked, from vLLM's detailed result of a batch.

    In order of sending. vLLM's times are in seconds, in the order of the prompts. TPOT is (E2EL -
    TTFT) / (output tokens - 1), as vLLM has it; null for one-token answers. `max_tokens` None: an
    endpoint that is not ours counts its tokens as it likes. Raises `InfrastructureError` when the
    result does not hold what was asked.
    """
    count = len(batch.rows)
    lists = ("start_times", "errors", "input_lens", "output_lens", "ttfts", "itls", "latencies")
    odd = {name: len(raw[name]) for name in lists if len(raw[name]) != count}
    if odd:
        raise InfrastructureError(f"{count} requests were asked, vLLM's result holds {odd}")
    first = min(raw["start_times"], default=0.0)
    rows: list[Row] = []
    for index, asked in enumerate(batch.rows):
        error = raw["errors"][index]
        row: Row = {
            "rate": batch.rate,
            "request_id": asked["id"],
            "start_s": raw["start_times"][index] - first,
            "ok": not error,
            "error": error or None,
            "prompt_tokens": None,
            "output_tokens": None,
            "ttft_ms": None,
            "tpot_ms": None,
            "itl_ms": None,
            "e2el_ms": None,
            "scenario": asked.get("scenario"),
        }
        rows.append(row)
        if error:
            continue
        ttft, e2el = raw["ttfts"][index], raw["latencies"][index]
        tokens, exactly = raw["output_lens"][index], asked.get("output_tokens")
        if max_tokens is not None and exactly not in (None, tokens):
            row |= {"ok": False, "error": f"{tokens} of exactly {exactly} tokens came"}
            continue
        limit = exactly or max_tokens
        counted = max_tokens is None or (tokens <= limit and raw["input_lens"][index] > 0)
        if not (counted and tokens > 0 and 0 < ttft <= e2el):
            raise InfrastructureError(
                f"request {asked['id']}: {raw['input_lens'][index]} prompt tokens, {tokens} of at "
                f"most {limit} output tokens, TTFT {ttft} s, E2EL {e2el} s cannot be right"
            )
        row |= {
            "prompt_tokens": raw["input_lens"][index],
            "output_tokens": tokens,
            "ttft_ms": ttft * 1000,
            "tpot_ms": (e2el - ttft) / (tokens - 1) * 1000 if tokens > 1 else None,
            "itl_ms": [interval * 1000 for interval in raw["itls"][index]],
            "e2el_ms": e2el * 1000,
        }
    return sorted(rows, key=lambda row: row["start_s"])
