"""What a release ends with: a verdict per gate, per candidate, and for the release as a whole.

`ReleaseOutcome` is the document that `--json` prints, that the report is drawn from and that is
kept on the MLflow run. It names bundles by digest and holds numbers, never weights.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from registry.errors import EXIT_INCONCLUSIVE, EXIT_PASS, EXIT_REFUSED
from registry.evidence import LoadPoint


class Verdict(StrEnum):
    """The six words; only PASS promotes."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    ANOMALOUS = "ANOMALOUS"
    INFEASIBLE = "INFEASIBLE"
    INVALID = "INVALID"

    @property
    def exit_status(self) -> int:
        if self is Verdict.PASS:
            return EXIT_PASS
        return EXIT_INCONCLUSIVE if self is Verdict.INCONCLUSIVE else EXIT_REFUSED


class Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GateResult(Result):
    """One gate on one bundle. Numbers are null where there is none; the reason says why."""

    name: str
    kind: str
    metric: str
    tier: str
    result: Verdict
    estimate: float | None = Field(
        description="On the scale of the margin: a ratio, a difference, or the value itself."
    )
    margin: float
    candidate: float | None = Field(description="The candidate's own value.")
    reference: float | None = Field(default=None, description="The reference's value.")
    reference_name: str | None = Field(default=None, description="teacher, student, or none.")
    ratio: float | None = Field(default=None, description="candidate / reference.")
    rate: float | None = Field(default=None, description="Requests/s of a latency gate.")
    n: int | None = Field(description="Items scored, or requests sent, behind the estimate.")
    reason: str

    @property
    def decides(self) -> bool:
        """Whether this gate has a say in the candidate's verdict."""
        return self.tier == "critical"


class CandidateOutcome(Result):
    """One bundle of a release, judged."""

    name: str
    bundle: str = Field(description="Digest of the bundle.")
    verdict: Verdict
    reasons: list[str] = Field(description="Why it is not PASS; empty when it is.")
    gates: list[GateResult] = Field(default_factory=list)
    metrics: dict[str, float | None] = Field(
        default_factory=dict, description="Accuracy means, by metric; null: no number."
    )
    latency: list[LoadPoint] = Field(default_factory=list, description="Rising request rates.")
    target: str = Field(default="", description="Digest of the target weights.")
    draft: bool = Field(default=False, description="Served with its EAGLE3 draft on.")
    size_bytes: int | None = Field(default=None, description="Bytes of the target's weights.")
    engines: dict[str, str] = Field(
        default_factory=dict, description="What measured it, by kind of evidence."
    )
    evidence: dict[str, str] = Field(
        default_factory=dict, description="Digest of each evidence folder, by kind."
    )


class Champion(Result):
    """The version that an alias points to."""

    version: int
    bundle: str
    alias: str = "champion"


class StageOutcome(Result):
    """One stage of the plan, as it went."""

    name: str
    key: str
    reused: bool = Field(description="Found in the store; nothing ran.")
    seconds: float = Field(ge=0, description="Spent now; near 0 when reused.")
    made_seconds: float | None = Field(
        default=None, description="What it took when it was made, however long ago."
    )


class ReleaseOutcome(Result):
    """A whole release. The last line of `pilotage release --json` is this as JSON."""

    schema_version: int = 1
    release: str = Field(description="Digest of resolved recipe and evidence: which release.")
    name: str = Field(description="Name of the release recipe.")
    verdict: Verdict
    reasons: list[str] = Field(default_factory=list, description="About the release as a whole.")
    model: str = Field(description="Name in the registry.")
    version: int | None = Field(default=None, description="Version promoted by this release.")
    promoted: str | None = Field(default=None, description="Name of the promoted candidate.")
    champion: Champion | None = Field(default=None, description="After this release.")
    previous: Champion | None = Field(default=None, description="The version it replaced.")
    candidates: list[CandidateOutcome]
    stages: list[StageOutcome] = Field(default_factory=list)
    report: Path | None = None
    run_id: str | None = Field(default=None, description="MLflow parent run.")
    policy: str = ""
    suite: str = ""
    profile: str = ""
    recipe_digest: str = ""
    finished_at: datetime
    seconds: float = Field(ge=0, description="Wall-clock of this run.")

    def counts(self) -> dict[Verdict, int]:
        """How many candidates ended with each verdict."""
        return dict(Counter(candidate.verdict for candidate in self.candidates))
