"""The front of a server in parts: each request is first computed by a prefill engine, then
answered by a decode engine that fetches the KV cache of the prompt. Run by the serve environment's
Python; needs aiohttp, which vLLM brings, and nothing else of this project:

    VLLM_API_KEY=... python disaggregated_proxy.py --port 8000 \
        --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8201

One key for all parts: clients must send it, and it is sent on to the engines. What cannot be
transferred is refused; a prompt is never computed again by a decode engine without a word:

- 400 for requests whose answer needs the whole prompt on the decode side, or several answers;
- 503 where no engine of a role answers, or where the prefill engine kept no KV cache.

`/health` is 200 while each role has an engine that answers. `/metrics` is one page of all engines,
each sample with its `part`; see `SIDES` for which engine's samples are there.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from aiohttp import web

Role = Literal["prefill", "decode"]

CONNECT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
"""An answer may take as long as its client waits for it."""
SHORT = aiohttp.ClientTimeout(total=5.0)
DOWN = 1.0
"""Seconds for which an engine that did not answer is not asked again."""
MOST_BYTES = 64 << 20
PARTS = "X-Disaggregated-Parts"
"""Header by which a request names the engines that are to answer it: `prefill-0 decode-1`."""

SIDES: dict[str, tuple[Role, ...]] = {
    "vllm:num_requests_running": ("prefill", "decode"),
    "vllm:num_requests_waiting": ("prefill", "decode"),
    "vllm:kv_cache_usage_perc": ("prefill", "decode"),
    "vllm:num_preemptions": ("prefill", "decode"),
    "process_start_time_seconds": ("prefill", "decode"),
    "vllm:prefix_cache_queries": ("prefill",),
    "vllm:prefix_cache_hits": ("prefill",),
    "vllm:nixl_num_kv_expired_reqs": ("prefill",),
}
"""Whose samples of a family count; of the others the decode engines'.

