"""How a page and a summary word the saving of a released bundle. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from registry.outcome import Measure, Savings, SavingSide
from registry.report_latency import clause_words, kept_words
from registry.report_numbers import NONE, cost


@dataclass(frozen=True)
class Row:
    name: str
    kept: str
    replicas: str
    gpus: str
    cost: str


def rows(found: Savings) -> list[Row]:
    """The released bundle, the reference."""
    return [_row(one) for one in found.sides]


def _row(one: SavingSide) -> Row:
    return Row(
        name=one.name,
        kept=kept_words(one.kept_rate),
        replicas=spread(one.replicas, count),
        gpus=spread(one.gpus, count) if one.gpus_per_replica else NONE,
        cost=spread(one.cost_per_month, cost),
    )


def spread(one: Measure | None, shown: Callable[[float], str]) -> str:
    """`8 (7 to 8)`; `or less`, `from` where an end is open; the value alone where it is exact."""
    if one is None or one.value is None:
        return NONE
    value = shown(one.value)
    low = None if one.low is None else shown(one.low)
    high = None if one.high is None else shown(one.high)
    if low == high == value:
        return value
    if low is not None and high is not None:
        return f"{value} ({low} to {high})"
    if high is not None:
        return f"{value} or less" if high == value else f"{value} (up to {high})"
    return f"{value} (from {low})" if low is not None else f"{value} (both ends open)"


def count(value: float) -> str:
    """Replicas: whole where they were rounded, else with three digits."""
    return f"{value:,.0f}" if value.is_integer() else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{round(100 * value)} %"


def limits(found: Savings) -> str:
    return "; ".join(clause_words(text) for text in found.sla)


def load(found: Savings) -> str:
    """`at the peak of 30 requests/s (...)`, or for each request/s."""
    if found.rate is None:
        return "for each request/s"
    return f"at the peak of {found.rate:g} requests/s ({found.rate_source})"


def statement(found: Savings) -> str:
    """One sentence for a page and a summary."""
    if found.reason:
        return f"No statement about savings against {found.reference}: {found.reason}"
    ours, theirs = found.sides
    what = f"{spread(ours.replicas, count)} replicas instead of {spread(theirs.replicas, count)}"
    less = spread(found.saving_share, percent)
    if ours.gpus_per_replica != theirs.gpus_per_replica:
        what += f", {spread(ours.gpus, count)} GPUs instead of {spread(theirs.gpus, count)}"
    price = ""
    if found.saving_per_month is not None:
        price = f"; {spread(found.saving_per_month, cost)} {found.currency} a month less"
    return (
        f"{found.released} against {found.reference} {load(found)}, same limits "
        f"({limits(found)}): {what}{price}; saves {less}"
    )
