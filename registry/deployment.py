"""What a deployable is rendered from, and what follows from it: names, devices, memory."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from registry.bundle import Bundle
from registry.engine_memory import PlannedMemory, size_words
from registry.errors import Problem, UserError
from registry.serve_words import served_env
from registry.topology import ROLES, Role, gpus_of

LONGEST_NAME = 40
"""A Kubernetes name may have 63 characters; the rest is for what is appended."""

MEMORY_SHARE = 0.9
"""A container that stays above this share of its memory takes no traffic."""

PEAK_OF_LIMIT = 0.75
"""The memory limit is set so that the expected peak is this share of it: under MEMORY_SHARE."""

GIB = 2**30


class Deployment(BaseModel):
    """A bundle under the name it is registered by, and what was known when it was gated.

    The version's number is not known before it is registered: the bundle's digest names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="Name of the registered model.")
    bundle: Bundle
    hardware: dict[str, Any] = Field(
        description="What it was gated on, as `registry.provenance.hardware()` says it: cpu, "
        "cores, memory_gib, gpus."
    )
    weights_bytes: int = Field(ge=0, description="Size of target and draft together.")
    peak_memory_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Most resident memory of all the engine's processes in the load test; "
        "None: not measured.",
    )
    planned_memory: PlannedMemory | None = Field(
        default=None, description="Of its plan; None: it knows nothing, or of several engines."
    )
    replicas: int = Field(default=1, ge=1, description="Servers that carry the peak together.")
    replicas_from: str = "no traffic is known here"
    startup_seconds: float | None = Field(
        default=None, ge=0, description="Measured start of the engine; None: not measured."
    )

    @property
    def name(self) -> str:
        """The model's name for Kubernetes and systemd."""
        return dns_name(self.model)

    @property
    def label(self) -> str:
        """First twelve digits of the bundle's digest."""
        return self.bundle.digest[:12]

    @property
    def public_version(self) -> str:
        """The engine's version without its build: `0.32.0` of `0.32.0+cpu`."""
        return self.bundle.engine_version.partition("+")[0]

    @property
    def cpu_build(self) -> bool:
        return self.bundle.engine_version.partition("+")[2].startswith("cpu")

    @property
    def gpus(self) -> int:
        """GPUs that one server takes; 0 where the bundle was gated on a CPU."""
        if self.cpu_build or not self.hardware.get("gpus"):
            return 0
        if self.bundle.topology is not None:
            return gpus_of(self.bundle.engine_args, self.bundle.topology)
        sizes = ["tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"]
        if self.bundle.engine == "sglang":
            # Each has two names, of which a command has one.
            sizes += ["tp-size", "pp-size", "dp-size"]
        arguments = {name.replace("_", "-"): size for name, size in self._engine_args.items()}
        return math.prod(int(arguments.get(name) or 1) for name in sizes)

    @property
    def cores(self) -> int:
        """Cores that one server asks for: all it was gated with; by GPUs, one for each process.

        The processes by GPUs are the front, the engine's core and a worker for each GPU.
        """
        cores = int(self.hardware.get("cores") or 1)
        return min(cores, self.gpus + 2) if self.gpus else cores

    @property
    def gated_on(self) -> str:
        """The hardware in one line."""
        gpus = [str(gpu) for gpu in self.hardware.get("gpus") or ()]
        facts = [*gpus, f"{self.hardware.get('cores', '?')} cores of {self.hardware.get('cpu')}"]
        return ", ".join([*facts, f"{self.hardware.get('memory_gib', '?')} GiB memory"])

    @property
    def env(self) -> dict[str, str]:
        """The engine's environment, as gated; the API key apart."""
        env = served_env(self.bundle.env)
        return {name: value for name, value in env.items() if name != "VLLM_API_KEY"}

    @property
    def _engine_args(self) -> dict[str, Any]:
        return self.bundle.engine_args


@dataclass(frozen=True)
class Memory:
    """What a container asks for and may have, in bytes, and where the figures come from."""

    request: int
    limit: int
    source: str