A request is at one engine at a time: those running and waiting add up. Prompts are looked up by
the prefill engines, which is what saves computing. Answers, their tokens, drafts and transfers are
the decode engines': a prefill engine's one token is thrown away. Histograms of seconds are left
out: an engine's time to the first token begins or ends in the middle of a request.
"""


@dataclass
class Engine:
    url: str
    part: str
    busy: int = 0
    """Requests of this proxy that it has now."""
    down_until: float = 0.0


class Refused(Exception):
    """What the client gets in place of an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Proxy:
    def __init__(self, prefill: Sequence[str], decode: Sequence[str], key: str) -> None:
        self.engines: dict[Role, list[Engine]] = {
            "prefill": [Engine(url, f"prefill-{i}") for i, url in enumerate(prefill)],
            "decode": [Engine(url, f"decode-{i}") for i, url in enumerate(decode)],
        }
        self.key = key
        self.turns = {role: itertools.count() for role in self.engines}
        self.session: aiohttp.ClientSession

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BYTES)
        app.cleanup_ctx.append(self._client)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self.answer)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics{slash:/?}", self.metrics)
        for path in ("/v1/models", "/version"):
            app.router.add_get(path, self.forward)
        return app

    async def _client(self, app: web.Application) -> AsyncIterator[None]:
        # No limit: how many requests run at once is the engines' to say.
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as self.session:
            yield

    # -- one request -----------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            self._check_key(request)
            body = asked(await request.read())
            parts = request.headers.get(PARTS, "").split()
            params = await self._prefill(request.path, body, parts)
            return await self._decode(request, {**body, "kv_transfer_params": params}, parts)
        except Left:
            return web.Response(status=499)
        except Refused as refused:
            return refusal(refused.status, str(refused))
        except Passed as passed:
            return web.Response(
                body=passed.body, status=passed.status, content_type="application/json"
            )

    async def _prefill(
        self, path: str, body: dict[str, Any], parts: Sequence[str]
    ) -> dict[str, Any]:
        """What the prefill engine says of the KV cache that it keeps for the decode engine."""
        async with self._engine("prefill", parts) as engine:
            url = engine.url + path
            async with self.session.post(url, json=prefill_body(body), timeout=CONNECT) as reply:
                text = await reply.read()
                if 400 <= reply.status < 500:
                    raise Passed(reply.status, text)
                if reply.status != 200:
                    raise Refused(
                        503, f"{engine.part} failed: {text[:1000].decode(errors='replace')}"
                    )
            params = json.loads(text).get("kv_transfer_params")
            if not params or not params.get("do_remote_prefill") or not params["remote_block_ids"]:
                raise Refused(503, f"{engine.part} kept no KV cache of this prompt to transfer")
            found: dict[str, Any] = params
            return found

    async def _decode(
        self, request: web.Request, body: dict[str, Any], parts: Sequence[str]
    ) -> web.StreamResponse:
        async with self._engine("decode", parts) as engine:
            url = engine.url + request.path
            async with self.session.post(url, json=body, timeout=CONNECT) as reply:
                if reply.status >= 500:
                    text = (await reply.read())[:1000].decode(errors="replace")
                    raise Refused(503, f"{engine.part} failed: {text}")
                answer = web.StreamResponse(status=reply.status)
                answer.content_type = reply.content_type
                with to_client():
                    await answer.prepare(request)
                try:
                    async for piece in reply.content.iter_any():
                        with to_client():
                            await answer.write(piece)
                except aiohttp.ClientError as error:
                    # The answer has begun: its connection is cut, so that no client takes what
                    # it has for all of it.
                    if request.transport is not None:
                        request.transport.abort()
                    self._is_down(engine)
                    print(f"{engine.part} broke off an answer: {error!r}", flush=True)
                    return answer
                with to_client():
                    await answer.write_eof()
                return answer

    @asynccontextmanager
    async def _engine(self, role: Role, parts: Sequence[str] = ()) -> AsyncIterator[Engine]:
        """The engine of this role with the fewest requests, in turn where several have as few.

        parts: the one that is named here, if any.
        """
        now, turn = time.monotonic(), next(self.turns[role])
        every = [one for one in self.engines[role] if one.part in parts] or self.engines[role]
        up = [engine for engine in every if engine.down_until <= now]
        if not up:
            raise Refused(503, f"no {role} engine answers ({', '.join(e.part for e in every)})")
        engine = min(
            (up[(turn + i) % len(up)] for i in range(len(up))), key=lambda engine: engine.busy
        )
        engine.busy += 1
        try:
            yield engine
        except (aiohttp.ClientError, OSError) as error:
            self._is_down(engine)
            raise Refused(503, f"{engine.part} does not answer: {error!r}") from None
        finally:
            engine.busy -= 1

    def _is_down(self, engine: Engine) -> None:
        engine.down_until = time.monotonic() + DOWN

    def _check_key(self, request: web.Request) -> None:
        # Bytes that are no UTF-8 come as surrogates: they are a wrong key like any other.
        said = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self.key and not hmac.compare_digest(said, f"Bearer {self.key}".encode()):
            raise Refused(401, "Unauthorized")

    # -- what it says of itself ------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """200 while each role has an engine that is healthy; else 503 with those that are not."""
        found = {}
        for role, engines in self.engines.items():
            well = await asyncio.gather(*(self._get(engine, "/health") for engine in engines))
            found[role] = [e.part for e, page in zip(engines, well, strict=True) if page is None]
        dead = [part for parts in found.values() for part in parts]
        fit = all(len(found[role]) < len(engines) for role, engines in self.engines.items())
        return web.json_response({"dead": dead}, status=200 if fit else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """503 where an engine does not answer: a sum without it would look like a restart."""
        parts = [(role, engine) for role, engines in self.engines.items() for engine in engines]
        path = request.path + (f"?{request.query_string}" if request.query_string else "")
        pages = await asyncio.gather(*(self._get(engine, path) for _, engine in parts))
        missing = [e.part for (_, e), page in zip(parts, pages, strict=True) if page is None]
        if missing:
            return refusal(503, f"{', '.join(missing)} shows no metrics")
        shown = [
            (role, engine.part, page or "")
            for (role, engine), page in zip(parts, pages, strict=True)
        ]
        return web.Response(text=one_page(shown))

    async def forward(self, request: web.Request) -> web.Response:
        """What one decode engine says."""
        try:
            if request.path.startswith("/v1/"):
                self._check_key(request)
            async with (
                self._engine("decode") as engine,
                self.session.get(engine.url + request.path, timeout=SHORT) as reply,
            ):
                return web.Response(
                    body=await reply.read(), status=reply.status, content_type=reply.content_type
                )
        except Refused as refused:
            return refusal(refused.status, str(refused))

    async def _get(self, engine: Engine, path: str) -> str | None:
        try:
            async with self.session.get(engine.url + path, timeout=SHORT) as reply:
                return await reply.text() if reply.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None


class Passed(Exception):
    """An engine's own refusal of a request, for the client as it is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status, self.body = status, body


class Left(Exception):
    """The client has gone: no fault of an engine, and nobody is there to be told."""


@contextmanager
def to_client() -> Iterator[None]:
    """Around what is written to the client: aiohttp raises the same errors as of an engine."""
    try:
        yield
    except (aiohttp.ClientError, OSError):
        raise Left from None


def refusal(status: int, message: str) -> web.Response:
    """In the form of the API: a client library shows the message."""
    print(f"{status}: {message}", flush=True)
    error = {"message": message, "type": "disaggregated_proxy", "code": status}
    return web.json_response({"error": error}, status=status)


def asked(body: bytes) -> dict[str, Any]:
    """The request, where it can be answered in two parts. Raises `Refused` with 400. Pure."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(400, "the body is no JSON object")
    several = [name for name in ("n", "best_of") if found.get(name) not in (None, 1)]
    prompt = found.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        several.append("prompt")
    if several:
        raise Refused(
            400, f"{', '.join(several)}: one prompt and one answer a request are transferred"
        )
    # The decode engine would compute the whole prompt itself.
    names = ("echo", "prompt_embeds", "use_beam_search")
    whole = [name for name in names if found.get(name)]
    # 0 asks for them too: of each prompt token itself.
    whole += ["prompt_logprobs"] if found.get("prompt_logprobs") is not None else []
    if whole:
        raise Refused(400, f"{', '.join(whole)}: not to be had from a prompt that is transferred")
    return found


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """What the prefill engine is asked: the same prompt, one token that is thrown away. Pure."""
    dropped = (
        *("stream", "stream_options", "min_tokens", "logprobs", "top_logprobs"),
        *("max_completion_tokens", "kv_transfer_params", "ignore_eos", "stop"),
    )
    kept = {name: value for name, value in body.items() if name not in dropped}
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**kept, "max_tokens": 1, "stream": False, "kv_transfer_params": params}


