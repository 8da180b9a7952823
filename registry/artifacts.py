"""What a stage is asked for (`Stage`), and what it leaves behind (`ArtifactRef`, `Manifest`).

A stage's key names its *inputs*: stage name and version, resolved recipe section, the keys of
the stages it builds on, digests of outside files, and the tool versions that matter. So the
whole plan of a release has its keys before anything has run, and `--dry-run` can say what would
be reused. An artifact's digest names its *content*. The store checks both (see `store.py`).
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from registry.digests import digest_of, digest_of_listing


class Stage(BaseModel):
    """One step of a plan, fully determined: equal stages have equal keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9_]+$", description="Kind of stage, e.g. `quantize`.")
    label: str = Field(default="", description="Which one, for people, e.g. `w8a8_int8`.")
    version: int = Field(ge=1, description="Raised when the code of the stage changes its output.")
    config: dict[str, Any] = Field(default_factory=dict, description="Resolved recipe section.")
    parents: dict[str, Stage] = Field(default_factory=dict, description="Stages by role.")
    inputs: dict[str, str] = Field(default_factory=dict, description="Digests of outside data.")
    tools: dict[str, str] = Field(default_factory=dict, description="Tool versions by name.")

    @property
    def key(self) -> str:
        """Hex SHA-256; the label is for people and does not count."""
        return digest_of(
            {
                "stage": self.name,
                "version": self.version,
                "config": self.config,
                "parents": {role: parent.key for role, parent in self.parents.items()},
                "inputs": self.inputs,
                "tools": self.tools,
            }
        )

    @property
    def title(self) -> str:
        return f"{self.name} {self.label}".strip()


class ArtifactRef(BaseModel):
    """A finished stage, small enough to travel through Prefect: names, never weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    key: str
    digest: str
    path: Path = Field(description="Folder of the artifact's files.")
    summary: dict[str, Any] = Field(default_factory=dict, description="What the stage measured.")
    made_at: datetime
    seconds: float = Field(ge=0, description="How long it took when it was made.")
    reused: bool = Field(description="True when it was found in the store and nothing ran.")


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    sha256: str


class Manifest(BaseModel):
    """Written last; a store entry without a complete, matching manifest does not exist."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    stage: str
    stage_version: int
    label: str
    key: str
    digest: str
    files: dict[str, FileEntry]
    config: dict[str, Any]
    parents: dict[str, dict[str, str]] = Field(
        description="By role: stage, key, and the content digest that was read."
    )
    inputs: dict[str, str]
    tools: dict[str, str]
    provenance: dict[str, Any] = Field(description="Git revision, host hardware, environments.")
    summary: dict[str, Any]
    made_at: datetime
    seconds: float

    @field_validator("parents")
    @classmethod
    def _named(cls, parents: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for role, parent in parents.items():
            if lacking := {"stage", "key", "digest"} - parent.keys():
                raise ValueError(f"parent {role} has no {', '.join(sorted(lacking))}")
        return parents

    @property
    def is_of_its_files(self) -> bool:
        """Whether the digest is that of the files which are listed, of which there are some."""
        listed = {name: file.sha256 for name, file in self.files.items()}
        return bool(listed) and self.digest == digest_of_listing(listed)
