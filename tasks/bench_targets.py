"""What `pilotage bench` measures: a URL of somebody else's, or a server of ours for a bundle."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from eval_suites.load import LoadProfile
from recipes import loader
from recipes.schema import ServeRecipe
from registry.bundle import Bundle
from registry.digests import digest_of, digest_of_folder
from registry.errors import InfrastructureError, UserError
from registry.provenance import engine_version, hardware_fingerprint, sglang_version
from registry.settings import settings
from registry.topology import gpus_of
from registry.transfer import Transfer
from tasks.bundles import as_served_here, bundle_named
from tasks.devices import exclusive
from tasks.engines.engine_watch import EngineWatch
from tasks.engines.load_generator import Traffic
from tasks.engines.load_prompts import tokenizer_of
from tasks.progress import LOG
from tasks.serving import ServedBundle, Watched, managed_server

PROBES = 5
"""Tries of the first question: an endpoint that refuses some requests is to be measured too."""

MOST_PORT = 65_535

PROBE_PAUSE = 0.2
"""Seconds between two of them."""


@dataclass(frozen=True)
class Target:
    """An endpoint that answers, and what is known of it. `tokenizer` None: words count."""

    url: str
    model: str
    api_key: str = field(repr=False)
    tokenizer: Path | None
    engine: str
    hardware: str
    bundle: str = ""
    count_words: bool = False
    pids: Callable[[], list[int]] | None = None
    check_alive: Callable[[], None] = lambda: None
    transfer: Callable[[], Transfer | None] = lambda: None
    """Of a server of ours in parts: what its engines counted until the last `check_alive`."""
    emulated: bool | None = None
    quantized: bool = False
    log: Path | None = None
    """Of a server of ours."""
    gpus: int = 0
    """Of a server of ours, by its arguments; 0: not known."""

    @property
    def ours(self) -> bool:
        return bool(self.bundle)

    def traffic(self, profile: LoadProfile, tokenizer: Path) -> Traffic:
        return Traffic.of(
            profile,
            self.url,
            self.model,
            tokenizer,
            count_words=self.count_words,
            exact_counts=self.ours,
        )

    def watch(self) -> EngineWatch:
        return EngineWatch(self.url, api_key=self.api_key, pids=self.pids)


def opened(
    *,
    url: str | None,
    model: str | None,
    bundle: str | None,
    serve: str | None,
    tokenizer: Path | None,
    api_key: str,
) -> tuple[AbstractContextManager[Target], str]:
    """The target that the command line names, not opened yet, and what tells it from others.

    Raises `UserError` where not exactly one is named.
    """
    if url is not None and model is not None and bundle is None and serve is None:
        if tokenizer is not None:
            tokenizer = tokenizer.resolve()
            tokenizer_of(tokenizer)
        return url_target(url, model, api_key, tokenizer), f"{endpoint_base(url)} {model}"
    if bundle is not None and (url, model, serve, tokenizer) == (None,) * 4:
        found = bundle_named(bundle)
        return bundle_target(found, bundle), found.digest
    if model is not None and (url, bundle, tokenizer) == (None,) * 3:
        folder = Path(model)
        return folder_target(folder, serve), f"{folder.resolve()} {serve}"
    raise UserError.at(
        "bench",
        "names not exactly one thing to measure",
        "needs one of: --url with --model (perhaps --tokenizer), --bundle, --model FOLDER "
        "(perhaps --serve)",
    )


@contextmanager
def url_target(url: str, model: str, api_key: str, tokenizer: Path | None) -> Iterator[Target]:
    """Raises `UserError` for what is no URL or an unknown model, `InfrastructureError`."""
    base = endpoint_base(url)
    yield Target(
        url=base,
        model=model,
        api_key=api_key,
        tokenizer=tokenizer,
        engine=f"openai {model}",
        hardware="whatever serves the URL",
        count_words=not probe(base, model, api_key),
        check_alive=lambda: listens(base),
    )


@contextmanager
def bundle_target(bundle: Bundle, reference: str) -> Iterator[Target]:
    """A server of the bundle, with the arguments that were gated. Raises as `VllmServer` does."""
    bundle = as_served_here(bundle, reference)
    with ServedBundle(bundle) as served:
        LOG.info("starting a server of %s", reference)
        server = served.server
        watched = Watched(server)
        yield Target(
            url=server.url.removesuffix("/v1"),
            model=server.served_name,
            api_key=server.api_key,
            tokenizer=bundle.target.path,
            engine=served.engine,
            hardware=hardware_fingerprint(),
            bundle=served.digest,
            pids=lambda: server.pids,
            check_alive=watched.check,
            transfer=lambda: watched.transfer,
            emulated=server.emulated,
            quantized=server.quantized,
            log=server.log,
            gpus=gpus_of(bundle.engine_args, bundle.topology),
        )


@contextmanager
def folder_target(folder: Path, serve: str | None) -> Iterator[Target]:
    """A server of a model folder; `serve` names a recipe with the engine's arguments."""
    if not (folder / "config.json").is_file():
        raise UserError.at(
            f"--model {folder}", "is no model folder: there is no config.json",
            "name a folder in Hugging Face format, or give --url with a model's name",
        )  # fmt: skip
    recipe = loader.load(serve, "serve", ServeRecipe) if serve else None
    args = recipe.engine_args if recipe else {}
    env = recipe.env if recipe else {}
    engine = recipe.engine if recipe else "vllm"
    version = sglang_version() if engine == "sglang" else engine_version()
    settings().logs_dir.mkdir(parents=True, exist_ok=True)
    topology = recipe.topology if recipe else None
    server = managed_server(
        engine,
        topology,
        folder,
        log=settings().logs_dir / f"serve-{folder.resolve().name}.log",
        served_name=folder.resolve().name,
        engine_args=args,
        env=env,
        where=f"serve recipe {serve}" if serve else "vLLM's defaults",
    )
    with exclusive(f"serving {folder.name}"), server:
        watched = Watched(server)
        yield Target(
            url=server.url.removesuffix("/v1"),
            model=server.served_name,
            api_key=server.api_key,
            tokenizer=folder,
            engine=f"{engine} {version}",
            hardware=hardware_fingerprint(),
            bundle=digest_of(
                {
                    "target": digest_of_folder(folder),
                    "engine_args": args,
                    "env": env,
                    "engine_version": version,
                    **({} if engine == "vllm" else {"engine": engine}),
                    **({} if topology is None else {"topology": topology}),
                }
            ),
            pids=lambda: server.pids,
            check_alive=watched.check,
            transfer=lambda: watched.transfer,
            emulated=server.emulated,
            quantized=server.quantized,
            log=server.log,
            gpus=gpus_of(args, topology),
        )


