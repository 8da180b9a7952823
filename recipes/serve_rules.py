"""What a serve recipe may not say: whatever would serve something that no digest covers.

A bundle's digest covers two folders, the engine, its arguments and its variables. An argument
that names another file, other weights or other code, and a variable that redirects a library,
would make two bundles of one digest serve differently. They are refused, by name and by value.
The names are those of `vllm serve` 0.32 and kept against its own parser by a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.loader import cut

OURS = "is set by the project, not by a recipe"
FILE = "names something outside of the bundle; put it into the model's folder"
CODE = "loads code that the bundle's digest does not cover"
SWAP = "changes what is served while it is served"
SECRET = "a secret does not belong into a recipe: bundle.json is there for everybody to read"
_LIBRARY = "changes which files or libraries the engine loads; that is the machine's affair"
DEVICE = (
    "takes devices that nobody has locked; set it for the process that releases (docs/devices.md)"
)

ARGUMENTS = {
    **dict.fromkeys(
        (
            *("model", "host", "port", "uds", "url", "served-model-name", "grpc", "grpc-port"),
            *("speculative-config", "spec-method", "spec-model", "spec-tokens"),
            "kv-transfer-config",
        ),
        OURS,
    ),
    **dict.fromkeys(
        (
            *("tokenizer", "tokenizer-revision", "revision", "code-revision", "config"),
            *("chat-template", "lora-modules", "default-mm-loras", "logging-config"),
        ),
        FILE,
    ),
    **dict.fromkeys(
        (
            *("trust-remote-code", "middleware", "logits-processors", "model-class-overrides"),
            *("worker-cls", "worker-extension-cls", "scheduler-cls", "tool-server"),
        ),
        CODE,
    ),
    "weight-transfer-config": SWAP,
    "device-ids": DEVICE,
    "api-key": SECRET,
    "hf-token": SECRET,
}
"""Arguments by their own names, each with the reason why no recipe may give it."""

_ARGUMENT_ENDINGS = {"-path": FILE, "-file": FILE, "-dir": FILE, "-plugin": CODE}
_URL_PATHS = frozenset({"root-path", "disable-access-log-for-endpoints"})
"""Their values begin with a slash and name no file."""

_NESTED_ENDINGS = {
    **{"_path": FILE, "_file": FILE, "_dir": FILE},
    **{"_plugin": CODE, "_cls": CODE, "inductor_passes": CODE},
}
"""Keys inside of an argument that is a mapping."""

VARIABLES = {
    **dict.fromkeys(("PATH", "HOME", "VLLM_MEDIA_CONNECTOR"), _LIBRARY),
    **dict.fromkeys(("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"), OURS),
    "CUDA_DEVICE_ORDER": DEVICE,
    **dict.fromkeys(("VLLM_USE_MODELSCOPE", "VLLM_LOGGING_CONFIG"), FILE),
    **dict.fromkeys(("VLLM_PLUGINS", "VLLM_ALLOW_INSECURE_SERIALIZATION"), CODE),
    **dict.fromkeys(("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"), SWAP),
}
_VARIABLE_BEGINNINGS = {
    **dict.fromkeys(("LD_", "DYLD_", "PYTHON", "XDG_"), _LIBRARY),
    **dict.fromkeys(("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "MODELSCOPE_"), OURS),
    **dict.fromkeys(("S3_", "AWS_"), FILE),
    "VLLM_LORA_RESOLVER_": SWAP,
}
_VARIABLE_ENDINGS = {
    "_VISIBLE_DEVICES": DEVICE,
    **dict.fromkeys(("_PATH", "_DIR", "_FOLDER", "_ROOT", "_HOME", "_FILE", "_PROXY"), _LIBRARY),
    **dict.fromkeys(("_API_KEY", "_ACCESS_KEY", "_KEY_ID", "_TOKEN", "_SECRET"), SECRET),
}
_HARMLESS_VARIABLES = frozenset({"PYTHONHASHSEED", "PYTHONUNBUFFERED"})

_OUTSIDE = re.compile(r"\s*(/|~|\.\.?/|file:|s3:|gs:|hf:)")
"""How a place outside of the bundle begins."""


def argument_problems(args: Mapping[str, Any]) -> list[str]:
    """What is wrong with engine arguments: `NAME: reason` each. Pure."""
    return [f"{name}: {reason}" for name in args if (reason := _argument(name, args[name]))]


def variable_problems(env: Mapping[str, str]) -> list[str]:
    """What is wrong with an engine's environment: `NAME: reason` each. Pure."""
    return [f"{name}: {reason}" for name in env if (reason := _variable(name, env[name]))]


def _argument(name: str, value: Any) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        return "write arguments as on the command line, in full, without --"
    positive = name.removeprefix("no-")
    # The engine takes any unambiguous beginning of an argument for the argument.
    meant = next((full for full in ARGUMENTS if full.startswith(positive)), None)
    if meant is not None:
        return (
            ARGUMENTS[meant] if meant == name else f"the engine reads {meant}: {ARGUMENTS[meant]}"
        )
    if name != positive:
        return f"write `{positive}: false`"
    if name == "generation-config" and value not in (None, "auto", "vllm"):
        return f"{FILE}; only `auto` and `vllm` are known to mean the same everywhere"
    if name.startswith("ssl-"):
        return "the server is asked over plain HTTP on this machine; encrypt in front of it"
    if name in _URL_PATHS:
        return ""
    ending = next((end for end in _ARGUMENT_ENDINGS if name.endswith(end)), None)
    if ending is not None and value:
        return _ARGUMENT_ENDINGS[ending]
    if name == "distributed-executor-backend" and "." in str(value):
        return CODE
    return next(value_problems(value), "")


def value_problems(value: Any) -> Iterator[str]:
    """Of an argument's value and of all that is nested in it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            ending = next((end for end in _NESTED_ENDINGS if str(key).endswith(end)), None)
            if ending is not None and inner:
                yield f"its {key} {_NESTED_ENDINGS[ending]}"
            yield from value_problems(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from value_problems(inner)
    elif isinstance(value, str):
        if _OUTSIDE.match(value):
            yield f"{cut(value)} {FILE}"
        if re.match(r"-+[A-Za-z]", value):
            yield f"{cut(value)} would be read as another argument"


def _variable(name: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "is no name of an environment variable"
    upper = name.upper()
    if upper in _HARMLESS_VARIABLES:
        return ""
    beginning = next((text for text in _VARIABLE_BEGINNINGS if upper.startswith(text)), None)
    ending = next((text for text in _VARIABLE_ENDINGS if upper.endswith(text)), None)
    if upper in VARIABLES:
        return VARIABLES[upper]
    if beginning is not None:
        return _VARIABLE_BEGINNINGS[beginning]
    if ending is not None:
        return _VARIABLE_ENDINGS[ending]
    return f"{cut(value)} {FILE}" if _OUTSIDE.match(value) else ""
