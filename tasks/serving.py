"""Bundles and their servers: each is started at most once in a release, at its first use.

Stage `serving` proves that this hardware runs a bundle (one generated token) or keeps the
engine's reason why it does not; both are remembered, for this hardware and this engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from prefect import task

from recipes.schema import ServeRecipe, TeacherRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.bundle import Bundle, Part
from registry.candidate_memory import APART, PLAN_FILE, MemoryPlan, apart
from registry.digests import digest_of, digest_of_listing
from registry.draft_binding import check_binding, lineage_root
from registry.errors import Infeasible, InfrastructureError, UserError
from registry.evidence import LoadPoint, ServingEvidence, read_summary, write_summary
from registry.provenance import engine_tools, engine_version, hardware_fingerprint, sglang_version
from registry.settings import settings
from registry.store import Absent
from registry.topology import Disaggregated
from registry.transfer import Transfer
from tasks.devices import devices, exclusive
from tasks.engines.disaggregated_server import DisaggregatedServer
from tasks.engines.draft_vocab import check_draft
from tasks.engines.sglang_server import SglangServer
from tasks.engines.vllm_bench import VllmBench
from tasks.engines.vllm_server import VllmServer
from tasks.progress import LOG
from tasks.stages import TASK_OPTIONS, artifact_of, make, store

VERSION = 2
"""2: which kernels the engine computes with, and whether one of them is emulated."""


def stage(name: str, parents: dict[str, Stage], config: dict[str, Any]) -> Stage:
    """The proof that this hardware serves the bundle of `bundle_config`."""
    return Stage(
        name="serving",
        label=name,
        version=VERSION,
        config=config,
        parents=parents,
        inputs={"hardware": hardware_fingerprint()},
        tools=engine_tools(),
    )


def bundle_config(serve: ServeRecipe, speculative_tokens: int | None) -> dict[str, Any]:
    """What of a bundle is known before its weights exist; part of every measurement's key.

    Every stage's tools name the vLLM that is installed, which sends the load; another engine's
    version stands here. Raises `UserError` where that engine is not installed.
    """
    config: dict[str, Any] = {
        "engine": serve.engine,
        "engine_args": serve.engine_args,
        "env": serve.env,
        "num_speculative_tokens": speculative_tokens,
    }
    if serve.engine == "sglang":
        config["engine_version"] = sglang_version()
    if serve.topology is not None:
        config["topology"] = serve.topology.model_dump(mode="json")
    return config


def part_of(stage: Stage, below: str = "") -> Part:
    """The folder of a finished stage (or one below it) as part of a bundle."""
    ref = artifact_of(stage)
    files = store().manifest(ref).files
    prefix = f"{below}/" if below else ""
    listing = {
        name.removeprefix(prefix): entry.sha256
        for name, entry in files.items()
        if name.startswith(prefix)
    }
    return Part(stage=stage.name, key=ref.key, below=below, digest=digest_of_listing(listing))


def bundle_of(name: str, target: Part, draft: Part | None, config: dict[str, Any]) -> Bundle:
    """Raises `StageFailed` where the draft is not one for this target."""
    if draft is not None:
        check_binding(draft, target, store().root)
        check_draft(draft.path, target.path)
    return Bundle(
        name=name,
        target=target,
        draft=draft,
        root=lineage_root(target, store().root),
        **({"engine_version": engine_version()} | config),
    )


SERVERS: dict[str, type[VllmServer]] = {"vllm": VllmServer, "sglang": SglangServer}
"""Managed servers by the engine's name in recipes and bundles."""


def managed_server(
    engine: str, topology: Disaggregated | None, target: Path, **server: Any
) -> VllmServer:
    """A server of ours that is not started yet; `server` as `VllmServer` takes it."""
    if topology is not None:
        return DisaggregatedServer(target, topology=topology, devices=devices(), **server)
    return SERVERS[engine](target, **server)


class Watched:
    """Whether a server of ours lives, and whether what it answered came by transfer.

    `check` goes where a measurement asks whether its server is alive, after each part of its load.
    Of a server that is not in parts there is nothing to transfer.
    """

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._parts = server if isinstance(server, DisaggregatedServer) else None
        self._last = self._parts.transfer() if self._parts else None
        self.transfer: Transfer | None = None
        """All that was counted until the last `check`; null of a server that is not in parts."""

    def check(self) -> None:
        """Raises `InfrastructureError` where it is dead, or computed a prompt again."""
        self._server.check_alive()
        if self._parts is None or self._last is None:
            return
        found = self._parts.check_transferred(self._last)
        # Not what stands there by now: what was counted since would never be looked at.
        self._last = self._last.plus(found)
        if found.preempted:
            LOG.warning(
                "%s: %d requests had to give up their room in a decode engine, which then computed "
                "their prompts again",
                self._server.served_name,
                found.preempted,
            )
        self.transfer = found if self.transfer is None else self.transfer.plus(found)