def part_of(deployment: Deployment, role: Role) -> Deployment:
    """One engine of a role as if it were a server of its own: its arguments, its share of memory.

    The peak that was measured is of all engines together, and each holds the weights.
    """
    bundle, peak = deployment.bundle, deployment.peak_memory_bytes
    topology = bundle.topology
    assert topology is not None, "the bundle is served by one engine"
    args = topology.arguments(role, bundle.engine_args)
    engines = topology.prefill + topology.decode
    changes: dict[str, Any] = {
        "bundle": bundle.model_copy(update={"topology": None, "engine_args": args}),
        "peak_memory_bytes": None if peak is None else math.ceil(peak / engines),
        "planned_memory": None,
    }
    if not deployment.gpus:
        cores = max(1, int(deployment.hardware.get("cores") or 1) // engines)
        changes["hardware"] = {**deployment.hardware, "cores": cores}
    return deployment.model_copy(update=changes)


def memory_of(deployment: Deployment) -> Memory:
    """Host memory of one server. The limit leaves the expected peak under MEMORY_SHARE of it.

    Measured, else planned (on a CPU: a plan for GPUs is of their memory), else guessed.
    """
    topology = deployment.bundle.topology
    if topology is not None:
        each = {role: memory_of(part_of(deployment, role)) for role in ROLES}
        counts = {role: topology.engines(role) for role in ROLES}
        return Memory(
            sum(each[role].request * counts[role] for role in ROLES),
            sum(each[role].limit * counts[role] for role in ROLES),
            f"of {sum(counts.values())} engines together; {each['decode'].source}",
        )
    plan = deployment.planned_memory
    planned = plan.peak_bytes if plan is not None and plan.gpus == 0 else None
    if deployment.peak_memory_bytes:
        peak = deployment.peak_memory_bytes
        source = "the load test's peak, measured"
        if planned is not None:
            source += f"; the plan said {size_words(planned)}"
    elif planned is not None:
        peak, source = planned, "the capacity plan, an estimate; nothing measured"
    else:
        peak = _estimate(deployment)
        source = "estimated from the weights' size, nothing measured"
        source += "" if deployment.gpus else " and nothing planned"
    return Memory(peak, math.ceil(peak / PEAK_OF_LIMIT), source + _of_gpus(deployment))


def _of_gpus(deployment: Deployment) -> str:
    """What the plan says of GPU memory, which no container asks for by its size."""
    plan = deployment.planned_memory
    if plan is None or plan.gpus == 0:
        return ""
    least = plan.floor_bytes
    words = [] if least is None else [f"at least {size_words(least)}"]
    if plan.peak_bytes is not None:
        words.append(f"takes {size_words(plan.peak_bytes)}")
    return f"; of each GPU by the plan: {', '.join(words)}" if words else ""


def _estimate(deployment: Deployment) -> int:
    weights = deployment.weights_bytes
    if deployment.gpus:
        # Weights pass through the host's memory; every process holds its libraries.
        return weights + 4 * GIB * (deployment.gpus + 2)
    kv_cache = deployment.bundle.engine_args.get("kv-cache-memory-bytes")
    # Twice: while they are loaded, weights are there in the file's layout and in the kernels'.
    return 2 * weights + (kv_cache if isinstance(kv_cache, int) else 4 * GIB) + 4 * GIB


def start_budget(deployment: Deployment) -> int:
    """Seconds that a start may take: five times the measured one, at least ten minutes."""
    if deployment.startup_seconds is None:
        return 1800
    return max(600, math.ceil(5 * deployment.startup_seconds / 10) * 10)


def dns_name(model: str) -> str:
    """A DNS label (RFC 1035) of at most LONGEST_NAME characters; models keep names of their own.

    A name that had to be changed carries six digits of its digest.
    """
    label = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"m-{label}".rstrip("-")
    if label == model and len(label) <= LONGEST_NAME:
        return label
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{label[: LONGEST_NAME - 7].rstrip('-')}-{digest}"


def one_line(text: object) -> str:
    """Text that can stand in a comment: no line ends, no control characters."""
    return "".join(char if char.isprintable() else "?" for char in str(text))


def check(deployment: Deployment) -> None:
    """Raise `UserError` for what no command line, environment or unit could carry."""
    bundle, problems = deployment.bundle, []
    if bundle.engine not in ("vllm", "sglang"):
        problems.append(
            Problem("bundle: engine", f"{bundle.engine!r} has no deployables: vllm and sglang have")
        )
    if bundle.draft is not None and (bundle.num_speculative_tokens or 0) < 1:
        problems.append(Problem("bundle: num_speculative_tokens", "a draft needs at least 1"))
    for name, value in bundle.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            problems.append(
                Problem(f"serve recipe: env: {name!r}", "is no name of an environment variable")
            )
        if "\0" in value:
            problems.append(Problem(f"serve recipe: env: {name!r}", "has a NUL character"))
    topology = bundle.topology.model_dump() if bundle.topology else {}
    if "\0" in deployment.model + repr_words([bundle.engine_args, topology]):
        problems.append(Problem("serve recipe: engine_args", "has a NUL character"))
    if problems:
        raise UserError(problems)


def repr_words(value: Any) -> str:
    """All text in a nested value, for a search in it."""
    if isinstance(value, dict):
        return "".join(f"{key}{repr_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "".join(repr_words(item) for item in value)
    return str(value)
