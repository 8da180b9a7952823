"""`prefect server start` whose web sockets only its own pages may open.

    python -m tasks.prefect_server server start --host 127.0.0.1 ...

For requests Prefect checks origin and token; web sockets, by which it hands out events and log
lines and takes events in, it opens for any page that a browser shows (3.9.1). So its app is wrapped
where uvicorn runs it. `tests/integration/test_workarounds.py` says when this can go.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ORIGINS = "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"
"""The pages that may read what the server answers, by commas; `*`: all."""

REFUSED = 1008


class OwnPages:
    """An ASGI app that refuses web sockets of pages from other origins.

    Who sends no origin is no page: Prefect's own clients.
    """

    def __init__(self, app: App, origins: Collection[str]) -> None:
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and not self._allows(scope["headers"]):
            await receive()
            # Closed before it was accepted: the browser is told 403.
            await send({"type": "websocket.close", "code": REFUSED})
            return
        await self._app(scope, receive, send)

    def _allows(self, headers: Collection[tuple[bytes, bytes]]) -> bool:
        said = {value.decode("latin-1") for name, value in headers if name == b"origin"}
        return "*" in self._origins or said <= set(self._origins)


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
