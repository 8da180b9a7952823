"""How the processes of a bundle's server are arranged: one engine, or prefill and decode apart.

Colocated is the default and has no description: one engine does both. Disaggregated are engines
that only compute prompts (prefill), engines that only generate (decode), and a proxy in front that
asks one of each per request; the KV cache goes from the first to the second over a connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")

COLOCATED = "colocated"
"""What a recipe and a report call the arrangement without a description."""


class Disaggregated(BaseModel):
    """x prefill engines, y decode engines, a proxy, and what carries the KV cache between them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["disaggregated"] = "disaggregated"
    prefill: int = Field(default=1, ge=1, le=64, description="Engines that compute prompts.")
    decode: int = Field(default=1, ge=1, le=64, description="Engines that generate.")
    connector: Literal["NixlConnector"] = Field(
        default="NixlConnector",
        description="vLLM's name of what moves the KV cache; P2pNcclConnector is not in vLLM 0.32.",
    )
    prefill_args: dict[str, Any] = Field(
        default_factory=dict, description="Engine arguments of the prefill engines alone."
    )
    decode_args: dict[str, Any] = Field(
        default_factory=dict, description="Engine arguments of the decode engines alone."
    )

    def engines(self, role: Role) -> int:
        """How many engines have this role."""
        return self.prefill if role == "prefill" else self.decode

    def arguments(self, role: Role, engine_args: Mapping[str, Any]) -> dict[str, Any]:
        """What an engine of this role is started with: the shared arguments, then its own."""
        own = self.prefill_args if role == "prefill" else self.decode_args
        return {**engine_args, **own}
