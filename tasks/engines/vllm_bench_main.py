"""The half of `vllm_bench` that runs in the serve environment: vLLM's own load generator.

`python vllm_bench_main.py BASE`. Imports the standard library and vLLM only, nothing of this
checkout. The import takes about 12 s on two cores, so the process may be started while a server
still starts: it imports first and then waits for `BASE.0.job.json` to appear, answers with
`BASE.0.result.json`, waits for job 1, and so on until it is ended. A job is one batch, sent by
one call of what `vllm bench serve` itself calls.

Job: `{"url", "model", "tokenizer", "sampling", "burstiness", "request_timeout", "count_words",
"rate" (requests/s; null: no waiting), "concurrency" (null: no limit), "seed", "raw", "rows":
[{"id", "messages", "tools"?, "output_tokens"?}]}`. vLLM's result goes to the file `raw`; the
answer is `{"vllm": version, "lag_ms"}`, how late the client's own event loop was (P99). The API key
comes in OPENAI_API_KEY.
"""

import asyncio
import codecs
import contextlib
import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

EVENT = re.compile(r"data:\s*")

DONE = "[DONE]"

HEARTBEAT = 0.02
"""Seconds between two looks at how late the event loop is."""


def main() -> None:
    base = sys.argv[1]
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    import vllm
    import vllm.benchmarks.serve as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for number in itertools.count():
        job_file = Path(f"{base}.{number}.job.json")
        while not job_file.exists():
            time.sleep(0.05)
        job = json.loads(job_file.read_text(encoding="utf-8"))
        raw, late = send(serve, parser, job)
        raw_file = Path(job["raw"])
        raw_file.write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
        result_file = Path(f"{base}.{number}.result.json")
        # As `registry.whole_files`, which this environment cannot import.
        partial = result_file.with_suffix(".partial")
        partial.write_text(json.dumps({"vllm": vllm.__version__, "lag_ms": late}), encoding="utf-8")
        partial.rename(result_file)


