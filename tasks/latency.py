"""Stage `latency`: load on a served bundle, at fixed rates or in search of the largest kept one.

The hardware's fingerprint is part of the key. The date is not: the policy says how old is too
old, and evidence older than that is measured again under the same key. A search that was killed
goes on from its finished steps, which lie outside of the store until it ends.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from prefect import task

from eval_suites.schema import LoadProfile
from registry.artifacts import ArtifactRef, Stage
from registry.evidence import (
    REQUESTS,
    SUMMARY,
    TIMELINE,
    LatencyEvidence,
    note_transfer,
    read_summary,
)
from registry.provenance import engine_tools, hardware_fingerprint
from registry.settings import settings
from registry.store import Absent
from registry.topology import gpus_of
from tasks.engines.engine_watch import EngineWatch, reset_prefix_cache
from tasks.engines.fixed_rates import Measuring, measure_rates
from tasks.engines.kept_rate import KeptRateSearch
from tasks.engines.load_generator import Traffic
from tasks.engines.load_prompts import first_prompt, supply_of
from tasks.engines.load_run import LoadRun
from tasks.hardware import known_price
from tasks.progress import LOG
from tasks.serving import ServedBundle, Watched, check_times_count, renewed_after_fault
from tasks.stages import TASK_OPTIONS, folder_of, make, store

VERSION = 3
"""3: whether a kernel was emulated."""


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
        tools=engine_tools(),
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

    prompts = folder_of(stage.parents["prompts"]) / "load.jsonl"

    work = settings().home / "bench" / f"release-{stage.key[:24]}-{served.digest[:12]}"

    def produce(folder: Path) -> dict[str, Any]:
        if profile.search is None and work.exists():
            shutil.rmtree(work)
        work.mkdir(parents=True, exist_ok=True)
        generator, server = served.load_generator, served.server
        check_times_count(server, profile.production)
        traffic = Traffic.of(profile, server.url, server.served_name, served.bundle.target.path)
        watch = EngineWatch(traffic.url, api_key=server.api_key, pids=lambda: server.pids)
        watched = Watched(server)
        run = LoadRun(traffic, generator, watch, work / "raw", watched.check,
                      lambda: reset_prefix_cache(traffic.url, server.api_key),
                      lambda: server.check_answers(profile.request_timeout))  # fmt: skip
        supply = supply_of(
            profile,
            None if profile.scenarios else prompts,
            first_prompt(work),
            served.bundle.target.path,
        )
        of = Measuring(
            bundle=served.digest,
            profile=profile_name,
            hardware=hardware_fingerprint(),
            engine=served.engine,
            price_per_hour=known_price(
                profile, gpus_of(served.bundle.engine_args, served.bundle.topology)
            ),
            emulated=server.emulated,
        )
        # A generator that failed has ended too; another try needs a new one.
        with renewed_after_fault(served):
            if profile.search is not None:
                name = stage.parents["prompts"].key
                KeptRateSearch(
                    profile, run, supply, work, of, say=LOG.info, prompts_name=name
                ).run()
            else:
                measure_rates(profile, run, supply, work, of, say=LOG.info)
        note_transfer(work, watched.transfer)
        for name in (SUMMARY, REQUESTS, TIMELINE):
            shutil.copyfile(work / name, folder / name)
        shutil.copytree(work / "raw", folder / "raw")
        return figures(folder)

    ref = make(stage, produce, fresh=young_enough(max_age_days), heavy=True)
    # Not before the store has it: a stop in between would lose the finished steps.
    shutil.rmtree(work, ignore_errors=True)
    return ref


def figures(folder: Path) -> dict[str, Any]:
    """What the manifest says of the evidence in a few numbers."""
    evidence = read_summary(folder)
    assert isinstance(evidence, LatencyEvidence)
    low, high = evidence.kept_rate or (None, None)
    return {
        "points": len(evidence.points),
        "requests": sum(point.total for point in evidence.points),
        "failed": sum(point.failed for point in evidence.points),
        "kept_rate_low": low,
        "kept_rate_high": high,
        "emulated": evidence.emulated,
        "seconds": evidence.seconds,
    }
