"""A chat endpoint whose every token and log-probability is written down beforehand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Top = dict[str, float]
"""Log-probabilities in nats at one place; the first token is the one that is chosen."""


@dataclass
class PretendChat:
    """Answers by the last message's text. A number in place of an answer is a status."""

    answers: Mapping[str, Sequence[Top] | int]
    logprobs: bool = True
    busy: int = 0
    """First requests that are answered with 503."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if len(self.asked) <= self.busy:
            return 503, {"error": {"message": "starting"}}
        said = self.answers[body["messages"][-1]["content"]]
        if isinstance(said, int):
            return said, {"error": {"message": f"no {said}"}}
        content = [
            {
                "token": f"token_id:{next(iter(top))}",
                "bytes": list(next(iter(top)).encode()),
                "logprob": next(iter(top.values())),
                "top_logprobs": [
                    {"token": f"token_id:{token}", "logprob": value}
                    for token, value in sorted(top.items(), key=lambda one: -one[1])
                ],
            }
            for top in said
        ]
        text = "".join(next(iter(top)) for top in said)
        choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": "stop"}
        choice["logprobs"] = {"content": content} if self.logprobs else None
        return 200, {"choices": [choice]}


@contextmanager
def pretending(chat: PretendChat) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            chat.open += 1
            chat.most_open = max(chat.most_open, chat.open)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat.asked.append({"path": self.path, **body})
            chat.keys.append(self.headers["Authorization"])
            status, content = chat.reply(body)
            encoded = json.dumps(content).encode()
            chat.open -= 1
            self.send_response(status)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
