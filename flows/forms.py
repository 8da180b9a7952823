"""What each flow is asked for: one pydantic model per flow, which Prefect shows as a form."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from recipes.loader import shipped

Reason = Annotated[str, StringConstraints(strip_whitespace=True)]


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


class PromoteRequest(BaseModel):
    """Point an alias to a bundle that passed, on its recorded evidence alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bundle: str = Field(
        description="MODEL@candidate, MODEL@VERSION, or the first digits of a bundle's digest.",
        json_schema_extra={"position": 0},
    )
    alias: str = Field(
        default="champion", description="The alias to move.", json_schema_extra={"position": 1}
    )
    policy: str | None = Field(
        default=None,
        description="A policy that it must have been judged by; empty: the one it was judged by.",
        json_schema_extra={"position": 2},
    )
    reason: Reason = Field(
        default="",
        description="For the ledger; needed for a version that was rolled back.",
        json_schema_extra={"position": 3},
    )
    expected: int | None = Field(
        default=None,
        ge=0,
        description="Version that must hold the alias still, 0 for none; empty: whichever does.",
        json_schema_extra={"position": 4},
    )
    actor: str = Field(
        default="", description="Who or what asks.", json_schema_extra={"position": 5}
    )


class RollbackRequest(BaseModel):
    """Point the champion back to an earlier one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Registered model.", json_schema_extra={"position": 0})
    reason: Reason = Field(
        min_length=1, description="Why; it stands in the ledger.", json_schema_extra={"position": 1}
    )
    to: int | None = Field(
        default=None,
        ge=1,
        description="A version that was champion; empty: the one before.",
        json_schema_extra={"position": 2},
    )
    smoke: bool = Field(
        default=True,
        description="Start it and ask it a prompt first. Off only where no engine is at hand.",
        json_schema_extra={"position": 3},
    )
    actor: str = Field(
        default="", description="Who or what asks.", json_schema_extra={"position": 4}
    )
