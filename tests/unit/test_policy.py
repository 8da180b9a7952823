"""What a policy file may say, what it leaves to defaults, and the words of each refusal."""

from __future__ import annotations

import math
from datetime import date

import pytest
import yaml
from pydantic import ValidationError

from eval_suites.policy import GateRule, Policy
from eval_suites.questions import scale_of

BASE = {"name": "g", "metric": "hit_rate", "kind": "retention", "reference": "teacher"}
KINDS = {
    "retention": {"reference": "teacher"},
    "non_inferiority": {"reference": "teacher", "margin": 0.02},
    "regression": {"margin": 0.01},
    "slice": {"reference": "teacher", "margin": 0.05},
    "floor": {"margin": 0.8},
    "ceiling": {"margin": 0.1},
    "length": {"reference": "teacher", "margin": 1.2},
    "ratio": {"reference": "teacher", "margin": 0.9},
    "implausible": {"reference": "student", "margin": 0.1},
}
METRIC = {kind: {} if kind == "length" else {"metric": "hit_rate"} for kind in KINDS}


def gate(kind: str, **changes) -> GateRule:
    fields = {"name": "g", "kind": kind, **METRIC[kind], **KINDS[kind], **changes}
    return GateRule.model_validate({key: v for key, v in fields.items() if v is not ...})


def policy(**changes) -> Policy:
    return Policy.model_validate({"kind": "policy", "description": "d", "gates": [BASE], **changes})


# -- defaults --------------------------------------------------------------------------------


def test_what_every_gate_is_where_nothing_is_said():
    one = GateRule.model_validate(BASE)
    assert (one.tier, one.confidence, one.min_items) == ("critical", 0.95, 100)
    assert (one.strata, one.cluster, one.slices, one.expected) == (
        "segment",
        "conversation",
        [],
        [],
    )
    assert (one.direction, one.rate, one.named_columns) == ("higher", None, set())


def test_defaults_of_each_kind():
    assert gate("retention").margin == 0.90
    assert gate("regression").reference == "champion"
    assert gate("slice").slices == ["segment"]
    assert (gate("length").metric, gate("length").direction) == ("output_tokens", "lower")
    assert gate("ratio").tier == "advisory"
    assert gate("ceiling").direction == "lower"


def test_what_is_written_wins_over_the_defaults():
    assert gate("retention", margin=0.97).margin == 0.97
    assert gate("slice", slices=["language"]).slices == ["language"]
    assert gate("length", metric="words").metric == "words"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "retention"])
def test_a_margin_is_needed_by_every_kind_but_retention(kind):
    with pytest.raises(ValidationError, match=r"margin\n  Field required"):
        gate(kind, margin=...)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "length"])
def test_a_metric_is_needed_by_every_kind_but_length(kind):
    with pytest.raises(ValidationError, match=r"metric\n  Field required"):
        gate(kind, metric=...)


def test_metrics_are_named_with_or_without_their_kind_of_evidence():
    assert gate("retention", metric="accuracy.slot_f1") == gate("retention", metric="slot_f1")
    sla = gate("ceiling", metric="latency.e2el_p99_ms", rate=2.0, margin=900)
    assert sla.on_latency and not gate("ceiling").on_latency


def test_columns_that_the_policy_names_itself_must_be_there():
    assert gate("retention", strata="topic").named_columns == {"topic"}
    assert gate("retention", cluster="conversation").named_columns == {"conversation"}
    assert gate("retention", strata=None, cluster=None).named_columns == set()


@pytest.mark.parametrize(
    ("kind", "changes", "asked"),
    [
        ("retention", {"margin": 0.95}, ("ratio", 0.95, 1)),
        ("length", {"margin": 1.2}, ("ratio", 1.2, -1)),
        ("floor", {"margin": 0.8}, ("mean", 0.8, 1)),
        ("ceiling", {"margin": 0.1}, ("mean", 0.1, -1)),
        ("non_inferiority", {"margin": 0.02}, ("difference", -0.02, 1)),
        ("non_inferiority", {"margin": 0.02, "direction": "lower"}, ("difference", 0.02, -1)),
        ("regression", {"margin": 0.01}, ("difference", -0.01, 1)),
        ("slice", {"margin": 0.05}, ("difference", -0.05, 1)),
        ("slice", {"margin": 0.05, "direction": "lower"}, ("difference", 0.05, -1)),
    ],
)
def test_the_question_that_each_kind_asks(kind, changes, asked):
    assert scale_of(gate(kind, **changes)) == asked


