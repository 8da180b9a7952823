"""Requests to a server in parts and to one that is not, for tests that compare their answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tasks.engines.vllm_server import VllmServer

ENGINE_ARGS = {
    "enforce-eager": True,
    "max-model-len": 512,
    "kv-cache-memory-bytes": 64 * 2**20,
    "distributed-executor-backend": "uni",
}
ENGINE_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""Half the seconds of a start: vLLM is imported by one process less."""

BLOCK = 128
"""Tokens, on a CPU."""
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 32 * 2
"""Of `tasks.engines.random_llama`: K and V of 2 layers, 2 heads of 32 bf16 values a token."""


@dataclass(frozen=True)
class Asked:
    """Prompt tokens and how the answer is wanted."""

    prompt: list[int]
    stream: bool = False
    max_tokens: int = 8


@dataclass(frozen=True)
class Said:
    """Tokens' texts with their logprobs; `fault` where no whole answer came."""

    tokens: list[str]
    logprobs: list[float]
    fault: str = ""
    status: int = 200


def prompts(lengths: Sequence[int], seed: int | str) -> list[list[int]]:
    """Prompts that begin differently, so that no prefix cache has one of another's blocks."""
    chance = random.Random(seed)
    return [[chance.randrange(32, 224) for _ in range(length)] for length in lengths]


def ask(server: VllmServer, asked: Asked, root: str | None = None) -> Said:
    """One request at temperature 0 with logprobs. `root`: another address than the server's."""
    body: dict[str, Any] = {
        "model": server.served_name, "prompt": asked.prompt, "max_tokens": asked.max_tokens,
        "temperature": 0.0, "logprobs": 1, "ignore_eos": True, "stream": asked.stream,
    }  # fmt: skip
    url = f"{root or server._root}/v1/completions"
    headers = {"Authorization": f"Bearer {server.api_key}"}
    tokens: list[str] = []
    logprobs: list[float] = []
    done = not asked.stream
    try:
        with (
            httpx.Client(trust_env=False, timeout=120.0) as client,
            client.stream("POST", url, json=body, headers=headers) as reply,
        ):
            if reply.status_code != 200:
                return Said([], [], reply.read().decode(), reply.status_code)
            for line in reply.iter_lines() if asked.stream else [reply.read().decode()]:
                text = line.removeprefix("data: ")
                if text == "[DONE]":
                    done = True
                elif text:
                    found = json.loads(text)["choices"][0]["logprobs"]
                    if found is not None:
                        tokens += found["tokens"]
                        logprobs += found["token_logprobs"]
    except httpx.HTTPError as error:
        return Said(tokens, logprobs, type(error).__name__)
    return Said(tokens, logprobs, "" if done else "the stream has no end")


def ask_all(server: VllmServer, asked: Sequence[Asked], root: str | None = None) -> list[Said]:
    """All at once."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: ask(server, one, root), asked))


def addresses(server: VllmServer) -> set[tuple[str, int]]:
    """Where its processes listen."""
    fronts = [psutil.Process(pid) for pid in server.pids]
    family = [one for front in fronts for one in [front, *front.children(recursive=True)]]
    return {
        (one.laddr.ip, one.laddr.port)
        for process in family
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
