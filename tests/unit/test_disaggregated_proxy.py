"""The proxy of a server in parts, with engines that are pretended: what it asks, refuses, shows."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import httpx
import pytest

from tasks.engines.disaggregated_server import PROXY
from tasks.engines.ports import free_port

KEPT = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"}


class Engine(ThreadingHTTPServer):
    """Answers what it is told to; `asked` holds the bodies of its requests."""

    def __init__(self, role: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.role = role
        self.asked: list[dict[str, Any]] = []
        self.params: dict[str, Any] | None = dict(KEPT)
        self.status = 200
        self.breaks = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        value = 3 if self.server.role == "prefill" else 5
        names = ("prefix_cache_queries_total", "generation_tokens_total", "num_requests_running")
        page = "".join(
            f'# HELP vllm:{name} x\n# TYPE vllm:{name} counter\nvllm:{name}{{engine="0"}} {value}\n'
            for name in names
        )
        page += (
            "# HELP vllm:e2e_seconds x\n# TYPE vllm:e2e_seconds histogram\nvllm:e2e_seconds_sum 1\n"
        )
        self._send(200, page.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer key"
        self.server.asked.append(body)
        if self.server.breaks:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"data: half of an ans")
            return
        said = {"role": self.server.role, "kv_transfer_params": self.server.params}
        self._send(self.server.status, json.dumps(said).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class Parts:
    def __init__(self) -> None:
        self.prefill, self.decode = Engine("prefill"), Engine("decode")
        self.port = free_port()
        words = ["--port", str(self.port), "--prefill", self.prefill.url]
        self.process = subprocess.Popen(
            [sys.executable, str(PROXY), *words, "--decode", self.decode.url],
            env={"VLLM_API_KEY": "key"},
        )
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=20.0,
            headers={"Authorization": "Bearer key"},
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                assert self.client.get("/health").status_code == 200
                return
            except httpx.HTTPError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.05)

    def ask(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "m", "prompt": [1, 2], **body})


@pytest.fixture
def parts() -> Iterator[Parts]:
    found = Parts()
    yield found
    found.client.close()
    found.process.kill()
    found.process.wait()
    for engine in (found.prefill, found.decode):
        engine.shutdown()
        engine.server_close()


def test_a_request_goes_to_both_and_its_cache_with_it(parts: Parts) -> None:
    words = {"max_tokens": 9, "min_tokens": 9, "stream": True, "logprobs": 2, "seed": 4, "own": "x"}
    assert parts.ask(**words).json()["role"] == "decode"
    (first,), (second,) = parts.prefill.asked, parts.decode.asked
    assert first == {
        "model": "m", "prompt": [1, 2], "seed": 4, "own": "x", "max_tokens": 1, "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip
    assert second == {"model": "m", "prompt": [1, 2], **words, "kv_transfer_params": KEPT}


@pytest.mark.parametrize("params", [None, {}, {**KEPT, "remote_block_ids": []}])
def test_a_prompt_that_nobody_kept_is_not_computed_again(
    parts: Parts, params: dict[str, Any] | None
) -> None:
    parts.prefill.params = params
    said = parts.ask()
    assert said.status_code == 503
    assert "kept no KV cache" in said.json()["error"]["message"]
    assert parts.decode.asked == []


def test_a_dead_part_is_said(parts: Parts) -> None:
    parts.prefill.shutdown()
    parts.prefill.server_close()
    said = parts.ask()
    assert (said.status_code, parts.decode.asked) == (503, [])
    assert "prefill-0 does not answer" in said.json()["error"]["message"]
    # It is not asked again at once.
    assert "no prefill engine answers" in parts.ask().json()["error"]["message"]
    assert parts.client.get("/health").json() == {"dead": ["prefill-0"]}
    assert parts.client.get("/health").status_code == 503
    # A sum without it would look like a restart.
    assert parts.client.get("/metrics").status_code == 503


def test_an_engine_that_fails_is_503_and_its_refusal_is_its_own(parts: Parts) -> None:
    parts.decode.status = 500
    assert parts.ask().status_code == 503
    parts.decode.status, parts.prefill.status = 200, 500
    assert parts.ask().status_code == 503
    parts.prefill.status = 400
    said = parts.ask()
    assert (said.status_code, said.json()["role"]) == (400, "prefill")
    assert len(parts.decode.asked) == 1


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(parts: Parts) -> None:
    parts.decode.breaks = True
    with pytest.raises(httpx.RemoteProtocolError):
        parts.ask(stream=True)


@pytest.mark.parametrize(
    "body",
    [{"n": 2}, {"best_of": 3}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"echo": True},
     {"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {"use_beam_search": True}],
)  # fmt: skip
def test_what_cannot_be_transferred_is_refused(parts: Parts, body: dict[str, Any]) -> None:
    said = parts.ask(**body)
    assert said.status_code == 400
    assert next(iter(body)) in said.json()["error"]["message"]
    assert parts.prefill.asked == parts.decode.asked == []


def test_the_key_is_asked_for(parts: Parts) -> None:
    assert parts.client.get("/v1/models", headers={"Authorization": "Bearer k"}).status_code == 401
    assert parts.client.get("/v1/models").status_code == 200
    wrong = {"Authorization": "Bearer k"}
    said = parts.client.post("/v1/completions", json={"prompt": "x"}, headers=wrong)
    assert (said.status_code, parts.prefill.asked) == (401, [])
    said = parts.client.get("/v1/models", headers={b"Authorization": b"Bearer \xff"})
    assert said.status_code == 401
    for body in (b"no json", b"[" * 100_000):
        assert parts.client.post("/v1/completions", content=body).status_code == 400


def test_one_page_shows_each_figure_once(parts: Parts) -> None:
    page = parts.client.get("/metrics/?name[]=x").text
    samples = sorted(line for line in page.splitlines() if not line.startswith("#"))
    assert samples == [
        'vllm:generation_tokens_total{part="decode-0",engine="0"} 5',
        'vllm:num_requests_running{part="decode-0",engine="0"} 5',
        'vllm:num_requests_running{part="prefill-0",engine="0"} 3',
        'vllm:prefix_cache_queries_total{part="prefill-0",engine="0"} 3',
    ]
    assert page.count("# TYPE vllm:num_requests_running") == 1


def proxy_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("disaggregated_proxy", PROXY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_dead_engine_gets_no_more_requests_while_another_lives() -> None:
    """One that refuses at once always has the fewest requests: it would get them all."""
    import asyncio

    proxy = proxy_module().Proxy(["http://a", "http://b"], ["http://c"], "")

    async def chosen(count: int) -> list[str]:
        parts = []
        for _ in range(count):
            async with proxy._engine("prefill") as engine:
                parts.append(engine.part)
        return parts

    assert asyncio.run(chosen(4)) == ["prefill-0", "prefill-1"] * 2
    proxy.engines["prefill"][0].busy = 1
    assert asyncio.run(chosen(2)) == ["prefill-1"] * 2
    proxy._is_down(proxy.engines["prefill"][1])
    assert asyncio.run(chosen(2)) == ["prefill-0"] * 2


def test_a_client_that_has_gone_is_no_fault_of_an_engine() -> None:
    """aiohttp has one error for both: the engine would get no requests of others for a second."""
    import asyncio

    import aiohttp

    module = proxy_module()
    proxy = module.Proxy(["http://a"], ["http://b"], "")

    async def asked(error: Exception, *, by_client: bool) -> None:
        async with proxy._engine("decode"):
            if not by_client:
                raise error
            with module.to_client():
                raise error

    lost = aiohttp.ClientConnectionResetError("Cannot write to closing transport")
    (engine,) = proxy.engines["decode"]
    with pytest.raises(module.Left):
        asyncio.run(asked(lost, by_client=True))
    assert (engine.busy, engine.down_until) == (0, 0.0)
    with pytest.raises(module.Refused, match="decode-0 does not answer"):
        asyncio.run(asked(lost, by_client=False))
    assert engine.down_until > 0
