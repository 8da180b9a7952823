"""How a prompt spreads from artifact to artifact: one rule for each kind of stage, row by row.

A rule follows what the stage reads (see the stage's own module): the adapter only the accepted
answers, a quantizer only the first `samples` calibration rows, a harness only the first `items`.
Where a file is gone from the store, all that it may have held counts as reached, and `sure` is
false: for a deletion request, too much is the safe side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from registry.lineage import BUNDLE, EVIDENCE, Edge, Lineage, Node

Found = Mapping[str, Mapping[str, int]]
"""By part: the asked ids that stand in it, each with its row number from 0."""


@dataclass(frozen=True)
class Reach:
    """What of the asked prompts an artifact holds, by the part of the prompts they came from."""

    role: str
    rows: Found = field(default_factory=dict)
    evidence: Found = field(default_factory=dict)
    """Prompts that a bundle, or a quantized model, was measured on."""
    sure: bool = True

    @property
    def reached(self) -> bool:
        return bool(self.rows or self.evidence)


@dataclass(frozen=True)
class _Case:
    """One artifact with what is known of its parents. `found` is None where its files are gone."""

    node: Node
    found: Found | None
    parents: Mapping[str, Reach]

    def of(self, role: str) -> Reach:
        return self.parents.get(role, Reach("data"))


def spread(lineage: Lineage, found: Mapping[str, Found]) -> dict[str, Reach]:
    """What each artifact holds, by node id. `found` are rows that were read, by content digest.

    By digest, for the same content may have been made under two keys.
    """
    reaches: dict[str, Reach] = {}
    for node in reversed(lineage.ordered()):
        parents = {role: reaches[one.id] for role, one in lineage.parents(node.id).items()}
        case = _Case(node, found.get(node.digest), parents)
        reaches[node.id] = _RULES.get(node.kind, _unknown)(case)
    return reaches


def ways(lineage: Lineage, found: Mapping[str, Found], reaches: Mapping[str, Reach]) -> list[Edge]:
    """The edges by which something came through; the others' ends were reached by other ways."""
    taken = []
    for edge in lineage.edges:
        node, parent = lineage.nodes[edge.child], reaches[edge.parent]
        if node.kind in EVIDENCE and edge.role in ("target", "draft"):
            continue
        rule = _RULES.get(node.kind, _unknown)
        if (
            parent.reached
            and rule(_Case(node, found.get(node.digest), {edge.role: parent})).reached
        ):
            taken.append(edge)
    return taken


# -- the rules -------------------------------------------------------------------------------


def _prompts(case: _Case) -> Reach:
    return Reach("data", _filled(case.found or {}))


def _teacher_data(case: _Case) -> Reach:
    """Every answer is kept in it, also those that were set aside."""
    if case.found is not None:
        return Reach("data", _filled(case.found))
    asked = _only(case.of("prompts"), "train", "calibration")
    # Which answers were set aside is not known, so no row's place is.
    rows = {part: dict.fromkeys(ids, 0) for part, ids in asked.rows.items()}
    return Reach("data", rows, sure=not rows)


def _distill(case: _Case) -> Reach:
    """Held-out rows count too: they measured the loss, and samples of them are in the manifest."""
    return _joined("weights", case.of("base"), _only(case.of("data"), "train"))


def _quantize(case: _Case) -> Reach:
    """Of the calibration rows the first `samples`; the last ones judged it and are in its report.

    How many did is not in the lineage, so every row that it was not calibrated on counts.
    """
    facts = case.node.facts
    part = "foreign" if facts.get("calibration.source") == "foreign" else "calibration"
    read = _only(case.of("calibration"), part)
    samples = facts.get("calibration.samples", "")
    if samples.isdecimal():
        read = _first(read, int(samples))
    elif read.reached:  # its own manifest is gone
        read = replace(read, sure=False)
    judged = {
        part: {name: place for name, place in places.items() if name not in read.rows.get(part, {})}
        for part, places in _only(case.of("held_out"), "calibration").rows.items()
    }
    weights = _joined("weights", case.of("student"), read)
    return replace(weights, evidence=_filled(judged))


def _draft(case: _Case) -> Reach:
    return _joined(
        "weights", case.of("student"), case.of("target"), _only(case.of("prompts"), "draft")
    )


def _draft_choice(case: _Case) -> Reach:
    """One of the draft's checkpoints; it was chosen by answers to the draft's own prompts."""
    return _joined("weights", case.of("draft"), case.of("target"), case.of("student"))


def _model(case: _Case) -> Reach:
    return _joined("weights", *case.parents.values())


def _measured(part: str) -> Callable[[_Case], Reach]:
    """Evidence holds rows of one part; what its weights were trained on is none of its rows."""

    def rule(case: _Case) -> Reach:
        if case.node.facts.get("load") == "synthetic":
            return Reach("evidence")
        if case.found is not None:
            return Reach("evidence", _filled(case.found))
        asked = _only(case.of("prompts"), part)
        return Reach("evidence", asked.rows, sure=not asked.reached)

    return rule


def _serving(case: _Case) -> Reach:
    """A server is started and asked for one token; no prompt of the business is read."""
    return Reach("evidence")


def _bundle(case: _Case) -> Reach:
    weights = _joined("weights", case.of("target"), case.of("draft"))
    measured = [one for role, one in case.parents.items() if role.startswith("evidence.")]
    target = case.of("target")
    seen = _joined("evidence", Reach("evidence", target.evidence, sure=target.sure), *measured)
    return replace(weights, evidence=seen.rows, sure=weights.sure and seen.sure)


def _unknown(case: _Case) -> Reach:
    """A stage that this module was not told of may have read everything."""
    whole = _joined("unknown", *case.parents.values())
    return replace(whole, sure=not whole.reached)


_RULES: dict[str, Callable[[_Case], Reach]] = {
    "prompts": _prompts,
    "teacher_data": _teacher_data,
    "model": _model,
    "distill": _distill,
    "quantize": _quantize,
    "draft": _draft,
    "draft_choice": _draft_choice,
    "accuracy": _measured("eval"),
    "latency": _measured("load"),
    "draft_proof": _measured("load"),
    "serving": _serving,
    BUNDLE: _bundle,
}


# -- parts -----------------------------------------------------------------------------------


def _filled(rows: Found) -> dict[str, Mapping[str, int]]:
    return {part: places for part, places in rows.items() if places}


def _only(reach: Reach, *parts: str) -> Reach:
    rows = {part: places for part, places in reach.rows.items() if part in parts}
    return replace(reach, rows=rows, sure=reach.sure or not rows)


def _first(reach: Reach, samples: int) -> Reach:
    rows = {
        part: {name: place for name, place in places.items() if place < samples}
        for part, places in reach.rows.items()
    }
    return replace(reach, rows=_filled(rows))


def _joined(role: str, *reaches: Reach) -> Reach:
    rows: dict[str, Mapping[str, int]] = {}
    for reach in reaches:
        for part, places in reach.rows.items():
            rows[part] = {**rows.get(part, {}), **places}
    return Reach(role, rows, sure=all(reach.sure for reach in reaches))
