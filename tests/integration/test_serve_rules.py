"""The rules for engine arguments, against the installed engine's own list of them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from recipes.serve_rules import ARGUMENTS, VARIABLES, argument_problems, variable_problems
from registry.settings import CHECKOUT

PYTHON = CHECKOUT / ".venv-serve" / "bin" / "python"

LIST = """
import json, sys
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
names = [o for a in make_arg_parser(FlexibleArgumentParser())._actions for o in a.option_strings]
print(json.dumps({"arguments": names, "variables": list(envs.environment_variables)}))
"""

SUSPICIOUS = re.compile(
    r"path|file|dir\b|folder|root|plugin|module|cls|class|template|tokenizer|revision|token$|key"
    r"|certs|middleware|processor|server|model|lora|remote|url|endpoint|host|config$|device-ids"
)
"""Words in the names of arguments that might bring something in from outside."""

LOOKED_AT = {
    # Inline values, numbers and switches.
    *("additional-config", "attention-config", "aux-output-config", "compilation-config"),
    *("diffusion-config", "ec-manager-config", "ec-transfer-config", "engram-config"),
    *("eplb-config", "fault-tolerance-config", "generation-config", "kernel-config"),
    *("kv-events-config", "model-loader-extra-config", "pooler-config"),
    *("override-generation-config", "profiler-config", "quantization-config"),
    *("reasoning-config", "structured-outputs-config", "watermark-config"),
    *("chat-template-content-format", "default-chat-template-kwargs", "max-model-len"),
    *("model-impl", "language-model-only", "cohere-is-reasoning-model", "tokenizer-mode"),
    *("skip-tokenizer-init", "enable-tokenizer-info-endpoint", "trust-request-chat-template"),
    *("enable-lora", "max-loras", "max-lora-rank", "lora-dtype", "max-cpu-loras"),
    *("fully-sharded-loras", "enable-tower-connector-lora", "specialize-active-lora"),
    *("enable-mixed-moe-lora-format", "enable-moe-shared-loras", "max-lora-cls-labels"),
    *("mm-processor-kwargs", "mm-processor-cache-gb", "mm-processor-cache-type"),
    *("lora-target-modules", "mm-processor-device", "api-server-count", "data-parallel-rank"),
    # Of the server, not of what it answers.
    *("root-path", "disable-access-log-for-endpoints", "otlp-traces-endpoint"),
    *("enable-server-load-tracking", "enable-return-routed-experts", "device-ids"),
}


@pytest.fixture(scope="module")
def engine() -> dict[str, list[str]]:
    if not PYTHON.exists():
        pytest.skip("no serve environment: `make env` builds it")
    done = subprocess.run(
        [PYTHON, "-c", LIST],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path.home(),
        timeout=300,
    )
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def free(engine: dict[str, list[str]]) -> set[str]:
    """Arguments by their full names, which a recipe may give."""
    names = {name[2:] for name in engine["arguments"] if name.startswith("--")}
    positive = {name for name in names if not name.startswith("no-")} - {"help"}
    return {name for name in positive if not argument_problems({name: "x"})}


def test_the_rules_name_arguments_that_there_are(engine: dict[str, list[str]]) -> None:
    assert set(ARGUMENTS) - {name[2:] for name in engine["arguments"]} <= {"url"}
    known = set(engine["variables"])
    ours = {name for name in VARIABLES if name.startswith("VLLM_")}
    assert ours - known <= {"VLLM_SERVER_DEV_MODE", "VLLM_LOGGING_CONFIG"}


def test_every_argument_that_might_bring_something_in_was_looked_at(
    engine: dict[str, list[str]],
) -> None:
    """A new version of the engine with a new `--x-path` or `--x-config` fails here."""
    assert {name for name in free(engine) if SUSPICIOUS.search(name)} <= LOOKED_AT


def test_ordinary_arguments_are_free(engine: dict[str, list[str]]) -> None:
    ordinary = {
        *("dtype", "seed", "max-model-len", "gpu-memory-utilization", "enforce-eager"),
        *("max-num-seqs", "quantization", "kv-cache-dtype", "enable-prefix-caching", "block-size"),
        *("tensor-parallel-size", "attention-backend", "reasoning-parser", "tool-call-parser"),
    }
    assert ordinary <= free(engine)


def test_variables_that_name_files_are_refused(engine: dict[str, list[str]]) -> None:
    free_ones = {name for name in engine["variables"] if not variable_problems({name: "1"})}
    odd = re.compile(r"PATH|DIR$|FOLDER|ROOT$|PLUGIN|SO_|REDIRECT|MODELSCOPE|RESOLVER|_URL$")
    assert {name for name in free_ones if odd.search(name)} <= {
        *("VLLM_BUILD_URL", "VLLM_MEDIA_URL_ALLOW_REDIRECTS", "VLLM_TPU_USING_PATHWAYS"),
    }
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in free_ones