def one_page(pages: Sequence[tuple[Role, str, str]]) -> str:
    """Prometheus pages of several engines as one: role, part and page of each. Pure.

    Which samples are taken says `SIDES`; each gets the label `part`. Families stay together.
    """
    families: dict[str, list[str]] = {}
    for role, part, page in pages:
        name, wanted = "", False
        for line in page.splitlines():
            if line.startswith("# "):
                words = line.split(" ", 3)
                if len(words) < 4 or words[1] not in ("HELP", "TYPE"):
                    continue
                name = words[2]
                wanted = role in sides(name)
                if wanted and line not in families.setdefault(name, []):
                    families[name].append(line)
            elif wanted and line:
                families[name].append(with_part(line, part))
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def sides(family: str) -> tuple[Role, ...]:
    """The roles whose samples of a family are shown; of a counter's name with `_total` too."""
    name = family.removesuffix("_created").removesuffix("_total")
    if name in SIDES:
        return SIDES[name]
    if not name.startswith("vllm:") or name.endswith("_seconds"):
        return ()
    return ("decode",)


def with_part(sample: str, part: str) -> str:
    """A sample with one label more."""
    label = f'part="{part}"'
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    words = parser.parse_args()
    proxy = Proxy(words.prefill, words.decode, os.environ.get("VLLM_API_KEY", ""))
    web.run_app(
        proxy.application(),
        host=words.host,
        port=words.port,
        print=None,
        access_log=None,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
