"""By what candidates that passed are compared: their numbers and how far those may be off. Pure.

Every number has an interval. A kept rate lies between the highest rate kept and the lowest not
kept; a percentile between its gate's two bounds; weights are exact. The accuracy bound is exact
too: what the measurement does not know has been taken off already, so the bound is the number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal

from registry.outcome import CandidateOutcome, ComparedAxis, GateResult, Measure
from registry.report_latency import kept_point, percentile_of, point_at, sla_of

RELATIVE = ("retention", "non_inferiority", "regression")
WEIGHTS_NOTE = (
    "memory is the weights of target and draft, once for each engine of a server, the part of the "
    "memory floor that is known of all; KV cache and activations come on top"
)
FLOOR_NOTE = (
    "memory is the floor of each plan on all GPUs together: weights, the KV cache of max-num-seqs "
    "sequences of max-model-len, estimates of activations and graphs, and the reserve"
)
UNKNOWN = Measure(value=None)


def axes_of(
    passed: Sequence[CandidateOutcome], rate: float | None
) -> tuple[list[ComparedAxis], list[str]]:
    """The axes on which somebody has a number, and in words what was left out or approximated.

    `rate` in requests/s is where fixed rates are compared when no gate on E2EL says so.
    """
    accuracy, notes = _accuracy(passed)
    notes += _emulations(passed)
    speed, said = _speed(passed, rate)
    cost, why = _cost(passed, speed.key == "kept_rate")
    memory, which = _memory(passed)
    notes += [*said, which]
    found = []
    for axis, absent in ((accuracy, ""), (speed, ""), (memory, ""), (cost, why)):
        missing = [name for name, one in axis.values.items() if one.value is None]
        if len(missing) == len(axis.values):
            notes.append(f"left out: {axis.label}, {absent or 'which nobody has a number of'}")
            continue
        found.append(axis)
        if missing:
            notes.append(
                f"not known of {', '.join(missing)}: {axis.label}; they can neither dominate nor "
                "be dominated"
            )
    return found, notes


# -- accuracy --------------------------------------------------------------------------------


def _accuracy(passed: Sequence[CandidateOutcome]) -> tuple[ComparedAxis, list[str]]:
    """The smallest lower bound among the critical accuracy gates of one scale and reference.

    Those of the first such gate in the policy. All of them must hold at once, so the smallest bound
    is itself a bound, at the same error, of what is kept of the worst metric (intersection-union);
    a mean of bounds would be a bound of nothing, and one metric alone would hide a loss in another.

    Holm judges each candidate at a level of its own, and a looser level makes a higher bound of the
    same scores. So all bounds are moved to the strictest level among the candidates, as a normal
    distribution would have them. Three decimals: the bootstrap's own chance moves the fourth.
    """
    gates = [{g.name: g for g in one.gates if _bounds_accuracy(g)} for one in passed]
    common = [g for name, g in gates[0].items() if all(name in others for others in gates)]
    family = [g.name for g in common if _alike(g, common[0])]
    if not family:
        values = {one.name: _exact(_mean(one.metrics)) for one in passed}
        note = (
            "no critical accuracy gate has a bound of every candidate: means were compared, "
            "without intervals"
        )
        return _axis("accuracy", "mean of the accuracy metrics", "higher", values), [note]
    used = [[of_one[name] for name in family] for of_one in gates]
    level = min((g.level for of_one in used for g in of_one if g.level), default=None)
    values = {
        one.name: _exact(round(min(_bound_at(level, g) for g in of_one), 3))
        for one, of_one in zip(passed, used, strict=True)
    }
    first = common[0]
    scale = {
        "retention": f"as a ratio to the {first.reference_name}'s",
        "floor": "by itself",
    }.get(first.kind, f"as a difference to the {first.reference_name}'s")
    which = f"the smallest of {', '.join(family)}" if len(family) > 1 else family[0]
    note = f"the accuracy lower bound is that of {which}, {scale}"
    if level is not None:
        note += f", for all at the error {level:.3g}, the strictest among them"
    return _axis("accuracy", "accuracy lower bound", "higher", values), [note]


def _bounds_accuracy(gate: GateResult) -> bool:
    """Critical, not waived, about accuracy, more being better, and with a bound."""
    return (
        gate.decides
        and gate.kind in (*RELATIVE, "floor")
        and not gate.metric.startswith("latency.")
        and gate.estimate is not None
        and gate.bound is not None
        and (gate.opposite_bound is None or gate.bound <= gate.opposite_bound)
    )


def _alike(gate: GateResult, first: GateResult) -> bool:
    """On one scale against one reference; floors of two metrics share no scale."""
    return (
        gate.kind == first.kind
        and gate.reference_name == first.reference_name
        and (gate.kind != "floor" or gate.metric == first.metric)
    )


def _bound_at(level: float | None, gate: GateResult) -> float:
    assert gate.estimate is not None
    assert gate.bound is not None
    if level is None or not gate.level or not 0 < gate.level < 0.5:
        return gate.bound
    wider = NormalDist().inv_cdf(level) / NormalDist().inv_cdf(gate.level)
    return gate.estimate - (gate.estimate - gate.bound) * wider


def _mean(metrics: Mapping[str, float | None]) -> float | None:
    known = [value for value in metrics.values() if value is not None]
    return sum(known) / len(known) if known else None


# -- speed -----------------------------------------------------------------------------------


def _speed(
    passed: Sequence[CandidateOutcome], rate: float | None
) -> tuple[ComparedAxis, list[str]]:
    """The kept rate of a search; of fixed rates the policy's percentile of E2EL, or the P99."""
    if any(one.kept_rate is not None for one in passed):
        values = {one.name: _kept(one) for one in passed}
        return _axis("kept_rate", "request rate that keeps the SLA", "higher", values), []
    sla = sla_of(passed)
    at = sla.rate if sla is not None and sla.rate is not None else rate
    percentile = percentile_of(sla)
    label = f"{percentile.upper()} E2EL" + (f" at {at:g} requests/s" if at is not None else "")
    judged = [next((g for g in one.gates if sla and g.name == sla.name), None) for one in passed]
    values = {}
    for one, gate in zip(passed, judged, strict=True):
        if not one.times_count:
            values[one.name] = UNKNOWN
        elif gate is not None and gate.estimate is not None and gate.level is not None:
            values[one.name] = Measure(
                value=gate.estimate, low=gate.opposite_bound, high=gate.bound
            )
        else:
            point = point_at(one.latency, at)
            known = point is not None and point.answer != "void"
            values[one.name] = _exact(point.e2el_ms.get(percentile) if point and known else None)
    plain = [name for name, one in values.items() if one.value is not None and one.low == one.high]
    notes = [f"{label} of {', '.join(plain)} has no interval: compared as it is"] if plain else []
    return _axis("latency", label, "lower", values), notes


