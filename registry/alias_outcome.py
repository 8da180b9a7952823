"""What a promotion or a rollback ends with: one JSON document, and a text for a terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from registry.promotion import Moved


class SmokeAnswer(BaseModel):
    """What a freshly started bundle said to its smoke prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str = Field(description="What was started: MODEL@ALIAS or MODEL@VERSION.")
    bundle: str
    prompt: str
    text: str
    tokens: int
    hardware: str = Field(default="", description="Fingerprint of the machine that answered.")
    startup_seconds: float
    seconds: float


class AliasOutcome(BaseModel):
    """An alias that was moved, or stood right already. `pilotage promote --json` prints this."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    action: Literal["promote", "rollback"]
    model: str
    alias: str
    version: int
    bundle: str = Field(description="Digest of what the alias points to now.")
    before: int | None = Field(description="Version that held the alias before; null: none.")
    changed: bool = Field(description="False: it pointed there already, nothing was written.")
    line: int | None = Field(description="Number of the ledger's line that says so.")
    line_hash: str = ""
    actor: str = ""
    reason: str = ""
    smoke: list[SmokeAnswer] = Field(
        default_factory=list, description="Answers before and after the move."
    )
    finished_at: datetime
    seconds: float = Field(ge=0)

    @classmethod
    def of(
        cls,
        action: Literal["promote", "rollback"],
        model: str,
        alias: str,
        bundle: str,
        moved: Moved,
        smoke: list[SmokeAnswer],
        seconds: float,
    ) -> Self:
        """What came of a move that was read back."""
        line = moved.entry
        return cls(
            action=action,
            model=model,
            alias=alias,
            version=moved.version,
            bundle=bundle,
            before=moved.before,
            changed=moved.changed,
            line=line.sequence if line else None,
            line_hash=line.hash if line else "",
            actor=line.actor if line else "",
            reason=line.reason if line else "",
            smoke=smoke,
            finished_at=datetime.now(UTC),
            seconds=round(seconds, 2),
        )
