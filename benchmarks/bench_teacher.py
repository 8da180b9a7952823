"""How fast teacher data is made, against a bare asyncio/httpx loop on the same endpoint.

    python -m benchmarks.bench_teacher [--prompts 200000] [--bare 20000] [--concurrency 64]
                                       [--delay 0.0] [--endpoints 1]

A mock endpoint answers after `--delay` seconds from a process of its own; `--endpoints` of them
listen there. The bare loop and the stage run in a process of their own too, one after the other:
the bare one (with `--bare` prompts of one endpoint, as it is slow), the stage with a tenth of the
prompts and with all, the bare one again. Prints prompts per second, CPU a prompt, their ratios, and
the peak of memory; and how busy the mock was, since one at its limit hides what a client costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ANSWER = '{"intent":"track_order","slots":{"order":"WL7"},"reply":"您好，正在为您查询订单WL7。"}'
PROMPT = "客服你好，查一下订单 {0} 到哪了，比较着急，麻烦快点；we need it by noon, thank you"
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=200_000)
    parser.add_argument("--bare", type=int, default=20_000, help="Prompts of the bare loop.")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--delay", type=float, default=0.0, help="Seconds of every answer.")
    parser.add_argument("--endpoints", type=int, default=1, help="That the stage asks.")
    asked = parser.parse_args()
    here, there = multiprocessing.Pipe()
    mock = multiprocessing.Process(
        target=serve, args=(there, asked.delay, asked.endpoints), daemon=True
    )
    mock.start()
    urls = here.recv()
    with tempfile.TemporaryDirectory(prefix="pilotage-teacher-") as home:
        figures = []
        for what, work, count in (
            ("bare", bare, asked.bare),
            ("a tenth", stage, asked.prompts // 10),
            ("stage", stage, asked.prompts),
            ("bare again", bare, asked.bare),
        ):
            before = cpu_of(mock.pid)
            one = apart(work, urls, count, asked.concurrency, f"{home}/{what}")
            one["mock"] = (cpu_of(mock.pid) - before) / one["seconds"]
            one["rate"], one["whole"] = count / one["asking"], count / one["seconds"]
            one["each"] = one["cpu"] / count
            figures.append(one)
            print(f"{what:10} {count:7} prompts, {one['rate']:5.0f}/s, asking {one['asking']:6.1f} "
                  f"of {one['seconds']:6.1f} s, CPU {1e3 * one['each']:5.2f} ms a prompt, "
                  f"memory {one['base']:4.0f} -> {one['peak']:4.0f} MiB, "
                  f"mock busy {one['mock']:.0%}")  # fmt: skip
    mock.terminate()
    first, tenth, own, last = figures
    fair = (first["rate"] + last["rate"]) / 2
    print(f"{asked.concurrency} at once, {asked.delay:g} s an answer, {os.cpu_count()} cores")
    differ = abs(first["rate"] - last["rate"]) / fair
    print(f"asking: {own['rate'] / fair:.1%} of the bare loop (two bare ones: {differ:.1%} apart)")
    if asked.delay:
        limit = asked.concurrency / asked.delay
        print(f"asking: {own['rate'] / limit:.1%} of the {limit:.0f}/s that the endpoint can give")
    each = (first["each"] + last["each"]) / 2
    print(f"CPU a prompt, files included: {own['each'] / each:.1%} of the bare loop's")
    whole = (first["whole"] + last["whole"]) / 2
    print(f"with reading and writing all files: {own['whole'] / whole:.1%}")
    for name, one, count in (
        ("stage", tenth, asked.prompts // 10),
        ("stage", own, asked.prompts),
        ("bare", first, asked.bare),
    ):
        print(f"memory that the rows take: {name} {one['peak'] - one['base']:.0f} MiB for {count}")


def apart(
    work: Callable[..., float], urls: list[str], prompts: int, concurrency: int, home: str
) -> Any:
    """Figures of `work` in a new process: seconds, CPU seconds, MiB before and at the peak."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=measured, args=(there, work.__name__, urls, prompts, concurrency, home)
    )
    process.start()
    figures = here.recv()
    process.join()
    return figures


