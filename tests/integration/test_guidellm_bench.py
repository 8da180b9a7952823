"""GuideLLM as load generator: against a pretend server for every fault, and a queue that is known.

One process for the whole file: it takes 6 s to start and any number of batches.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_suites.load_steps import rate_sent
from registry.errors import InfrastructureError
from registry.evidence import percentile
from tasks.engines.guidellm_bench import GuidellmBench
from tasks.engines.load_generator import Batch, Row, Sent, Traffic
from tests.mock_server import MockServer, serving
from tests.processes import gone

pytestmark = pytest.mark.alone

KEY = "secret-key"
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8, "seed": 3}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guidellm") / "bench.log"


@pytest.fixture(scope="module")
def bench(log: Path) -> Iterator[GuidellmBench]:
    with GuidellmBench(KEY, log=log) as running:
        yield running
        tree = psutil.Process(running._tree.pid)
        members = [tree, *tree.children(recursive=True)]
        assert not [one for one in members if KEY in " ".join(one.cmdline())]
    assert len(members) > 1
    assert all(map(gone, members)), "nothing outlives it"
    assert KEY not in log.read_text(encoding="utf-8")
    assert not list(log.parent.glob("*.json")), "jobs hold prompts"


# -- a pretend server ------------------------------------------------------------------------


class PretendServer(ThreadingHTTPServer):
    """Streams 4 tokens 50 ms apart, the first after 100 ms; a prompt names the fault it meets."""

    request_queue_size = 100
    daemon_threads = True
    asked: list[Row]
    keys: set[str | None]
    got: list[str]


class _Handler(BaseHTTPRequestHandler):
    server: PretendServer

    def do_GET(self) -> None:
        self.server.got.append(self.path)
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        self.server.asked.append(body)
        self.server.keys.add(self.headers["Authorization"])
        assert self.path == "/v1/chat/completions"
        if prompt == "refused":
            self.send_response_only(503, "")
            self.end_headers()
            return
        if prompt == "sent elsewhere":
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:9/v1/chat/completions")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if prompt == "hangs":
            time.sleep(4)
            return
        time.sleep(0.1)
        self._chunk({"role": "assistant", "content": ""})
        tokens = body["max_completion_tokens"] if body.get("ignore_eos") else 4
        for token in range(tokens if prompt != "empty" else 0):
            if token:
                time.sleep(1.0 if prompt == "trickles" else 0.05)
            if prompt == "breaks off" and token == 2:
                self._send({"error": {"message": "EngineCore died"}})
                return
            if prompt == "just ends" and token == 2:
                return
            self._chunk({"content": "x "})
        count = 3 if prompt == "one too few" else tokens
        usage = {"prompt_tokens": 21, "completion_tokens": count, "total_tokens": 21 + count}
        if prompt == "empty":
            usage |= {"completion_tokens": 0}
        if prompt != "uncounted":
            self._send({"choices": [], "usage": usage})
        if prompt != "no end mark":
            self._write(b"data: [DONE]\n\n")

    def _chunk(self, delta: Row) -> None:
        self._send({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def _send(self, content: Row) -> None:
        self._write(f"data: {json.dumps(content)}\n\n".encode())

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # who gave up has closed the connection
            self.wfile.write(content)
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pretend() -> Iterator[tuple[PretendServer, str]]:
    server = PretendServer(("127.0.0.1", 0), _Handler)
    server.asked, server.keys, server.got = [], set(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def rows_of(*prompts: str) -> list[Row]:
    return [
        {"id": f"id of {prompt}", "messages": [{"role": "user", "content": prompt}]}
        for prompt in prompts
    ]


def traffic(url: str, **changes: Any) -> Traffic:
    given = {"sampling": SAMPLING, "request_timeout": 3.0, **changes}
    return Traffic(url, "m", Path("unused"), **given)


def by_prompt(sent: Sent) -> dict[str, Row]:
    return {row["request_id"].removeprefix("id of "): row for row in sent.rows}


def test_faults_are_failed_requests_and_numbers_are_the_stopwatchs(
    pretend: tuple[PretendServer, str], bench: GuidellmBench, tmp_path: Path
) -> None:
    server, url = pretend
    prompts = ["fine", "refused", "sent elsewhere", "breaks off", "just ends", "no end mark"]
    prompts += ["empty", "uncounted", "hangs", "trickles", "one too few", "six", "also fine"]
    rows = rows_of(*prompts)
    rows[-3] |= {"output_tokens": 4}
    rows[-2] |= {"output_tokens": 6, "scenario": "counted"}
    rows[-1]["messages"] = [
        {"role": "system", "content": "Be  brief.\n"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "user", "content": "<|im_start|> “é”", "name": "u"},
        {"role": "user", "content": "also fine"},
    ]
    parameters = {"type": "object", "properties": {"order": {"type": "string"}}}
    function = {"name": "track", "description": "Finds.", "parameters": parameters}
    rows[-1]["tools"] = [{"type": "function", "function": function}]
    sent = bench.send(traffic(url), Batch(rows, seed=1, rate=20.0), tmp_path / "raw.json")

    assert bench.version == "guidellm 0.8.1"
    assert server.keys == {f"Bearer {KEY}"}
    assert [body["messages"] for body in server.asked] == [row["messages"] for row in rows]
    assert [body.get("tools") for body in server.asked] == [row.get("tools") for row in rows]
    assert [body.get("tool_choice") for body in server.asked] == [None] * 12 + ["auto"]
    assert set(server.got) == {"/health"}, "nothing of its own but this"
    for row, body in zip(rows, server.asked, strict=True):
        assert (body["temperature"], body["top_p"], body["seed"]) == (0.0, 1.0, 3)
        assert (body["model"], body["stream_options"]) == ("m", {"include_usage": True})
        exactly = row.get("output_tokens")
        assert body["max_completion_tokens"] == exactly or 8
        assert body.get("ignore_eos", False) is (exactly is not None)

    found = by_prompt(sent)
    assert list(found) == prompts, "every row once, in order"
    assert [row["start_s"] for row in sent.rows] == sorted(row["start_s"] for row in sent.rows)
    for prompt in ("fine", "also fine", "six"):
        row = found[prompt]
        tokens = 6 if prompt == "six" else 4
        assert row["ok"], row["error"]
        assert (row["prompt_tokens"], row["output_tokens"]) == (21, tokens)
        assert row["ttft_ms"] == pytest.approx(100, abs=80)
        assert len(row["itl_ms"]) == tokens - 1, "the role's chunk is no token"
        assert row["e2el_ms"] == pytest.approx(50 + 50 * tokens, abs=120)
        assert row["tpot_ms"] == pytest.approx(50, abs=30)
        assert row["ttft_ms"] + sum(row["itl_ms"]) == pytest.approx(row["e2el_ms"], abs=20)
    assert found["six"]["scenario"] == "counted"
    errors = {prompt: row["error"] for prompt, row in found.items() if not row["ok"]}
    assert errors == {
        "refused": "HTTP 503",
        "sent elsewhere": "HTTP 307 Temporary Redirect",
        "breaks off": "ValueError: Streaming response returned an error: EngineCore died",
        "just ends": "the stream broke off",
        "no end mark": "the stream broke off",
        "empty": "the answer is empty",
        "uncounted": "the stream ended without a token count",
        "hangs": "no end within 3.0 s",
        "trickles": "no end within 3.0 s",
        "one too few": "3 of exactly 4 tokens came",
    }
    assert found["trickles"]["e2el_ms"] is None
    assert sent.duration > 3
    assert sent.client_lag_ms is not None
    text = (tmp_path / "raw.json").read_text(encoding="utf-8")
    assert KEY not in text
    (benchmark,) = json.loads(text)["benchmarks"]
    assert benchmark["config"]["strategy"]["type_"] == "poisson"
    assert [path.name for path in tmp_path.glob("*.json")] == ["raw.json"]


def test_words_are_counted_where_the_endpoint_counts_nothing(
    pretend: tuple[PretendServer, str], bench: GuidellmBench, tmp_path: Path
) -> None:
    _, url = pretend
    words = traffic(url, count_words=True, exact_counts=False)
    rows = rows_of("uncounted", "just ends")
    # Burstiness is the shape of a schedule; without one any is right.
    sent = bench.send(words, Batch(rows, seed=1), tmp_path / "raw.json")
    found = by_prompt(sent)
    assert (found["uncounted"]["ok"], found["uncounted"]["output_tokens"]) == (True, 4)
    assert found["uncounted"]["prompt_tokens"] is None
    assert found["just ends"]["error"] == "the stream broke off"


def test_a_server_that_is_not_there_answers_nothing(bench: GuidellmBench, tmp_path: Path) -> None:
    batch = Batch(rows_of("one", "two"), seed=1)
    sent = bench.send(traffic("http://127.0.0.1:9"), batch, tmp_path / "raw.json")
    assert {row["error"] for row in sent.rows} == {"ConnectError: All connection attempts failed"}


# -- a queue that is known -------------------------------------------------------------------


def queue_rows(name: str, count: int) -> list[Row]:
    return rows_of(*(f"{name} {index}" for index in range(count)))


def test_times_are_the_queues(bench: GuidellmBench, tmp_path: Path) -> None:
    """200 ms of service in four tokens, and always a free slot."""
    mock = MockServer(service=0.2, exponential=False, slots=40, tokens=4)
    with serving(mock) as url:
        batch = Batch(queue_rows("steady", 40), seed=5, rate=8.0)
        sent = bench.send(traffic(url), batch, tmp_path / "raw.json")
    assert mock.asked == len(mock.seen) == 40, "each prompt once"
    assert all(row["ok"] for row in sent.rows)
    assert [row["request_id"] for row in sent.rows] == [row["id"] for row in batch.rows]
    for name, known in (("ttft_ms", 50.0), ("e2el_ms", 200.0), ("tpot_ms", 50.0)):
        values = [row[name] for row in sent.rows]
        assert min(values) > 0.95 * known
        middle = percentile(values, 50)
        assert middle is not None and middle < 1.5 * known
    gaps = [b["start_s"] - a["start_s"] for a, b in zip(sent.rows, sent.rows[1:], strict=False)]
    assert len({round(gap, 2) for gap in gaps}) > 10, "no two workers with one seed"
    # 39 exponential gaps of mean 1/8 s: the sum is within 3.3 standard deviations.
    assert sum(gaps) == pytest.approx(39 / 8, rel=0.53)


def test_the_gaps_add_up_to_the_asked_rate(bench: GuidellmBench, tmp_path: Path) -> None:
    """Sixty exponential gaps alone would miss their mean by 13 %, as a standard deviation."""
    off = []
    with serving(MockServer(service=0.01, exponential=False, slots=40, tokens=2)) as url:
        for seed in (1, 2, 3):
            batch = Batch(rows_of(*(f"{seed} {n}" for n in range(60))), seed=seed, rate=30)
            sent = bench.send(traffic(url), batch, tmp_path / "raw.json")
            off.append(abs(rate_sent(sent.rows) / 30 - 1))
    assert sorted(off)[1] < 0.05, "one of three may meet a busy machine"


def test_at_most_so_many_in_flight(bench: GuidellmBench, tmp_path: Path) -> None:
    mock = MockServer(service=0.1, exponential=False, slots=40, tokens=2)
    most = _watch_running(mock)
    with serving(mock) as url:
        closed = bench.send(
            traffic(url), Batch(queue_rows("closed", 12), seed=1, concurrency=3), tmp_path / "c"
        )
        assert most[0] == 3
        most[0] = 0
        bench.send(
            traffic(url),
            Batch(queue_rows("both", 12), seed=1, rate=500.0, concurrency=2),
            tmp_path / "b",
        )
        assert most[0] == 2
        most[0] = 0
        free = bench.send(traffic(url), Batch(queue_rows("free", 12), seed=1), tmp_path / "f")
        assert most[0] > 6, "all at once, as fast as the client is"
    assert mock.asked == 36
    for sent in (closed, free):
        assert all(row["ok"] for row in sent.rows)
        assert len({row["request_id"] for row in sent.rows}) == 12
    assert closed.duration > 0.95 * 4 * 0.1


def _watch_running(mock: MockServer) -> list[int]:
    """The highest number of requests that were in service at one time."""
    most = [0]
    stream = mock._stream

    async def watched(body: Row, duration: float) -> Any:
        async for event in stream(body, duration):
            most[0] = max(most[0], mock.running)
            yield event

    mock._stream = watched  # type: ignore[method-assign]
    return most


def test_a_generator_that_fails_says_why(tmp_path: Path) -> None:
    sampling = {name: SAMPLING[name] for name in ("temperature", "top_p", "seed")}
    with (
        GuidellmBench("", log=tmp_path / "bench.log") as own,
        pytest.raises(InfrastructureError, match=r"(?s)guidellm ended with status 1.*KeyError"),
    ):
        own.send(
            traffic("http://127.0.0.1:9", sampling=sampling),
            Batch(rows_of("one"), seed=1),
            tmp_path / "raw.json",
        )
