"""Policies: which gates a candidate must pass, by how much, and with how much certainty."""

from __future__ import annotations

import math
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from recipes.schema import Written

Kind = Literal[
    "retention",
    "non_inferiority",
    "regression",
    "slice",
    "floor",
    "ceiling",
    "length",
    "ratio",
    "implausible",
]
Reference = Literal["teacher", "student", "champion"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]


def _no_boolean(written: Any) -> Any:
    """`true` is no number: as 1 it would be the loosest `min_items` there is."""
    if isinstance(written, bool):
        raise ValueError("must be a number, not true or false")
    return written


Number = Annotated[float, BeforeValidator(_no_boolean)]
Count = Annotated[int, BeforeValidator(_no_boolean)]

ABSOLUTE = ("floor", "ceiling")
DIFFERENCES = ("non_inferiority", "regression", "slice", "implausible")
DEFAULT_RETENTION = 0.90
KEPT_RATE = "latency.kept_rate"
"""The largest request rate that keeps the load profile's SLA, from a search."""

STRATA, CLUSTER = "segment", "conversation"
"""Columns that items are stratified and clustered by where they have them."""


class GateRule(Written):
    """One gate of a policy.

    ================  ==========================================================================
    kind              passes when, with the gate's confidence,
    ================  ==========================================================================
    retention         candidate / reference is above `margin` (default 0.90), a ratio
    non_inferiority   candidate - reference is above -`margin`, an absolute loss
    regression        the same against the champion, with McNemar's test and the flips beside it
    slice             the same in the worst segment (`slices`, by default `segment`)
    floor, ceiling    the candidate's own value is above / below `margin`
    length            candidate / reference of `output_tokens` is below `margin`, a ratio
    ratio             candidate / reference of two means is at least `margin`: no bound, advisory
    implausible       candidate - reference is at most `margin`; more is ANOMALOUS, no bound
    ================  ==========================================================================

    Latency metrics take only floor and ceiling. Percentiles of TTFT, TPOT and E2EL have a bound
    from order statistics; other latency figures are judged as they are. `latency.kept_rate` is a
    search's interval: PASS when its lower end is at least `margin`, FAIL when its upper end is at
    most that.
    """

    name: Name
    metric: str = Field(
        min_length=1, description="`hit_rate`, `output_tokens`, `latency.e2el_p99_ms`, ..."
    )
    kind: Kind
    reference: Reference | None = None
    margin: Number = Field(description="On the scale of the estimate; see the kinds.")
    direction: Literal["higher", "lower"] = Field(
        default="higher", description="Which way is better, for the kinds that are differences."
    )
    tier: Literal["critical", "supporting", "advisory"] = Field(
        default="critical", description="Only critical gates have a say in the verdict."
    )
    confidence: Number = Field(default=0.95, gt=0.5, lt=1, description="One-sided.")
    slices: list[str] = Field(
        default_factory=list, description="Columns; the gate must hold in each of their values."
    )
    expected: list[str] = Field(
        default_factory=list, description="Values that must occur in the slices."
    )
    strata: str | None = Field(default=STRATA, description="Column the bootstrap is stratified by.")
    cluster: str | None = Field(
        default=CLUSTER, description="Column whose items are not independent of each other."
    )
    min_items: Count = Field(
        default=100, ge=1, description="Fewer items (in each slice) than this can never pass."
    )
    rate: Number | None = Field(
        default=None, gt=0, description="Request rate of a latency metric, in requests/s."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, written: object) -> object:
        if not isinstance(written, dict):
            return written
        kind = written.get("kind")
        by_kind: dict[str, dict[str, object]] = {
            "retention": {"margin": DEFAULT_RETENTION},
            "regression": {"reference": "champion"},
            "slice": {"slices": [STRATA]},
            "length": {"metric": "output_tokens", "direction": "lower"},
            "ratio": {"tier": "advisory"},
            "ceiling": {"direction": "lower"},
        }
        return {**by_kind.get(str(kind), {}), **written}

    @field_validator("metric")
    @classmethod
    def _plain(cls, metric: str) -> str:
        return metric.removeprefix("accuracy.")

    @property
    def on_latency(self) -> bool:
        return self.metric.startswith("latency.")

    @property
    def named_columns(self) -> set[str]:
        """Strata and cluster columns that the policy asks for itself, so they must be there."""
        columns = {"strata": self.strata, "cluster": self.cluster}
        return {name for field, name in columns.items() if name and field in self.model_fields_set}

    @model_validator(mode="after")
    def _sound(self) -> GateRule:
        if not math.isfinite(self.margin):
            raise ValueError("margin must be a finite number")
        absolute = self.kind in ABSOLUTE
        if absolute == (self.reference is not None):
            raise ValueError(
                f"{self.kind} {'takes no' if absolute else 'needs a'} reference"
                + ("" if absolute else " (teacher, student or champion)")
            )
        if self.kind == "regression" and self.reference != "champion":
            raise ValueError("regression compares with the champion; use non_inferiority")
        if self.kind in ("retention", "ratio") and not 0 < self.margin <= 1:
            raise ValueError(f"margin of a {self.kind} must be above 0 and at most 1")
        if self.kind in DIFFERENCES and self.margin < 0:
            raise ValueError(f"margin of {self.kind} must not be negative: it is a loss allowed")
        if self.kind == "length" and not 0 < self.margin <= 100:
            raise ValueError("margin of a length must be above 0 and at most 100, e.g. 1.2")
        if self.kind == "ratio" and self.tier != "advisory":
            raise ValueError("ratio has no bound, so its tier must be advisory; use retention")
        if self.kind == "slice" and not self.slices:
            raise ValueError("slice needs `slices`, e.g. [segment]")
        if self.expected and not self.slices:
            raise ValueError("`expected` belongs to `slices`")
        if self.kind in ("retention", "ratio", "floor") and self.direction == "lower":
            raise ValueError(f"{self.kind} is for metrics where higher is better")
        if self.kind in ("length", "ceiling") and self.direction == "higher":
            raise ValueError(f"{self.kind} is for metrics where lower is better")
        if self.metric == KEPT_RATE:
            if self.kind != "floor" or self.rate is not None:
                raise ValueError(f"{KEPT_RATE} is a floor in requests/s, without a `rate`")
        elif self.on_latency != (self.rate is not None):
            raise ValueError("`rate` belongs to latency metrics, and they need it")
        if self.on_latency and not absolute:
            raise ValueError(f"{self.kind} is not for latency metrics; use ceiling or floor")
        if self.slices and (self.on_latency or self.kind in ("ratio", "implausible")):
            raise ValueError(f"{self.kind} of {self.metric} has no slices")
        return self


