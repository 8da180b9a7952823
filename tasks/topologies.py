"""Of a release with the same weights colocated and disaggregated: which of them pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eval_suites.topology_comparison import (
    Side,
    TopologyComparison,
    compare_topologies,
    counted,
    kept_for_each,
)
from registry.bundle import Bundle
from registry.outcome import CandidateOutcome, ReleaseOutcome
from registry.provenance import hardware
from registry.report_latency import kept_words
from registry.report_topology import TopologyRow, TopologyTable
from registry.topology import gpus_of, topology_words
from tasks.judging import Measured


@dataclass(frozen=True)
class Arranged:
    """A candidate that was judged, and its bundle."""

    outcome: CandidateOutcome
    bundle: Bundle


def topology_tables(
    outcome: ReleaseOutcome, everyone: Mapping[str, Measured]
) -> list[TopologyTable]:
    """One for each disaggregated candidate whose weights are served colocated too."""
    arranged = [
        Arranged(one, bundle)
        for one in outcome.candidates
        if one.name in everyone and (bundle := everyone[one.name].bundle) is not None
    ]
    gpus = bool(hardware()["gpus"])
    return [
        _table(one, apart, gpus)
        for apart in arranged
        if apart.bundle.topology is not None
        for one in arranged
        if one.bundle.topology is None and _same_weights(one.bundle, apart.bundle)
    ]


def _same_weights(one: Bundle, other: Bundle) -> bool:
    drafts = [bundle.draft.digest if bundle.draft else None for bundle in (one, other)]
    return one.target.digest == other.target.digest and drafts[0] == drafts[1]


def _table(one: Arranged, apart: Arranged, gpus: bool) -> TopologyTable:
    unit = "GPU" if gpus else "machine"
    found = compare_topologies(_side(one, gpus), _side(apart, gpus), unit)
    return TopologyTable(
        unit=unit,
        rows=[_row(side, arranged, unit) for side, arranged in _both(found, one, apart)],
        words=list(found.words[1:]),
    )


def _both(found: TopologyComparison, one: Arranged, apart: Arranged) -> list[tuple[Side, Arranged]]:
    return [(found.a, one), (found.b, apart)]


def _side(arranged: Arranged, gpus: bool) -> Side:
    """Times of an emulated kernel, where they count for nothing, are no kept rate."""
    bundle, outcome = arranged.bundle, arranged.outcome
    return Side(
        outcome.name,
        topology_words(bundle.topology),
        gpus_of(bundle.engine_args, bundle.topology) if gpus else 1,
        outcome.kept_rate if outcome.times_count else None,
    )


def _row(side: Side, arranged: Arranged, unit: str) -> TopologyRow:
    return TopologyRow(
        name=side.name,
        topology=side.topology,
        devices=counted(side.devices, unit),
        kept=kept_words(arranged.outcome.kept_rate),
        each=kept_for_each(side),
    )
