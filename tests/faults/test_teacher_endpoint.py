"""A teacher behind somebody else's URL that misbehaves, over real sockets.

The stage itself, without a release around it: no engine is needed, so these run in seconds.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import TeacherRecipe
from registry.artifacts import ArtifactRef
from registry.errors import InfrastructureError
from registry.settings import settings
from tasks.engines.openai_chat import MAX_ATTEMPTS
from tests.faults.conftest import Tell
from tests.threaded_server import QuietHandler, listening
from tests.unit.teacher_builders import recipe_for, run

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

PROMPTS = 60
TIMEOUT = 1.0
"""Seconds for one request."""

FAULTS = ("429", "500", "503", "garbage", "no choices", "half a response", "closes", "hangs")


@dataclass
class Endpoint:
    """Answers every prompt with itself; requests number `first` to `last` go wrong."""

    fault: str
    first: int = 1
    last: int = 0
    asked: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, http: BaseHTTPRequestHandler) -> None:
        body = json.loads(http.rfile.read(int(http.headers["Content-Length"])))
        prompt = str(body["messages"][-1]["content"])
        with self.lock:
            self.asked += 1
            wrong = self.first <= self.asked <= self.last
            self.answered[prompt] += not wrong
        if wrong:
            self._go_wrong(http)
        else:
            _send(http, 200, json.dumps(_answer(f"I can tell you about {prompt}.")).encode())

    def _go_wrong(self, http: BaseHTTPRequestHandler) -> None:
        if self.fault.isdecimal():
            _send(http, int(self.fault), b'{"error": {"message": "not now"}}')
        elif self.fault == "garbage":
            _send(http, 200, b"<html>It works!</html>\x00\xff")
        elif self.fault == "no choices":
            _send(http, 200, b'{"choices": []}')
        elif self.fault == "half a response":
            whole = json.dumps(_answer("half")).encode()
            _send(http, 200, whole[:20], length=len(whole))
            http.close_connection = True
            http.connection.shutdown(socket.SHUT_RDWR)
        elif self.fault == "closes":
            http.close_connection = True
            http.connection.shutdown(socket.SHUT_RDWR)
        else:
            assert self.fault == "hangs"
            time.sleep(2 * TIMEOUT)


def _send(http: BaseHTTPRequestHandler, status: int, body: bytes, length: int = 0) -> None:
    http.send_response(status)
    http.send_header("Content-Type", "application/json")
    http.send_header("Content-Length", str(length or len(body)))
    http.end_headers()
    http.wfile.write(body)
    http.wfile.flush()


def _answer(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14},
    }


@contextmanager
def served(endpoint: Endpoint) -> Iterator[str]:
    class Handler(QuietHandler):
        def do_POST(self) -> None:
            endpoint.handle(self)

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:  # the client has gone, or this end was closed on purpose
                self.close_connection = True

    with listening(Handler) as url:
        yield url


def recipe(url: str, **changes: Any) -> TeacherRecipe:
    return recipe_for(url, request_timeout=TIMEOUT, max_retry_wait=1.0, **changes)


def rows_of(ref: ArtifactRef, prompts: int = PROMPTS) -> None:
    """Every prompt has its one answer, and it is the prompt's own."""
    lines = (ref.path / "responses.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert Counter(row["id"] for row in rows) == Counter(f"p{n}" for n in range(prompts))
    learned = [
        json.loads(line)
        for part in ("train", "calibration")
        for line in (ref.path / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for row in learned:
        assert row["id"] in json.dumps(row["messages"][-1], ensure_ascii=False)
    assert len(learned) == prompts


@pytest.mark.parametrize("fault", FAULTS)
def test_it_gets_well(home: Path, tell: Tell, fault: str) -> None:
    """A teacher by URL goes wrong for ten requests, then answers"""
    endpoint = Endpoint(fault, first=20, last=29)
    with served(endpoint) as url:
        rows_of(run(recipe(url), PROMPTS))
    assert endpoint.asked == PROMPTS + 10, "the ten that went wrong were asked again, no other"
    assert set(endpoint.answered.values()) == {1}, "a prompt was paid for twice"
    tell(
        fault=f"endpoint: {fault}, ten times", caused="a server of the test on a real socket",
        stage="teacher_data", seen=f"{endpoint.asked} requests for {PROMPTS} prompts", status="-",
        then="all answered in the same run, none twice",
    )  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_it_stays_ill(home: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A teacher by URL goes wrong in the middle and stays so; the next run finds it well"""
    monkeypatch.setattr("tasks.stages.TRIES", 1)
    endpoint = Endpoint(fault, first=20, last=10**9)
    with served(endpoint) as url:
        started = time.monotonic()
        with pytest.raises(InfrastructureError) as told:
            run(recipe(url), PROMPTS)
        took = time.monotonic() - started
        assert endpoint.asked <= 19 + MAX_ATTEMPTS * (PROMPTS - 19), "it was asked on and on"
        assert not list((settings().store_dir / "teacher_data").glob("*/manifest.json"))
        endpoint.last = 0
        rows_of(run(recipe(url), PROMPTS))
    assert set(endpoint.answered.values()) == {1}, "what was answered before was asked again"
    assert re_reason(fault) in str(told.value), told.value
    tell(
        fault=f"endpoint: {fault}, from then on", caused="a server of the test on a real socket",
        stage="teacher_data", seen=f"after {took:.0f} s: {told.value}"[:250], status=4,
        then="19 answers were kept, only the others were asked for",
    )  # fmt: skip


def re_reason(fault: str) -> str:
    """What the message must say of it."""
    return {
        "garbage": "JSON",
        "no choices": "choices",
        "half a response": "",
        "closes": "",
        "hangs": "no answer within 1 s",
    }.get(fault, f"HTTP {fault}")
