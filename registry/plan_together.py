"""Several models on the same GPUs, each in an engine of its own. Pure.

vLLM's `gpu-memory-utilization` is a limit of one instance, so the shares have to add up to no more
than what one engine alone would get. Each share is the model's floor, rounded up to a hundredth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from registry.capacity_plan import PARALLEL, check_length, plan
from registry.errors import UserError
from registry.machines import GIB, Machine
from registry.plan_parts import HOURS_PER_MONTH, Demand, Fit, Limits, Model, RuledOut, Wish


@dataclass(frozen=True)
class Shared:
    """A machine that holds all of them: `fits` in the order of the models."""

    machine: Machine
    tp: int
    fits: tuple[Fit, ...]
    shares: tuple[float, ...]

    @property
    def cost_per_month(self) -> float | None:
        price = self.machine.price_per_hour
        machines = max(fit.machines for fit in self.fits)
        return None if price is None else price * HOURS_PER_MONTH * machines

    @property
    def rank(self) -> tuple[bool, float, float, str]:
        cost = self.cost_per_month
        size = self.tp * self.machine.memory_bytes
        return cost is None, cost or 0.0, size, self.machine.name


def together(
    models: Sequence[Model], machines: Sequence[Machine], demands: Sequence[Demand], wish: Wish
) -> tuple[list[Shared], list[RuledOut]]:
    """Every machine with the fewest GPUs whose memory holds all floors, and why the others not.

    Raises `UserError` for what no machine could serve.
    """
    for model, demand in zip(models, demands, strict=True):
        check_length(model, demand.longest)
    found: list[Shared] = []
    ruled: list[RuledOut] = []
    for machine in machines:
        if machine.is_cpu:
            reason = "engines on a CPU take turns on its cores: not planned together"
            ruled.append(RuledOut(machine, wish.formats[0], reason))
            continue
        best = _on(machine, models, demands, wish)
        if isinstance(best, Shared):
            found.append(best)
        else:
            ruled.append(best)
    return sorted(found, key=lambda one: one.rank), ruled


def _on(
    machine: Machine, models: Sequence[Model], demands: Sequence[Demand], wish: Wish
) -> Shared | RuledOut:
    last: RuledOut | None = None
    for tp in PARALLEL if wish.tp is None else (wish.tp,):
        fits = []
        for model, demand in zip(models, demands, strict=True):
            try:
                alone = plan(model, [machine], demand, replace(wish, tp=tp), Limits())
            except UserError as error:
                # Heads that do not divide; whoever asked for this many GPUs is told so.
                if wish.tp is not None:
                    raise
                reason = f"{model.name}: tensor-parallel-size {tp}: {error.problems[0].what}"
                last = last or RuledOut(machine, wish.formats[0], reason)
                break
            if not alone.fits:
                last = alone.ruled_out[-1]
                break
            fits.append(alone.fits[0])
        if len(fits) < len(models):
            continue
        shares = tuple(_share(fit) for fit in fits)
        if sum(shares) <= wish.utilization + 1e-9:
            shared = [
                _with_share(fit, share, demand.concurrency)
                for fit, share, demand in zip(fits, shares, demands, strict=True)
            ]
            return Shared(machine, tp, tuple(shared), shares)
        floors = [fit.floor.per_gpu.floor_bytes / GIB for fit in fits]
        what = " + ".join(f"{floor:.2f}" for floor in floors)
        reason = (
            f"too little memory for all: floors of {what} GiB on each of {tp} GPUs, and "
            f"{wish.utilization:.0%} of {machine.memory_gib:.2f} GiB are "
            f"{wish.utilization * machine.memory_gib:.2f}"
        )
        last = RuledOut(machine, fits[0].format, reason, tp=tp)
    assert last is not None
    return last


def _share(fit: Fit) -> float:
    return math.ceil(100 * fit.floor.per_gpu.floor_bytes / fit.machine.memory_bytes) / 100


def _with_share(fit: Fit, share: float, concurrency: int) -> Fit:
    """Its engine gets so much of the GPU, and the sequences that were asked for."""
    args = fit.engine_args | {"gpu-memory-utilization": share}
    # The other engines compute on the same GPU: an estimate for this one alone would be wrong.
    return replace(fit, engine_args=args, estimate=None, max_concurrency=concurrency)
