"""The half of `guidellm_bench` that runs in a process of its own: GuideLLM sends the load.

`python guidellm_bench_main.py BASE`. Imports the standard library and GuideLLM only, nothing of
this checkout. Waits for `BASE.0.job.json`, answers with `BASE.0.result.json`, waits for job 1, and
so on until it is ended. Each job is one call of `benchmark_generative_text`, which is what
`guidellm run` calls; GuideLLM's report is written to the job's `raw`.

Job: `{"url", "model", "sampling", "request_timeout" (s), "rate" (requests/s or null), "concurrency"
(or null), "seed", "raw" (a file), "rows": [{"messages", "tools"?, "output_tokens"?}]}`. Result:
`{"guidellm": version, "lag_ms"}`, how late the sending process's own event loop was (P99). The API
key comes in OPENAI_API_KEY. In the report, a request's `conversation_id` is its row's number, and
`response_metrics.pilotage` holds what GuideLLM does not keep: `usage` as the server sent it and
`arrived`, the Unix time of each piece of the answer.
"""

# GuideLLM's classes are narrowed here in ways that it allows and its annotations do not.
# mypy: disable-error-code="assignment, index, union-attr"

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import httpx
from guidellm.backends import Backend, OpenAIHTTPBackend
from guidellm.backends.openai import ChatCompletionsRequestHandler, OpenAIRequestHandlerFactory
from guidellm.benchmark import benchmark_generative_text
from guidellm.benchmark.schemas import GenerativeBenchmarksReport
from guidellm.schemas.backends import BackendArgs, OpenAIHTTPBackendArgs
from guidellm.schemas.benchmark import BenchmarkArgs, BenchmarkScenario

KIND = "pilotage"
HEARTBEAT = 0.02


class Failed(Exception):
    """Why a request has no answer. GuideLLM records the `repr` of what was raised."""

    def __repr__(self) -> str:
        return str(self)


# -- GuideLLM's own points of extension: a backend, its arguments, a handler of answers -----------


@OpenAIRequestHandlerFactory.register(KIND)
class WholeAnswer(ChatCompletionsRequestHandler):
    """Takes no stream that broke off for an answer, and keeps when each piece of it came.

    GuideLLM calls a stream that simply ends a success. Where the server sent no usage it takes the
    number of tokens asked for, or the number of pieces, as the number of tokens that came.
    """

    def __init__(self):  # type: ignore[no-untyped-def]
        super().__init__()
        self.arrived = []
        self.ended = False

    def format(self, data, history=None, **kwargs):  # type: ignore[no-untyped-def]
        arguments = super().format(data, history, **kwargs)
        # Asked for otherwise: usage with every piece, which no other client of ours asks for.
        arguments.body["stream_options"] = {"include_usage": True}
        return arguments

    def add_streaming_line(self, line):  # type: ignore[no-untyped-def]
        pieces = super().add_streaming_line(line)
        if pieces is None:
            self.ended = True
        elif pieces:
            self.arrived.append(time.time())
        return pieces

    def compile_streaming(self, request, arguments):  # type: ignore[no-untyped-def]
        response = super().compile_streaming(request, arguments)
        kept = {"usage": self.streaming_usage, "arrived": self.arrived}
        response.response_metrics = {**(response.response_metrics or {}), KIND: kept}
        return response

    def post_validation(self, response):  # type: ignore[no-untyped-def]
        if not self.ended:
            raise Failed("the stream broke off")
        if not self.arrived:
            raise Failed("the answer is empty")


@BackendArgs.register(KIND)
class LimitedArgs(OpenAIHTTPBackendArgs):
    kind: Literal["pilotage"] = "pilotage"
    request_format: Literal["pilotage"] = "pilotage"
    seconds: float
    lags: str


@Backend.register(KIND)
class LimitedBackend(OpenAIHTTPBackend):
    """Gives a request up after `seconds`: GuideLLM's own timeout is for one read, not for all.

    From the first request on it notes how late a heartbeat comes: a client that is busy sends late
    and looks late. Seconds, as a JSON list in the file `lags`.
    """

    _args: LimitedArgs

    async def process_startup(self):  # type: ignore[no-untyped-def]
        await super().process_startup()
        self._heart = None
        self._lags = []

    async def validate(self):  # type: ignore[no-untyped-def]
        # The first use of the HTTP client takes 0.1 s, which the first request would show.
        with contextlib.suppress(httpx.HTTPError):
            await self._async_client.get(f"{self._args.target}/health", timeout=5)

    async def process_shutdown(self):  # type: ignore[no-untyped-def]
        if self._heart is not None:
            self._heart.cancel()
            Path(self._args.lags).write_text(json.dumps(self._lags), encoding="utf-8")
            self._heart = None
        await super().process_shutdown()

    async def _beat(self):  # type: ignore[no-untyped-def]
        while True:
            due = time.perf_counter() + HEARTBEAT
            await asyncio.sleep(HEARTBEAT)
            self._lags.append(time.perf_counter() - due)

    async def resolve(self, request, request_info, history=None):  # type: ignore[no-untyped-def]
        if self._heart is None:
            self._heart = asyncio.create_task(self._beat())
        try:
            async with asyncio.timeout(self._args.seconds):
                async for item in super().resolve(request, request_info, history):
                    yield item
        except Failed:
            raise
        except TimeoutError:
            raise Failed(f"no end within {self._args.seconds} s") from None
        except httpx.HTTPStatusError as error:
            reply = error.response
            raise Failed(f"HTTP {reply.status_code} {reply.reason_phrase}".strip()) from None
        except Exception as error:
            raise Failed(f"{type(error).__name__}: {error}") from error


