"""How the processes of a bundle's server are arranged: one engine, or prefill and decode apart.

Colocated is the default and has no description: one engine does both. Disaggregated are engines
that only compute prompts (prefill), engines that only generate (decode), and a proxy in front that
asks one of each per request; the KV cache goes from the first to the second over a connector.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from registry.digests import canonical_json

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")

COLOCATED = "colocated"
"""What a recipe and a report call the arrangement without a description."""

SIZES = frozenset(
    {
        *("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"),
        *("tp-size", "pp-size", "dp-size"),
    }
)
"""Arguments whose product is the GPUs of an engine: vLLM's, and SGLang's second names."""

DATA_PARALLEL = frozenset({"data-parallel-size", "dp-size"})


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

    @field_validator("connector", mode="before")
    @classmethod
    def _there_is(cls, connector: Any) -> Any:
        if connector == "P2pNcclConnector":
            raise ValueError("vLLM 0.32 has no P2pNcclConnector any more; write NixlConnector")
        return connector

    @field_validator("prefill_args", "decode_args")
    @classmethod
    def _in_one_order(cls, args: dict[str, Any]) -> dict[str, Any]:
        # As in a bundle's `engine_args`: the digest knows no order, so there is one only.
        try:
            return dict(json.loads(canonical_json(args)))
        except TypeError as error:
            raise ValueError(f"cannot be written as JSON: {error}") from None

    @property
    def words(self) -> str:
        """For people: how many of each, and over what."""
        return f"disaggregated, {self.prefill} prefill + {self.decode} decode ({self.connector})"

    def engines(self, role: Role) -> int:
        """How many engines have this role."""
        return self.prefill if role == "prefill" else self.decode

    def own(self, role: Role) -> dict[str, Any]:
        """The arguments of this role alone."""
        return self.prefill_args if role == "prefill" else self.decode_args

    def arguments(self, role: Role, engine_args: Mapping[str, Any]) -> dict[str, Any]:
        """What an engine of this role is started with: the shared arguments, then its own."""
        return {**engine_args, **self.own(role)}


def gpus_of(engine_args: Mapping[str, Any], topology: Disaggregated | None = None) -> int:
    """GPUs of one server: of its engine, or of all its engines."""
    if topology is None:
        return engine_gpus(engine_args)
    return sum(
        topology.engines(role) * engine_gpus(topology.arguments(role, engine_args))
        for role in ROLES
    )


def engine_gpus(engine_args: Mapping[str, Any]) -> int:
    """GPUs of one engine; a size that is no whole number counts as 1."""
    found = 1
    for name, value in engine_args.items():
        text = str(value)
        if name in SIZES and text.isdecimal():
            found *= max(1, int(text))
    return found


def weight_copies(engine_args: Mapping[str, Any], topology: Disaggregated | None = None) -> int:
    """How often one server holds all of the weights: once for each engine and data-parallel rank.

    Tensor and pipeline parallelism divide them.
    """
    if topology is None:
        ranks = {name: size for name, size in engine_args.items() if name in DATA_PARALLEL}
        return engine_gpus(ranks)
    return sum(
        topology.engines(role) * weight_copies(topology.arguments(role, engine_args))
        for role in ROLES
    )


def topology_words(topology: Disaggregated | None) -> str:
    """The arrangement in words; None is the one that has no description."""
    return COLOCATED if topology is None else topology.words


def cpu_env(topology: Disaggregated, cores: int, *, one_host: bool) -> dict[str, str]:
    """Variables of every engine on CPUs with `cores` for all of them. Pure.

    vLLM binds the workers of all engines to the same cores, and each engine's threads would take
    all of them; UCX would try networks that no other part uses. one_host: all engines see each
    other's loopback, and the cache goes over it alone, or UCX would listen on every network of the
    machine, and whoever reaches it there reaches the KV cache.
    """
    return {
        "UCX_TLS": "tcp,sm,self",
        **({"UCX_NET_DEVICES": "lo"} if one_host else {}),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores // (topology.prefill + topology.decode))),
    }


def transfer_config(topology: Disaggregated, role: Role, buffer: str | None = None) -> str:
    """vLLM's JSON for `--kv-transfer-config` of an engine of this role.

    buffer: `cpu` where the cache lies in the machine's memory; None leaves it where the engine
    computes. What cannot be fetched fails the request (vLLM 0.32's own default, said here): a
    prompt that is computed again without a word would hide that nothing is transferred.
    """
    config = {
        "kv_connector": topology.connector,
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "fail",
    }
    if buffer is not None:
        config["kv_buffer_device"] = buffer
    return json.dumps(config)
