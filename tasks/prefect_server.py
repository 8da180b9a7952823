"""`prefect server start` that answers under its own name, and opens web sockets for its own pages.

    python -m tasks.prefect_server server start --host 127.0.0.1 ...

For requests Prefect checks origin and token; web sockets, by which it hands out events and log
lines and takes events in, it opens for any page that a browser shows (3.9.1). Nor does it look at
the name that it is called by: a page whose own name is made to mean this machine (DNS rebinding)
would be one of its own. So its app is wrapped where uvicorn runs it.
`tests/integration/test_workarounds.py` says when this can go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ORIGINS = "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"
"""The pages that may read what the server answers, by commas; `*`: all."""

REFUSED = 1008
MISDIRECTED = 421

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of a server that listens on this machine alone; any port: a tunnel has another one."""


class OwnPages:
    """An ASGI app that refuses foreign names, and web sockets of pages from other origins.

    Who sends no origin is no page: Prefect's own clients.
    """

    def __init__(self, app: App, origins: Collection[str]) -> None:
        self._app, self._origins = app, origins
        self._names = {*LOOPBACK, *(_without_port(urlsplit(one).netloc) for one in origins)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_called(scope["headers"]):
            body = f"not a name of this server: add its page to {ORIGINS}\n".encode()
            start = {"type": "http.response.start", "status": MISDIRECTED, "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": body})
            return
        if scope["type"] == "websocket" and not (
            self._is_called(scope["headers"]) and self._allows(scope["headers"])
        ):
            await receive()
            # Closed before it was accepted: the browser is told 403.
            await send({"type": "websocket.close", "code": REFUSED})
            return
        await self._app(scope, receive, send)

    def _is_called(self, headers: Collection[tuple[bytes, bytes]]) -> bool:
        said = {
            _without_port(value.decode("latin-1")) for name, value in headers if name == b"host"
        }
        return "*" in self._origins or said <= self._names

    def _allows(self, headers: Collection[tuple[bytes, bytes]]) -> bool:
        said = {value.decode("latin-1") for name, value in headers if name == b"origin"}
        return "*" in self._origins or said <= set(self._origins)


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host.lower())


def main() -> None:
    """Prefect's command line, with its app wrapped."""
    import uvicorn
    from prefect.cli import app

    run = uvicorn.run
    named = os.environ.get(ORIGINS, "").split(",")

    def wrapped(app: App, **options: Any) -> None:
        own = f"http://{options['host']}:{options['port']}"
        run(OwnPages(app, [own, *named]), **options)

    uvicorn.run = wrapped  # type: ignore[assignment] # fewer kinds of app than uvicorn takes
    app()


if __name__ == "__main__":
    main()