class ServedBundle:
    """A bundle and its server; the server starts when it is first asked for."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._running = ExitStack()
        self._started = False
        self._held = False
        self._generator: VllmBench | None = None
        self._server = managed_server(
            bundle.engine,
            bundle.topology,
            bundle.target.path,
            served_name=bundle.name,
            engine_args=bundle.engine_args,
            env=bundle.env,
            draft=bundle.draft.path if bundle.draft else None,
            num_speculative_tokens=bundle.num_speculative_tokens or 0,
            log=self.log,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # With the error: what is being stopped has one grace for all its processes.
        self._running.__exit__(kind, error, trace)

    @property
    def server(self) -> VllmServer:
        """The running server. Raises `Infeasible` when the engine cannot run the bundle here."""
        if not self._started:
            for part in filter(None, (self.bundle.target, self.bundle.draft)):
                store().mark_used(part.stage, part.key)
            self._hold()
            self._running.enter_context(self._server)
            self._started = True
        try:
            self._server.check_alive()
        except InfrastructureError as dead:
            if not self._revived(dead):
                self.reset()
                raise
        return self._server

    def _revived(self, dead: InfrastructureError) -> bool:
        """Whether the parts that died work again, each at its place."""
        if not isinstance(self._server, DisaggregatedServer):
            return False
        LOG.warning("%s: starting again what is dead: %s", self.bundle.name, dead)
        try:
            started = self._server.revive()
        except InfrastructureError as error:
            LOG.warning("%s: its parts could not be started again: %s", self.bundle.name, error)
            return False
        LOG.info("%s: %s started again", self.bundle.name, ", ".join(started))
        return True

    def reset(self) -> None:
        """End what runs, so that another try starts a server and a generator of its own."""
        self._running.close()
        self._started = False
        self._generator = None
        self._held = False

    def _hold(self) -> None:
        """The device, from before the first process starts until the last one has ended."""
        if not self._held:
            self._running.enter_context(exclusive(f"serving {self.bundle.name}"))
            self._held = True

    @property
    def load_generator(self) -> VllmBench:
        """The process that sends load. Asked for early, its import overlaps the server's start."""
        if self._generator is None:
            self._hold()
            # Two releases may measure one bundle at once; job and result lie beside the log.
            name = f"load-{os.getpid()}-{self.log.name.removeprefix('serve-')}"
            log = self.log.with_name(name)
            generator = VllmBench(self._server.api_key, log=log)
            self._generator = self._running.enter_context(generator)
        return self._generator

    @property
    def digest(self) -> str:
        return self.bundle.digest

    @property
    def engine(self) -> str:
        return f"{self.bundle.engine} {self.bundle.engine_version}"

    @property
    def log(self) -> Path:
        return settings().logs_dir / f"serve-{self.bundle.name}-{self.bundle.digest[:12]}.log"


@dataclass(frozen=True)
class RemoteServer:
    """A teacher that somebody else serves: a URL, a model name there, perhaps a key."""

    url: str
    served_name: str
    api_key: str


class RemoteTeacher:
    """Stands where a `ServedBundle` stands; its digest names the URL and model, no weights."""

    def __init__(self, recipe: TeacherRecipe) -> None:
        key = settings().teacher_api_key.get_secret_value()
        self.server = RemoteServer(str(recipe.url), str(recipe.served_model), key)
        self.digest = digest_of({"url": recipe.url, "served_model": recipe.served_model})
        self.engine = f"openai {recipe.served_model}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


Served = ServedBundle | RemoteTeacher


@contextmanager
def renewed_after_fault(served: Served) -> Iterator[None]:
    """Where the block ends with a fault of a machine, another try starts a server of its own.

    A server whose engine hangs still calls itself healthy: vLLM's /health (0.32) only sees death.
    """
    try:
        yield
    except InfrastructureError:
        if isinstance(served, ServedBundle):
            served.reset()
        raise


class Kernels(Protocol):
    """What a server of ours says of its kernels."""

    @property
    def quantized(self) -> bool: ...
    @property
    def emulated(self) -> bool | None: ...
    @property
    def log(self) -> Path | None: ...


