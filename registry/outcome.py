"""What a release ends with: a verdict per gate, per candidate, and for the release as a whole.

`ReleaseOutcome` is the document that `--json` prints, that the report is drawn from and that is
kept on the MLflow run. It names bundles by digest and holds numbers, never weights.
"""

from __future__ import annotations

from collections import Counter
from datetime import date, datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from registry.engine_memory import ComparedMemory, PlannedMemory
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


class Waived(Result):
    """A waiver that stood when the gate was judged: its refusal has no say until it expires."""

    owner: str
    reason: str
    expires: date


class Flips(Result):
    """Items that only one side got right, of a gate on a 0/1 metric."""

    gained: int = Field(description="Right with the candidate only.")
    lost: int = Field(description="Right with the reference only.")
    gained_items: list[str] = Field(default_factory=list, description="The first of them, by id.")
    lost_items: list[str] = Field(default_factory=list, description="The first of them, by id.")
    mcnemar_p: float | None = Field(
        default=None, description="Exact two-sided McNemar; large is no proof of equality."
    )


class GateResult(Result):
    """One gate on one bundle. Numbers are null where there is none; the reason says why.

    `estimate`, `bound`, `opposite_bound`, `margin` and `mde` are on one scale: a ratio for
    `retention`, `length`, `ratio` and `draft` (TPOT with the draft over without), a difference for
    `non_inferiority`, `regression`, `slice` and `implausible`, the value itself for `floor` and
    `ceiling`.
    """

    name: str
    kind: str
    metric: str
    tier: str
    result: Verdict
    estimate: float | None
    bound: float | None = Field(
        default=None, description="One-sided confidence bound; PASS when it clears the margin."
    )
    opposite_bound: float | None = Field(
        default=None, description="The other side's; FAIL when it is beyond the margin."
    )
    margin: float = Field(description="As the policy has it.")
    limit: float | None = Field(
        default=None, description="What the bound must clear: the margin, or minus an allowed loss."
    )
    level: float | None = Field(
        default=None, description="One-sided error of the bounds, after all corrections."
    )
    p_value: float | None = Field(default=None, description="Of `no better than the margin`.")
    method: str = Field(default="", description="How the bounds were computed.")
    candidate: float | None = Field(description="The candidate's own value.")
    reference: float | None = Field(default=None, description="The reference's value.")
    reference_name: str | None = Field(
        default=None, description="teacher, student, champion, or none."
    )
    ratio: float | None = Field(default=None, description="candidate / reference.")
    rate: float | None = Field(default=None, description="Requests/s of a latency gate.")
    n: int | None = Field(description="Items scored, or requests sent, behind the estimate.")
    units: int | None = Field(default=None, description="Clusters, where items are clustered.")
    slice: str | None = Field(default=None, description="The worst slice, `column=value`.")
    mde: float | None = Field(
        default=None, description="Nearest true value that would pass in 80 % of runs like this."
    )
    needed: int | None = Field(
        default=None, description="INCONCLUSIVE: further items that would decide in 80 % of runs."
    )
    flips: Flips | None = None
    waived: Waived | None = None
    reason: str

    @property
    def decides(self) -> bool:
        """Whether this gate has a say in the candidate's verdict."""
        return self.tier == "critical" and self.waived is None


class WaiverShown(Result):
    """A waiver of the policy, whether or not it changed anything."""

    gate: str
    owner: str
    reason: str
    expires: date
    state: Literal["active", "expired", "unused"]


class LoosenedGate(Result):
    """A gate that asks for less than the policy that promoted the champion."""

    gate: str
    what: str = Field(description="What was loosened, e.g. `margin 0.95 -> 0.90`.")
    acknowledged_by: str | None = Field(description="Who owned up to it; null refuses.")
    reason: str = ""


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
    latency: list[LoadPoint] = Field(default_factory=list, description="In order of measuring.")
    kept_rate: tuple[float | None, float | None] | None = Field(
        default=None, description="Highest rate kept, lowest not kept; null: no search."
    )
    emulated: bool | None = Field(
        default=None,
        description="Its times are those of an emulated kernel, not of its format; null: unknown.",
    )
    times_count: bool = Field(
        default=True,
        description="False: emulated, under a profile of production; compared with nobody's.",
    )
    target: str = Field(default="", description="Digest of the target weights.")
    draft: bool = Field(default=False, description="Served with its EAGLE3 draft on.")
    topology: str = Field(
        default="", description="How its processes are arranged; empty: one engine does all."
    )
    size_bytes: int | None = Field(default=None, description="Bytes of the target's weights.")
    weight_copies: int = Field(
        default=1,
        exclude_if=lambda copies: copies == 1,
        description="How often its server holds the weights: once for each engine.",
    )
    draft_bytes: int | None = Field(
        default=None, description="Bytes of the draft's weights; null: no draft, or not known."
    )
    memory: list[ComparedMemory] = Field(
        default_factory=list, description="Figures of its plan beside what was measured."
    )
    planned_memory: PlannedMemory | None = Field(
        default=None, description="Of its plan, before it was started; null: it knows nothing."
    )
    engines: dict[str, str] = Field(
        default_factory=dict, description="What measured it, by kind of evidence."
    )
    evidence: dict[str, str] = Field(
        default_factory=dict, description="Digest of each evidence folder, by kind."
    )


