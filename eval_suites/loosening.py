"""Is a policy looser than the one that promoted the champion? Gate by gate.

A gate is found again by its name, or by what it judges when it was renamed. Whatever could let
through what the old policy refused counts, and so does a gate that can no longer be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from eval_suites.policy import GateRule, Policy
from registry.outcome import LoosenedGate

TIERS = ("critical", "supporting", "advisory")


def loosened(old: Policy, new: Policy) -> list[LoosenedGate]:
    """What `new` asks less of, and who owned up to it in the policy file."""
    owners = {one.gate: one for one in new.acknowledged}
    found = []
    texts = [(gate.name, _looser(gate, _same_gate(gate, new.gates))) for gate in old.gates]
    texts.append(("policy", _looser_settings(old, new)))
    for gate, what in texts:
        if not what:
            continue
        owner = owners.get(gate)
        found.append(
            LoosenedGate(
                gate=gate,
                what="; ".join(what),
                acknowledged_by=owner.owner if owner else None,
                reason=owner.reason if owner else "",
            )
        )
    return found


def _same_gate(gate: GateRule, gates: Sequence[GateRule]) -> GateRule | None:
    by_name = next((other for other in gates if other.name == gate.name), None)
    if by_name is not None:
        return by_name
    return next((other for other in gates if _judged(other) == _judged(gate)), None)


def _judged(gate: GateRule) -> tuple[object, ...]:
    return gate.metric, gate.kind, gate.reference, gate.direction, gate.rate


def _looser(old: GateRule, new: GateRule | None) -> list[str]:
    if old.tier == "advisory":
        return []
    if new is None:
        return ["the gate is gone"]
    found = [
        f"{name} {before} -> {after}"
        for name, before, after in (
            ("metric", old.metric, new.metric),
            ("kind", old.kind, new.kind),
            ("reference", old.reference, new.reference),
            ("direction", old.direction, new.direction),
            ("rate", old.rate, new.rate),
        )
        if before != after
    ]
    # A larger margin asks for more where the number must reach it, and for less elsewhere.
    higher_is_stricter = old.kind in ("retention", "floor", "ratio")
    if new.margin != old.margin and (new.margin < old.margin) == higher_is_stricter:
        found.append(f"margin {old.margin:g} -> {new.margin:g}")
    if TIERS.index(new.tier) > TIERS.index(old.tier):
        found.append(f"tier {old.tier} -> {new.tier}")
    if new.confidence < old.confidence:
        found.append(f"confidence {old.confidence:g} -> {new.confidence:g}")
    if new.min_items < old.min_items:
        found.append(f"min_items {old.min_items} -> {new.min_items}")
    for name in ("slices", "expected"):
        lost = sorted(set(getattr(old, name)) - set(getattr(new, name)))
        if lost:
            found.append(f"{name} without {', '.join(lost)}")
    if new.cluster != old.cluster:
        found.append(f"cluster {old.cluster} -> {new.cluster}")
    return found


def _looser_settings(old: Policy, new: Policy) -> list[str]:
    found = []
    if new.max_age_days > old.max_age_days:
        found.append(f"max_age_days {old.max_age_days:g} -> {new.max_age_days:g}")
    if new.allow_limited and not old.allow_limited:
        found.append("allow_limited false -> true")
    if old.noise_floor and not new.noise_floor:
        found.append("noise_floor true -> false")
    if old.approval is not None and new.approval is None:
        found.append("no person is asked any more")
    # Without looks, what had only a share of the error has all of it, on any number of items.
    if old.looks != new.looks:
        found.append("other looks are planned" if new.looks else "no looks are planned")
    return found
