"""Load tests for a plan: of an evidence folder, or of a bundle, found in the home's store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.bundle import Bundle
from registry.capacity_plan import format_name
from registry.engine_memory import size_words
from registry.errors import UserError
from registry.evidence import SUMMARY, LatencyEvidence, read_summary
from registry.kv_cache import kv_dtype_of
from registry.machines import Machine
from registry.plan_evidence import Served, measured_of
from registry.plan_parts import Demand, Fit, Model
from registry.provenance import hardware_fingerprint
from registry.settings import settings
from registry.topology import engine_gpus
from tasks.bundles import bundle_named
from tasks.capacity_inputs import model_of
from tasks.release_capacity import is_here, this_machine
from tasks.stages import store


def served_of(names: Sequence[str]) -> list[Served]:
    """Folders with a latency summary, or bundles. Raises `UserError` for what has none."""
    found = []
    for name in names:
        if (Path(name) / SUMMARY).is_file():
            evidence = read_summary(Path(name))
            if not isinstance(evidence, LatencyEvidence):
                what = f"holds {evidence.kind} evidence"
                raise UserError.at(f"--evidence {name}", what, "name the folder of a load test")
            try:
                bundle = bundle_named(evidence.bundle)
            except UserError:
                raise UserError.at(
                    f"--evidence {name}",
                    f"is of bundle {evidence.bundle[:12]}, which this home does not know",
                    "a plan needs its arguments: measure it with --bundle, or in a release",
                ) from None
            found.append(_served(bundle, evidence, name))
            continue
        bundle = bundle_named(name)
        ours = [_served(bundle, evidence, where) for evidence, where in _in_store(bundle.digest)]
        if not ours:
            raise UserError.at(
                f"--evidence {name}",
                f"bundle {bundle.digest[:12]} has no load test in this home",
                "`pilotage bench --bundle`, or a release, makes one",
            )
        found += ours
    return found


def _in_store(bundle: str) -> Iterator[tuple[LatencyEvidence, str]]:
    """Of releases, and of `pilotage bench` where it had no folder of its own."""
    released = store().root.glob(f"latency/*/files/{SUMMARY}")
    for path in sorted([*released, *(settings().home / "bench").glob(f"*/{SUMMARY}")]):
        try:
            evidence = read_summary(path.parent)
        except UserError:
            continue
        if isinstance(evidence, LatencyEvidence) and evidence.bundle == bundle:
            yield evidence, str(path.parent)


def _served(bundle: Bundle, evidence: LatencyEvidence, source: str) -> Served:
    shape = model_of(str(bundle.target.path), None).shape
    args = bundle.engine_args
    tp = int(args.get("tensor-parallel-size") or 1)
    pp = int(args.get("pipeline-parallel-size") or 1)
    return Served(
        evidence=evidence,
        source=source,
        here=evidence.hardware == hardware_fingerprint(),
        shape=shape,
        format=format_name("auto", shape),
        kv_dtype=kv_dtype_of(shape, str(args.get("kv-cache-dtype", "auto"))),
        draft=bundle.draft is not None,
        tp=tp,
        pp=pp,
        engine_args=args,
        one_engine=bundle.engine == "vllm"
        and bundle.topology is None
        and engine_gpus(args) == tp * pp,
    )


def with_evidence(
    rows: Sequence[tuple[Fit, dict[str, Any]]],
    model: Model,
    demand: Demand,
    served: Sequence[Served],
) -> list[str]:
    """Puts `measured` into every row, null where nothing is of it; what is of no row, in words."""
    here = this_machine() if served else None
    of_a_row = 0
    for fit, document in rows:
        mine = here is not None and is_here(fit.machine, here)
        document["measured"] = measured_of(fit, model, demand, served, fit_is_here=mine)
        of_a_row += document["measured"] is not None
    notes = [
        f"{one.source}: measured on another machine than this one, so no row has its times"
        for one in served
        if not one.here
    ]
    if served and not of_a_row and not notes:
        notes.append(
            "the evidence is of another shape, format, draft, machine or arrangement of engines "
            "than every row"
        )
    return notes


def peak_words(measured: Mapping[str, Any] | None, machine: Machine) -> str:
    """How much of a machine its load test took; empty where that is not known.

    GPU memory is what was in use on all GPUs of this machine, so it is held against all of them.
    """
    if measured is None or measured["rate"] is None:
        return ""
    cache = measured["kv_cache_usage_max"]
    taken = measured["memory_peak_bytes" if machine.is_cpu else "gpu_memory_peak_bytes"]
    words = [] if cache is None else [f"the KV cache was at most {cache:.1%} full"]
    if taken is not None:
        gpus = max(1, this_machine().accelerators)
        where = f" on {gpus} GPUs" if gpus > 1 else ""
        has = size_words(machine.memory_bytes * gpus)
        words.append(f"{size_words(taken)} of {has} were taken{where}")
    return f"; measured: {', '.join(words)}" if words else ""
