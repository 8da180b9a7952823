"""A teacher behind a URL that asks for a key, and says a wrong one back as some providers do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Teacher:
    key: str
    url: str = ""
    refuses: bool = False
    answered: int = 0

    def reply(self, body: dict[str, object], header: str) -> tuple[int, dict[str, object]]:
        if self.refuses or header != f"Bearer {self.key}":
            said = header.removeprefix("Bearer ")
            return 401, {"error": {"message": f"Incorrect API key provided: {said}"}}
        self.answered += 1
        text = f"Order {self.answered} ships on day {self.answered % 28 + 1} by sea from Ningbo."
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"],
                     "choices": [choice], "usage": usage}  # fmt: skip


@contextmanager
def teacher(key: str) -> Iterator[Teacher]:
    state = Teacher(key)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = state.reply(body, self.headers["Authorization"] or "")
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