def endpoint_base(url: str) -> str:
    """The URL without `/v1`. Raises `UserError` for what is no http URL."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise UserError.at(f"--url {url}", str(error), "e.g. http://127.0.0.1:8000") from None
    if parsed.userinfo:
        raise UserError.at(
            "--url", "holds a name or password", "give a key in PILOTAGE_TEACHER_API_KEY"
        )
    port = parsed.port or 80
    if parsed.scheme not in ("http", "https") or not parsed.host or port > MOST_PORT:
        raise UserError.at(f"--url {url}", "is no http URL", "e.g. http://127.0.0.1:8000")
    return base


def probe(base: str, model: str, api_key: str) -> bool:
    """Ask one short question; whether the endpoint counts tokens. Raises `InfrastructureError`."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for _ in range(PROBES):
        try:
            reply = httpx.post(
                f"{base}/v1/chat/completions", json=body, headers=headers, timeout=120
            )
        except httpx.HTTPError as error:
            raise InfrastructureError(f"{base} does not answer: {error!r}") from None
        if reply.status_code < 500 and reply.status_code != 429:
            break
        time.sleep(PROBE_PAUSE)
    if reply.status_code in (400, 401, 403, 404, 422):
        raise UserError.at(
            f"--url {base} --model {model}",
            f"the endpoint answers {reply.status_code}: {reply.text[:200]}",
            "correct the URL, the model's name or PILOTAGE_TEACHER_API_KEY",
        )
    if reply.status_code != 200:
        LOG.warning("%s answered the first %d questions with %d", base, PROBES, reply.status_code)
        return True
    return any(isinstance(chunk, dict) and chunk.get("usage") for chunk in _chunks(reply.text))


def listens(base: str) -> None:
    """Raises `InfrastructureError` where nobody accepts connections any more."""
    try:
        httpx.get(f"{base}/health", timeout=10)
    except httpx.ConnectError as error:
        raise InfrastructureError(f"{base} is gone: {error}") from None
    except httpx.HTTPError:
        # Slow, or of few words: it is there.
        return


def _chunks(text: str) -> list[Any]:
    found = []
    for line in text.splitlines():
        content = line.removeprefix("data:").strip()
        if line.startswith("data:") and content != "[DONE]":
            try:
                found.append(json.loads(content))
            except ValueError:
                continue
    return found
