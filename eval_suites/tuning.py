"""Which of a few batch arguments serves a load best: the points to try, and the choice. Pure.

The choice is by the rate that keeps the SLA; where the intervals of rates overlap, by the median
TPOT at the highest rate that all of those kept, where it was measured at the same rates. What is
left undistinguished is said to be so, and then what is there already stays, or else what takes the
most sequences at once is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from registry.candidate_memory import MemoryPlan
from registry.errors import Problem, UserError

SEQUENCES, BATCHED = "max-num-seqs", "max-num-batched-tokens"
TUNABLE = (SEQUENCES, BATCHED)
MOST_POINTS = 12
"""Each is a server of its own and minutes of load."""

Args = Mapping[str, int]


def points_of(axes: Sequence[str]) -> list[dict[str, int]]:
    """All combinations of `NAME=VALUE,VALUE`. Raises `UserError` with every mistake."""
    found: dict[str, list[int]] = {}
    problems = []
    for axis in axes:
        name, _, values = axis.partition("=")
        numbers = [one.strip() for one in values.split(",")]
        where = f"--tune {axis}"
        if name not in TUNABLE:
            problems.append(Problem(where, f"{name!r} is not tuned", f"one of {_or(TUNABLE)}"))
        elif name in found:
            problems.append(Problem(where, f"{name} is given twice", "give all its values at once"))
        elif not all(one.isdecimal() and 0 < int(one) < 10**9 for one in numbers):
            problems.append(Problem(where, "has no list of whole numbers", f"e.g. {name}=16,32,64"))
        else:
            found[name] = list(dict.fromkeys(int(one) for one in numbers))
    made = [dict(zip(found, values, strict=True)) for values in product(*found.values())]
    if not problems and len(made) > MOST_POINTS:
        what = f"are {len(made)} points, each with a server of its own; at most {MOST_POINTS}"
        problems.append(Problem("--tune", what, "leave some values out"))
    if problems:
        raise UserError(problems)
    return made


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)


def outside(plan: MemoryPlan, args: Mapping[str, object]) -> str:
    """Why a point is not worth a start, by its plan; empty where it is, or where that is open.

    `args` are all of the engine's arguments at this point.
    """
    sequences, batched = args.get(SEQUENCES), args.get(BATCHED)
    if isinstance(sequences, int) and isinstance(batched, int) and batched < sequences:
        return f"vLLM takes no {BATCHED} ({batched}) below {SEQUENCES} ({sequences})"
    if plan.refusal:
        return plan.refusal
    if plan.unknown or not isinstance(sequences, int):
        return ""
    if plan.kv_cache_tokens and plan.max_model_len:
        most = plan.kv_cache_tokens // plan.max_model_len
        if sequences > most:
            return (
                f"by the plan the KV cache holds {most} sequences of {plan.max_model_len} tokens: "
                "more of that length would be preempted"
            )
    return ""


# -- the choice ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Tried:
    """A point that was measured. `void`: why it counts for nothing.

    `kept`: highest rate kept and lowest not kept, requests/s; `tpot_ms`: the median by fixed rate.
    """

    args: Args
    kept: tuple[float | None, float | None] = (None, None)
    tpot_ms: Mapping[float, Interval] = field(default_factory=dict)
    void: str = ""


@dataclass(frozen=True)
class Choice:
    """`equal`: other points that may be as good. `chosen` None: nothing was kept."""

    chosen: Args | None
    by: Literal["kept rate", "TPOT", ""] = ""
    equal: tuple[Args, ...] = ()
    reason: str = ""


def choose(tried: Sequence[Tried], current: Args) -> Choice:
    """`current`: the arguments that are served now, as far as they are tuned."""
    good = [one for one in tried if not one.void and one.kept[0] is not None]
    if not good:
        return Choice(None, reason="no point kept any rate")
    best = max(good, key=_low)
    alike = [one for one in good if not _surely_below(one, best)]
    by: Literal["kept rate", "TPOT"] = "kept rate"
    said = f"keeps {_low(best):.4g} requests/s"
    rate = _common_rate(alike)
    if len(alike) > 1 and rate is not None:
        fastest = min(alike, key=lambda one: one.tpot_ms[rate].value)
        nearer = [o for o in alike if o.tpot_ms[rate].low <= fastest.tpot_ms[rate].high]
        if len(nearer) < len(alike):
            by, best = "TPOT", fastest
            tpot = fastest.tpot_ms[rate]
            said = f"TPOT {tpot.value:.3g} ms ({tpot.low:.3g} to {tpot.high:.3g}) at {rate:.4g}/s"
        alike = nearer
    if len(alike) == 1:
        return Choice(best.args, by, (), f"{words(best.args)}: {said}")
    chosen = next((one for one in alike if dict(one.args) == dict(current)), None)
    why = "it is what is there"
    if chosen is None:
        # A load that shows no difference is too light to say that a burst would not need them.
        chosen = max(alike, key=lambda o: (o.args.get(SEQUENCES, 0), -o.args.get(BATCHED, 0)))
        why = "it takes the most sequences at once"
    others = tuple(one.args for one in alike if one is not chosen)
    told = "; ".join(words(one) for one in others)
    return Choice(
        chosen.args, by, others, f"not distinguishable from {told}: {words(chosen.args)}, as {why}"
    )


def words(args: Args) -> str:
    return ", ".join(f"{name} {value}" for name, value in args.items())


def _low(one: Tried) -> float:
    return one.kept[0] or 0.0


def _surely_below(one: Tried, best: Tried) -> bool:
    """The best kept a rate that this one lost."""
    return one.kept[1] is not None and one.kept[1] <= _low(best)


def _common_rate(alike: Sequence[Tried]) -> float | None:
    """The highest rate that all of them kept and have a TPOT of."""
    rates = [{rate for rate in one.tpot_ms if rate <= _low(one) * (1 + 1e-9)} for one in alike]
    common = set.intersection(*rates) if rates else set()
    return max(common, default=None)