# -- what a gate may not say -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("retention", {"name": "Hit Rate"}, "should match pattern"),
        ("retention", {"metric": ""}, "at least 1 character"),
        ("retention", {"tier": "vital"}, "'critical', 'supporting' or 'advisory'"),
        ("retention", {"reference": "oracle"}, "'teacher', 'student' or 'champion'"),
        ("retention", {"margn": 0.9}, "Extra inputs are not permitted"),
        ("retention", {"margin": math.nan}, "finite number"),
        ("retention", {"margin": math.inf}, "finite number"),
        ("retention", {"margin": "most"}, "valid number"),
        ("retention", {"margin": None}, "valid number"),
        ("retention", {"margin": True}, "must be a number, not true or false"),
        ("retention", {"min_items": True}, "must be a number, not true or false"),
        ("retention", {"min_items": 99.5}, "valid integer"),
        ("floor", {"rate": True}, "must be a number, not true or false"),
        ("retention", {"confidence": 0.5}, "greater than 0.5"),
        ("retention", {"confidence": 1.0}, "less than 1"),
        ("retention", {"confidence": 95}, "less than 1"),
        ("retention", {"min_items": 0}, "greater than or equal to 1"),
        ("retention", {"rate": 0, "metric": "latency.e2el_p99_ms"}, "greater than 0"),
        ("retention", {"margin": 0.0}, "margin of a retention must be above 0 and at most 1"),
        ("retention", {"margin": 1.1}, "margin of a retention must be above 0 and at most 1"),
        ("retention", {"margin": -1}, "margin of a retention must be above 0 and at most 1"),
        ("ratio", {"margin": 90}, "margin of a ratio must be above 0 and at most 1"),
        ("retention", {"reference": ...}, "retention needs a reference (teacher, student or"),
        ("implausible", {"reference": ...}, "implausible needs a reference"),
        ("floor", {"reference": "teacher"}, "floor takes no reference"),
        ("ceiling", {"reference": "champion"}, "ceiling takes no reference"),
        ("regression", {"reference": "teacher"}, "compares with the champion; use non_inferiority"),
        ("non_inferiority", {"margin": -0.02}, "margin of non_inferiority must not be negative"),
        ("regression", {"margin": -0.01}, "must not be negative: it is a loss allowed"),
        ("slice", {"margin": -0.05}, "margin of slice must not be negative"),
        ("implausible", {"margin": -0.1}, "margin of implausible must not be negative"),
        ("length", {"margin": 0}, "margin of a length must be above 0 and at most 100"),
        ("length", {"margin": 120}, "margin of a length must be above 0 and at most 100"),
        ("ratio", {"tier": "critical"}, "ratio has no bound, so its tier must be advisory"),
        ("ratio", {"tier": "supporting"}, "its tier must be advisory; use retention"),
        ("slice", {"slices": []}, "slice needs `slices`, e.g. [segment]"),
        ("retention", {"expected": ["air"]}, "`expected` belongs to `slices`"),
        ("retention", {"direction": "lower"}, "retention is for metrics where higher is better"),
        ("floor", {"direction": "lower"}, "floor is for metrics where higher is better"),
        ("ratio", {"direction": "lower"}, "ratio is for metrics where higher is better"),
        ("length", {"direction": "higher"}, "length is for metrics where lower is better"),
        ("ceiling", {"direction": "higher"}, "ceiling is for metrics where lower is better"),
        ("floor", {"rate": 2.0}, "`rate` belongs to latency metrics, and they need it"),
        ("ceiling", {"metric": "latency.e2el_p99_ms"}, "`rate` belongs to latency metrics"),
        (
            "non_inferiority",
            {"metric": "latency.e2el_p99_ms", "rate": 2.0},
            "non_inferiority is not for latency metrics; use ceiling or floor",
        ),
        (
            "ceiling",
            {"metric": "latency.e2el_p99_ms", "rate": 2.0, "slices": ["segment"]},
            "ceiling of latency.e2el_p99_ms has no slices",
        ),
        ("ratio", {"slices": ["segment"]}, "ratio of hit_rate has no slices"),
        ("implausible", {"slices": ["segment"]}, "implausible of hit_rate has no slices"),
    ],
)  # fmt: skip
def test_a_gate_is_refused_with_its_reason(kind, changes, text):
    with pytest.raises(ValidationError) as refused:
        gate(kind, **changes)
    assert text in str(refused.value)


