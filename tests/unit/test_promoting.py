"""What speaks against promoting a bundle: each refusal alone, all at once, and none."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from registry.bundle import Bundle, Part
from registry.digests import digest_of
from registry.evidence import AccuracyEvidence, LatencyEvidence, ServingEvidence
from registry.outcome import Verdict, Waived
from registry.provenance import hardware_fingerprint
from registry.versions import PromotionRefused
from tasks.promoting import check_recorded, problems_of
from tasks.recorded import Recorded
from tests.promotion_builders import POLICY, evidence, facts, gate, outcome

NOW = datetime(2030, 6, 15, 12, tzinfo=UTC)
TARGET = Part(stage="quantize", key="k1", digest="d1")
BUNDLE = Bundle(name="c1", target=TARGET, engine_version="0.32.0")
ELSE = "e" * 64
LAPSED = date(2030, 6, 14)
HERE = hardware_fingerprint()
AGAINST_CHAMPION = {
    **POLICY,
    "gates": [
        *POLICY["gates"],
        {"name": "no_worse", "kind": "regression", "metric": "hit_rate", "margin": 0.02},
    ],
}


def found(**changes: Any) -> Recorded:
    """A candidate that may be promoted, but for the changes."""
    fields: dict[str, Any] = {
        "model": "support-student",
        "version": 4,
        "model_id": "m-1",
        "run_id": "r-1",
        "bundle": BUNDLE,
        "outcome": outcome(BUNDLE),
        "facts": facts(),
        "evidence": evidence(BUNDLE.digest, NOW - timedelta(hours=1)),
        "unreadable": {},
    }
    return Recorded(**{**fields, **changes})


def measured(kind: str, **changes: Any) -> Recorded:
    """The same with one piece of evidence changed."""
    records = evidence(BUNDLE.digest, NOW - timedelta(hours=1))
    return found(evidence={**records, kind: records[kind].model_copy(update=changes)})


def problems(of: Recorded, **changes: Any) -> list[str]:
    asked: dict[str, Any] = {"hardware": HERE, "champion": None, "now": NOW, **changes}
    return problems_of(of, **asked)


def waiver(expires: date) -> Waived:
    return Waived(owner="mei", reason="known", expires=expires)


def against(champion: int | None) -> Recorded:
    gates = [gate(), gate(name="no_worse", kind="regression")]
    told = facts(AGAINST_CHAMPION, champion=champion)
    return found(facts=told, outcome=outcome(BUNDLE, gates=gates if champion else gates[:1]))


def test_nothing_speaks_against_a_bundle_that_passed() -> None:
    assert problems(found()) == []
    assert problems(found(version=None), policy=facts().policy_digest) == []
    assert problems(against(3), champion=3) == []
    assert problems(against(None), champion=None) == [], "a first release has none to compare with"
    standing = outcome(BUNDLE, gates=[gate(), gate(name="x", waived=waiver(NOW.date()))])
    assert problems(found(outcome=standing)) == [], "its last day still counts"


def test_a_champion_that_the_policy_does_not_compare_with_may_have_moved() -> None:
    assert problems(found(facts=facts(champion=3)), champion=7) == []


FAILED = outcome(BUNDLE, verdict=Verdict.FAIL, reasons=["hits FAIL: 0.41", "b", "c", "d"])
ALONE: dict[str, tuple[Callable[[], Recorded], str]] = {
    "verdict": (lambda: found(outcome=FAILED), "its verdict is FAIL: hits FAIL: 0.41; b; c"),
    "gates contradict": (
        lambda: found(outcome=outcome(BUNDLE, gates=[gate(result=Verdict.FAIL)])),
        "its gates make FAIL, its verdict says PASS",
    ),
    "no gates": (
        lambda: found(outcome=outcome(BUNDLE, gates=[])),
        "its gates make INVALID, its verdict says PASS",
    ),
    "a gate left out": (
        lambda: found(outcome=outcome(BUNDLE, gates=[gate(name="another")])),
        "gates of its policy were not judged: hits",
    ),
    "another bundle's outcome": (
        lambda: found(outcome=outcome(BUNDLE, bundle=ELSE)),
        f"the verdict is about bundle eeeeeeeeeeee, not {BUNDLE.digest[:12]}",
    ),
    "the policy was changed": (
        lambda: found(facts=facts().model_copy(update={"policy_digest": ELSE})),
        "the recorded policy is not the one of its digest",
    ),
    "accuracy of another bundle": (
        lambda: measured("accuracy", bundle=ELSE),
        f"evidence accuracy names bundle eeeeeeeeeeee, not {BUNDLE.digest[:12]}",
    ),
    "latency elsewhere": (
        lambda: measured("latency", hardware="a10"),
        f"evidence latency was measured on hardware a10; this is {HERE}",
    ),
    "served elsewhere": (
        lambda: measured("serving", hardware="a10"),
        f"evidence serving was measured on hardware a10; this is {HERE}",
    ),
    "another load": (
        lambda: measured("latency", profile="bursts"),
        "latency was measured with bursts, not steady",
    ),
    "too old": (
        lambda: measured("latency", measured_at=NOW - timedelta(days=31)),
        "its latency is 31 days old; its policy allows 30",
    ),
    "from the future": (
        lambda: measured("latency", measured_at=NOW + timedelta(days=400)),
        "its latency is from the future (2031-07-20 12:00)",
    ),
    "infeasible": (
        lambda: measured("serving", feasible=False, reason="no kernel for int8"),
        "this hardware cannot serve it: no kernel for int8",
    ),
    "NaN": (
        lambda: measured("accuracy", metrics={"hit_rate": float("nan")}),
        "accuracy: metrics.hit_rate is no number",
    ),
    "infinite gate": (
        lambda: found(outcome=outcome(BUNDLE, gates=[gate(bound=float("inf"))])),
        "outcome: gates.0.bound is no number",
    ),
    "waiver": (
        lambda: found(
            outcome=outcome(BUNDLE, gates=[gate(), gate(name="x", waived=waiver(LAPSED))])
        ),
        "a waiver has run out: x (mei, until 2030-06-14)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_each_alone(name: str) -> None:
    make, text = ALONE[name]
    assert problems(make()) == [text]


@pytest.mark.parametrize("kind", ["accuracy", "latency", "serving"])
def test_evidence_that_is_missing_or_cannot_be_read(kind: str) -> None:
    records = evidence(BUNDLE.digest, NOW)
    del records[kind]
    assert problems(found(evidence=records)) == [f"no {kind} evidence is recorded"]
    unreadable = {kind: "not JSON"}
    assert problems(found(evidence=records, unreadable=unreadable)) == [
        f"evidence {kind}: not JSON"
    ]


def test_a_time_without_a_zone_is_utc() -> None:
    naive = (NOW - timedelta(days=30, minutes=-1)).replace(tzinfo=None)
    assert problems(measured("latency", measured_at=naive)) == []
    older = naive - timedelta(minutes=2)
    assert "its latency is 30 days old" in problems(measured("latency", measured_at=older))[0]


def test_another_policy_is_demanded() -> None:
    told = facts()
    assert problems(found(), policy=ELSE) == [
        f"it was judged by policy demo ({told.policy_digest[:12]}), asked for is eeeeeeeeeeee"
    ]


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [
        (3, 5, "it was compared with version 3 as the champion, which now is version 5"),
        (3, None, "it was compared with version 3 as the champion, which now is nothing"),
        (None, 5, "it was compared with nothing as the champion, which now is version 5"),
    ],
)
def test_the_champion_it_was_compared_with_moved(
    then: int | None, now: int | None, text: str
) -> None:
    assert problems(against(then), champion=now) == [text]


def test_a_draft_needs_its_acceptance_record(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Part(stage="draft", key="k2", digest="d2")
    pair = BUNDLE.model_copy(update={"draft": draft, "num_speculative_tokens": 3})
    records = evidence(pair.digest, NOW)
    speaks = found(bundle=pair, outcome=outcome(pair), evidence=records)
    monkeypatch.setattr("tasks.promoting.binding_problems", lambda bundle: ["for another student"])
    assert problems(speaks) == [
        "for another student",
        "no acceptance length is recorded for this draft on this target",
    ]
    monkeypatch.setattr("tasks.promoting.binding_problems", lambda bundle: [])
    load = records["latency"]
    assert isinstance(load, LatencyEvidence)
    point = load.points[0].model_copy(update={"acceptance_length": 2.4})
    records["latency"] = load.model_copy(update={"points": [point]})
    assert problems(found(bundle=pair, outcome=outcome(pair), evidence=records)) == []


def test_everything_at_once() -> None:
    old = NOW - timedelta(days=90)
    records: dict[str, Any] = evidence(ELSE, old)
    records["serving"] = records["serving"].model_copy(
        update={"feasible": False, "reason": "no memory"}
    )
    del records["accuracy"]
    told = facts(AGAINST_CHAMPION, champion=3, profile="bursts")
    told = told.model_copy(update={"policy_digest": "f" * 64})
    gates = [gate(waived=waiver(old.date()))]
    all_wrong = found(
        outcome=outcome(BUNDLE, verdict=Verdict.FAIL, reasons=["bad"], bundle=ELSE, gates=gates),
        facts=told,
        evidence=records,
        unreadable={"accuracy": "not JSON"},
    )
    said = problems(all_wrong, hardware="a10", champion=5, policy=digest_of("another"))
    assert [one.split(":")[0] for one in said] == [
        "its verdict is FAIL",
        f"the verdict is about bundle eeeeeeeeeeee, not {BUNDLE.digest[:12]}",
        "the recorded policy is not the one of its digest",
        f"it was judged by policy demo (ffffffffffff), asked for is {digest_of('another')[:12]}",
        "evidence accuracy",
        f"evidence latency names bundle eeeeeeeeeeee, not {BUNDLE.digest[:12]}",
        f"evidence serving names bundle eeeeeeeeeeee, not {BUNDLE.digest[:12]}",
        f"evidence latency was measured on hardware {HERE}; this is a10",
        f"evidence serving was measured on hardware {HERE}; this is a10",
        "latency was measured with steady, not bursts",
        "its latency is 90 days old; its policy allows 30",
        "this hardware cannot serve it",
        "a waiver has run out",
        "it was compared with version 3 as the champion, which now is version 5",
    ]


def test_a_refusal_says_everything_and_how_to_repair_it() -> None:
    with pytest.raises(PromotionRefused) as refused:
        check_recorded(found(outcome=FAILED, evidence={}), "support-student@4", None)
    assert [one.what for one in refused.value.problems] == [
        "its verdict is FAIL: hits FAIL: 0.41; b; c",
        "no accuracy evidence is recorded",
        "no latency evidence is recorded",
        "no serving evidence is recorded",
    ]
    assert {one.where for one in refused.value.problems} == {"promote support-student@4"}
    assert all("pilotage release demo" in one.remedy for one in refused.value.problems)


def test_the_builders_write_what_the_models_read() -> None:
    """Otherwise these tests would prove nothing about recorded evidence."""
    kinds = (AccuracyEvidence, LatencyEvidence, ServingEvidence)
    for kind, record in zip(kinds, evidence(BUNDLE.digest, NOW).values(), strict=True):
        assert kind.model_validate_json(json.dumps(record.model_dump(mode="json"))) == record
