"""`pilotage bench --tune`: a few batch arguments, each measured by a server and a load of its own.

A point is a bundle of its own, since its arguments are in the digest. What lies outside of the
plan is dropped before anything starts; a point whose measurement lies in the folder is not measured
again. No recipe is changed: the lines to paste are printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_suites.load import LoadProfile
from eval_suites.loader import load_profile
from eval_suites.percentiles import Percentile
from eval_suites.tuning import Args, Choice, Interval, Tried, choose, outside, points_of, words
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import Infeasible, UserError
from registry.evidence import REQUESTS, SUMMARY, LatencyEvidence, read_summary
from registry.outcome import Verdict
from registry.provenance import hardware_fingerprint
from tasks.bench_targets import bundle_target
from tasks.benchmarking import bench
from tasks.bundles import as_served_here, bundle_named, remember
from tasks.measured_folders import begun, default_folder, prompts_digest
from tasks.progress import LOG
from tasks.release_capacity import plan_of_bundle

ALPHA = 0.025
"""Of each end of a 95 % interval."""


@dataclass(frozen=True)
class Point:
    """`dropped`: why it was not started. `folder` None: nothing was measured."""

    args: Args
    bundle: str
    dropped: str = ""
    folder: Path | None = None
    evidence: LatencyEvidence | None = None
    tried: Tried | None = None


@dataclass(frozen=True)
class Tuned:
    """`current`: the same arguments as they are in the bundle."""

    load: str
    current: Args
    points: tuple[Point, ...]
    choice: Choice
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """INCONCLUSIVE where the choice is not distinguishable from another."""
        if self.choice.chosen is None:
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if self.choice.equal else Verdict.PASS


def tune(
    reference: str,
    load: str,
    axes: Sequence[str],
    *,
    prompts: Path | None = None,
    out: Path | None = None,
    generator: str = "vllm",
) -> Tuned:
    """Measure every point that the plan allows. Called again, what was measured is taken.

    Raises `UserError` for an axis, a bundle or a profile that is wrong, and as `bench` does.
    """
    combinations = points_of(axes)
    base = as_served_here(bundle_named(reference), reference)
    profile = load_profile(load)
    if base.topology is not None or base.engine != "vllm":
        raise UserError.at(
            f"--bundle {reference}",
            "its engines have no such arguments in common",
            "tune a bundle of one vLLM engine",
        )
    identity = {
        "command": "tune",
        "bundle": base.digest,
        "profile": digest_of(profile),
        "prompts": prompts_digest(profile, prompts),
    }
    folder = (out or default_folder("tune", load, identity)).resolve()
    made = [_planned(base, args, profile.hardware) for args in combinations]
    for one in made:
        if one.dropped:
            LOG.warning("%s: not started: %s", words(one.args), one.dropped)
    begun(folder, None, identity)
    points = []
    for one in made:
        if not one.dropped:
            bundle = _bundle(base, one.args)
            remember(bundle)
            here = folder / one.bundle[:12]
            one = _measured(one, bundle, load, profile, here, prompts, generator)
        points.append(one)
    current = {
        name: value
        for name in combinations[0]
        if isinstance(value := base.engine_args.get(name), int)
    }
    choice = choose([one.tried for one in points if one.tried is not None], current)
    return Tuned(load, current, tuple(points), choice, tuple(_notes(points)))


def _bundle(base: Bundle, args: Args) -> Bundle:
    return base.model_copy(update={"engine_args": {**base.engine_args, **args}})


def _planned(base: Bundle, args: Args, hardware: str) -> Point:
    bundle = _bundle(base, args)
    plan = plan_of_bundle(bundle, hardware)
    return Point(args, bundle.digest, dropped=outside(plan, bundle.engine_args))


def _measured(
    point: Point,
    bundle: Bundle,
    load: str,
    profile: LoadProfile,
    folder: Path,
    prompts: Path | None,
    generator: str,
) -> Point:
    evidence = _found(folder, bundle.digest)
    if evidence is None:
        LOG.info("%s: bundle %s", words(point.args), bundle.digest[:12])
        try:
            done = bench(
                bundle_target(bundle, f"{bundle.name} with {words(point.args)}"),
                bundle.digest, load, prompts=prompts, generator=generator, out=folder,
            )  # fmt: skip
        except Infeasible as error:
            return Point(point.args, point.bundle, dropped=str(error))
        evidence = done.evidence
    else:
        LOG.info("%s: measured already, %s", words(point.args), folder)
    return Point(
        point.args,
        point.bundle,
        folder=folder,
        evidence=evidence,
        tried=_tried(point.args, evidence, folder, fixed=profile.search is None),
    )


def _found(folder: Path, bundle: str) -> LatencyEvidence | None:
    """A finished measurement of this bundle on this machine. The folder is of one profile."""
    if not (folder / SUMMARY).is_file():
        return None
    found = read_summary(folder)
    if not isinstance(found, LatencyEvidence):
        return None
    same = (found.bundle, found.hardware) == (bundle, hardware_fingerprint())
    return found if same else None


def _tried(args: Args, evidence: LatencyEvidence, folder: Path, *, fixed: bool) -> Tried:
    void = ""
    if not evidence.times_count:
        void = "its times are of an emulated kernel"
    elif all(point.answer == "void" for point in evidence.points):
        void = "; ".join(dict.fromkeys(point.cause for point in evidence.points))
    return Tried(
        args=args,
        kept=evidence.kept_rate or (None, None),
        # A search has rates of its own at each point.
        tpot_ms=_counted(evidence, dict(_medians(folder / REQUESTS))) if fixed else {},
        void=void,
    )


def _counted(evidence: LatencyEvidence, found: Mapping[float, Interval]) -> dict[float, Interval]:
    """Without the rates that are void: what was measured there is not the engine's."""
    void = {point.rate for point in evidence.points if point.answer == "void"}
    return {rate: one for rate, one in found.items() if rate not in void}