def end_with_parent(parent):  # type: ignore[no-untyped-def]
    """End when the process that started this one is gone, in the middle of a batch too.

    What goes on sending would be measured by whoever asks the same server next.
    """
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def send(serve, parser, job):  # type: ignore[no-untyped-def]
    """vLLM's result with per-request detail in the order of the rows, and the client's lag."""
    raw_file = Path(job["raw"])
    raw_file.parent.mkdir(parents=True, exist_ok=True)
    prompts = raw_file.with_suffix(".jsonl")
    rows = job["rows"]
    # The custom dataset reads a text to count its tokens; what is sent are the messages.
    prompts.write_text(
        "".join(json.dumps({"prompt": text_of(row)}) + "\n" for row in rows), encoding="utf-8"
    )
    sampling = job["sampling"]
    arguments = [
        # The server renders its own chat template, as it does in production; the client applies
        # none (--skip-chat-template). The other way, /v1/completions with a prompt rendered here,
        # would leave the template out of the time measured, and BOS would stand twice where a
        # template writes it, because that endpoint adds special tokens.
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        "--skip-chat-template",
        *("--base-url", job["url"], "--model", job["model"]),
        *("--tokenizer", job["tokenizer"]),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle"),
        *("--num-prompts", str(len(rows)), "--no-oversample"),
        *("--custom-output-len", str(sampling["max_tokens"])),
        *("--request-rate", str(job["rate"] or "inf"), "--burstiness", str(job["burstiness"])),
        *("--temperature", str(sampling["temperature"]), "--top-p", str(sampling["top_p"])),
        *("--seed", str(job["seed"]), "--request-id-prefix", f"{raw_file.stem}-"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"),
        # No ready check and no warm-up of vLLM's own: both send the first prompt of the batch,
        # which would then be answered from the prefix cache. Ours has prompts of its own.
        *("--ready-check-timeout-sec", "0", "--num-warmups", "0"),
        *("--save-detailed", "--disable-tqdm"),
    ]
    if job["concurrency"] is not None:
        arguments += ["--max-concurrency", str(job["concurrency"])]
    if sampling.get("seed") is not None:
        arguments += ["--extra-body", json.dumps({"seed": sampling["seed"]})]
    args = parser.parse_args(arguments)
    client = sys.modules[serve.ASYNC_REQUEST_FUNCS["openai-chat"].__module__]
    client.__dict__["StreamedResponseHandler"] = Stream
    with checked(serve, rows, job["request_timeout"], job["count_words"]):
        raw, lags = asyncio.run(beating(serve.main_async(args)))
    prompts.unlink(missing_ok=True)
    lags.sort()
    return raw, 1000 * lags[int(0.99 * len(lags))] if lags else None


def text_of(row):  # type: ignore[no-untyped-def]
    """All texts of a row: their tokens are recorded where the server sends no usage."""
    return "\n".join(one["content"] or "" for one in row["messages"])


async def beating(sending):  # type: ignore[no-untyped-def]
    """The result of `sending`, and how late a heartbeat beside it came, in seconds.

    A client that is busy sends late and looks late: its lag is in every time it measures.
    """
    lags = []

    async def beat():  # type: ignore[no-untyped-def]
        while True:
            due = time.perf_counter() + HEARTBEAT
            await asyncio.sleep(HEARTBEAT)
            lags.append(time.perf_counter() - due)

    task = asyncio.create_task(beat())
    try:
        return await sending, lags
    finally:
        task.cancel()


class Stream:
    """Stands for vLLM's `StreamedResponseHandler`, which reads vLLM's own streams only.

    That one needs `data: ` with a space and an empty line after it, loses the event after a
    comment, and hands on the empty chunk with the role, whose arrival would be taken for the first
    token's. What this one hands on: chunks from the first one with text on, and the usage by
    itself. The client strips every read, so events are told apart by their JSON, not by lines.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._buffer = ""
        self._begun = False

    def add_chunk(self, chunk: bytes) -> list[str]:
        self._buffer += self._decode(chunk)
        messages = []
        while found := EVENT.search(self._buffer):
            rest = self._buffer[found.end() :]
            if rest.startswith(DONE):
                self._buffer = rest[len(DONE) :]
                messages.append(f"data: {DONE}")
            elif rest.startswith("{"):
                try:
                    data, end = json.JSONDecoder().raw_decode(rest)
                except ValueError:
                    break  # not whole yet
                self._buffer = rest[end:]
                messages += [f"data: {json.dumps(one)}" for one in self._parts(data)]
            elif DONE.startswith(rest):
                break  # not whole yet
            else:
                self._buffer = rest  # a comment with these letters in it
        return messages

    def _parts(self, data: object) -> list[object]:
        """The chunk with its text where vLLM's client looks for it, and the usage."""
        if not isinstance(data, dict) or not data.get("choices"):
            return [data]
        usage = data.pop("usage", None)
        delta = data["choices"][0].get("delta") or {}
        text = delta.get("content") or _called(delta)
        text = text or delta.get("reasoning_content") or delta.get("reasoning")
        delta["content"] = text
        data["choices"][0]["delta"] = delta
        self._begun = self._begun or bool(text or data["choices"][0].get("finish_reason"))
        parts: list[object] = [data] if self._begun else []
        return [*parts, {"choices": [], "usage": usage}] if usage else parts


def _called(delta):  # type: ignore[no-untyped-def]
    """What a chunk says of the calls of tools; such an answer is no empty one."""
    calls = delta.get("tool_calls")
    functions = [one.get("function") or {} for one in calls or [] if isinstance(one, dict)]
    return "".join(f"{one.get('name') or ''}{one.get('arguments') or ''}" for one in functions)


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
        row = rows[index]
        request = replace(request_func_input, chat_messages=row["messages"])
        if row.get("tools"):
            request = replace(
                request, extra_body={**(request.extra_body or {}), "tools": row["tools"]}
            )
        if row.get("output_tokens") is not None:
            request = replace(request, output_len=row["output_tokens"], ignore_eos=True)
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
        if output.success and not output.generated_text:
            output.success = False
            output.error = "the answer is empty"
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