class Look(Written):
    """One planned look at growing evidence, and its share of the error."""

    items: Count = Field(gt=0, description="Items scored so far.")
    share: Number = Field(gt=0, le=1, description="Of the error that the gates' confidence leaves.")


class Waiver(Written):
    """A refusal that has no say until a day, because somebody answers for it."""

    gate: Name
    owner: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    expires: date = Field(description="The last day on which it counts (UTC).")


class Acknowledged(Written):
    """A gate that is looser than when the champion was promoted, because somebody wants it so."""

    gate: str = Field(min_length=1, description="Name of the gate, or `policy` for its settings.")
    owner: str = Field(min_length=1)
    reason: str = Field(min_length=1)


class Approval(Written):
    """A person says yes before the champion moves, or it does not move."""

    deadline_hours: Number = Field(
        default=12.0, gt=0, le=24 * 30, description="Without an answer until then it is a no."
    )


class Policy(Written):
    """kind: policy. The gates that a candidate must pass; all critical ones, always."""

    kind: Literal["policy"]
    description: str
    gates: list[GateRule] = Field(min_length=1)
    looks: list[Look] = Field(
        default_factory=list,
        description="Numbers of items at which may be judged, decided before the first.",
    )
    waivers: list[Waiver] = Field(default_factory=list)
    acknowledged: list[Acknowledged] = Field(default_factory=list)
    noise_floor: bool = Field(
        default=False, description="Demand an A/A run; a margin below its noise decides nothing."
    )
    allow_limited: bool = Field(
        default=False, description="Let evidence pass whose task was cut by a limit."
    )
    max_age_days: Number = Field(
        default=30.0, gt=0, description="Older latency evidence is measured again."
    )
    approval: Approval | None = Field(
        default=None, description="Ask a person before a version becomes the champion."
    )

    @model_serializer(mode="wrap")
    def _as_written(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `approval` where there is none: such a policy keeps the digest that it had."""
        written: dict[str, Any] = plain(self)
        if self.approval is None:
            written.pop("approval", None)
        return written

    @model_validator(mode="after")
    def _usable(self) -> Policy:
        names = [gate.name for gate in self.gates]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"gate names occur twice: {', '.join(doubled)}")
        asking = [gate for gate in self.gates if gate.kind != "implausible"]
        if not any(gate.tier == "critical" for gate in asking):
            raise ValueError("a policy needs at least one critical gate beside implausible ones")
        if "policy" in names:
            raise ValueError(
                "no gate may be called policy: `acknowledged` means its settings by it"
            )
        unknown = sorted({waiver.gate for waiver in self.waivers} - set(names))
        if unknown:
            raise ValueError(f"waivers name no gate of this policy: {', '.join(unknown)}")
        waived = [waiver.gate for waiver in self.waivers]
        if len(set(waived)) < len(waived):
            raise ValueError("a gate has two waivers")
        items = [look.items for look in self.looks]
        if items != sorted(set(items)):
            raise ValueError("looks must have rising numbers of items")
        if sum(look.share for look in self.looks) > 1 + 1e-9:
            raise ValueError("the shares of the looks add up to more than 1")
        return self
