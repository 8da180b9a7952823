"""An OpenAI-compatible endpoint whose queue is known: what a benchmark finds can be computed.

`slots` requests are served at once, each for its service time, the others wait in order of arrival:
with exponential times and one slot an M/M/1 queue, whose times in the system are exponential with
mean 1 / (1 / service - rate) (Kleinrock 1975, Queueing Systems 1, 3.2). Tokens are streamed evenly
over the service time.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class MockServer:
    """Settings of the queue, and what was asked of it. Times in seconds."""

    service: float = 0.05
    exponential: bool = True
    slots: int = 1
    tokens: int = 4
    error_share: float = 0.0
    cached_share: float = 1.0
    """Service time of a prompt that was asked before, as a share: below 1 a prefix cache."""
    drift: float = 0.0
    """Growth of the service time per second."""
    burst: float = 0.0
    """Service times are three times as long in the first so many seconds after a pause of 2 s."""
    seed: int = 0
    asked: int = 0
    hits: int = 0
    running: int = 0
    waiting: int = 0
    seen: set[str] = field(default_factory=set)

    def app(self) -> Starlette:
        self._random = random.Random(self.seed)
        self._free = asyncio.Semaphore(self.slots)
        self._began = self._last = self._burst_from = time.monotonic()
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
                Route("/health", lambda _: PlainTextResponse("")),
            ]
        )

    def kept_below(self, limit: float, percent: float) -> float:
        """The rate below which the percentile of an M/M/1 queue is under `limit` seconds."""
        assert self.exponential and self.slots == 1
        return 1 / self.service + math.log(1 - percent / 100) / limit

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _metrics(self, _: Request) -> Response:
        values = {
            "prefix_cache_queries_total": 10 * self.asked,
            "prefix_cache_hits_total": 10 * self.hits,
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
        }
        return PlainTextResponse(
            "".join(f'vllm:{name}{{engine="0"}} {value}.0\n' for name, value in values.items())
        )

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        prompt = json.dumps(body["messages"])
        self.asked += 1
        hit = prompt in self.seen
        self.hits += hit
        self.seen.add(prompt)
        if self._random.random() < self.error_share:
            return JSONResponse({"error": {"message": "overloaded"}}, status_code=503)
        duration = self._duration() * (self.cached_share if hit else 1.0)
        return StreamingResponse(self._stream(body, duration), media_type="text/event-stream")

    def _duration(self) -> float:
        now = time.monotonic()
        if now - self._last > 2:
            self._burst_from = now
        self._last = now
        drawn = self._random.expovariate(1.0) if self.exponential else 1.0
        slow = 3.0 if now - self._burst_from < self.burst else 1.0
        return self.service * drawn * slow * (1 + self.drift * (now - self._began))

    async def _stream(self, body: dict[str, Any], duration: float) -> AsyncIterator[str]:
        self.waiting += 1
        async with self._free:
            self.waiting -= 1
            self.running += 1
            try:
                # The loop's own delay must not add to the service time.
                until = asyncio.get_running_loop().time()
                for _ in range(self.tokens):
                    until += duration / self.tokens
                    await asyncio.sleep(max(0.0, until - asyncio.get_running_loop().time()))
                    yield _event({"choices": [{"index": 0, "delta": {"content": "word "}}]})
            finally:
                self.running -= 1
        words = sum(len(str(message["content"]).split()) for message in body["messages"])
        usage = {"prompt_tokens": max(1, words), "completion_tokens": self.tokens}
        yield _event({"choices": [], "usage": {**usage, "total_tokens": words + self.tokens}})
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@contextmanager
def serving(mock: MockServer) -> Iterator[str]:
    """The URL of the mock, served by a thread of this process."""
    config = uvicorn.Config(mock.app(), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
