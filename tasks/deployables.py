"""The `deploy/` folder of a version: what `registry.deployables` renders from a gated bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from registry import savings
from registry.bundle import Bundle
from registry.deployables import write
from registry.deployment import Deployment
from registry.outcome import CandidateOutcome
from registry.provenance import hardware
from registry.savings import Asked


def write_deployables(
    folder: Path,
    model: str,
    bundle: Bundle,
    outcome: CandidateOutcome,
    startup_seconds: float | None,
    asked: Asked | None = None,
) -> None:
    """Write the files into `folder`, with the memory and the start that were measured.

    `asked`: the peak of the traffic that the release is for; None: nobody knows it any more.
    """
    peaks = [point.engine.get("memory_peak_bytes") for point in outcome.latency]
    measured = [peak for peak in peaks if peak is not None]
    weights = sum(
        path.stat().st_size
        for part in (bundle.target, bundle.draft)
        if part is not None
        for path in part.path.rglob("*.safetensors")
    )
    deployment = Deployment(
        model=model,
        bundle=bundle,
        hardware=hardware(),
        weights_bytes=weights,
        peak_memory_bytes=int(max(measured)) if measured else None,
        planned_memory=outcome.planned_memory if bundle.topology is None else None,
        startup_seconds=startup_seconds,
        **replicas_of(outcome, asked),
    )
    write(deployment, folder)


def replicas_of(outcome: CandidateOutcome, asked: Asked | None) -> dict[str, Any]:
    """How many servers the peak takes at the rate that one kept, and from what that follows."""
    if asked is None or asked.rate is None:
        return {}
    if outcome.kept_rate is None:
        return {"replicas_from": f"the peak is {asked.rate:g} requests/s, and no rate was sought"}
    kept = outcome.kept_rate[0]
    if not kept or not outcome.times_count:
        return {"replicas_from": f"the peak is {asked.rate:g} requests/s, and no rate was kept"}
    return {
        "replicas": int(savings.replicas_of((kept, None), asked.rate)[0]),
        "replicas_from": f"for {asked.rate:g} requests/s ({asked.source}), one keeps {kept:g}",
    }
