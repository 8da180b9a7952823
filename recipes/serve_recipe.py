"""kind: serve."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from recipes.serve_rules import argument_problems, variable_problems
from recipes.sglang_rules import sglang_problems
from recipes.topology_rules import topology_problems
from recipes.written import Written
from registry.digests import canonical_json
from registry.topology import COLOCATED, Disaggregated


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
    topology: Disaggregated | None = Field(
        default=None,
        exclude_if=lambda topology: topology is None,
        description="`colocated`: one engine does all. Or `kind: disaggregated` with how many "
        "engines compute prompts (`prefill`) and how many generate (`decode`).",
    )

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

    @field_validator("topology", mode="before")
    @classmethod
    def _colocated_has_no_description(cls, written: Any) -> Any:
        if written == COLOCATED:
            return None
        if isinstance(written, str):
            raise ValueError(f"is `{COLOCATED}`, or a mapping with `kind: disaggregated`")
        return written

    @field_validator("topology")
    @classmethod
    def _that_the_engine_has(
        cls, topology: Disaggregated | None, info: ValidationInfo
    ) -> Disaggregated | None:
        if topology is None:
            return None
        if info.data.get("engine") == "sglang":
            raise ValueError("only `engine: vllm` is served in parts")
        problems = topology_problems(topology, info.data.get("engine_args") or {})
        if problems:
            raise ValueError("; ".join(problems))
        return topology