def _emulations(passed: Sequence[CandidateOutcome]) -> list[str]:
    """Whose times are of an emulated kernel, and whether they were compared all the same."""
    notes = []
    left = ", ".join(one.name for one in passed if not one.times_count)
    if left:
        notes.append(
            f"times of {left} are of an emulated kernel: under a profile of production they are "
            "compared with nobody's"
        )
    flagged = ", ".join(one.name for one in passed if one.emulated and one.times_count)
    if flagged:
        notes.append(
            f"times of {flagged} are of an emulated kernel, compared because the load profile is "
            "not one of production: on other hardware the order may be another"
        )
    return notes


def _kept(candidate: CandidateOutcome) -> Measure:
    low, high = candidate.kept_rate or (None, None)
    if (low is None and high is None) or not candidate.times_count:
        return UNKNOWN
    return Measure(value=low or 0.0, low=low or 0.0, high=high)


# -- memory and cost -------------------------------------------------------------------------


def _memory(passed: Sequence[CandidateOutcome]) -> tuple[ComparedAxis, str]:
    """The floor where all have one: a cache in 8 bit or a draft counts too. Else the weights.

    Never one's floor against another's weights, which are no measure of the same.
    """
    floors = {
        one.name: one.planned_memory.floor_of_all if one.planned_memory else None for one in passed
    }
    planned = None not in floors.values()
    sizes = floors if planned else {one.name: weights_bytes(one) for one in passed}
    axis = ComparedAxis(
        key="memory",
        label="memory floor (plan)" if planned else "weights",
        better="lower",
        values={name: _exact(size) for name, size in sizes.items()},
    )
    return axis, FLOOR_NOTE if planned else WEIGHTS_NOTE


def weights_bytes(candidate: CandidateOutcome) -> float | None:
    """Of target and draft, in every engine that holds them; None where a part is not known."""
    if candidate.size_bytes is None or (candidate.draft and candidate.draft_bytes is None):
        return None
    one = candidate.size_bytes + (candidate.draft_bytes or 0)
    return float(one * candidate.weight_copies)


def _cost(passed: Sequence[CandidateOutcome], searched: bool) -> tuple[ComparedAxis, str]:
    """Cost per million output tokens at the highest rate kept, and why there is none.

    Where the rate may be higher, the cost may be lower in proportion. At a fixed rate every
    candidate is paid for the same load: cost per token would rank them by how long they talk.
    """
    label = "cost per million output tokens"
    values = {one.name: _cost_of(one) if searched else UNKNOWN for one in passed}
    why = "since no price is known or no rate was kept"
    if not searched:
        why = "since at fixed rates all are paid for the same load; a search would tell"
    return _axis("cost", label, "lower", values), why


def _cost_of(candidate: CandidateOutcome) -> Measure:
    point = kept_point(candidate)
    cost = point.cost.get("per_million_output_tokens") if point is not None else None
    low, high = candidate.kept_rate or (None, None)
    if cost is None or low is None or not candidate.times_count:
        return UNKNOWN
    return Measure(value=cost, low=cost * low / high if high else None, high=cost)


# -- parts -----------------------------------------------------------------------------------


def _axis(
    key: Literal["accuracy", "kept_rate", "latency", "cost"],
    label: str,
    better: Literal["higher", "lower"],
    values: dict[str, Measure],
) -> ComparedAxis:
    return ComparedAxis(key=key, label=label, better=better, values=values)


def _exact(value: float | None) -> Measure:
    return UNKNOWN if value is None else Measure(value=value, low=value, high=value)
