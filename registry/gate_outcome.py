"""What judging folders of evidence ends with, when no release is run.

`GateOutcome` is what `pilotage gate --json` prints as its last line, and what the JUnit file, the
Markdown summary and the text for a terminal are drawn from. It holds numbers and digests only.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from registry.outcome import GateResult, LoosenedGate, Result, Verdict, WaiverShown

Settings = Literal["recorded", "unknown"]
"""Whether the evidence says how it was measured; a bare `items.csv` does not."""


class CandidateVerdict(Result):
    """One folder of evidence, judged."""

    name: str
    folder: str
    bundle: str = Field(default="", description="Digest of the bundle; empty where none is named.")
    verdict: Verdict
    reasons: list[str] = Field(
        default_factory=list, description="Why it is not PASS; empty when it is."
    )
    gates: list[GateResult] = Field(default_factory=list)
    level_share: float = Field(
        default=1.0, description="Share of the gates' error that was left to this candidate."
    )
    settings: Settings


class GateOutcome(Result):
    """A policy applied to one or more candidates."""

    schema_version: int = 1
    verdict: Verdict
    promotable: bool = Field(
        description="PASS with known settings, a bundle that is named, no limit, no smoke suite."
    )
    settings: Settings = Field(description="`unknown` as soon as one folder's are.")
    policy: str
    policy_digest: str
    candidates: list[CandidateVerdict]
    references: dict[str, str] = Field(default_factory=dict, description="Folder, by name.")
    notes: list[str] = Field(
        default_factory=list, description="Corrections made, looks, whatever else a reader needs."
    )
    waivers: list[WaiverShown] = Field(default_factory=list)
    loosened: list[LoosenedGate] = Field(default_factory=list)
    seconds: float = Field(ge=0, description="Wall-clock of this run.")

    @model_validator(mode="after")
    def _never_promotes_by_mistake(self) -> GateOutcome:
        if self.promotable and (self.verdict is not Verdict.PASS or self.settings == "unknown"):
            raise ValueError("only PASS with recorded settings is promotable")
        return self
