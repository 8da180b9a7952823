"""The `deploy/` folder of a version: what `registry.deployables` renders from a gated bundle."""

from __future__ import annotations

from pathlib import Path

from registry.bundle import Bundle
from registry.deployables import write
from registry.deployment import Deployment
from registry.outcome import CandidateOutcome
from registry.provenance import hardware


def write_deployables(
    folder: Path,
    model: str,
    bundle: Bundle,
    outcome: CandidateOutcome,
    startup_seconds: float | None,
) -> None:
    """Write the files into `folder`, with the memory and the start that were measured."""
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
        startup_seconds=startup_seconds,
    )
    write(deployment, folder)
