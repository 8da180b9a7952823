"""A bundle: all that a server is started from, under one digest.

The digest covers the contents of target and draft (weights, quantization, tokenizer and chat
template lie in the target's folder), the engine with its version, its arguments and environment.
Where the folders lie does not count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from registry.digests import digest_of
from registry.settings import settings


class Part(BaseModel):
    """A folder of weights inside a bundle, by where it lies in the store; never a full path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    key: str
    below: str = Field(default="", description="Folder within the artifact's files.")
    digest: str = Field(description="Digest of that folder's names and contents.")

    @property
    def path(self) -> Path:
        """The folder in this machine's store."""
        return settings().store_dir / self.stage / self.key / "files" / self.below


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

    @property
    def digest(self) -> str:
        return digest_of(
            {
                "target": self.target.digest,
                "draft": self.draft.digest if self.draft else None,
                "num_speculative_tokens": self.num_speculative_tokens,
                "engine": self.engine,
                "engine_version": self.engine_version,
                "engine_args": self.engine_args,
                "env": self.env,
            }
        )
