"""Gates: what can pass, and everything that must not."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from eval_suites.gates import (
    CandidateEvidence,
    judge,
    judge_all,
    reasons_of,
    release_verdict,
    verdict_of,
)
from eval_suites.schema import GateRule, Policy
from registry.errors import EXIT_INCONCLUSIVE, EXIT_PASS, EXIT_REFUSED
from registry.evidence import (
    AccuracyEvidence,
    LatencyEvidence,
    LoadPoint,
    ServingEvidence,
    percentiles,
    write_summary,
)
from registry.outcome import GateResult, Verdict

NOW = datetime(2030, 1, 2, tzinfo=UTC)
SETTINGS = {"sampling": {"temperature": 0.0}, "few_shot": 0, "chat_template": "t1", "batch_size": 8}
ABSENT = object()
POLICIES = Path(__file__).resolve().parents[2] / "eval_suites" / "policies"


def accuracy(bundle: str, /, **changes: Any) -> AccuracyEvidence:
    """Evidence without validation: gates must stand what a reader let through."""
    fields: dict[str, Any] = {
        "schema_version": 1,
        "kind": "accuracy",
        "bundle": bundle,
        "suite": "freight",
        "task": "freight.yaml",
        "task_version": "1",
        "engine": "vllm 0.32.0",
        "harness": "lm-eval 0.4.13",
        "items_digest": "items",
        "settings": SETTINGS,
        "items_asked": 400,
        "items_scored": 400,
        "metrics": {"hit_rate": 0.72},
        "smoke": False,
        "measured_at": NOW,
        "seconds": 1.0,
    }
    return AccuracyEvidence.model_construct(**{**fields, **changes})


def point(rate: float = 2.0, times: list[float] | None = None, failed: int = 0) -> LoadPoint:
    answered = [100.0] * 40 if times is None else times
    table = percentiles(answered, failed)
    return LoadPoint(
        rate=rate,
        achieved_rate=rate,
        total=len(answered) + failed,
        ok=len(answered),
        failed=failed,
        duration_s=20.0,
        ttft_ms=table,
        tpot_ms=table,
        itl_ms=table,
        e2el_ms=table,
        output_tokens_per_s=100.0,
    )


def latency(bundle: str, /, *points: LoadPoint, **changes: Any) -> LatencyEvidence:
    fields: dict[str, Any] = {
        "bundle": bundle,
        "profile": "cpu",
        "hardware": "h",
        "engine": "vllm",
        "harness": "vllm bench",
        "settings": {"sampling": {"temperature": 0.0}},
        "points": list(points),
        "measured_at": NOW,
        "seconds": 1.0,
    }
    return LatencyEvidence.model_validate({**fields, **changes})


def serving(bundle: str, feasible: bool, reason: str = "") -> ServingEvidence:
    return ServingEvidence(
        bundle=bundle,
        hardware="h",
        engine="vllm",
        feasible=feasible,
        reason=reason,
        measured_at=NOW,
    )


def rule(**changes: Any) -> GateRule:
    fields: dict[str, Any] = {
        "name": "g",
        "metric": "accuracy.hit_rate",
        "kind": "retention",
        "reference": "teacher",
        "margin": 0.95,
    }
    return GateRule.model_validate({**fields, **changes})


def sla(margin: float = 2000.0, metric: str = "latency.e2el_p95_ms") -> GateRule:
    return rule(metric=metric, kind="ceiling", reference=None, margin=margin, rate=2.0)


def with_metrics(name: str, metrics: dict[str, Any], **changes: Any) -> CandidateEvidence:
    return CandidateEvidence(name, accuracy=accuracy(name, metrics=metrics, **changes))


CASES = [
    ("normal", 0.71, 0.72, 0.95, "PASS"),
    ("candidate nan", math.nan, 0.72, 0.95, "INVALID"),
    ("baseline nan", 0.71, math.nan, 0.95, "INVALID"),
    ("candidate missing", ABSENT, 0.72, 0.95, "INVALID"),
    ("baseline missing", 0.71, ABSENT, 0.95, "INVALID"),
    ("baseline null", 0.71, None, 0.95, "INVALID"),
    ("both zero", 0.0, 0.0, 0.95, "INVALID"),
    ("text number", "0.71", 0.72, 0.95, "INVALID"),
    ("boolean", True, 0.72, 0.95, "INVALID"),
    ("infinite candidate", math.inf, 0.72, 0.95, "INVALID"),
    ("real loss", 0.6, 0.72, 0.95, "FAIL"),
    ("nan limit", 0.1, 0.72, math.nan, "policy error"),
    ("negative limit", 0.1, 0.72, -1, "policy error"),
    ("limit over one", 0.71, 0.72, 95, "policy error"),
]


@pytest.mark.parametrize(
    ("own", "theirs", "margin", "expected"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_missing_and_odd_values_never_pass(
    own: Any, theirs: Any, margin: float, expected: str
) -> None:
    if expected == "policy error":
        with pytest.raises(ValidationError):
            rule(margin=margin)
        return
    sides = [{} if value is ABSENT else {"hit_rate": value} for value in (own, theirs)]
    result = judge(
        rule(margin=margin), with_metrics("c", sides[0]), with_metrics("teacher", sides[1])
    )
    assert result.result == expected
    assert result.reason
    if expected == "INVALID":
        assert "hit_rate" in result.reason
        assert result.estimate is None


def test_margin_is_met_exactly() -> None:
    # 63/70 is 0.8999999999999999 in floating point.
    pair = with_metrics("c", {"hit_rate": 0.63}), with_metrics("t", {"hit_rate": 0.7})
    assert judge(rule(margin=0.9), *pair).result is Verdict.PASS
    assert judge(rule(margin=0.9001), *pair).result is Verdict.FAIL


def test_result_carries_the_numbers() -> None:
    result = judge(
        rule(), with_metrics("c", {"hit_rate": 0.71}), with_metrics("t", {"hit_rate": 0.72})
    )
    assert (result.candidate, result.reference, result.n) == (0.71, 0.72, 400)
    assert result.ratio == result.estimate == pytest.approx(0.71 / 0.72)
    assert GateResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"items_scored": 399}, "399 of the candidate's 400"),
        ({"items_asked": 0, "items_scored": 0}, "no item"),
        ({"schema_version": 2}, "schema version 2"),
        ({"bundle": "another"}, "names bundle another"),
        ({"settings": {}}, "unknown settings of the candidate"),
        ({"metrics": {}}, "no metric 'hit_rate'"),
    ],
)
def test_unusable_evidence_is_invalid(changes: dict[str, Any], words: str) -> None:
    candidate = CandidateEvidence("c", accuracy=accuracy("c", **changes))
    reference = CandidateEvidence("t", accuracy=accuracy("t"))
    result = judge(rule(), candidate, reference)
    assert result.result is Verdict.INVALID
    assert words in result.reason


def test_no_evidence_is_invalid() -> None:
    full = CandidateEvidence("c", accuracy=accuracy("c"))
    empty = CandidateEvidence("c")
    assert judge(rule(), empty, full).result is Verdict.INVALID
    assert judge(rule(), full, empty).result is Verdict.INVALID
    assert "no evidence of the teacher" in judge(rule(), full).reason
    assert judge(sla(), full).result is Verdict.INVALID
    assert judge(rule(metric="taste.sweet"), full, full).result is Verdict.INVALID


def test_every_difference_of_measurement_is_named() -> None:
    other = accuracy(
        "t",
        suite="old",
        task_version="2",
        harness="lm-eval 0.4.0",
        items_digest="others",
        items_asked=1319,
        items_scored=1319,
        settings={
            "sampling": {"temperature": 1.0},
            "few_shot": 5,
            "chat_template": None,
            "multiturn": True,
            "batch_size": 16,
        },
        metrics={"hit_rate": 0.1},
    )
    candidate = CandidateEvidence("c", accuracy=accuracy("c"))
    result = judge(rule(reference="student"), candidate, CandidateEvidence("t", accuracy=other))
    assert result.result is Verdict.INVALID
    for words in (
        "suite freight against old",
        "task_version 1 against 2",
        "harness lm-eval 0.4.13 against lm-eval 0.4.0",
        "items_digest items against others",
        "items_asked 400 against 1319",
        "sampling.temperature 0.0 against 1.0",
        "few_shot 0 against 5",
        "chat_template t1 against None",
        "multiturn not recorded against True",
    ):
        assert words in result.reason
    assert "batch_size" not in result.reason


def test_only_a_teacher_may_have_its_own_chat_template() -> None:
    other = accuracy("t", settings={**SETTINGS, "chat_template": "t2"})
    pair = CandidateEvidence("c", accuracy=accuracy("c")), CandidateEvidence("t", accuracy=other)
    assert judge(rule(reference="teacher"), *pair).result is Verdict.PASS
    assert judge(rule(reference="student"), *pair).result is Verdict.INVALID


def test_smoke_evidence_never_passes() -> None:
    own = CandidateEvidence("c", accuracy=accuracy("c", smoke=True, suite="tiny"))
    theirs = CandidateEvidence("t", accuracy=accuracy("t", smoke=True, suite="tiny"))
    result = judge(rule(), own, theirs)
    assert result.result is Verdict.INCONCLUSIVE
    assert "tiny" in result.reason
    floor = rule(kind="floor", reference=None, margin=0.5)
    assert judge(floor, own).result is Verdict.INCONCLUSIVE
    quick = CandidateEvidence("c", latency=latency("c", point(), smoke=True, profile="quick"))
    assert "quick" in judge(sla(), quick).reason
    bad = with_metrics("c", {"hit_rate": 0.0}, smoke=True, suite="tiny")
    assert judge(rule(), bad, theirs).result is Verdict.FAIL


def test_a_handful_of_items_decides_nothing() -> None:
    few = {"items_asked": 99, "items_scored": 99}
    own = CandidateEvidence(bundle="c", accuracy=accuracy("c", **few))
    teacher = CandidateEvidence(bundle="t", accuracy=accuracy("t", **few))
    result = judge(rule(), own, teacher)
    assert result.result is Verdict.INCONCLUSIVE
    assert "fewer than 100 decide nothing" in result.reason
    assert judge(rule(min_items=99), own, teacher).result is Verdict.PASS
    assert judge(rule(margin=1.0, min_items=1000), own, teacher).result is not Verdict.PASS


def test_implausibly_good_is_anomalous() -> None:
    check = rule(kind="implausible", reference="student", margin=0.1)
    student = with_metrics("s", {"hit_rate": 0.5})
    assert judge(check, with_metrics("c", {"hit_rate": 0.6}), student).result is Verdict.PASS
    odd = judge(check, with_metrics("c", {"hit_rate": 0.61}), student)
    assert odd.result is Verdict.ANOMALOUS
    assert odd.estimate == pytest.approx(0.11)


def test_failed_requests_count_as_over_the_limit() -> None:
    times = [700.0 + 40 * i for i in range(30)]
    result = judge(sla(), CandidateEvidence("c", latency=latency("c", point(2.0, times, 10))))
    assert result.result is Verdict.FAIL
    assert "10 of 40 requests failed" in result.reason
    none = judge(sla(), CandidateEvidence("c", latency=latency("c", point(2.0, [], 5))))
    assert none.result is Verdict.FAIL
    assert none.candidate is None
    nothing = judge(sla(), CandidateEvidence("c", latency=latency("c", point(2.0, [], 0))))
    assert nothing.result is Verdict.INVALID
    few = judge(
        sla(metric="latency.e2el_p50_ms"),
        CandidateEvidence("c", latency=latency("c", point(2.0, times, 10))),
    )
    assert few.result is Verdict.PASS  # the median is among those answered


def test_success_only_percentiles_decide_nothing() -> None:
    made_up = point(2.0, [100.0] * 30, 10).model_copy(update={"e2el_ms": {"p95": 1822.0}})
    result = judge(sla(), CandidateEvidence("c", latency=latency("c", made_up)))
    assert result.result is Verdict.FAIL


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([point(1.0)], "rate 2 requests/s was not measured"),
        ([], "measured: none"),
        ([point(2.0), point(2.0)], "occurs 2 times"),
        ([point().model_copy(update={"ok": 39})], "do not add up"),
        ([point().model_copy(update={"e2el_ms": {"p95": None}})], "no number"),
        ([point().model_copy(update={"e2el_ms": {"p95": math.nan}})], "not a finite number"),
        ([point().model_copy(update={"e2el_ms": {}})], "p95 of e2el_ms is not in"),
    ],
)
def test_latency_without_a_number_is_invalid(points: list[LoadPoint], words: str) -> None:
    result = judge(sla(), CandidateEvidence("c", latency=latency("c", *points)))
    assert result.result is Verdict.INVALID
    assert words in result.reason


def test_other_latency_figures() -> None:
    evidence = CandidateEvidence("c", latency=latency("c", point(2.0, [100.0] * 9, 1)))

    def floor(metric: str, margin: float) -> GateResult:
        asked = rule(
            metric=f"latency.{metric}", kind="floor", reference=None, margin=margin, rate=2.0
        )
        return judge(asked, evidence)

    assert floor("success_rate", 0.9).result is Verdict.PASS
    assert floor("success_rate", 0.99).result is Verdict.FAIL
    assert floor("output_tokens_per_s", 50).result is Verdict.PASS
    assert floor("acceptance_length", 1).result is Verdict.INVALID
    assert "no metric 'beauty'" in floor("beauty", 1).reason


def test_infeasible_names_the_engines_reason_once() -> None:
    candidate = CandidateEvidence(
        "c", accuracy=accuracy("c"), serving=serving("c", False, "no kernel for wna16")
    )
    results = judge_all([rule(), sla()], candidate, {"teacher": with_metrics("t", {})})
    assert [result.result for result in results] == [Verdict.INFEASIBLE] * 2
    assert verdict_of(results) is Verdict.INFEASIBLE
    assert reasons_of(results) == ["vllm cannot serve it on this hardware: no kernel for wna16"]
    assert results[0].candidate == 0.72


def test_serving_evidence_of_another_bundle_is_invalid() -> None:
    for broken in (
        CandidateEvidence("c", accuracy=accuracy("c"), serving=serving("x", False, "no")),
        CandidateEvidence("c", accuracy=accuracy("c"), unreadable={"serving": "not JSON"}),
    ):
        result = judge(rule(), broken, CandidateEvidence("t", accuracy=accuracy("t")))
        assert result.result is Verdict.INVALID
        assert "serving evidence" in result.reason


def gate(verdict: Verdict, tier: str = "critical") -> GateResult:
    return GateResult(
        name=f"g_{verdict}".lower(),
        kind="floor",
        metric="accuracy.hit_rate",
        tier=tier,
        result=verdict,
        estimate=None,
        margin=0.5,
        candidate=None,
        n=None,
        reason="because",
    )


def test_verdict_order() -> None:
    order = ["INFEASIBLE", "INVALID", "ANOMALOUS", "FAIL", "INCONCLUSIVE", "PASS"]
    for place, name in enumerate(order):
        results = [gate(Verdict(other)) for other in reversed(order[place:])]
        assert verdict_of(results) == name
    assert verdict_of([]) is Verdict.INVALID
    assert verdict_of([gate(Verdict.PASS, "advisory")]) is Verdict.INVALID
    assert verdict_of([gate(Verdict.PASS), gate(Verdict.FAIL, "supporting")]) is Verdict.PASS
    assert reasons_of([gate(Verdict.FAIL), gate(Verdict.PASS)]) == ["g_fail FAIL: because"]


def test_release_verdict_order() -> None:
    assert release_verdict([Verdict.FAIL, Verdict.PASS], promoted=True) is Verdict.PASS
    assert release_verdict([Verdict.FAIL, Verdict.PASS], promoted=False) is Verdict.FAIL
    order = ["INCONCLUSIVE", "FAIL", "ANOMALOUS", "INVALID", "INFEASIBLE"]
    for place, name in enumerate(order):
        assert release_verdict(map(Verdict, reversed(order[place:])), promoted=False) == name
    assert release_verdict([], promoted=False) is Verdict.INVALID
    assert release_verdict([Verdict.PASS], promoted=False) is Verdict.INCONCLUSIVE


def test_exit_statuses() -> None:
    assert Verdict.PASS.exit_status == EXIT_PASS
    assert Verdict.INCONCLUSIVE.exit_status == EXIT_INCONCLUSIVE
    for verdict in (Verdict.FAIL, Verdict.ANOMALOUS, Verdict.INFEASIBLE, Verdict.INVALID):
        assert verdict.exit_status == EXIT_REFUSED


def test_evidence_that_cannot_be_read_is_a_reason(tmp_path: Path) -> None:
    good, old, wrong = tmp_path / "good", tmp_path / "old", tmp_path / "wrong"
    for folder in (good, old, wrong):
        folder.mkdir()
    write_summary(good, accuracy("c"))
    content = json.loads((good / "summary.json").read_text())
    (old / "summary.json").write_text(json.dumps({**content, "schema_version": 7}))
    write_summary(wrong, serving("c", True))

    reference = CandidateEvidence.read("c", accuracy=good)
    assert judge(rule(), CandidateEvidence.read("c", accuracy=good), reference).result == "PASS"
    for folder, words in (
        (old, "schema_version"),
        (wrong, "holds serving evidence"),
        (tmp_path / "none", "no such evidence"),
    ):
        result = judge(rule(), CandidateEvidence.read("c", accuracy=folder), reference)
        assert result.result is Verdict.INVALID
        assert words in result.reason


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", "true", '"0.72"'])
def test_what_is_no_number_in_a_file_is_invalid(tmp_path: Path, value: str) -> None:
    write_summary(tmp_path, accuracy("c"))
    path = tmp_path / "summary.json"
    path.write_text(path.read_text().replace("0.72", value))
    own = CandidateEvidence.read("c", accuracy=tmp_path)
    result = judge(rule(), own, CandidateEvidence("t", accuracy=accuracy("t")))
    assert result.result is Verdict.INVALID
    assert "hit_rate" in result.reason


@pytest.mark.parametrize("name", ["demo", "label", "smoke"])
def test_shipped_policies_are_valid(name: str) -> None:
    policy = Policy.model_validate(yaml.safe_load((POLICIES / f"{name}.yaml").read_text()))
    assert verdict_of(judge_all(policy.gates, CandidateEvidence("c"), {})) is Verdict.INVALID
