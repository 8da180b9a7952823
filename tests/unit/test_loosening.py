"""A policy that asks for less than the one that promoted the champion: gate by gate."""

from __future__ import annotations

import pytest

from eval_suites.gating import check_not_looser
from eval_suites.loosening import loosened
from eval_suites.policy import Policy
from registry.errors import UserError

HIT = {"name": "hit", "metric": "hit_rate", "kind": "retention", "reference": "teacher"}
OTHER = {"name": "size", "metric": "words", "kind": "floor", "margin": 1.0}
MARGINS = {
    "retention": {"reference": "teacher", "margin": 0.9},
    "floor": {"margin": 0.9},
    "ceiling": {"margin": 0.9},
    "non_inferiority": {"reference": "teacher", "margin": 0.9},
    "regression": {"margin": 0.9},
    "slice": {"reference": "teacher", "margin": 0.9},
    "length": {"reference": "teacher", "margin": 0.9},
    "implausible": {"reference": "teacher", "margin": 0.9},
}
STRICTER_WHEN_LARGER = ("retention", "floor")


def policy(*gates: dict, **changes) -> Policy:
    fields = {"kind": "policy", "description": "d", "gates": [*(gates or [HIT]), OTHER]}
    return Policy.model_validate({**fields, **changes})


def found(old: Policy, new: Policy) -> dict[str, str]:
    return {one.gate: one.what for one in loosened(old, new)}


def test_the_same_policy_is_no_looser():
    assert loosened(policy(), policy()) == []


@pytest.mark.parametrize("kind", MARGINS)
def test_a_margin_is_looser_in_one_direction(kind):
    gate = {"name": "hit", "metric": "hit_rate", "kind": kind, **MARGINS[kind]}
    high, low = policy({**gate, "margin": 0.95}), policy(gate)
    if kind in STRICTER_WHEN_LARGER:
        assert found(high, low) == {"hit": "margin 0.95 -> 0.9"} and found(low, high) == {}
    else:
        assert found(low, high) == {"hit": "margin 0.9 -> 0.95"} and found(high, low) == {}


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ({"confidence": 0.99}, {"confidence": 0.95}, "confidence 0.99 -> 0.95"),
        ({}, {"min_items": 50}, "min_items 100 -> 50"),
        ({}, {"tier": "supporting"}, "tier critical -> supporting"),
        ({"tier": "supporting"}, {"tier": "advisory"}, "tier supporting -> advisory"),
        ({"slices": ["segment", "lane"]}, {"slices": ["lane"]}, "slices without segment"),
        (
            {"slices": ["lane"], "expected": ["air", "sea"]},
            {"slices": ["lane"], "expected": ["sea"]},
            "expected without air",
        ),
        ({}, {"cluster": None}, "cluster conversation -> None"),
    ],
)
def test_what_is_asked_less_of_is_named_and_its_opposite_is_not(old, new, what):
    before, after = policy({**HIT, **old}), policy({**HIT, **new})
    assert found(before, after) == {"hit": what}
    if not what.startswith("cluster"):
        assert found(after, before) == {}


@pytest.mark.parametrize(
    ("new", "what"),
    [
        ({"metric": "slot_f1"}, "metric hit_rate -> slot_f1"),
        ({"reference": "student"}, "reference teacher -> student"),
        (
            {"kind": "non_inferiority", "margin": 0.1},
            "kind retention -> non_inferiority; margin 0.9 -> 0.1",
        ),
        ({"cluster": "customer"}, "cluster conversation -> customer"),
    ],
)
def test_what_can_no_longer_be_compared_counts_as_looser(new, what):
    assert found(policy(), policy({**HIT, **new})) == {"hit": what}


def test_another_direction_or_rate_is_another_gate():
    loss = {"name": "hit", "metric": "hit_rate", "kind": "regression", "margin": 0.1}
    turned = policy({**loss, "direction": "lower"})
    assert found(policy(loss), turned) == {"hit": "direction higher -> lower"}
    sla = {"name": "hit", "metric": "latency.e2el_p99_ms", "kind": "ceiling", "margin": 900}
    assert found(policy({**sla, "rate": 4.0}), policy({**sla, "rate": 2.0})) == {
        "hit": "rate 4.0 -> 2.0"
    }


