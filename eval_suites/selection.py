"""Which of the candidates that passed is promoted: the Pareto front, and one of it. Pure.

The front is what may be chosen without giving anything away for nothing; the recipe's objective
picks from it. Differences within the noise of a measurement decide nothing: among equals the
champion stays, since moving the alias costs a restart, or else the smallest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eval_suites.selection_axes import axes_of, weights_bytes
from registry.outcome import AXES_OF, CandidateOutcome, ComparedAxis, Measure, Selection, Verdict
from registry.report_numbers import measured, megabytes, number

WEIGHTS = "weights"


@dataclass(frozen=True)
class Merit:
    """A number where more is better, and what it may be at worst and at best."""

    worst: float
    value: float
    best: float

    def surely_above(self, other: Merit) -> bool:
        """Beyond the noise of both. A rate that one keeps and the other loses is above it."""
        return self.value > other.value and self.worst >= other.best


Merits = Sequence[Merit | None]
"""On every axis; None where a candidate has no number."""


def choose(
    candidates: Sequence[CandidateOutcome],
    objective: str,
    *,
    weights: Mapping[str, float] | None = None,
    rate: float | None = None,
    incumbent: str | None = None,
) -> Selection:
    """The front of the candidates that passed, and the one that the objective picks from it.

    `objective` and `weights` as in `recipes.schema.Promotion`; `rate` in requests/s is where fixed
    rates are compared when no gate on E2EL says so; `incumbent` is the digest of the champion's
    bundle.

    Weights are exponents of a product of ratios to the best: with accuracy 4 and kept_rate 1, one
    percent of accuracy is worth four percent of rate. Unlike weighted sums of rescaled numbers, no
    third candidate can turn the order of two.

    None is chosen when none passed, or when none has a number that the objective needs: another
    objective is never taken silently.
    """
    total = sum((weights or {}).values())
    shares = {key: weight / total for key, weight in (weights or {}).items()}
    passed = [one for one in candidates if one.verdict is Verdict.PASS]
    if not passed:
        return Selection(objective=objective, weights=shares, reason="No candidate passed.")
    axes, notes = axes_of(passed, rate)
    merits = {one.name: [_merit(axis.values[one.name], axis) for axis in axes] for one in passed}
    dominated = _under(merits, _dominates)
    keys = tuple(shares) if objective == WEIGHTS else AXES_OF[objective]
    needed = [axis for axis in axes if axis.key in keys]
    scores = _scores(needed, shares, list(merits)) if objective == WEIGHTS else {}
    selection = Selection(
        objective=objective,
        weights=shares,
        axes=axes,
        front=[name for name in merits if name not in dominated],
        dominated=dominated,
        nearly=_under(merits, _nearly),
        scores=scores,
        notes=notes,
        reason="",
    )
    deciding = scores or (needed[0].values if needed else {})
    known = {
        name: merit
        for name, found in deciding.items()
        if (merit := _merit(found, needed[0], scores)) is not None
    }
    if not known:
        return selection.model_copy(update={"reason": _nothing(len(passed), objective, keys, axes)})
    # The best number is on the front: who dominates its holder has the same number.
    front = [one for one in passed if one.name in selection.front and one.name in known]
    picked = _pick(known, front, incumbent, by_size=objective != WEIGHTS)
    return selection.model_copy(
        update={
            "chosen": picked.name,
            "equal": picked.equal,
            "reason": _reason(selection, picked, known, len(passed), needed[0]),
        }
    )


def _merit(
    found: Measure, axis: ComparedAxis, scores: Mapping[str, Measure] | None = None
) -> Merit | None:
    """The number on an axis, or of a score, of which more is better."""
    if found.value is None:
        return None
    low = found.low if found.low is not None else -math.inf
    high = found.high if found.high is not None else math.inf
    if scores or axis.better == "higher":
        return Merit(low, found.value, high)
    return Merit(-high, -found.value, -low)


# -- domination ------------------------------------------------------------------------------


def _no_worse(one: Merits, other: Merits) -> bool:
    """At least as good in every number; what is not known is not said to be."""
    pairs = zip(one, other, strict=True)
    return all(a is not None and b is not None and a.value >= b.value for a, b in pairs)


def _dominates(one: Merits, other: Merits) -> bool:
    return _no_worse(one, other) and any(
        a is not None and b is not None and a.surely_above(b)
        for a, b in zip(one, other, strict=True)
    )


def _nearly(one: Merits, other: Merits) -> bool:
    """By the numbers alone as `_dominates`, but by no more than the noise."""
    return _no_worse(one, other) and not _no_worse(other, one) and not _dominates(one, other)


def _under(
    merits: Mapping[str, Merits], over: Callable[[Merits, Merits], bool]
) -> dict[str, list[str]]:
    """Who has others over itself, and whom."""
    found = {
        name: [other for other, theirs in merits.items() if other != name and over(theirs, own)]
        for name, own in merits.items()
    }
    return {name: others for name, others in found.items() if others}


# -- weights ---------------------------------------------------------------------------------


def _scores(
    axes: Sequence[ComparedAxis], shares: Mapping[str, float], names: Sequence[str]
) -> dict[str, Measure]:
    """The weighted product by candidate; 1 would be the best on every axis.

    Its interval is what it is at worst, and at best, on all axes at once. Nobody has a score where
    an axis with a weight is missing.
    """
    made = dict.fromkeys(names, Measure(value=None))
    if len(axes) < len(shares):
        return made
    for name in names:
        ratios = [_ratios(axis, name) for axis in axes]
        known = [(one, shares[axis.key]) for one, axis in zip(ratios, axes, strict=True) if one]
        if len(known) < len(axes):
            continue
        worst, value, best = (math.prod(ratio[end] ** w for ratio, w in known) for end in range(3))
        made[name] = Measure(value=value, low=worst, high=best if math.isfinite(best) else None)
    return made


def _ratios(axis: ComparedAxis, name: str) -> tuple[float, float, float] | None:
    """A candidate's number against the best one's: at worst, as measured, and at best."""
    found = axis.values[name]
    if found.value is None:
        return None
    known = [one.value for one in axis.values.values() if one.value is not None]
    # A difference in accuracy, about 0 and mostly below it, counts as what is left of 1.
    shift = 1.0 if axis.key == "accuracy" and min(known) <= 0 else 0.0
    low = max(0.0, (found.low or 0.0) + shift)
    value = max(0.0, found.value + shift)
    high = found.high + shift if found.high is not None else math.inf
    if axis.better == "higher":
        top = max(known) + shift
        return _over(low, top), _over(value, top), _over(high, top)
    top = min(known)
    return _over(top, high), _over(top, value), _over(top, low)


def _over(above: float, below: float) -> float:
    if above == below:
        return 1.0
    return above / below if below > 0 else math.inf


# -- the choice and its reason ---------------------------------------------------------------


@dataclass(frozen=True)
class Picked:
    """The chosen one, the others that may be as good, and why it is not one of those."""

    name: str
    equal: list[str]
    why: str


def _pick(
    known: Mapping[str, Merit],
    front: Sequence[CandidateOutcome],
    incumbent: str | None,
    by_size: bool,
) -> Picked:
    """Of those that nobody is surely above: the champion, else smallest, best, first.

    Not by size where weights decide: they say themselves what memory is worth.
    """
    # Above by any of them: of two with the same value, one may be known better than the other.
    merits = [known[one.name] for one in front]
    equal = [one for one in front if not any(m.surely_above(known[one.name]) for m in merits)]
    sizes = {one.name: (weights_bytes(one) if by_size else None) or math.inf for one in equal}
    least = min(sizes.values())
    smallest = [name for name, size in sizes.items() if size == least]
    top = max(known[name].value for name in smallest)
    first = next(name for name in smallest if known[name].value == top)
    champion = next((one.name for one in equal if incumbent and one.bundle == incumbent), None)
    if champion is not None:
        why = "the champion already"
    elif len(smallest) == 1 and math.isfinite(least):
        why = f"the smallest of them with {megabytes(round(least))} of weights"
    elif sum(known[name].value == top for name in smallest) == 1:
        why = (
            "the best of the smallest of them" if len(smallest) < len(equal) else "the best of them"
        )
    else:
        why = "the first of them in the recipe"
    chosen = champion or first
    return Picked(chosen, [name for name in sizes if name != chosen], why)


def _reason(
    selection: Selection,
    picked: Picked,
    known: Mapping[str, Merit],
    passed: int,
    axis: ComparedAxis,
) -> str:
    """One sentence: by which number, how far before the next, and why this one among equals."""
    if passed == 1:
        return f"{picked.name} was chosen because no other candidate passed."
    if selection.scores:
        shares = ", ".join(f"{key} {share:.2g}" for key, share in selection.weights.items())
        name, what = "best", f"its score by the weights {shares} is"
        write = {name: number(one.value) for name, one in selection.scores.items()}
    else:
        name, what = selection.objective.replace("_", " "), axis.label
        write = {name: measured(one.value, axis.key) for name, one in axis.values.items()}
    said = f"{picked.name} was chosen as the {name} of {passed} that passed: {what} "
    said += write[picked.name]
    others = sorted((n for n in known if n != picked.name), key=lambda n: -known[n].value)
    if not picked.equal:
        return f"{said} (next: {others[0]}, {write[others[0]]})." if others else f"{said}."
    told = ", ".join(f"{n} ({write[n]})" for n in others if n in picked.equal)
    same = {known[n].value for n in picked.equal} == {known[picked.name].value}
    alike = "may be as good within the noise of the measurement"
    if same:
        alike = "has the same" if len(picked.equal) == 1 else "have the same"
    return f"{said}; {told} {alike}, and {picked.name} is {picked.why}."


def _nothing(passed: int, objective: str, keys: Sequence[str], axes: Sequence[ComparedAxis]) -> str:
    """Why the objective could not choose."""
    by = "the weights need" if objective == WEIGHTS else f"{objective.replace('_', ' ')} needs"
    absent = sorted(set(keys) - {axis.key for axis in axes}) if objective == WEIGHTS else []
    what = ", ".join(absent or keys).replace("_", " ")
    return f"Nothing was chosen of {passed} that passed: {by} {what}, and it was not measured."