# -- what a policy may not say ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gates": []}, "at least 1 item"),
        ({"gates": [BASE, BASE]}, "gate names occur twice: g"),
        ({"gates": [{**BASE, "tier": "advisory"}]}, "a policy needs at least one critical gate"),
        ({"gates": [{**BASE, "tier": "supporting"}]}, "at least one critical gate"),
        ({"max_age_days": 0}, "greater than 0"),
        ({"max_age_days": True}, "must be a number, not true or false"),
        ({"looks": [{"items": True, "share": True}]}, "must be a number, not true or false"),
        ({"looks": [{"items": 0, "share": 1}]}, "greater than 0"),
        ({"looks": [{"items": 100, "share": 0}]}, "greater than 0"),
        ({"looks": [{"items": 100, "share": 1.1}]}, "less than or equal to 1"),
        (
            {"looks": [{"items": 200, "share": 0.5}, {"items": 100, "share": 0.5}]},
            "looks must have rising numbers of items",
        ),
        (
            {"looks": [{"items": 100, "share": 0.5}, {"items": 100, "share": 0.5}]},
            "looks must have rising numbers of items",
        ),
        (
            {"looks": [{"items": 100, "share": 0.6}, {"items": 200, "share": 0.5}]},
            "the shares of the looks add up to more than 1",
        ),
        ({"no_such_key": 1}, "Extra inputs are not permitted"),
    ],
)
def test_a_policy_is_refused_with_its_reason(changes, text):
    with pytest.raises(ValidationError) as refused:
        policy(**changes)
    assert text in str(refused.value)


def test_planned_looks_may_use_the_whole_error_and_less():
    third = [{"items": n, "share": 1 / 3} for n in (100, 200, 300)]
    assert [look.items for look in policy(looks=third).looks] == [100, 200, 300]
    assert policy(looks=third[:1]).looks[0].share == pytest.approx(1 / 3)


WAIVER = {"gate": "g", "owner": "Ada", "reason": "known bad labels", "expires": "2030-01-31"}


def test_a_waivers_day_is_a_date_as_yaml_writes_it():
    text = "{gate: g, owner: Ada, reason: known bad labels, expires: 2030-01-31}"
    (waiver,) = policy(waivers=[yaml.safe_load(text)]).waivers
    assert waiver.expires == date(2030, 1, 31)
    assert policy(waivers=[WAIVER]).waivers == [waiver]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gate": "h"}, "waivers name no gate of this policy: h"),
        ({"owner": ""}, "at least 1 character"),
        ({"reason": ""}, "at least 1 character"),
        ({"expires": "soon"}, "valid date"),
        ({"expires": None}, "valid date"),
        ({"expires": "2030-02-30"}, "valid date"),
    ],
)
def test_a_waiver_is_refused_with_its_reason(changes, text):
    with pytest.raises(ValidationError) as refused:
        policy(waivers=[{**WAIVER, **changes}])
    assert text in str(refused.value)


@pytest.mark.parametrize("missing", ["gate", "owner", "reason", "expires"])
def test_a_waiver_needs_all_that_somebody_answers_for(missing):
    with pytest.raises(ValidationError, match="Field required"):
        policy(waivers=[{key: value for key, value in WAIVER.items() if key != missing}])


def test_a_gate_is_waived_once():
    with pytest.raises(ValidationError, match="a gate has two waivers"):
        policy(waivers=[WAIVER, {**WAIVER, "expires": "2031-01-01"}])


@pytest.mark.parametrize("missing", ["gate", "owner", "reason"])
def test_an_acknowledgement_needs_gate_owner_and_reason(missing):
    entry = {"gate": "g", "owner": "Ada", "reason": "agreed"}
    assert policy(acknowledged=[entry]).acknowledged[0].owner == "Ada"
    with pytest.raises(ValidationError, match="Field required"):
        policy(acknowledged=[{key: value for key, value in entry.items() if key != missing}])
    with pytest.raises(ValidationError, match="at least 1 character"):
        policy(acknowledged=[{**entry, missing: ""}])
