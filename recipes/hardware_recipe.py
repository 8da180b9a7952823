"""kind: hardware."""

from __future__ import annotations

from datetime import date
from typing import Literal

from pydantic import Field, model_validator

from recipes.written import Written


class Compute(Written):
    """Dense operations of one accelerator, 10^12 per second, by the type of the factors.

    Without sparsity, and with sums in 32 bits, as the engine's kernels add. Null where it has no
    units for the type, and where no source is known.
    """

    fp32: float | None = Field(default=None, gt=0, le=100_000)
    fp16: float | None = Field(default=None, gt=0, le=100_000)
    bf16: float | None = Field(default=None, gt=0, le=100_000)
    fp8: float | None = Field(default=None, gt=0, le=100_000)
    int8: float | None = Field(default=None, gt=0, le=100_000)
    fp4: float | None = Field(default=None, gt=0, le=100_000)


class HardwareRecipe(Written):
    """kind: hardware. A machine that serves, and what an hour of it costs whoever runs it.

    A price is the user's own number: without one, costs are null and the report says why. A number
    that is null makes the estimates null that need it, never wrong.
    """

    kind: Literal["hardware"]
    description: str
    accelerator: str | None = Field(
        default=None, min_length=1, description="Name as `nvidia-smi` shows it; null: CPU only."
    )
    accelerators: int = Field(default=0, ge=0, le=1024, description="How many of them.")
    memory_gib: float = Field(
        gt=0,
        le=1_000_000,
        description="Of one accelerator as `nvidia-smi` shows it; without, the machine's.",
    )
    bandwidth_gb_s: float | None = Field(
        default=None, gt=0, le=100_000, description="Of its memory, 10^9 bytes per second."
    )
    link_gb_s: float | None = Field(
        default=None,
        gt=0,
        le=100_000,
        description="Of one accelerator to its neighbours, both directions together, as data "
        "sheets say it.",
    )
    compute: Compute = Compute()
    compute_capability: str | None = Field(
        default=None, pattern=r"^\d{1,2}\.\d$", description="E.g. '8.6'; null: CPU only."
    )
    cpu_instructions: list[Literal["avx2", "avx512", "amx"]] = Field(
        default_factory=list, description="Of a machine without an accelerator (`lscpu`)."
    )
    sources: dict[str, str] = Field(
        default_factory=dict,
        description="Who says each number, by its field: `bandwidth_gb_s`, `compute.fp8`, ...",
    )
    price_per_hour: float | None = Field(
        default=None, gt=0, description="Of the whole machine, all accelerators; null: unknown."
    )
    currency: str | None = Field(default=None, pattern=r"^[A-Z]{3}$", description="E.g. USD.")
    price_source: str | None = Field(default=None, min_length=1, description="Who says so.")
    price_as_of: date | None = Field(default=None, description="YYYY-MM-DD.")

    @property
    def numbers(self) -> dict[str, float | str]:
        """What needs a source, by the name that it has in `sources`: every number that is given."""
        plain = {
            name: getattr(self, name)
            for name in ("memory_gib", "bandwidth_gb_s", "link_gb_s", "compute_capability")
        }
        dense = {f"compute.{name}": value for name, value in self.compute.model_dump().items()}
        return {name: value for name, value in (plain | dense).items() if value is not None}

    @model_validator(mode="after")
    def _consistent(self) -> HardwareRecipe:
        problems = [*self._accelerator_problems(), *self._price_problems()]
        # The memory alone is what a bench asks for; its own user knows where it is from.
        unsaid = [name for name in self.numbers if name not in {"memory_gib", *self.sources}]
        if unsaid:
            problems.append(f"no `sources` for {', '.join(unsaid)}")
        nothing = [name for name in self.sources if name not in self.numbers]
        if nothing:
            problems.append(f"`sources` for {_listed(nothing)}, of which there is no number")
        empty = [name for name, text in self.sources.items() if not text.strip()]
        if empty:
            problems.append(f"`sources` says nothing of {_listed(empty)}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _accelerator_problems(self) -> list[str]:
        if (self.accelerator is None) != (self.accelerators == 0):
            return ["give both `accelerator` and `accelerators`, or neither for a CPU"]
        if self.accelerator is None and (self.compute_capability or self.link_gb_s):
            return ["`compute_capability` and `link_gb_s` are an accelerator's"]
        if self.accelerator is not None and self.cpu_instructions:
            return ["`cpu_instructions` are of a machine without an accelerator"]
        return []

    def _price_problems(self) -> list[str]:
        about = ("currency", "price_source", "price_as_of")
        given = [name for name in about if getattr(self, name) is not None]
        if self.price_per_hour is None:
            return [f"{', '.join(given)} given without a `price_per_hour`"] if given else []
        missing = [name for name in about if name not in given]
        return [f"a price needs {', '.join(missing)} too"] if missing else []


def _listed(names: list[str]) -> str:
    """Names that a person made up, cut where they are long or many."""
    shown = [name if len(name) <= 60 else f"{name[:57]}..." for name in names[:10]]
    return ", ".join(shown) + (", ..." if len(names) > 10 else "")
