"""The half of `vllm_bench` that runs in the serve environment: vLLM's own load generator.

`python vllm_bench_main.py BASE`. Imports the standard library and vLLM only, nothing of this
checkout. The import takes about 12 s on two cores, so the process may be started while a server
still starts: it imports first and then waits for `BASE.0.job.json` to appear, answers with
`BASE.0.result.json`, waits for job 1, and so on until it is ended. Each point of a job is sent by
one call of what `vllm bench serve` itself calls.

Job: `{"url", "served_name", "tokenizer", "raw_dir", "sampling", "burstiness", "request_timeout",
"count_words", "points": [{"rate" (requests/s; null: all at once), "seed", "rows": [{"id",
"messages"}]}], "warmup": the same without a rate, or null}`. Result: `{"vllm": version, "points":
[{"raw": file, "before", "after"}]}` where before and after are the engine's counters. The API key
comes in OPENAI_API_KEY.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import sys
import time
import traceback
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

COUNTERS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:num_preemptions_total",
)


def main() -> None:
    base, parent = sys.argv[1], os.getppid()
    import vllm
    import vllm.benchmarks.serve as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for number in itertools.count():
        job_file = Path(f"{base}.{number}.job.json")
        while not job_file.exists():
            if os.getppid() != parent:
                sys.exit("the process that started this one is gone")
            time.sleep(0.05)
        job = json.loads(job_file.read_text(encoding="utf-8"))
        result = {"vllm": vllm.__version__, "points": run(serve, parser, job)}
        result_file = Path(f"{base}.{number}.result.json")
        partial = result_file.with_suffix(".partial")
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.rename(result_file)


def run(serve, parser, job):  # type: ignore[no-untyped-def]
    """Warm up and send every point; for each the file of vLLM's result and the counters."""
    raw_dir = Path(job["raw_dir"])
    raw_dir.mkdir(parents=True, exist_ok=True)
    if job["warmup"]:
        warmed = send(serve, parser, job, job["warmup"], raw_dir / "warmup")
        if not warmed["completed"]:
            sys.exit(f"no warm-up request was answered: {warmed['errors'][0]}")
    points = []
    for index, point in enumerate(job["points"]):
        before = counters(job["url"])
        raw = send(serve, parser, job, point, raw_dir / f"point{index}")
        after = counters(job["url"])
        name = f"point{index}.json"
        (raw_dir / name).write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
        points.append({"raw": name, "before": before, "after": after})
    return points


def send(serve, parser, job, point, base):  # type: ignore[no-untyped-def]
    """vLLM's result of one point, with per-request detail in the order of the rows."""
    prompts = base.with_suffix(".jsonl")
    rows = point["rows"]
    # The custom dataset reads the prompt as text for counting; what is sent are the messages.
    prompts.write_text(
        "".join(json.dumps({"prompt": row["messages"][-1]["content"]}) + "\n" for row in rows),
        encoding="utf-8",
    )
    sampling = job["sampling"]
    arguments = [
        # The server renders its own chat template, as it does in production; the client applies
        # none (--skip-chat-template). The other way, /v1/completions with a prompt rendered here,
        # would leave the template out of the time measured, and BOS would stand twice where a
        # template writes it, because that endpoint adds special tokens.
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        "--skip-chat-template",
        *("--base-url", job["url"], "--model", job["served_name"]),
        *("--tokenizer", job["tokenizer"]),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle"),
        *("--num-prompts", str(len(rows)), "--no-oversample"),
        *("--custom-output-len", str(sampling["max_tokens"])),
        *("--request-rate", str(point["rate"] or "inf"), "--burstiness", str(job["burstiness"])),
        *("--temperature", str(sampling["temperature"]), "--top-p", str(sampling["top_p"])),
        *("--seed", str(point["seed"]), "--request-id-prefix", f"{base.name}-"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"),
        # No ready check and no warm-up of vLLM's own: both send the first prompt of the point,
        # which would then be answered from the prefix cache. Ours has prompts of its own.
        *("--ready-check-timeout-sec", "0", "--num-warmups", "0"),
        *("--save-detailed", "--disable-tqdm"),
    ]
    if sampling.get("seed") is not None:
        arguments += ["--extra-body", json.dumps({"seed": sampling["seed"]})]
    args = parser.parse_args(arguments)
    with checked(serve, rows, job["request_timeout"], job["count_words"]):
        raw = asyncio.run(serve.main_async(args))
    prompts.unlink()
    return raw


@contextlib.contextmanager
def checked(serve, rows, timeout, count_words):  # type: ignore[no-untyped-def]
    """Send each row's own messages, and call no request answered that was not.

    `count_words` is for endpoints that report no usage: words of the answer stand for tokens, and
    a stream that broke off between two of them cannot be told from a whole one.

    vLLM's client calls a stream that broke off after its first chunk a success, waits up to six
    hours, and leaves the error text empty where the server gave no reason. Afterwards an empty
    error text means: answered, with a token count by the server.
    """
    ask = serve.ASYNC_REQUEST_FUNCS["openai-chat"]

    async def ask_checked(request_func_input, session, pbar=None):  # type: ignore[no-untyped-def]
        index = int(request_func_input.request_id.rpartition("-")[2])
        request = replace(request_func_input, chat_messages=rows[index]["messages"])
        started = time.perf_counter()
        try:
            output = await asyncio.wait_for(ask(request, session, pbar), timeout)
        except TimeoutError:
            output = serve.RequestFuncOutput(start_time=started)
            output.error = f"no end within {timeout} s"
        if output.success and count_words and not output.output_tokens:
            output.output_tokens = len(output.generated_text.split())
        if output.success and not output.output_tokens:
            output.success = False
            output.error = "the stream ended without a token count"
        if not output.success:
            # The client keeps whole tracebacks; the last line says what was raised.
            last = output.error.strip().rpartition("\n")[2]
            output.error = last or "failed without a reason"
        return output

    serve.ASYNC_REQUEST_FUNCS["openai-chat"] = ask_checked
    try:
        yield
    finally:
        serve.ASYNC_REQUEST_FUNCS["openai-chat"] = ask


def counters(url):  # type: ignore[no-untyped-def]
    """The engine's counters now, summed over their labels; none where it shows no metrics."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
            text = reply.read().decode("utf-8")
    except (urllib.error.URLError, OSError):
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in COUNTERS:
            value = float(line.rpartition(" ")[2])
            if math.isfinite(value):
                found[name] = found.get(name, 0.0) + value
    return found


if __name__ == "__main__":
    # Left without Python's own shutdown: libraries that vLLM imports take seconds there and fill
    # the log with leak reports, below the lines that say what went wrong.
    try:
        main()
    except SystemExit as end:
        print(end, flush=True)
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
