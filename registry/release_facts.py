"""What a release says of a candidate beside its outcome: all that a promotion demands later.

Written into every candidate's LoggedModel, so that a promotion reads recorded facts alone.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

RELEASE_FILE = "release.json"


class ReleaseFacts(BaseModel):
    """How a candidate was judged: by which policy, against which champion, on what machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    release: str = Field(description="Digest of resolved recipe and evidence.")
    recipe: str = Field(description="Name of the release recipe.")
    recipe_digest: str
    model: str = Field(description="Name in the registry.")
    policy_name: str
    policy: dict[str, Any] = Field(description="The resolved policy.")
    policy_digest: str
    suite: str = Field(description="Accuracy suite.")
    profile: str = Field(description="Load profile.")
    champion: int | None = Field(description="Version that was champion when it was judged.")
    first_release: bool
    prompts: str = Field(description="Digest of the prompt set.")
    smoke: list[dict[str, Any]] = Field(
        default_factory=list, description="Messages of the smoke prompt, a business prompt."
    )
