"""How many items a decision needs, and how small a difference so many can show: quick answers.

Normal approximations (Chow, Shao, Wang and Lokhnygina 2018, Sample Size Calculations in Clinical
Research, 3.1 and 4.2), with the spread under the limit for the error and under the assumed truth
for the power. `eval_suites.power_releases` starts from them and draws releases instead.
"""

from __future__ import annotations

import math

from scipy.special import ndtri

from eval_suites.statistics import Estimate

POWER = 0.80
"""Share of runs that should end with a decision."""

MOST_ITEMS = 10_000_000
"""More items than this are not a plan."""


def items_for(
    distance: float, sd_at_limit: float, sd_at_truth: float, level: float, power: float = POWER
) -> int | None:
    """Units that clear a limit `distance` away with error `level`; None when no number would."""
    if distance <= 0:
        return None
    reach = -float(ndtri(level)) * sd_at_limit + float(ndtri(power)) * sd_at_truth
    wanted = (max(reach, 0.0) / distance) ** 2
    return max(1, math.ceil(wanted)) if wanted <= MOST_ITEMS else None


def units_to_see(distance: float, worst: float, level: float) -> float:
    """Units without a loss of `worst` (below 0) that leave it rarer than `distance` allows.

    None of n units showed it, and it may still befall `1 - level ** (1 / n)` of all. 0 where
    nothing could be lost, infinite where no number of units would do.
    """
    if worst >= 0:
        return 0.0
    if distance <= 0:
        return math.inf
    return math.log(level) / math.log1p(-distance / (distance - worst))


def distance_to_see(units: int, worst: float, level: float) -> float:
    """The distance that so many units without such a loss leave certain."""
    return max(-worst, 0.0) * (level ** (-1 / units) - 1)


def needed_items(
    estimate: Estimate, limit: float, level: float, n: int, units: int | None = None
) -> int | None:
    """Further items that would decide in 80 % of runs if the estimate is the truth.

    Where so many are there already and this sample did not decide, as many again.
    """
    wanted = items_for(
        abs(estimate.value - limit),
        estimate.unit_sd(limit),
        estimate.unit_sd(estimate.value),
        level,
    )
    unseen = estimate.unseen_units(limit, level)
    if wanted is None or not unseen <= MOST_ITEMS:
        return None
    further = math.ceil(max(wanted, math.ceil(unseen)) * n / (units or n)) - n
    return further if further > 0 else n


def minimum_detectable(
    estimate: Estimate, limit: float, side: int, level: float, units: int
) -> float:
    """The true value nearest to the limit that passes in 80 % of runs on so many units."""
    error = estimate.unit_sd(limit) / math.sqrt(units)
    # Two bounds on the mean that is observed: the further one has to be cleared.
    unseen = estimate.unseen_distance(limit, side, level, units)
    cleared = max(-float(ndtri(level)) * error, unseen)
    return limit + side * (cleared + float(ndtri(POWER)) * error)
