"""Base of everything that people write into a recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Written(BaseModel):
    """Base of what people write: no unknown keys, frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
