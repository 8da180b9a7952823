"""What a request and a million output tokens cost on a machine that is paid by the hour. Pure."""

from __future__ import annotations

import math

from recipes.schema import HardwareRecipe

SECONDS_PER_HOUR = 3600
TOKENS = 1_000_000


def cost_of(
    price_per_hour: float | None, rate_per_s: float | None, output_tokens_per_s: float | None
) -> dict[str, float | None]:
    """The cost at one load, in the price's currency.

        per_request               = price_per_hour / (3600 * rate_per_s)
        per_million_output_tokens = price_per_hour / (3600 * output_tokens_per_s) * 1_000_000

    `price_per_hour` is of all that served, `rate_per_s` counts answered requests, in the same
    seconds as the tokens. The machine is paid whether it works or waits, so this is the cost at
    exactly that load: at half of it, twice as much. Null where a factor is unknown, not finite or
    not above zero.
    """
    return {
        "per_request": _quotient(price_per_hour, rate_per_s, 1),
        "per_million_output_tokens": _quotient(price_per_hour, output_tokens_per_s, TOKENS),
    }


def machines_paid(hardware: HardwareRecipe, gpus: int) -> int:
    """Machines of this file that one server of so many GPUs takes; 0: not known, or a CPU.

    A file of one GPU is taken as many times as there are GPUs, as in a plan and in the savings.
    """
    return max(1, math.ceil(gpus / hardware.accelerators)) if hardware.accelerators else 1


def price_note(name: str, hardware: HardwareRecipe, machines: int = 1) -> str:
    """One sentence for a report: where the costs come from, or why there are none."""
    if hardware.price_per_hour is None:
        return f"no costs: hardware {name} has no `price_per_hour`"
    of_them = f", {machines} of them" if machines > 1 else ""
    return (
        f"costs in {hardware.currency} at {hardware.price_per_hour:g} per hour of {name}{of_them} "
        f"({hardware.price_source}, as of {hardware.price_as_of})"
    )


def _quotient(price: float | None, per_s: float | None, units: int) -> float | None:
    if price is None or per_s is None or not (0 < price < math.inf and 0 < per_s < math.inf):
        return None
    cost = price / SECONDS_PER_HOUR / per_s * units
    return cost if math.isfinite(cost) else None
