"""What a serve recipe for SGLang may not say; the reasons are those of `recipes/serve_rules.py`.

The names are those of sglang 0.5.23, read in its source (`srt/arg_groups/fields`); no SGLang was
here to keep them against.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from recipes.serve_rules import CODE, DEVICE, FILE, OURS, SECRET, SWAP, value_problems

ARGUMENTS = {
    **dict.fromkeys(
        (
            *("model", "model-path", "host", "port", "served-model-name", "config"),
            *("enable-metrics", "grpc-mode", "grpc-port", "smg-grpc-mode"),
            *("speculative-algorithm", "speculative-draft-model", "speculative-draft-model-path"),
            *("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"),
            "speculative-adaptive",
        ),
        OURS,
    ),
    **dict.fromkeys(
        (
            *("tokenizer", "tokenizer-path", "revision", "chat-template", "completion-template"),
            *("lora-paths", "speculative-draft-model-revision", "speculative-token-map"),
            *("speculative-adaptive-config", "hisparse-config", "deepep-config", "encoder-urls"),
            *("log-requests-target", "weight-cache-socket", "watermark-config"),
        ),
        FILE,
    ),
    **dict.fromkeys(
        (
            *("trust-remote-code", "trust-request-chat-template", "custom-weight-loader"),
            *("enable-custom-logit-processor", "forward-hooks", "model-config-parser"),
        ),
        CODE,
    ),
    **dict.fromkeys(("enable-lora", "checkpoint-engine-wait-weights-before-ready"), SWAP),
    **dict.fromkeys(("device", "base-gpu-id", "gpu-id-step"), DEVICE),
    **dict.fromkeys(("api-key", "admin-api-key"), SECRET),
}
"""Arguments by their own names, each with the reason why no recipe may give it."""

_BEGINNINGS = {"remote-instance-weight-loader-": SWAP}
_ENDINGS = {
    **dict.fromkeys(("-path", "-paths", "-file", "-dir", "-folder"), FILE),
}
_WHOLE = frozenset({"log-requests"})
"""Arguments of their own, though a refused one begins like them."""
_URL_PATHS = frozenset({"fastapi-root-path"})
"""Its value begins with a slash and names no file."""


def sglang_problems(args: Mapping[str, Any]) -> list[str]:
    """What is wrong with engine arguments: `NAME: reason` each. Pure."""
    return [f"{name}: {reason}" for name in args if (reason := _argument(name, args[name]))]


def _argument(name: str, value: Any) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        return "write arguments as on the command line, in full, without --"
    # argparse takes any unambiguous beginning of an argument for the argument.
    meant = next((full for full in ARGUMENTS if full.startswith(name)), None)
    if name in ARGUMENTS:
        meant = name
    if meant is not None and name not in _WHOLE:
        said = "" if meant == name else f"the engine reads {meant}: "
        return f"{said}{ARGUMENTS[meant]}"
    if value is False:
        return (
            "SGLang's flags are given or left out; where it has a `--no-` form, write "
            f"`no-{name}: true`"
        )
    if name.startswith("ssl-"):
        return "the server is asked over plain HTTP on this machine; encrypt in front of it"
    if name in _URL_PATHS:
        return ""
    beginning = next((text for text in _BEGINNINGS if name.startswith(text)), None)
    if beginning is not None:
        return _BEGINNINGS[beginning]
    ending = next((text for text in _ENDINGS if name.endswith(text)), None)
    if ending is not None and value:
        return _ENDINGS[ending]
    return next(value_problems(value), "")
