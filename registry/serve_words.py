"""How a bundle is spelled for its engine: one spelling for the gate, the server and `deploy/`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN_FLAGS = frozenset(
    {
        "headless",
        "grpc",
        "data-parallel-multi-port-external-lb",
        "disable-log-stats",
        "aggregate-engine-logging",
    }
)
"""The flags of `vllm serve` 0.32 that have no `--no-` form; all other booleans have one."""

FIXED_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
}
"""Set for every managed server: no hub, no telemetry. A recipe cannot turn it round."""

LOOPBACK_ENV = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1"}
"""Where vLLM's own processes meet. A recipe for several nodes may say otherwise."""

FOREIGN_ENV = ("VLLM_", "OMP_", "KMP_", "PYTHONPATH", "PYTHONHOME")
"""Variables of the caller that begin so are taken away: they would be in no bundle."""

SGLANG_FOREIGN_ENV = (*FOREIGN_ENV, "SGLANG_")


def served_env(env: Mapping[str, str]) -> dict[str, str]:
    """Every variable that a bundle's server was gated with, the API key apart."""
    return {**LOOPBACK_ENV, **env, **FIXED_ENV}


def serve_words(
    target: str,
    served_name: str,
    engine_args: Mapping[str, Any],
    port: int | str,
    draft: str | None = None,
    num_speculative_tokens: int = 0,
    host: str = "127.0.0.1",
) -> list[str]:
    """What follows `vllm`; the API key is in VLLM_API_KEY, not here.

    `engine_args` are vLLM's by their own names without `--`: true is the flag alone, false its
    `--no-` form, null leaves vLLM's default, a mapping is JSON, a list is several words (vLLM
    reads lists with `nargs="+"`; a mapping inside a list is JSON again).
    """
    words = ["serve", target, "--host", host, "--port", str(port)]
    words += ["--served-model-name", served_name, *engine_words(engine_args)]
    if draft is not None:
        words += ["--speculative-config", speculative_config(draft, num_speculative_tokens)]
    return words


def sglang_words(
    target: str,
    served_name: str,
    engine_args: Mapping[str, Any],
    port: int | str,
    draft: str | None = None,
    num_speculative_tokens: int = 0,
    host: str = "127.0.0.1",
) -> list[str]:
    """What follows `python -m sglang.launch_server`; `engine_args` are SGLang's by its own names.

    The names are those of sglang 0.5.23. The API key is not here.
    """
    words = ["--model-path", target, "--host", host, "--port", str(port)]
    words += ["--served-model-name", served_name, "--enable-metrics", *engine_words(engine_args)]
    if draft is not None:
        words += sglang_draft_words(draft, num_speculative_tokens)
    return words


def sglang_draft_words(draft: str, num_speculative_tokens: int) -> list[str]:
    """The same chain of tokens as vLLM's, which drafts no tree: one candidate at each step.

    All three numbers are said: left out, SGLang 0.5.23 takes a tree for a Llama (5 steps, 4
    candidates, 8 tokens). Of a chain it verifies one token more than there are steps.
    """
    if num_speculative_tokens < 1:
        raise ValueError("a draft needs num_speculative_tokens >= 1")
    return [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft),
        *("--speculative-num-steps", str(num_speculative_tokens)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(num_speculative_tokens + 1)),
    ]


def engine_words(engine_args: Mapping[str, Any]) -> list[str]:
    """A bundle's engine arguments and no others."""
    return [word for name, value in engine_args.items() for word in argument(name, value)]


def argument(name: str, value: Any) -> list[str]:
    """One engine argument as words; none where vLLM's default is meant."""
    if value is None:
        return []
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [] if name in PLAIN_FLAGS else [f"--no-{name}"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [f"--{name}", *(_word(item) for item in value)]
    return [f"--{name}", _word(value)]


def speculative_config(draft: str, num_speculative_tokens: int) -> str:
    """vLLM's JSON for an EAGLE3 draft in a folder."""
    if num_speculative_tokens < 1:
        raise ValueError("a draft needs num_speculative_tokens >= 1")
    return json.dumps(
        {
            "method": "eagle3",
            "model": draft,
            "num_speculative_tokens": num_speculative_tokens,
        }
    )


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping | list | tuple) else str(value)
