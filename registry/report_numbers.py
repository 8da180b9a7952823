"""How the page of a release writes numbers: short, in their unit, a dash where there is none."""

from __future__ import annotations

from decimal import Decimal

from registry.outcome import GateResult

NONE = "–"
LONGEST_TEXT = 1500
"""Characters of one prompt or response on the page."""


def short_ms(value: float | None) -> str:
    """1234.5 -> `1.23 s`, 87.2 -> `87 ms`."""
    if value is None:
        return NONE
    if value >= 10_000:
        return f"{value / 1000:.1f} s".replace(".0 s", " s")
    if value >= 1000:
        return f"{value / 1000:.2f} s".replace(".00 s", " s")
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def number(value: float | None, digits: int = 3) -> str:
    """A plain number with fixed digits; a dash where there is none."""
    return NONE if value is None else f"{value:,.{digits}f}"


def gate_value(value: float | None, metric: str) -> str:
    """A gate's number in its own unit."""
    return short_ms(value) if metric.endswith("_ms") else number(value, 4)


RATIOS = ("retention", "length", "ratio")
DIFFERENCES = ("non_inferiority", "regression", "slice", "implausible")


def scaled(value: float | None, gate: GateResult) -> str:
    """An estimate, a bound or an effect on the scale of the gate's margin."""
    if value is None:
        return NONE
    sign = "+" if gate.kind in DIFFERENCES and value >= 0 else "-" if value < 0 else ""
    own_unit = gate.metric.endswith("_ms") and gate.kind not in RATIOS
    return sign + (short_ms(abs(value)) if own_unit else number(abs(value), 4))


ASKED = {
    "retention": "≥ ",
    "floor": "≥ ",
    "ceiling": "≤ ",
    "length": "≤ ",
    "ratio": "≥ ",
    "implausible": "gain ≤ ",
}
"""What a margin asks for, by kind, where every gate of the kind asks for the same side."""


def asked(gate: GateResult) -> str:
    """The side of the margin on which a gate passes, for writing before it."""
    known = ASKED.get(gate.kind)
    if known is not None or gate.bound is None or gate.opposite_bound is None:
        return known or ""
    return "≥ " if gate.bound <= gate.opposite_bound else "≤ "


def duration(seconds: float | None) -> str:
    """Seconds as people say them: `0.4 s`, `48 s`, `3 min 12 s`, `2 h 05 min`."""
    if seconds is None:
        return NONE
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def megabytes(size: int | None) -> str:
    """Bytes in MB (10^6)."""
    return NONE if size is None else f"{size / 1e6:,.1f} MB"


def cut(text: str, length: int = LONGEST_TEXT) -> str:
    """At most `length` characters, saying how many are left out."""
    left = len(text) - length
    return text if left <= 0 else f"{text[:length]} … ({left} more characters)"


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def rate(value: float | None) -> str:
    """Requests/s with four digits, as a search finds them."""
    return NONE if value is None else f"{value:.4g}"


def share(value: float | None) -> str:
    """A share of 1 in percent."""
    return NONE if value is None else f"{100 * value:.0f} %"


def cost(value: float | None) -> str:
    """In the currency of the hardware file, with three digits and no exponent."""
    return NONE if value is None else format(Decimal(f"{value:.3g}"), ",f")


def measured(value: float | None, key: str) -> str:
    """A number on one axis of a selection, in the axis's unit."""
    if value is None:
        return NONE
    if key == "kept_rate":
        return f"{rate(value)} requests/s"
    if key == "latency":
        return short_ms(value)
    if key == "memory":
        return megabytes(round(value))
    return cost(value) if key == "cost" else number(value)
