"""What made an artifact: tool versions of both environments, git revision, hardware.

Asked once per process. Names of hosts, users and folders are left out on purpose: a manifest
travels, and says what matters for making the same thing again.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from registry.digests import digest_of
from registry.errors import InfrastructureError, UserError
from registry.redaction import without_secrets
from registry.settings import CHECKOUT, settings

DRIVER_TOOLS = (
    "prefect",
    "mlflow",
    "torch",
    "transformers",
    "peft",
    "trl",
    "datasets",
    "llmcompressor",
    "compressed-tensors",
    "speculators",
    "lm_eval",
    "pandas",
)
SERVE_TOOLS = ("vllm", "torch", "transformers", "compressed-tensors")
UNPACKED = "vllm-cpu-unpacked"
"""Our plugin of vLLM for CPUs (requirements/vllm-cpu-unpacked). It changes what can be served."""
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "bf16")

_ASK_VERSIONS = (
    "import importlib.metadata as m, json, sys\n"
    "def v(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
)


@lru_cache(maxsize=1)
def driver_versions() -> dict[str, str | None]:
    """Versions of the driver environment's tools; None for one that is not installed."""
    return {name: _version(name) for name in DRIVER_TOOLS}


@lru_cache(maxsize=1)
def serve_versions() -> dict[str, str | None]:
    """Versions of the serve environment's tools, of our plugin where it is installed.

    Raises `UserError` when the environment is not there.
    """
    python = settings().serve_python
    remedy = "`make env`, or set PILOTAGE_SERVE_PYTHON to a Python that has vLLM"
    if not python.exists():
        raise UserError.at(f"PILOTAGE_SERVE_PYTHON={python}", "no such Python", remedy)
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", _ASK_VERSIONS, *SERVE_TOOLS, UNPACKED],
            env=without_secrets(os.environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        versions: dict[str, str | None] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError.at(
            f"PILOTAGE_SERVE_PYTHON={python}", f"does not run ({error})", remedy
        ) from None
    if versions["vllm"] is None:
        raise UserError.at(f"PILOTAGE_SERVE_PYTHON={python}", "has no vLLM", remedy)
    if versions[UNPACKED] is None:
        del versions[UNPACKED]
    return versions


def tools(*names: str) -> dict[str, str]:
    """Driver tools by name and version, for a stage's key."""
    return {name: _version(name) or "absent" for name in names}


def engine_version() -> str:
    """Version of vLLM in the serve environment."""
    return str(serve_versions()["vllm"])


@lru_cache(maxsize=1)
def sglang_version() -> str:
    """Version of SGLang where it is installed. Raises `UserError` where it is not."""
    python = settings().sglang_python
    remedy = (
        "install SGLang into an environment of its own and name its Python, or serve with "
        "`engine: vllm`"
    )
    if python is None:
        what = "is not set, and a serve recipe or a bundle asks for `engine: sglang`"
        raise UserError.at("PILOTAGE_SGLANG_PYTHON", what, remedy)
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", _ASK_VERSIONS, "sglang"],
            env=without_secrets(os.environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found = json.loads(answer.stdout)["sglang"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        where = f"PILOTAGE_SGLANG_PYTHON={python}"
        raise UserError.at(where, f"does not run ({error})", remedy) from None
    if found is None:
        raise UserError.at(f"PILOTAGE_SGLANG_PYTHON={python}", "has no SGLang", remedy)
    return str(found)


def engine_tools() -> dict[str, str]:
    """What decides which bundles the serve environment can run, for a stage's key."""
    versions = serve_versions()
    return {name: str(versions[name]) for name in ("vllm", UNPACKED) if name in versions}


@lru_cache(maxsize=1)
def hardware() -> dict[str, Any]:
    """CPU model, the instruction sets that change what runs, cores, memory in GiB, GPUs."""
    model, flags = platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):  # x86, ARM
                flags = set(value.split())
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": _gpus(),
    }


def hardware_fingerprint() -> str:
    """Twelve hex digits that name this kind of machine; in every speed measurement's key."""
    return digest_of(hardware())[:12]


@lru_cache(maxsize=1)
def git_revision() -> str:
    """Commit of the checkout, with `+changes` when files differ from it; `unknown` outside git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+changes" if _git("status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def actor_name() -> str:
    """Who a line of the ledger names where nobody else is named: PILOTAGE_ACTOR, or the login."""
    try:
        return settings().actor or getpass.getuser()
    except (OSError, KeyError):
        # No login: a container with a bare user id.
        return f"user {os.getuid()}"


def provenance() -> dict[str, Any]:
    """Everything above as one JSON-ready record."""
    return {
        "git": git_revision(),
        "python": platform.python_version(),
        "driver": driver_versions(),
        "serve": serve_versions() if settings().serve_python.exists() else None,
        "hardware": hardware(),
        "hardware_fingerprint": hardware_fingerprint(),
    }


def _git(*words: str) -> str:
    answer = subprocess.run(
        ["git", *words],
        env=without_secrets(os.environ),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return answer.stdout.strip()


@lru_cache(maxsize=64)
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    said = nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return [line.strip() for line in said.splitlines() if line.strip()]


DEVICE_FILES = Path("/dev")


def nvidia_smi(*words: str) -> str:
    """What it prints; empty on a machine without a GPU.

    Raises `InfrastructureError` where there is a GPU and it does not answer (a driver that was
    changed under it, a GPU that fell off the bus): the machine would pass as one without.
    """
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", *words]
    env = without_secrets(os.environ)
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        node = next(DEVICE_FILES.glob("nvidia[0-9]*"), None)
        if node is None:
            return ""
        # It writes its errors where it writes its answers.
        said = getattr(error, "stdout", None)
        why = " ".join(said.split()) if isinstance(said, str) and said.strip() else str(error)
        raise InfrastructureError(
            f"`{' '.join(command)}` failed though {node} is there: {why[:300]}; repair the "
            "driver, or take the GPU away from this process"
        ) from None
