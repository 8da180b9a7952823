"""Stage `latency`: vLLM's load generator with our prompts, at rising request rates.

The hardware's fingerprint is part of the key. The date is not: the policy says how old is too
old, and evidence older than that is measured again under the same key.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from prefect import task

from eval_suites.schema import LoadProfile
from registry.artifacts import ArtifactRef, Stage
from registry.errors import InfrastructureError
from registry.provenance import engine_version, hardware_fingerprint
from registry.store import Absent
from tasks.serving import ServedBundle
from tasks.stages import TASK_OPTIONS, folder_of, make, store

VERSION = 1


def stage(
    name: str,
    profile: LoadProfile,
    prompts: Stage,
    parents: dict[str, Stage],
    config: dict[str, Any],
) -> Stage:
    return Stage(
        name="latency",
        label=name,
        version=VERSION,
        config={
            "profile": profile.model_dump(mode="json", exclude={"description"}),
            "bundle": config,
        },
        parents={"prompts": prompts, **parents},
        inputs={"hardware": hardware_fingerprint()},
        tools={"vllm": engine_version()},
    )


def will_run(stage: Stage, max_age_days: float) -> bool:
    """Whether the load has to be sent, so that its generator can be started early."""
    try:
        return not young_enough(max_age_days)(store().find(stage))
    except Absent:
        return True


def young_enough(max_age_days: float) -> Callable[[ArtifactRef], bool]:
    return lambda ref: datetime.now(UTC) - ref.made_at <= timedelta(days=max_age_days)


@task(name="latency", **TASK_OPTIONS)
def measure_latency(
    stage: Stage,
    profile: LoadProfile,
    profile_name: str,
    max_age_days: float,
    served: ServedBundle,
) -> ArtifactRef:
    """TTFT, TPOT, ITL and E2EL at every rate of the profile; failed requests are kept."""

    def produce(folder: Path) -> dict[str, Any]:
        generator, server = served.load_generator, served.server
        job = {
            **profile.model_dump(
                mode="json",
                include={
                    "rates",
                    "seconds_per_rate",
                    "warmup_requests",
                    "sampling",
                    "burstiness",
                    "seed",
                    "smoke",
                },
            ),
            "url": server.url,
            "served_name": server.served_name,
            "tokenizer": str(served.bundle.target.path),
            "prompts_file": str(folder_of(stage.parents["prompts"]) / "load.jsonl"),
            "out_dir": str(folder),
            "bundle": served.digest,
            "profile": profile_name,
            "hardware": hardware_fingerprint(),
            "engine": served.engine,
        }
        try:
            result = generator.measure(job)
            server.check_alive()
        except InfrastructureError:
            # A generator that failed has ended; another try needs a new one.
            served.reset()
            raise
        return result

    return make(stage, produce, fresh=young_enough(max_age_days))