# -- one job after the other ----------------------------------------------------------------------


def main() -> None:
    base = sys.argv[1]
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    # What was registered above is otherwise unknown to the models that were built before.
    for model in (BenchmarkArgs, BenchmarkScenario, GenerativeBenchmarksReport):
        model.model_rebuild(force=True)
    # Each batch has two processes of its own. Forked from one that has imported GuideLLM already,
    # they start in a moment; the server of these forks is started here, with nothing to do yet.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["guidellm.benchmark"])
    context.Process(target=int).start()
    for number in itertools.count():
        job_file = Path(f"{base}.{number}.job.json")
        while not job_file.exists():
            time.sleep(0.05)
        job = json.loads(job_file.read_text(encoding="utf-8"))
        result = {"guidellm": version("guidellm"), "lag_ms": send(job)}
        result_file = Path(f"{base}.{number}.result.json")
        # As `registry.whole_files`, which the Python that this runs in need not have.
        partial = result_file.with_suffix(".partial")
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.rename(result_file)


def end_with_parent(parent):  # type: ignore[no-untyped-def]
    """End with all workers when the process that started this one is gone.

    What goes on sending would be measured by whoever asks the same server next.
    """
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def send(job):  # type: ignore[no-untyped-def]
    """Have GuideLLM send the rows; its report is the file `raw` afterwards. The lag in ms."""
    raw = Path(job["raw"])
    partial, lags_file = (raw.with_name(f"{raw.name}.{kind}.json") for kind in ("partial", "lags"))
    sampling = dict(job["sampling"])
    backend = {
        "kind": KIND,
        "target": job["url"],
        "model": job["model"],
        "api_key": os.environ["OPENAI_API_KEY"] or None,
        "api_routes": {KIND: "v1/chat/completions"},
        "max_tokens": sampling.pop("max_tokens"),
        "extras": {"body": {name: one for name, one in sampling.items() if one is not None}},
        "seconds": job["request_timeout"],
        "lags": str(lags_file),
        "timeout": None,
        "timeout_connect": None,
        "http2": False,
        "verify": True,
        # The job names one address, and a redirect is another.
        "follow_redirects": False,
    }
    spec = {
        "backend": backend,
        "profile": profile(job),
        # Not to send fewer: GuideLLM waits for ever for a batch whose last request has ended before
        # its loader has found that there are no more, which takes the loader some 0.1 s.
        "constraints": [{"kind": "max_requests", "count": len(job["rows"])}],
        # A whole conversation of one turn: the only way to hand over messages that no column type
        # of `datasets` has been through, with a name to know each by.
        "data": [{"kind": "in_memory_dict", "data": {"row": turns(job["rows"])}}],
        "data_column_mapper": {
            "kind": "generative_column_mapper",
            "column_mappings": {"conversation_turns_column": "row"},
        },
        "data_preprocessors": [],
        "seed": {"kind": "static", "value": job["seed"]},
        "outputs": [{"kind": "json", "path": str(partial)}],
    }
    scenario = BenchmarkScenario.model_validate({"spec": spec})
    asyncio.run(benchmark_generative_text(scenario, progress=False))
    partial.rename(raw)
    if not lags_file.exists():
        return None
    lags = sorted(json.loads(lags_file.read_text(encoding="utf-8")))
    lags_file.unlink()
    return 1000 * lags[int(0.99 * len(lags))] if lags else None


def profile(job):  # type: ignore[no-untyped-def]
    """When requests start. Without a limit of its own GuideLLM has at most 10240 in flight."""
    limit = job["concurrency"] or len(job["rows"])
    if job["rate"] is not None:
        rate = job["rate"] * stretch(job["seed"], len(job["rows"]))
        return {"kind": "poisson", "rate": [rate], "max_concurrency": limit}
    if job["concurrency"] is not None:
        return {"kind": "concurrent", "streams": [limit]}
    return {"kind": "throughput", "max_concurrency": limit}


def stretch(seed, count):  # type: ignore[no-untyped-def]
    """By how much the rate is changed so that the gaps of this seed add up to what was asked.

    A few hundred exponential gaps miss their mean by several per cent, and the load with them. As
    `vllm bench serve` has it; the draws are those of GuideLLM's `AsyncPoissonStrategy`.
    """
    drawn = random.Random(seed)
    gaps = [drawn.expovariate(1.0) for _ in range(count)][1:]
    return sum(gaps) / len(gaps) if gaps else 1.0


def turns(rows):  # type: ignore[no-untyped-def]
    """Each row as JSON of GuideLLM's `ConversationGraphData`."""
    found = []
    for number, row in enumerate(rows):
        columns = {"raw_messages_column": [row["messages"]]}
        if row.get("output_tokens") is not None:
            # Becomes `max_completion_tokens` with `ignore_eos`.
            columns["output_tokens_count_column"] = [row["output_tokens"]]
        if row.get("tools"):
            # As a turn whose calls nobody answers: otherwise GuideLLM demands a call, and asks a
            # second time with a result that it makes up. `auto` is what no choice means.
            columns["tools_column"] = [row["tools"]]
            columns["turn_type_column"] = ["server_tool_call"]
            columns["tool_choice_column"] = ["auto"]
        turn = {"node_id": "0", "columns": columns}
        found.append(json.dumps({"graph_id": str(number), "turns": [turn]}))
    return found


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        print(end, flush=True)
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
