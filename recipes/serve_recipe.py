"""kind: serve."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from recipes.serve_rules import argument_problems, variable_problems
from recipes.sglang_rules import sglang_problems
from recipes.written import Written
from registry.digests import canonical_json


class ServeRecipe(Written):
    """kind: serve. The engine and its arguments in production; they are part of the bundle."""

    kind: Literal["serve"]
    description: str
    engine: Literal["vllm", "sglang"] = "vllm"
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of `vllm serve`, or of `sglang.launch_server`, by their own names.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Engine environment variables.")

    @field_validator("engine_args")
    @classmethod
    def _within_the_digest(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        sglang = info.data.get("engine") == "sglang"
        problems = sglang_problems(args) if sglang else argument_problems(args)
        if problems:
            raise ValueError("; ".join(problems))
        try:
            canonical_json(args)
        except TypeError as error:
            raise ValueError(f"cannot be written as JSON: {error}") from None
        return args

    @field_validator("env")
    @classmethod
    def _no_redirection(cls, env: dict[str, str]) -> dict[str, str]:
        problems = variable_problems(env)
        if problems:
            raise ValueError("; ".join(problems))
        return env