def test_every_loosening_of_a_gate_is_named():
    after = policy({**HIT, "margin": 0.8, "tier": "advisory", "confidence": 0.9, "min_items": 10})
    assert found(policy(), after) == {
        "hit": "margin 0.9 -> 0.8; tier critical -> advisory; confidence 0.95 -> 0.9; "
        "min_items 100 -> 10"
    }


def test_a_gate_that_is_gone():
    both = policy(HIT, {**HIT, "name": "slots", "metric": "slot_f1"})
    assert found(both, policy()) == {"slots": "the gate is gone"}
    assert found(policy(), both) == {}


def test_a_renamed_gate_is_found_by_what_it_judges():
    renamed = {**HIT, "name": "hit_rate_kept"}
    assert found(policy(), policy(renamed)) == {}
    assert found(policy(), policy({**renamed, "margin": 0.8})) == {"hit": "margin 0.9 -> 0.8"}
    assert found(policy(), policy({**renamed, "metric": "slot_f1"})) == {"hit": "the gate is gone"}


def test_a_name_taken_over_by_another_gate_does_not_hide_the_old_one():
    swapped = policy({**HIT, "metric": "slot_f1"})
    assert found(policy(), swapped) == {"hit": "metric hit_rate -> slot_f1"}


def test_advisory_gates_may_change():
    advice = {**HIT, "name": "advice", "tier": "advisory"}
    assert found(policy(HIT, advice), policy()) == {}
    assert found(policy(HIT, advice), policy(HIT, {**advice, "margin": 0.5})) == {}


LOOKS = [{"items": 100, "share": 0.5}, {"items": 200, "share": 0.5}]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ({}, {"max_age_days": 60}, "max_age_days 30 -> 60"),
        ({}, {"allow_limited": True}, "allow_limited false -> true"),
        ({"noise_floor": True}, {}, "noise_floor true -> false"),
    ],
)
def test_settings_of_the_whole_policy(old, new, what):
    assert found(policy(**old), policy(**new)) == {"policy": what}
    assert found(policy(**new), policy(**old)) == {}


def test_other_looks_and_looks_given_up_are_named():
    """Half of the error at each look; without looks all of it, on any number of items."""
    later = [LOOKS[0], {"items": 300, "share": 0.5}]
    assert found(policy(), policy(looks=LOOKS)) == {"policy": "other looks are planned"}
    assert found(policy(looks=LOOKS), policy(looks=later)) == {"policy": "other looks are planned"}
    assert found(policy(looks=LOOKS), policy()) == {"policy": "no looks are planned"}
    assert found(policy(looks=LOOKS), policy(looks=LOOKS)) == {}


def test_an_acknowledgement_is_by_name_and_shown():
    entry = {"gate": "hit", "owner": "Ada", "reason": "the labels got harder"}
    after = policy({**HIT, "margin": 0.8}, acknowledged=[entry])
    (one,) = loosened(policy(), after)
    assert (one.acknowledged_by, one.reason) == ("Ada", "the labels got harder")
    assert check_not_looser(policy(), after) == [one]


def test_one_acknowledgement_is_not_for_another_gate():
    entry = {"gate": "hit", "owner": "Ada", "reason": "agreed"}
    after = policy({**HIT, "margin": 0.8}, max_age_days=60, acknowledged=[entry])
    owners = {one.gate: one.acknowledged_by for one in loosened(policy(), after)}
    assert owners == {"hit": "Ada", "policy": None}
    with pytest.raises(UserError) as refused:
        check_not_looser(policy(), after)
    (problem,) = refused.value.problems
    assert problem.where == "gate policy"
    assert "max_age_days 30 -> 60" in problem.what


def test_a_looser_policy_is_refused_gate_by_gate():
    after = policy({**HIT, "margin": 0.8}, allow_limited=True)
    with pytest.raises(UserError) as refused:
        check_not_looser(policy(), after)
    assert [problem.where for problem in refused.value.problems] == ["gate hit", "gate policy"]
    assert "margin 0.9 -> 0.8" in refused.value.problems[0].what
