"""Does it pay to serve prefill and decode apart? From measured numbers, and only as far as they go.

Apart, no prompt is computed between two tokens of an answer (TPOT, ITL), while a prompt's cache has
to go over first (TTFT); and it takes more GPUs, since each role holds all of the weights. So times
alone decide nothing: what counts is the rate that is kept under the same limits of time, for each
GPU.

    rate per GPU, B over A = (kept by B / GPUs of B) / (kept by A / GPUs of A)

A search gives a kept rate as two numbers, the highest that was kept and the lowest that was not.
The interval of the quotient takes the worst and the best of both. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval_suites.turns import LEVEL, Pair, TurnRatio, percentile_ratio

TIMES = ("ttft", "tpot", "itl", "e2el")
PERCENT = 95.0

Kept = tuple[float | None, float | None]
"""Highest rate kept, lowest rate not kept, in requests/s; None: there was none."""


@dataclass(frozen=True)
class Side:
    """`devices`: GPUs that it takes; without GPUs both are the whole machine, 1."""

    name: str
    topology: str
    devices: int
    kept: Kept | None = None


@dataclass(frozen=True)
class Quotient:
    """Of rates per device, B over A. `low` and `high`: None, that end is open."""

    value: float | None
    low: float | None
    high: float | None

    @property
    def decides(self) -> bool | None:
        """True: B is above A. False: below. None: the interval holds 1, or its end is open."""
        if self.low is not None and self.low > 1:
            return True
        if self.high is not None and self.high < 1:
            return False
        return None


@dataclass(frozen=True)
class TopologyComparison:
    """B against A. `pays`: whether B keeps more for each device; None: not decided."""

    a: Side
    b: Side
    unit: str
    times: Mapping[str, TurnRatio]
    per_device: Quotient | None
    pays: bool | None
    words: Sequence[str]

    @property
    def document(self) -> dict[str, Any]:
        return {
            "a": asdict(self.a),
            "b": asdict(self.b),
            "unit": self.unit,
            "times": {name: asdict(one) for name, one in self.times.items()},
            "per_device": asdict(self.per_device) if self.per_device else None,
            "pays": self.pays,
            "words": list(self.words),
        }


def compare_topologies(
    a: Side, b: Side, unit: str, pairs: Sequence[Pair] = (), level: float = LEVEL
) -> TopologyComparison:
    """`pairs`: requests of A and of B in each repeat, at one rate; none: no times are compared.

    unit: what `devices` counts, `GPU` or `machine`.
    """
    times = {
        f"{metric}_p{PERCENT:g}": percentile_ratio(pairs, metric, PERCENT, level)
        for metric in TIMES
    } if pairs else {}  # fmt: skip
    quotient = per_device(a, b)
    words = [
        f"{a.name} is {a.topology} on {counted(a.devices, unit)}, "
        f"{b.name} {b.topology} on {counted(b.devices, unit)}",
        *(change_words(name, one) for name, one in times.items()),
    ]
    if quotient is not None:
        pays = quotient.decides
        words += [_rate_words(a, b, unit, quotient), _verdict(b, unit, pays)]
    elif times and b.devices >= a.devices and all(worse(one) for one in times.values()):
        pays = False
        words.append(f"{b.name} does not pay: every time is worse, and it takes no fewer {unit}s")
    else:
        pays = None
        words += [_without_rates(a, b, unit), _verdict(b, unit, pays)]
    return TopologyComparison(a, b, unit, times, quotient, pays, words)


def per_device(a: Side, b: Side) -> Quotient | None:
    """None where one of them has no search, or kept no rate that could be divided by."""
    if a.kept is None or b.kept is None:
        return None
    a_low, a_high = a.kept
    b_low, b_high = b.kept
    share = a.devices / b.devices

    def over(top: float | None, bottom: float | None) -> float | None:
        return None if top is None or not bottom else top / bottom * share

    if b_low is None and a_low is not None:
        # B kept nothing that was tried: 0 is its lower end, its upper end the lowest that it lost.
        return Quotient(None, 0.0, over(b_high, a_low))
    return Quotient(over(b_low, a_low), over(b_low, a_high), over(b_high, a_low))


def better(one: TurnRatio) -> bool:
    """B's time is the smaller one, by all of the interval."""
    return one.high is not None and one.high < 1


def worse(one: TurnRatio) -> bool:
    return one.low is not None and one.low > 1


def change_words(name: str, one: TurnRatio) -> str:
    """`TPOT P95 21 % better (15 to 27 %)`; never better or worse where the interval holds 1."""
    metric, _, percent = name.partition("_p")
    title = f"{metric.upper()} P{percent}"
    if one.value is None:
        return f"{title}: not known, {one.reason}"
    if one.low is None or one.high is None:
        return f"{title}: not decided, one repeat has no interval"
    if better(one):
        ends = sorted((1 - one.low, 1 - one.high))
        return f"{title} {_percent(1 - one.value)} better ({_span(*ends)})"
    if worse(one):
        return f"{title} {_percent(one.value - 1)} worse ({_span(one.low - 1, one.high - 1)})"
    return f"{title}: not decided ({100 * (one.low - 1):+.0f} % to {100 * (one.high - 1):+.0f} %)"


def counted(devices: int, unit: str) -> str:
    if unit == "machine":
        return "the whole machine" if devices == 1 else f"{devices} machines"
    return f"{devices} {unit}{'s' if devices != 1 else ''}"


def _without_rates(a: Side, b: Side, unit: str) -> str:
    more = b.devices / a.devices
    said = (
        f"at the same load {b.name} takes {more:.2g} times the {unit}s"
        if more != 1
        else f"both take as many {unit}s"
    )
    return f"{said}; the rate that each keeps was not measured here"


def _rate_words(a: Side, b: Side, unit: str, found: Quotient) -> str:
    each = [f"{side.name} {kept_for_each(side)}" for side in (a, b)]
    ends = f"{_end(found.low, 'open')} to {_end(found.high, 'open')}"
    value = "none" if found.value is None else f"{found.value:.2f}"
    told = f"kept requests/s for each {unit}: {', '.join(each)}; quotient {value} ({ends})"
    if found.value and found.low and found.high:
        least, most = 1 / found.high, 1 / found.low
        told += (
            f"; at one price for each {unit} a request costs {1 / found.value:.2f} times as much "
            f"({least:.2f} to {most:.2f})"
        )
    return told


def _verdict(b: Side, unit: str, pays: bool | None) -> str:
    if pays is None:
        return f"whether {b.name} pays is not decided"
    if pays:
        return f"{b.name} pays: it keeps more under the same limits for each {unit}"
    return f"{b.name} does not pay: it gives no more for each {unit}"


def kept_for_each(side: Side) -> str:
    """The highest rate that was kept, for each device; `none`, or a dash where none was sought."""
    if side.kept is None:
        return "–"
    kept = side.kept[0]
    return "none" if kept is None else f"{kept / side.devices:.3g}"


def _end(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _span(low: float, high: float) -> str:
    return f"{100 * low:.0f} to {100 * high:.0f} %"
