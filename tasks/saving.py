"""What a release saves, from its evidence: who is compared, on what machine, at which load."""

from __future__ import annotations

from collections.abc import Sequence

from recipes import loader
from registry.errors import UserError
from registry.evidence import LatencyEvidence, read_summary
from registry.outcome import CandidateOutcome, ReleaseOutcome, Savings
from registry.provenance import hardware_fingerprint
from registry.savings import Side, savings
from registry.topology import gpus_of
from tasks.capacity_inputs import machine_of
from tasks.judging import Measured
from tasks.planning import ReleasePlan
from tasks.release_capacity import is_here, this_machine
from tasks.release_traffic import traffic_of


def savings_of(
    todo: ReleasePlan, outcome: ReleaseOutcome, measured: Sequence[Measured]
) -> Savings | None:
    """The released bundle against the reference candidate; None where nothing was released."""
    released = outcome.promoted
    if outcome.awaits_approval is not None and outcome.selection is not None:
        released = outcome.selection.chosen
    if released is None:
        return None
    recipes = todo.resolved
    names = (released, recipes.release.reference_candidate)
    try:
        machine = None
        if recipes.load.hardware in loader.shipped("hardware"):
            machine = machine_of(recipes.load.hardware)
        here = this_machine()
        if machine is not None and not is_here(machine, here):
            why = f"the load profile is meant for {machine.name}, and this machine is {here.title}"
            return Savings(released=names[0], reference=names[1], reason=why)
        asked = traffic_of(recipes.release)
    except UserError as error:
        problem = error.problems[0]
        why = f"{problem.where}: {problem.what}"
        return Savings(released=names[0], reference=names[1], reason=why)
    by_name = {one.name: one for one in measured}
    judged = {one.name: one for one in outcome.candidates}
    sides = [
        side_of(judged[name], by_name[name], cpu=here.is_cpu) if name in judged else None
        for name in names
    ]
    return savings(sides[0], sides[1], names, machine, hardware_fingerprint(), asked)


def side_of(outcome: CandidateOutcome, measured: Measured, *, cpu: bool) -> Side | None:
    """None where it has no load test."""
    if measured.latency is None or measured.bundle is None:
        return None
    evidence = read_summary(measured.latency.path)
    if not isinstance(evidence, LatencyEvidence):
        return None
    return Side(
        outcome=outcome,
        hardware=evidence.hardware,
        gpus=0 if cpu else gpus_of(measured.bundle.engine_args, measured.bundle.topology),
        sustained=evidence.sustained,
        # Of fixed rates the gates say what was kept, whatever limits the profile has.
        sla=limits_of(outcome) if outcome.kept_rate is None else evidence.sla,
        smoke=evidence.smoke,
    )


def limits_of(outcome: CandidateOutcome) -> list[str]:
    """The latency gates of fixed rates, as limits."""
    side = {"ceiling": "≤", "floor": "≥"}
    return [
        f"{gate.metric.removeprefix('latency.')} {side[gate.kind]} {gate.margin:g} at "
        f"{gate.rate:g}/s"
        for gate in outcome.gates
        if gate.metric.startswith("latency.") and gate.rate is not None and gate.kind in side
    ]