def measured(
    out: Connection, name: str, urls: list[str], prompts: int, concurrency: int, home: str
) -> None:
    os.environ["PILOTAGE_HOME"] = home
    prepare(prompts)
    work = globals()[name]
    base, began, cpu = peak_mib(), time.monotonic(), time.process_time()
    asking = work(urls, prompts, concurrency)
    out.send(
        {
            "asking": asking,
            "seconds": time.monotonic() - began,
            "cpu": time.process_time() - cpu,
            "base": base,
            "peak": peak_mib(),
        }
    )


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cpu_of(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- what is compared ------------------------------------------------------------------------


def prompts_stage(prompts: int) -> Any:
    from registry.artifacts import Stage

    return Stage(name="prompts", label="many.jsonl", version=1, config={"count": prompts})


def prepare(prompts: int) -> None:
    """The prompts in the store; the imports too, so that they are in the memory of before."""
    import httpx  # noqa: F401

    from registry.settings import settings
    from registry.store import Store
    from tasks import teacher_data  # noqa: F401

    def produce(folder: Path) -> dict[str, Any]:
        cut = prompts - prompts // 100
        for part, numbers in (("train", range(cut)), ("calibration", range(cut, prompts))):
            with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as out:
                for number in numbers:
                    row = {"id": f"p{number}", "segment": "all", "prompt": PROMPT.format(number)}
                    out.write(json.dumps({**row, "reference": None}, ensure_ascii=False) + "\n")
        return {}

    Store(settings().store_dir).make(prompts_stage(prompts), produce, {})


def stage(urls: list[str], prompts: int, concurrency: int) -> float:
    """The stage as a release runs it. Returns the seconds of its asking alone."""
    from recipes.schema import TeacherRecipe
    from tasks import stages, teacher_asking, teacher_data
    from tasks.serving import RemoteTeacher

    recipe = TeacherRecipe.model_validate(
        {"kind": "teacher", "description": "mock", "url": urls[0], "more_urls": urls[1:],
         "served_model": "m", "sampling": SAMPLING, "concurrency": concurrency}
    )  # fmt: skip
    spent: list[float] = []
    ask_each = teacher_asking.ask_each

    def timed(*args: Any, **options: Any) -> None:
        began = time.monotonic()
        ask_each(*args, **options)
        spent.append(time.monotonic() - began)

    teacher_asking.ask_each = timed
    stages.begin_run(1)
    made = teacher_data.stage(recipe, prompts_stage(prompts), {}, {"url": urls[0]})
    ref = teacher_data.generate_teacher_data.fn(made, recipe, RemoteTeacher(recipe))
    assert ref.summary["answers"] == {"accepted": prompts}
    return sum(spent)


def bare(urls: list[str], prompts: int, concurrency: int) -> float:
    """What one would write by hand: ask, keep the answers in memory, write them at the end."""
    import httpx

    from registry.settings import settings

    answers: dict[str, dict[str, Any]] = {}

    async def ask() -> None:
        async with httpx.AsyncClient(
            timeout=120.0, limits=httpx.Limits(max_connections=concurrency)
        ) as client:

            async def work() -> None:
                for row in rows:
                    response = await client.post(
                        f"{urls[0]}/v1/chat/completions",
                        json={
                            "model": "m",
                            "messages": [{"role": "user", "content": row["prompt"]}],
                            **SAMPLING,
                        },
                    )
                    response.raise_for_status()
                    answers[row["id"]] = response.json()

            await asyncio.gather(*(work() for _ in range(concurrency)))

    files = sorted(settings().store_dir.glob("prompts/*/files/*.jsonl"))
    everything = [json.loads(line) for file in files for line in file.open(encoding="utf-8")]
    rows = iter(everything)
    began = time.monotonic()
    asyncio.run(ask())
    spent = time.monotonic() - began
    with (settings().home / "answers.jsonl").open("w", encoding="utf-8") as out:
        for row in everything:
            answer = answers[row["id"]]["choices"][0]["message"]["content"]
            out.write(json.dumps({"id": row["id"], "answer": answer}, ensure_ascii=False) + "\n")
    return spent


# -- the endpoint ----------------------------------------------------------------------------


class Mock(asyncio.Protocol):
    """HTTP/1.1 with the least that a client needs: a server in full would be the limit."""

    delay = 0.0
    response = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._got = b""

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        self._got = body[length:]
        asyncio.get_running_loop().call_later(self.delay, self._transport.write, self.response)


def serve(out: Connection, delay: float, endpoints: int) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER},
              "finish_reason": "stop"}  # fmt: skip
    usage = {"prompt_tokens": 31, "completion_tokens": 24, "total_tokens": 55}
    body = json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    Mock.delay, Mock.response = delay, head.encode() + b"\r\n\r\n" + body

    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Mock, "127.0.0.1", 0) for _ in range(endpoints)]
        out.send([f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(run())


if __name__ == "__main__":
    main()
