"""What a plan is made of: a model, a load, what may be chosen, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from registry.machines import Machine
from registry.memory_floor import MemoryFloor
from registry.roofline import Estimate
from registry.shape_parts import ModelShape

HOURS_PER_MONTH = 730
UTILIZATION = 0.90
MAX_BATCHED_TOKENS = 2048
"""vLLM's own below 70 GiB, taken everywhere: a longer batch keeps those that decode waiting."""


@dataclass(frozen=True)
class Model:
    """What is served. `checkpoint_bytes`: of the tensors that are here; it goes with `auto`."""

    shape: ModelShape
    name: str
    draft: ModelShape | None = None
    checkpoint_bytes: int | None = None


@dataclass(frozen=True)
class Demand:
    """What is asked of all replicas together.

    `context` is what the memory is reserved for, of each sequence; `longest` what a request may
    have (`max-model-len`), `peak` the most that is ever in flight: an engine takes them where its
    cache has room. The rest is for estimates: `prompt` (None: it fills the context), `output` and
    `mean_prompt` in tokens, `rate` in requests/s.
    """

    concurrency: int
    context: int
    longest: int
    peak: int | None = None
    prompt: float | None = None
    output: float | None = None
    mean_prompt: float | None = None
    mean_output: float | None = None
    rate: float | None = None

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a sequence at a moment: half of an answer is there on average."""
        if self.mean_prompt is None or self.mean_output is None:
            return self.context
        return self.mean_prompt + self.mean_output / 2


@dataclass(frozen=True)
class Limits:
    """Milliseconds that an estimate must not exceed; none: memory alone decides."""

    limits: Mapping[str, float] = field(default_factory=dict)

    def broken(self, found: Estimate) -> list[str]:
        return [
            f"{name} {value:.0f} ms, at most {self.limits[name]:g} ms are wanted"
            for name, value in self._told(found).items()
            if value is not None and value > self.limits[name]
        ]

    def unknown(self, found: Estimate) -> list[str]:
        """Limits that this estimate says nothing about."""
        return [name for name, value in self._told(found).items() if value is None]

    def _told(self, found: Estimate) -> dict[str, float | None]:
        # Tokens of one request come one after the other: their gap is the time per token.
        told = {"ttft": found.ttft_ms, "tpot": found.tpot_ms, "itl": found.tpot_ms}
        told["e2el"] = found.e2el_ms
        return {name: value for name, value in told.items() if name in self.limits}


@dataclass(frozen=True)
class Wish:
    """What may be chosen. `formats` and `tp` as they were asked for; None: what the plan finds."""

    formats: tuple[str, ...] = ("auto",)
    kv_dtype: str = "auto"
    tp: int | None = None
    pp: int = 1
    utilization: float = UTILIZATION
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    replicas: bool = False
    """Whether more than one engine may share the load."""


@dataclass(frozen=True)
class Fit:
    """One way to serve it."""

    machine: Machine
    format: str
    tp: int
    pp: int
    kv_dtype: str
    floor: MemoryFloor
    max_concurrency: int
    engine_args: dict[str, int | float | str]
    replicas: int
    machines: int
    estimate: Estimate | None
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return 0 if self.machine.is_cpu else self.tp * self.pp * self.replicas

    @property
    def cost_per_month(self) -> float | None:
        price = self.machine.price_per_hour
        return None if price is None else price * HOURS_PER_MONTH * self.machines

    @property
    def rank(self) -> tuple[bool, float, float, str, int]:
        """Cost; without a price GPUs times memory. What has a price goes first."""
        cost = self.cost_per_month
        size = max(1, self.gpus) * self.machine.memory_bytes
        return cost is None, cost or 0.0, size, self.machine.name, self.tp


@dataclass(frozen=True)
class RuledOut:
    """`needs_bytes`: of one of `tp` GPUs, where memory is what is missing."""

    machine: Machine
    format: str
    reason: str
    needs_bytes: int | None = None
    tp: int | None = None
    max_concurrency: int | None = None


@dataclass(frozen=True)
class Plan:
    fits: tuple[Fit, ...]
    ruled_out: tuple[RuledOut, ...]
