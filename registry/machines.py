"""A machine as a plan sees it: the numbers of a hardware file, without the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """`memory_bytes`, `bandwidth`, `link` and `compute` are of one accelerator (or of the CPU).

    Bytes, bytes/s, bytes/s in both directions together, and dense operations/s by type; null where
    the hardware file does not say. `price_per_hour` is of the whole machine.
    """

    name: str
    title: str
    memory_bytes: int
    accelerators: int = 0
    capability: tuple[int, int] | None = None
    cpu_instructions: frozenset[str] = frozenset()
    bandwidth: float | None = None
    link: float | None = None
    compute: Mapping[str, float] = field(default_factory=dict)
    price_per_hour: float | None = None
    currency: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.accelerators == 0

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB
