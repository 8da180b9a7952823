"""What each flow is asked for: one pydantic model per flow, which Prefect shows as a form."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from recipes.loader import shipped


class ReleaseRequest(BaseModel):
    """Run one release recipe, to a promoted version or a refusal."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field(
        default="freight_demo",
        description="Name of a recipe in recipes/release/, or a path to one.",
        json_schema_extra={"position": 0, "examples": [*shipped("release")]},
    )
    overrides: list[str] = Field(
        default_factory=list,
        description="Changes to the recipe, each KEY.KEY=VALUE, e.g. distill.epochs=1.",
        json_schema_extra={"position": 1},
    )
    prompts: str | None = Field(
        default=None,
        description="A CSV, JSONL or Parquet file instead of the recipe's prompts.",
        json_schema_extra={"position": 2},
    )
