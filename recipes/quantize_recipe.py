"""kind: quantize."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from recipes.written import Written


class CalibrationSet(Written):
    """The texts a quantizer looks at."""

    source: Literal["business", "foreign"] = "business"
    samples: int = Field(gt=0)
    max_length: int = Field(default=512, gt=0)


class QuantizeRecipe(Written):
    """kind: quantize. An llmcompressor recipe, unchanged, and what must be true afterwards."""

    kind: Literal["quantize"]
    description: str
    recipe: dict[str, Any] | None = Field(
        description="llmcompressor stages and modifiers; null leaves the weights as they are."
    )
    calibration: CalibrationSet | None = None
    max_size_ratio: float | None = Field(
        default=None, gt=0, le=1, description="Quantized layers' bytes over their bytes before."
    )

    @model_validator(mode="after")
    def _complete(self) -> QuantizeRecipe:
        if self.recipe is not None and self.max_size_ratio is None:
            raise ValueError("`max_size_ratio` is needed where something is quantized")
        return self
