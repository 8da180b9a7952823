"""A bundle: all that a server is started from, under one digest.

The digest covers the contents of target and draft (weights, quantization, tokenizer and chat
template lie in the target's folder), the engine with its version, its arguments and environment,
and the topology where it is not one engine that does all.
Where the folders lie does not count, nor do file times, names given for people, the order of
keys, or where the draft and the target come from (`root`). What an argument or a variable would
bring in from outside of all this is refused where recipes are read (`recipes/serve_rules.py`).
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from registry.digests import canonical_json, digest_of
from registry.settings import settings
from registry.topology import Disaggregated

NAME = r"^[A-Za-z0-9_-]+$"
"""Names that stay in the store, whoever wrote them."""


class Part(BaseModel):
    """A folder of weights inside a bundle, by where it lies in the store; never a full path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str = Field(pattern=NAME)
    key: str = Field(pattern=NAME)
    below: str = Field(default="", description="Folder within the artifact's files.")
    digest: str = Field(pattern=NAME, description="Digest of that folder's names and contents.")

    @field_validator("below")
    @classmethod
    def _inside(cls, below: str) -> str:
        path = PurePosixPath(below)
        if path.is_absolute() or ".." in path.parts or "\0" in below:
            raise ValueError(f"{below!r} leaves the artifact's folder")
        return below

    @property
    def path(self) -> Path:
        """The folder in this machine's store, or what was fetched because the store lacks it."""
        stored = settings().store_dir / self.stage / self.key / "files" / self.below
        fetched = settings().downloads_dir / self.digest
        return fetched if fetched.is_dir() and not stored.is_dir() else stored


class Bundle(BaseModel):
    """What is gated, served and promoted: always as one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Candidate name, for people; not part of the digest.")
    target: Part
    draft: Part | None = None
    num_speculative_tokens: int | None = None
    engine: str = "vllm"
    engine_version: str
    engine_args: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    topology: Disaggregated | None = Field(
        default=None,
        exclude_if=lambda topology: topology is None,
        description="None: one engine does all; not written then, as before there were others.",
    )
    root: str = Field(
        default="",
        description="Digest of the merged student that target and draft come from; empty: not "
        "known, or no student. Not part of the digest.",
    )

    @field_validator("engine_args")
    @classmethod
    def _in_one_order(cls, args: dict[str, Any]) -> dict[str, Any]:
        # An engine may let a later argument win. The digest knows no order, so there is one only.
        return dict(json.loads(canonical_json(args)))

    @property
    def digest(self) -> str:
        content: dict[str, Any] = {
            "target": self.target.digest,
            "draft": self.draft.digest if self.draft else None,
            "num_speculative_tokens": self.num_speculative_tokens,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "engine_args": self.engine_args,
            "env": self.env,
        }
        if self.topology is not None:
            content["topology"] = self.topology
        return digest_of(content)