class Measure(Result):
    """A candidate's number on one axis and its interval; differences within it are noise."""

    value: float | None = Field(description="Null: not measured.")
    low: float | None = Field(default=None, description="End of the interval; null: open.")
    high: float | None = Field(default=None, description="The other end; exact: both the value.")


class ComparedAxis(Result):
    """One thing by which candidates that passed are compared."""

    key: Literal["accuracy", "kept_rate", "latency", "memory", "cost"]
    label: str
    better: Literal["higher", "lower"]
    values: dict[str, Measure] = Field(description="By candidate.")


AXES_OF = {
    "fastest": ("kept_rate", "latency"),
    "most_accurate": ("accuracy",),
    "cheapest": ("cost",),
    "smallest": ("memory",),
}
"""What an objective looks at: the one of them that there is."""


class Selection(Result):
    """Which of the candidates that passed was chosen, and why the others were not.

    One dominates another when it is at least as good on every axis and better on one beyond the
    noise of both. The front is who is dominated by nobody.
    """

    objective: str = Field(description="As in the recipe; `weights` where those decide.")
    weights: dict[str, float] = Field(default_factory=dict, description="Sum 1.")
    axes: list[ComparedAxis] = Field(default_factory=list)
    front: list[str] = Field(default_factory=list, description="Names in the recipe's order.")
    dominated: dict[str, list[str]] = Field(default_factory=dict, description="By whom.")
    nearly: dict[str, list[str]] = Field(
        default_factory=dict,
        description="No better than these on any axis, but worse only within the noise.",
    )
    scores: dict[str, Measure] = Field(
        default_factory=dict, description="With weights; 1 would be the best on every axis."
    )
    equal: list[str] = Field(
        default_factory=list, description="Others on the front that may be as good as the chosen."
    )
    chosen: str | None = None
    reason: str = Field(description="One sentence, with the numbers.")
    notes: list[str] = Field(default_factory=list, description="Axes left out, ties.")


class SavingSide(Result):
    """One bundle under the load. The value follows from the rate that was proved; the other end
    from the lowest rate that was not kept; null: none was lost, so that end is open."""

    name: str
    kept_rate: tuple[float, float | None] = Field(description="As in the evidence, requests/s.")
    gpus_per_replica: int = Field(description="0: a CPU.")
    replicas: Measure
    gpus: Measure
    cost_per_month: Measure | None = Field(default=None, description="Null: no price is known.")


class Savings(Result):
    """The released bundle against the reference at the same limits; `reason`: why nothing is said.

    Savings are what the reference takes more.
    """

    released: str
    reference: str
    reason: str = ""
    rate: float | None = Field(default=None, description="Requests/s at the peak; null: of 1.")
    rate_source: str = ""
    sla: list[str] = Field(default_factory=list)
    hardware: str | None = None
    price_per_hour: float | None = None
    currency: str | None = None
    sides: list[SavingSide] = Field(default_factory=list, description="Released, reference.")
    replicas: Measure | None = None
    saving_per_month: Measure | None = None
    saving_share: Measure | None = Field(
        default=None, description="Of the reference's cost; of its replicas without a price."
    )
    notes: list[str] = Field(default_factory=list)


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
    awaits_approval: int | None = Field(
        default=None, description="Version that passed and that a person is asked about now."
    )
    champion: Champion | None = Field(default=None, description="After this release.")
    previous: Champion | None = Field(default=None, description="The version it replaced.")
    candidates: list[CandidateOutcome]
    selection: Selection | None = Field(
        default=None, description="Who was chosen among those that passed; null: an older release."
    )
    savings: Savings | None = Field(
        default=None, description="Against the reference candidate; null: an older release."
    )
    stages: list[StageOutcome] = Field(default_factory=list)
    notes: list[str] = Field(
        default_factory=list,
        description="Corrections made to the gates' error, and what was not judged.",
    )
    waivers: list[WaiverShown] = Field(default_factory=list)
    loosened: list[LoosenedGate] = Field(default_factory=list)
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