def _medians(path: Path) -> Iterator[tuple[float, Interval]]:
    """The median TPOT of each rate with its 95 % interval; failed requests are infinitely slow."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path, columns=["rate", "tpot_ms", "ok", "output_tokens"]).to_pylist()
    for rate in dict.fromkeys(row["rate"] for row in rows):
        times = _times([row for row in rows if row["rate"] == rate])
        if len(times) < FEWEST:
            continue
        import numpy as np

        found = Percentile(np.array(times), 50.0)
        interval = Interval(found.value, found.lower(ALPHA), found.upper(ALPHA))
        if math.isfinite(interval.high):
            yield rate, interval


FEWEST = 20
"""Requests of a rate below which no interval is made of them."""


def _times(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Answers of one token have no TPOT."""
    return [
        row["tpot_ms"] if row["ok"] else math.inf
        for row in rows
        if not row["ok"] or row["tpot_ms"] is not None
    ]


def _notes(points: Sequence[Point]) -> Iterator[str]:
    yield (
        "each point was measured by one start and one load: `pilotage compare DIGEST DIGEST` "
        "measures two of them in turn"
    )
    if any(one.tried is not None and one.tried.void for one in points):
        yield "a point that is void is not compared"
    for one in points:
        kept = one.tried is not None and one.tried.kept[0] is not None
        if kept and one.evidence is not None and one.evidence.sustained is False:
            yield f"{words(one.args)}: the rate was not confirmed by the longer run"


# -- what it says ----------------------------------------------------------------------------


def yaml_lines(args: Args) -> str:
    """To paste into a serve recipe."""
    return "\n".join(["engine_args:", *(f"  {name}: {value}" for name, value in args.items())])


def document(done: Tuned) -> dict[str, Any]:
    """What `pilotage bench --tune --json` prints as its last line."""
    chosen = done.choice.chosen
    return {
        "verdict": done.verdict.value,
        "load": done.load,
        "current": dict(done.current),
        "points": [_row(one) for one in done.points],
        "chosen": None if chosen is None else dict(chosen),
        "by": done.choice.by,
        "not_distinguishable": [dict(one) for one in done.choice.equal],
        "reason": done.choice.reason,
        "yaml": None if chosen is None else yaml_lines(chosen),
        "notes": list(done.notes),
        "unit": "ms",
    }


def _row(point: Point) -> dict[str, Any]:
    tried = point.tried
    tpot = tried.tpot_ms if tried is not None else {}
    return {
        "args": dict(point.args),
        "bundle": point.bundle,
        "dropped": point.dropped,
        "void": tried.void if tried is not None else "",
        "kept_rate": list(tried.kept) if tried is not None else [None, None],
        "tpot_p50": [
            {"rate": rate, "value": one.value, "low": one.low, "high": one.high}
            for rate, one in tpot.items()
        ],
        "evidence": None if point.folder is None else str(point.folder),
    }
