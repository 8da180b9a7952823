"""kind: hardware."""

from __future__ import annotations

from datetime import date
from typing import Literal

from pydantic import Field, model_validator

from recipes.written import Written


class HardwareRecipe(Written):
    """kind: hardware. A machine that serves, and what an hour of it costs whoever runs it.

    A price is the user's own number: without one, costs are null and the report says why.
    """

    kind: Literal["hardware"]
    description: str
    accelerator: str | None = Field(
        default=None, min_length=1, description="Name as `nvidia-smi` shows it; null: CPU only."
    )
    accelerators: int = Field(default=0, ge=0, le=1024, description="How many of them.")
    memory_gib: float = Field(
        gt=0, description="Of one accelerator as `nvidia-smi` shows it; without, the machine's."
    )
    price_per_hour: float | None = Field(
        default=None, gt=0, description="Of the whole machine, all accelerators; null: unknown."
    )
    currency: str | None = Field(default=None, pattern=r"^[A-Z]{3}$", description="E.g. USD.")
    price_source: str | None = Field(default=None, min_length=1, description="Who says so.")
    price_as_of: date | None = Field(default=None, description="YYYY-MM-DD.")

    @model_validator(mode="after")
    def _consistent(self) -> HardwareRecipe:
        if (self.accelerator is None) != (self.accelerators == 0):
            raise ValueError("give both `accelerator` and `accelerators`, or neither for a CPU")
        about = ("currency", "price_source", "price_as_of")
        given = [name for name in about if getattr(self, name) is not None]
        if self.price_per_hour is None and given:
            raise ValueError(f"{', '.join(given)} given without a `price_per_hour`")
        missing = [name for name in about if name not in given]
        if self.price_per_hour is not None and missing:
            raise ValueError(f"a price needs {', '.join(missing)} too")
        return self
