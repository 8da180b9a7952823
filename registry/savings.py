"""What a released bundle saves against the reference under the same limits of time. Pure.

    replicas = ceil(rate of the traffic's peak / rate that one replica keeps)

A search gives the rate that is kept as two numbers: the highest that was kept and the lowest that
was not. The first is proved, so what follows from it is the value; a replica keeps less than the
second, which gives the other end of the interval. Without a traffic profile nothing is rounded:
it is then the share of a replica for each request/s, as of a large fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from registry.machines import Machine
from registry.outcome import CandidateOutcome, Measure, Savings, SavingSide, Verdict
from registry.plan_parts import HOURS_PER_MONTH


@dataclass(frozen=True)
class Side:
    """One bundle as it was measured. `gpus`: of one engine, 0 on a CPU."""

    outcome: CandidateOutcome
    hardware: str
    """Fingerprint of the machine that was measured."""
    gpus: int
    sustained: bool | None = None
    sla: Sequence[str] = ()
    smoke: bool = False


@dataclass(frozen=True)
class Asked:
    """Requests per second at the peak, and whose; None: of 1 request/s, not rounded."""

    rate: float | None = None
    source: str = ""


class Unsaid(Exception):
    """Nothing can be said; the text is the reason."""


def savings(
    released: Side | None,
    reference: Side | None,
    names: tuple[str, str],
    machine: Machine | None,
    here: str,
    asked: Asked,
) -> Savings:
    """The statement, or the reason why there is none.

    names: of the released bundle and of the reference. machine: of the hardware file that the load
    profile names; None: there is none, and costs are null. here: fingerprint of the machine that
    the file is held to describe.
    """
    try:
        return _stated(released, reference, names, machine, here, asked)
    except Unsaid as why:
        return Savings(released=names[0], reference=names[1], reason=str(why))


def _stated(
    released: Side | None,
    reference: Side | None,
    names: tuple[str, str],
    machine: Machine | None,
    here: str,
    asked: Asked,
) -> Savings:
    if names[0] == names[1]:
        raise Unsaid("the reference itself was released")
    kept = []
    for name, side in zip(names, (released, reference), strict=True):
        if side is None:
            raise Unsaid(f"{name} has no load test")
        kept.append(kept_rate(name, side))
        if side.hardware != here:
            raise Unsaid(
                f"{name} was measured on other hardware ({side.hardware}) than this ({here})"
            )
    assert released is not None
    assert reference is not None
    if list(released.sla) != list(reference.sla):
        raise Unsaid(f"{names[0]} and {names[1]} were not measured against the same limits")
    if kept[0] == kept[1] and kept[0][1] is None:
        raise Unsaid(
            f"both kept {kept[0][0]:g} requests/s, the highest that was measured: which of them "
            "keeps more is not known (a load profile with `search` finds it)"
        )
    sides = [
        _side(name, rates, side.gpus, machine, asked.rate)
        for name, rates, side in zip(names, kept, (released, reference), strict=True)
    ]
    ours, theirs = sides
    return Savings(
        released=names[0],
        reference=names[1],
        rate=asked.rate,
        rate_source=asked.source,
        sla=list(released.sla),
        hardware=machine.name if machine is not None else None,
        price_per_hour=machine.price_per_hour if machine is not None else None,
        currency=machine.currency if machine is not None else None,
        sides=sides,
        replicas=_less(theirs.replicas, ours.replicas),
        saving_per_month=_less(theirs.cost_per_month, ours.cost_per_month),
        saving_share=_saving_share(ours, theirs),
        notes=_notes(machine, asked),
    )


def kept_rate(name: str, side: Side) -> tuple[float, float | None]:
    """The highest rate kept, the lowest not kept. Raises `Unsaid` for evidence that cannot say it.

    Of fixed rates: the lowest at which a latency gate failed, and the highest below it at which
    every one passed.
    """
    one = side.outcome
    if not one.latency:
        raise Unsaid(f"{name} has no load test")
    if one.emulated is None:
        raise Unsaid(f"it is not known whether the times of {name} are those of a real kernel")
    if one.emulated:
        raise Unsaid(f"the times of {name} are those of an emulated kernel")
    if side.smoke:
        raise Unsaid(f"{name} was measured with a smoke profile")
    if one.kept_rate is not None:
        low, high = one.kept_rate
        if low is None:
            raise Unsaid(f"{name} kept no rate that was measured")
        if side.sustained is not True:
            raise Unsaid(f"the rate that {name} kept was not confirmed by the longer run")
        return low, high
    gates = [g for g in one.gates if g.metric.startswith("latency.") and g.rate is not None]
    void = {point.rate for point in one.latency if point.answer == "void"}
    rates = sorted({gate.rate for gate in gates if gate.rate is not None} - void)
    results = {rate: {gate.result for gate in gates if gate.rate == rate} for rate in rates}
    lost = next((rate for rate in rates if Verdict.FAIL in results[rate]), None)
    # As of a search: a rate that passed above one that failed is not believed.
    passed = [
        rate for rate in rates if results[rate] == {Verdict.PASS} and (lost is None or rate < lost)
    ]
    if not passed:
        below = "" if lost is None else f" below {lost:g} requests/s, where one failed"
        raise Unsaid(f"{name} passed its latency gates at no rate{below}")
    return passed[-1], lost


def replicas_of(
    kept: tuple[float, float | None], rate: float | None
) -> tuple[Fraction, Fraction | None]:
    """Replicas by the highest rate kept, and by the lowest not kept (None: none was lost).

    In exact decimals: 1.1 / 0.1 are 11 replicas and not 12. Of whole replicas the fewest are one
    more than would each have the rate that was not kept, or the next whole number above.
    """
    low, high = (None if one is None else Fraction(str(one)) for one in kept)
    assert low is not None
    if rate is None:
        return 1 / low, None if high is None else 1 / high
    asked = Fraction(str(rate))
    fewest = 1 if high is None else math.floor(asked / high) + 1
    return Fraction(math.ceil(asked / low)), Fraction(fewest)


def _side(
    name: str,
    kept: tuple[float, float | None],
    gpus: int,
    machine: Machine | None,
    rate: float | None,
) -> SavingSide:
    most, fewest = replicas_of(kept, rate)
    price = machine.price_per_hour if machine is not None else None

    def cost(replicas: Fraction | None) -> float | None:
        if replicas is None or price is None or machine is None:
            return None
        return float(machines_of(machine, gpus, replicas, whole=rate is not None)) * (
            price * HOURS_PER_MONTH
        )

    return SavingSide(
        name=name,
        kept_rate=kept,
        gpus_per_replica=gpus,
        replicas=_measure(most, fewest),
        gpus=_measure(most * gpus, None if fewest is None else fewest * gpus),
        cost_per_month=None
        if price is None
        else Measure(value=cost(most), low=cost(fewest), high=cost(most)),
    )


def machines_of(machine: Machine, gpus: int, replicas: Fraction, *, whole: bool) -> Fraction:
    """Machines that so many engines take; a file of one GPU is taken as often as they need GPUs."""
    if machine.is_cpu or gpus == 0:
        return replicas
    if machine.accelerators >= gpus:
        found = replicas / (machine.accelerators // gpus)
        return Fraction(math.ceil(found)) if whole else found
    return replicas * math.ceil(Fraction(gpus, machine.accelerators))


def _measure(value: Fraction, low: Fraction | None) -> Measure:
    return Measure(value=float(value), low=None if low is None else float(low), high=float(value))


def _less(theirs: Measure | None, ours: Measure | None) -> Measure | None:
    """What the reference has more. Its least less our most, and its most less our least."""
    if theirs is None or ours is None or theirs.value is None or ours.value is None:
        return None
    return Measure(
        value=theirs.value - ours.value,
        low=None if theirs.low is None else theirs.low - ours.value,
        high=None if ours.low is None else theirs.value - ours.low,
    )


def _saving_share(ours: SavingSide, theirs: SavingSide) -> Measure | None:
    """Of the cost; without a price of the GPUs, since replicas may differ in them; of a CPU's
    replicas."""
    if ours.cost_per_month is not None:
        return _share(theirs.cost_per_month, ours.cost_per_month)
    if ours.gpus_per_replica and theirs.gpus_per_replica:
        return _share(theirs.gpus, ours.gpus)
    return _share(theirs.replicas, ours.replicas)


def _share(theirs: Measure | None, ours: Measure | None) -> Measure | None:
    """The same as a share of what the reference takes."""
    if theirs is None or ours is None or not theirs.value or ours.value is None:
        return None
    return Measure(
        value=1 - ours.value / theirs.value,
        low=None if not theirs.low else 1 - ours.value / theirs.low,
        high=None if ours.low is None else 1 - ours.low / theirs.value,
    )


def _notes(machine: Machine | None, asked: Asked) -> list[str]:
    notes = []
    if asked.rate is None:
        notes.append(
            "for each request/s, nothing rounded: the release names no traffic profile "
            "(`traffic:`), so no peak is known"
        )
    if machine is None:
        notes.append("no costs: the load profile names no hardware file")
    elif machine.price_per_hour is None:
        notes.append(f"no costs: hardware {machine.name} has no `price_per_hour`")
    return notes
