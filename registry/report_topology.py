"""What the page of a release shows of the same weights in two topologies; it decides nothing."""

from __future__ import annotations

from registry.report_latency import Detail


class TopologyRow(Detail):
    """One candidate, in words."""

    name: str
    topology: str
    devices: str
    kept: str
    each: str


class TopologyTable(Detail):
    """A colocated candidate and a disaggregated one, and what follows from their rates."""

    unit: str
    rows: list[TopologyRow]
    words: list[str]
