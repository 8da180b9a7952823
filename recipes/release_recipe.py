"""kind: release."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from recipes.prompt_recipe import Prompts
from recipes.written import Written


class Candidate(Written):
    """One bundle of a release: a quantization, how it is served, with or without the draft."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=64)
    quantize: str
    serve: str
    draft: bool = False


Axis = Literal["accuracy", "kept_rate", "latency", "memory", "cost"]
"""What passing candidates are compared by; `kept_rate` of a search, `latency` of fixed rates."""


class Promotion(Written):
    """What happens to the best passing candidate: by one objective, or by weights over several."""

    objective: Literal["fastest", "most_accurate", "cheapest", "smallest", "weights"] = "fastest"
    weights: dict[Axis, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="In proportion: with accuracy 4 and kept_rate 1, 1 % of accuracy is worth 4 % "
        "of rate.",
    )
    first_release: bool = Field(
        default=False, description="May go on where no version of the model was ever promoted."
    )

    @model_validator(mode="before")
    @classmethod
    def _weights_alone(cls, written: object) -> object:
        if isinstance(written, dict) and written.get("weights") and "objective" not in written:
            return {**written, "objective": "weights"}
        return written

    @model_validator(mode="after")
    def _one_way(self) -> Promotion:
        if (self.objective == "weights") != bool(self.weights):
            raise ValueError("give an `objective`, or `weights` with `objective: weights` or none")
        return self


class ProveDraft(Written):
    """A draft has to pay. `load` has a search; `tokens` are numbers of speculative tokens tried."""

    load: str
    tokens: list[Annotated[int, Field(ge=1, le=16)]] = Field(default=[1, 2, 3], min_length=1)
    repeats: int = Field(default=5, ge=2, le=100)


class ReleaseRecipe(Written):
    """kind: release. Names the other recipes, the suites, and the candidates."""

    kind: Literal["release"]
    description: str
    run_on: str | None = Field(
        default=None,
        min_length=1,
        description="Where all of it has run, as it stands; null: nowhere yet. For people: no part "
        "of any stage's key.",
    )
    model: str = Field(description="Name in the registry.")
    prompts: Prompts
    teacher: str
    distill: str
    draft: str | None = None
    candidates: list[Candidate] = Field(min_length=1)
    reference_candidate: str = Field(description="The unquantized student among the candidates.")
    accuracy: str = Field(description="Accuracy suite.")
    load: str = Field(description="Load profile.")
    policy: str = Field(description="Policy with the gates.")
    promotion: Promotion = Promotion()
    prove_draft: ProveDraft | None = Field(default=None, description="None: no draft is proved.")
    traffic: str | None = Field(
        default=None,
        min_length=1,
        exclude=True,
        description="A file that `pilotage profile --out` wrote: at its peak the report says what "
        "the release saves. Decides nothing, and is no part of the release's digest.",
    )
    seed: int = Field(default=0, ge=0)

    @field_validator("model")
    @classmethod
    def _model_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
            raise ValueError(
                f"{name!r} cannot be a registered model's name; allowed are letters, digits, "
                "'_', '.' and '-', starting with a letter or digit"
            )
        return name

    @model_validator(mode="after")
    def _consistent(self) -> ReleaseRecipe:
        names = [candidate.name for candidate in self.candidates]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"candidate names occur twice: {', '.join(doubled)}")
        if self.reference_candidate not in names:
            raise ValueError(f"reference_candidate {self.reference_candidate!r} is no candidate")
        if self.draft is None and any(candidate.draft for candidate in self.candidates):
            raise ValueError("a candidate has `draft: true` but the release names no draft recipe")
        return self