def check_times_count(server: Kernels, production: bool) -> None:
    """Before times are taken under a profile of production: is it known whose kernels they are?

    Raises `UserError` where a quantized target's log does not tell. Such times would pass as real.
    """
    if production and server.quantized and server.emulated is None:
        raise UserError.at(
            str(server.log),
            "names no kernel of this quantized target, so nobody knows whether its times are real",
            "take what silences vLLM's log (VLLM_LOGGING_LEVEL, VLLM_CONFIGURE_LOGGING) out of the "
            "serve recipe; a vLLM that words it otherwise has to be taught to "
            "tasks/engines/engine_kernels.py; `production: false` in the load profile accepts it",
        )


@task(name="serving", **TASK_OPTIONS)
def prove_serving(
    stage: Stage, served: ServedBundle, planned: MemoryPlan | None = None
) -> ArtifactRef:
    """Start the bundle once and keep what came of it: a token, or the engine's reason.

    planned: written and digested before the engine starts. Where it refuses the bundle nothing is
    started, and where the engine's KV tokens are others than its own, that is said.
    """

    def produce(folder: Path) -> dict[str, Any]:
        facts: dict[str, Any] = {"feasible": True}
        if planned is not None:
            (folder / PLAN_FILE).write_text(planned.model_dump_json(indent=1) + "\n", "utf-8")
            facts |= plan_facts(planned)
            LOG.info("%s: plan %s: %s", served.bundle.name, planned.digest[:12], planned.words)
        try:
            if planned is not None and planned.refusal:
                raise Infeasible(planned.refusal)
            server = served.server
            facts["startup_seconds"] = round(server.startup_seconds, 2)
            facts["kv_cache_tokens"] = server.kv_cache_tokens
            facts["memory"] = server.memory()
            facts["kernels"] = server.kernels
            facts["emulated"] = server.emulated
            if server.emulated_kernels:
                LOG.warning(
                    "%s: %s only imitates a kernel that this hardware lacks: its times say "
                    "nothing about the candidate",
                    served.bundle.name,
                    ", ".join(server.emulated_kernels),
                )
        except Infeasible as reason:
            facts |= {"feasible": False, "reason": str(reason)}
        evidence = ServingEvidence(
            bundle=served.digest,
            hardware=hardware_fingerprint(),
            engine=served.engine,
            measured_at=datetime.now(UTC),
            **facts,
        )
        write_summary(folder, evidence)
        for found in plan_findings(served.bundle.name, evidence):
            LOG.warning("%s", found)
        if planned is not None and planned.refusal:
            facts[BY_PLAN] = True
        return {name: fact for name, fact in facts.items() if name not in _NESTED}

    return make(stage, produce, fresh=lambda ref: not short_of_memory(ref.summary), heavy=True)


BY_PLAN = "refused_by_plan"
_NESTED = ("planned_memory", "memory")
"""In the evidence alone, not in the few facts that a manifest repeats of it."""


def plan_facts(planned: MemoryPlan) -> dict[str, Any]:
    """What of a plan stands in the evidence."""
    return {
        "plan": planned.digest,
        "planned_kv_tokens": planned.kv_cache_tokens,
        "plan_exact": planned.exact,
        "planned_memory": planned.memory,
    }


def plan_findings(
    name: str, evidence: ServingEvidence, points: Sequence[LoadPoint] = ()
) -> list[str]:
    """How the engine's KV cache and memory differ from the plan; empty where they do not.

    `points`: of its load test, for the most that it held.
    By more than 5 % where the plan's figure is counted, 25 % where it is an estimate. A verdict
    comes of it only where it is certain (`eval_suites.plan_gate`).
    """
    found = []
    share = apart(evidence.planned_kv_tokens, evidence.kv_cache_tokens)
    if share is not None and abs(share) > APART:
        how = "counted" if evidence.plan_exact else "an estimate"
        found.append(
            f"{name}: the engine has room for {evidence.kv_cache_tokens} KV tokens, its plan said "
            f"{evidence.planned_kv_tokens} ({share:+.1%}, {how})"
        )
    return found + [f"{name}: {one.words}" for one in evidence.compared_memory(points) if one.apart]


def short_of_memory(summary: dict[str, Any]) -> bool:
    """A refusal for want of memory may be of this hour only, so it is tried again every time.

    So is a plan's refusal: it costs nothing, and its hardware file is not in the stage's key.
    """
    if summary["feasible"]:
        return False
    return bool(summary.get(BY_PLAN)) or "memory" in str(summary.get("reason", "")).lower()


def known_infeasible(stage: Stage) -> bool:
    """Whether the store remembers that this hardware cannot serve the bundle."""
    try:
        summary = store().find(stage).summary
    except Absent:
        return False
    return not summary["feasible"] and not short_of_memory(summary)


def serving_evidence(ref: ArtifactRef) -> ServingEvidence:
    evidence = read_summary(ref.path)
    assert isinstance(evidence, ServingEvidence)
    return evidence
