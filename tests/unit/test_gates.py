"""Gates: what can pass, and everything that must not."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from eval_suites.gates import judge_all
from eval_suites.policy import KEPT_RATE, GateRule, Policy
from eval_suites.verdicts import reasons_of, release_verdict, verdict_of
from registry.errors import EXIT_INCONCLUSIVE, EXIT_PASS, EXIT_REFUSED
from registry.evidence import LoadPoint, write_summary
from registry.evidence_folders import CandidateEvidence
from registry.outcome import GateResult, Verdict
from tests.unit.evidence_builders import (
    SETTINGS,
    accuracy,
    judge,
    latency,
    loaded,
    measured,
    point,
    policy,
    rule,
    scores,
    serving,
    table,
)

ABSENT = object()
POLICIES = Path(__file__).resolve().parents[2] / "eval_suites" / "policies"

GOOD = scores(360, 40)
"""400 items, 0.9 of them right."""


def sla(margin: float = 2000.0, metric: str = "latency.e2el_p95_ms") -> GateRule:
    return rule(metric=metric, kind="ceiling", margin=margin, rate=2.0)


def summary(name: str, metrics: dict[str, Any], **changes: Any) -> CandidateEvidence:
    """Means alone, without a row per item."""
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
        for kind in ("ratio", "retention"):
            with pytest.raises(ValidationError):
                rule(kind=kind, margin=margin)
        return
    sides = [{} if value is ABSENT else {"hit_rate": value} for value in (own, theirs)]
    pair = summary("c", sides[0]), summary("teacher", sides[1])
    result = judge(rule(kind="ratio", margin=margin), *pair)
    assert result.result == expected
    assert result.reason
    if expected == "INVALID":
        assert "hit_rate" in result.reason
        assert result.estimate is None
    # Means alone have no bound, so no other gate can pass on them.
    bounded = judge(rule(margin=margin), *pair)
    assert bounded.result is Verdict.INVALID
    assert "no scores per item" in bounded.reason


def test_margin_is_met_exactly() -> None:
    # 63/70 is 0.8999999999999999 in floating point.
    pair = summary("c", {"hit_rate": 0.63}), summary("t", {"hit_rate": 0.7})
    assert judge(rule(kind="ratio", margin=0.9), *pair).result is Verdict.PASS
    assert judge(rule(kind="ratio", margin=0.9001), *pair).result is Verdict.FAIL


def test_result_carries_the_numbers() -> None:
    candidate = [*scores(350, 0), *scores(5, 5), *scores(5, 35)]
    result = judge(rule(), measured("c", candidate), measured("t", GOOD))
    assert result.result is Verdict.PASS
    assert (result.candidate, result.reference, result.n) == (0.9, 0.9, 400)
    assert result.ratio == result.estimate == 1.0
    assert result.bound is not None
    assert result.opposite_bound is not None
    assert 0.97 < result.bound < 1 < result.opposite_bound < 1.03
    assert (result.margin, result.limit, result.level) == (0.9, 0.9, 0.05)
    assert result.mde is not None
    assert 0.9 < result.mde < 0.95
    assert result.needed is None
    assert result.flips is not None
    assert (result.flips.gained, result.flips.lost) == (5, 5)
    assert result.flips.lost_items == ["0355", "0356", "0357", "0358", "0359"]
    assert result.flips.mcnemar_p == 1.0
    assert GateResult.model_validate_json(result.model_dump_json()) == result


def test_pass_fail_and_in_between() -> None:
    teacher = measured("t", GOOD)
    kept = judge(rule(), measured("c", scores(350, 50)), teacher)
    straddling = judge(rule(), measured("c", scores(330, 70)), teacher)
    lost = judge(rule(), measured("c", scores(280, 120)), teacher)
    assert [r.result for r in (kept, straddling, lost)] == ["PASS", "INCONCLUSIVE", "FAIL"]
    assert straddling.bound is not None
    assert straddling.opposite_bound is not None
    assert straddling.bound < 0.9 < straddling.opposite_bound
    assert straddling.needed is not None
    assert straddling.needed > 400
    assert "more items would decide" in straddling.reason
    assert lost.opposite_bound is not None
    assert lost.opposite_bound < 0.9
    assert "at most" in lost.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"items_scored": 399}, "399 of the candidate's 400"),
        ({"items_asked": 0, "items_scored": 0}, "no item"),
        ({"bundle": "another"}, "names bundle another"),
        ({"settings": {}}, "unknown settings of the candidate"),
        ({"metrics": {"hit_rate": 0.8}}, "summary says hit_rate 0.8, its items have 0.9"),
        ({"items_asked": 401, "items_scored": 401}, "counts 401 scored items"),
    ],
)
def test_unusable_evidence_is_invalid(changes: dict[str, Any], words: str) -> None:
    named = {"bundle": "another"} if "bundle" in changes else {}
    summary_changes = {k: v for k, v in changes.items() if k != "bundle"}
    candidate = measured("c", GOOD, **summary_changes)
    if named:
        assert candidate.accuracy is not None
        other = candidate.accuracy.model_copy(update=named)
        candidate = CandidateEvidence("c", accuracy=other, items=candidate.items)
    result = judge(rule(), candidate, measured("t", GOOD))
    assert result.result is Verdict.INVALID
    assert words in result.reason


def test_no_evidence_is_invalid() -> None:
    full = measured("c", GOOD)
    empty = CandidateEvidence("c")
    assert judge(rule(), empty, full).result is Verdict.INVALID
    assert judge(rule(), full, empty).result is Verdict.INVALID
    assert "no evidence of the teacher" in judge(rule(), full).reason
    assert judge(sla(), full).result is Verdict.INVALID
    missing = judge(rule(metric="taste"), full, measured("t", GOOD))
    assert missing.result is Verdict.INVALID
    assert "no metric 'taste'" in missing.reason


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
            "chat_template": False,
            "chat_template_digest": None,
            "multiturn": True,
            "batch_size": 16,
        },
        limited=True,
        metrics={"hit_rate": 0.1},
    )
    candidate = summary("c", {"hit_rate": 0.9})
    by_means = rule(kind="implausible", reference="student", margin=0.1)
    result = judge(by_means, candidate, CandidateEvidence("t", accuracy=other))
    assert result.result is Verdict.INVALID
    for words in (
        "suite freight against old",
        "task_version 1 against 2",
        "harness lm-eval 0.4.13 against lm-eval 0.4.0",
        "items_digest items against others",
        "items_asked 400 against 1319",
        "limited False against True",
        "sampling.temperature 0.0 against 1.0",
        "few_shot 0 against 5",
        "chat_template True against False",
        "chat_template_digest t1 against None",
        "multiturn not recorded against True",
    ):
        assert words in result.reason
    assert "batch_size" not in result.reason


def test_a_chat_template_of_its_own_only_with_a_tokenizer_of_its_own() -> None:
    def compare(reference: str, own: dict[str, Any], theirs: dict[str, Any]) -> GateResult:
        sides = [measured(name, GOOD, settings={**SETTINGS, **changes})
                 for name, changes in (("c", own), ("t", theirs))]  # fmt: skip
        kind = "regression" if reference == "champion" else "retention"
        margin = {"margin": 0.05} if kind == "regression" else {}
        return judge(rule(kind=kind, reference=reference, **margin), *sides)

    llama = {"tokenizer_digest": "llama", "chat_template_digest": "t1"}
    other = {"tokenizer_digest": "llama", "chat_template_digest": "t2"}
    qwen = {"tokenizer_digest": "qwen", "chat_template_digest": "t2"}
    assert compare("teacher", llama, qwen).result is Verdict.PASS
    assert compare("champion", llama, qwen).result is Verdict.PASS
    for reference in ("teacher", "champion", "student"):
        result = compare(reference, llama, other)
        assert result.result is Verdict.INVALID
        assert "chat_template_digest t1 against t2" in result.reason
    # A student's candidates are of its own family, whatever they say.
    assert "tokenizer_digest llama against qwen" in compare("student", llama, qwen).reason
    # A teacher behind a URL does not tell its tokenizer.
    assert compare("teacher", llama, {"chat_template_digest": None}).result is Verdict.PASS
    # Whether one was applied at all is no matter of families.
    without = compare("teacher", llama, {"chat_template": False, "tokenizer_digest": "qwen"})
    assert without.result is Verdict.INVALID
    assert "chat_template True against False" in without.reason


def test_smoke_and_limited_evidence_never_passes(tmp_path: Path) -> None:
    own = measured("c", GOOD, smoke=True, suite="tiny")
    theirs = measured("t", GOOD, smoke=True, suite="tiny")
    result = judge(rule(), own, theirs)
    assert result.result is Verdict.INCONCLUSIVE
    assert "tiny" in result.reason
    assert judge(rule(kind="floor", margin=0.5), own).result is Verdict.INCONCLUSIVE
    check = rule(kind="implausible", margin=0.1)
    assert judge(check, own, theirs).result is Verdict.INCONCLUSIVE
    quick = loaded(tmp_path, "c", [100.0] * 99, smoke=True, profile="quick")
    assert "quick" in judge(sla(), quick).reason
    bad = measured("c", scores(0, 400), smoke=True, suite="tiny")
    assert judge(rule(), bad, theirs).result is Verdict.FAIL

    cut = measured("c", GOOD, limited=True), measured("t", GOOD, limited=True)
    assert judge(rule(), *cut).result is Verdict.INCONCLUSIVE
    assert "cut by a limit" in judge(rule(), *cut).reason
    assert judge(rule(), *cut, allow_limited=True).result is Verdict.PASS


def test_a_handful_of_items_decides_nothing() -> None:
    pair = measured("c", scores(99, 0)), measured("t", scores(99, 0))
    result = judge(rule(), *pair)
    assert result.result is Verdict.INCONCLUSIVE
    assert "fewer than 100 decide nothing" in result.reason
    assert result.needed == 1
    assert judge(rule(min_items=99), *pair).result is Verdict.PASS
    many = judge(rule(kind="implausible", margin=0.5, min_items=1000), *pair)
    assert many.result is Verdict.INCONCLUSIVE


def test_implausibly_good_is_anomalous() -> None:
    check = rule(kind="implausible", reference="student", margin=0.1)
    student = summary("s", {"hit_rate": 0.5})
    assert judge(check, summary("c", {"hit_rate": 0.6}), student).result is Verdict.PASS
    odd = judge(check, summary("c", {"hit_rate": 0.61}), student)
    assert odd.result is Verdict.ANOMALOUS
    assert odd.estimate == pytest.approx(0.11)


def test_failed_requests_count_as_over_the_limit(tmp_path: Path) -> None:
    times = [700.0 + 40 * i for i in range(30)]
    result = judge(sla(), loaded(tmp_path, "c", times, failed=10))
    assert result.result is Verdict.FAIL
    assert "10 of 40 requests over 2000 ms" in result.reason
    assert result.bound is None
    none = judge(sla(), loaded(tmp_path, "c", [], failed=40))
    assert (none.result, none.candidate) == (Verdict.FAIL, None)
    nothing = judge(sla(), CandidateEvidence("c", latency=latency("c", point(2.0, [], 0))))
    assert nothing.result is Verdict.INVALID
    # The median is among those answered.
    few = judge(sla(metric="latency.e2el_p50_ms"), loaded(tmp_path, "c", times, failed=10))
    assert few.result is Verdict.PASS


def test_a_percentile_has_a_bound_and_twenty_requests_never_show_a_p99(tmp_path: Path) -> None:
    p99 = sla(metric="latency.e2el_p99_ms")
    twenty = judge(p99, loaded(tmp_path, "c", [100.0] * 20))
    assert twenty.result is Verdict.INCONCLUSIVE
    assert "no bound from so few" in twenty.reason
    assert twenty.needed == 279
    enough = judge(p99, loaded(tmp_path, "c", [100.0] * 299))
    assert (enough.result, enough.bound, enough.n) == (Verdict.PASS, 100.0, 299)
    assert judge(p99, loaded(tmp_path, "c", [100.0] * 298)).result is Verdict.INCONCLUSIVE
    one_over = judge(p99, loaded(tmp_path, "c", [100.0] * 400 + [9000.0]))
    assert one_over.result is Verdict.INCONCLUSIVE
    slow = judge(p99, loaded(tmp_path, "c", [100.0] * 250 + [9000.0] * 50))
    assert slow.result is Verdict.FAIL
    # Candidates share the error here too.
    assert judge(p99, loaded(tmp_path, "c", [100.0] * 299), planned=5).level == pytest.approx(0.01)


def test_stalls_count_as_fewer_requests(tmp_path: Path) -> None:
    gate = sla(metric="latency.e2el_p90_ms")
    spread = [9000.0 if i % 16 == 0 else 100.0 for i in range(800)]
    alone = judge(gate, loaded(tmp_path, "c", spread))
    in_one = judge(gate, loaded(tmp_path, "c", sorted(spread, reverse=True)))
    assert alone.candidate == in_one.candidate == 100.0
    assert alone.result is Verdict.PASS
    assert in_one.result is Verdict.INCONCLUSIVE


def test_rows_of_requests_must_be_those_of_the_summary(tmp_path: Path) -> None:
    full = loaded(tmp_path, "c", [100.0] * 299)
    p99 = sla(metric="latency.e2el_p99_ms")
    assert "no rows per request" in judge(p99, CandidateEvidence("c", latency=full.latency)).reason
    other = latency("c", point(2.0, [100.0] * 300))
    unlike = judge(p99, CandidateEvidence("c", latency=other, requests=full.requests))
    assert unlike.result is Verdict.INVALID
    assert "has 299 requests at 2 requests/s, the summary counts 300" in unlike.reason
    (tmp_path / "requests.parquet").write_text("nonsense")
    assert judge(p99, full).result is Verdict.INVALID


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([point(1.0)], "rate 2 requests/s was not measured"),
        ([], "measured: none"),
        ([point(2.0), point(2.0)], "occurs 2 times"),
        ([point().model_copy(update={"ok": 39})], "do not add up"),
        ([point()], "no rows per request"),
    ],
)
def test_latency_without_a_number_is_invalid(points: list[LoadPoint], words: str) -> None:
    result = judge(sla(), CandidateEvidence("c", latency=latency("c", *points)))
    assert result.result is Verdict.INVALID
    assert words in result.reason


def test_other_latency_figures() -> None:
    evidence = CandidateEvidence("c", latency=latency("c", point(2.0, [100.0] * 9, 1)))

    def floor(metric: str, margin: float) -> GateResult:
        asked = rule(metric=f"latency.{metric}", kind="floor", margin=margin, rate=2.0)
        return judge(asked, evidence)

    assert floor("success_rate", 0.9).result is Verdict.PASS
    assert floor("success_rate", 0.99).result is Verdict.FAIL
    assert floor("output_tokens_per_s", 50).result is Verdict.PASS
    assert floor("acceptance_length", 1).result is Verdict.INVALID
    assert "no metric 'beauty'" in floor("beauty", 1).reason


EMULATED = {"emulated": True, "production": True}


@pytest.mark.parametrize(
    ("metric", "kind", "margin"),
    [
        ("latency.e2el_p95_ms", "ceiling", 2000.0),
        ("latency.e2el_p95_ms", "ceiling", 1.0),
        ("latency.itl_p95_ms", "ceiling", 2000.0),
        ("latency.success_rate", "floor", 0.9),
        (KEPT_RATE, "floor", 1.0),
    ],
)
def test_times_of_an_emulated_kernel_neither_pass_nor_fail_in_production(
    tmp_path: Path, metric: str, kind: str, margin: float
) -> None:
    asked = rule(kind=kind, metric=metric, margin=margin, rate=None if metric == KEPT_RATE else 2.0)
    found = judge(asked, loaded(tmp_path, "b", [100.0] * 60, **EMULATED))
    assert found.result is Verdict.INFEASIBLE
    assert "emulated" in found.reason
    assert "production" in found.reason
    assert found.estimate is None
    assert verdict_of([found]) is Verdict.INFEASIBLE


@pytest.mark.parametrize(
    "known",
    [
        {"emulated": True, "production": False},
        {"emulated": False, "production": True},
        {"emulated": None, "production": True},
    ],
)
def test_other_times_are_judged_as_they_are(tmp_path: Path, known: dict[str, Any]) -> None:
    fast = judge(sla(), loaded(tmp_path / "fast", "b", [100.0] * 100, **known))
    assert fast.result is Verdict.PASS
    slow = judge(sla(), loaded(tmp_path / "slow", "b", [9000.0] * 100, **known))
    assert slow.result is Verdict.FAIL


def test_emulated_evidence_of_another_bundle_is_invalid(tmp_path: Path) -> None:
    evidence = loaded(tmp_path, "b", [100.0] * 60, **EMULATED)
    other = dataclasses.replace(evidence, bundle="c")
    found = judge(sla(), other)
    assert found.result is Verdict.INVALID


def test_infeasible_names_the_engines_reason_once() -> None:
    full = measured("c", GOOD)
    candidate = CandidateEvidence(
        "c",
        accuracy=full.accuracy,
        items=full.items,
        serving=serving("c", False, "no kernel for wna16"),
    )
    gates = policy(rule(), rule(name="sla", metric="latency.e2el_p99_ms", kind="ceiling",
                                margin=1, rate=2.0))  # fmt: skip
    (results,) = judge_all(gates, {"c": candidate}, {"teacher": measured("t", GOOD)}).values()
    assert [result.result for result in results] == [Verdict.INFEASIBLE] * 2
    assert verdict_of(results) is Verdict.INFEASIBLE
    assert reasons_of(results) == ["vllm cannot serve it on this hardware: no kernel for wna16"]
    assert results[0].candidate == 0.9


def test_serving_evidence_of_another_bundle_is_invalid() -> None:
    full = measured("c", GOOD)
    for broken in (
        CandidateEvidence("c", full.accuracy, full.items, serving=serving("x", False, "no")),
        CandidateEvidence("c", full.accuracy, full.items, unreadable={"serving": "not JSON"}),
    ):
        result = judge(rule(), broken, measured("t", GOOD))
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
    write_summary(good, accuracy("c", metrics={"hit_rate": 0.72}))
    content = json.loads((good / "summary.json").read_text())
    (old / "summary.json").write_text(json.dumps({**content, "schema_version": 7}))
    write_summary(wrong, serving("c", True))

    means = rule(kind="ratio", margin=0.95)
    reference = CandidateEvidence.read("c", accuracy=good)
    assert judge(means, CandidateEvidence.read("c", accuracy=good), reference).result == "PASS"
    for folder, words in (
        (old, "schema version 7"),
        (wrong, "holds serving evidence"),
        (tmp_path / "none", "no such evidence"),
    ):
        result = judge(means, CandidateEvidence.read("c", accuracy=folder), reference)
        assert result.result is Verdict.INVALID
        assert words in result.reason


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", "true", '"0.72"'])
def test_what_is_no_number_in_a_file_is_invalid(tmp_path: Path, value: str) -> None:
    write_summary(tmp_path, accuracy("c", metrics={"hit_rate": 0.72}))
    path = tmp_path / "summary.json"
    path.write_text(path.read_text().replace("0.72", value))
    own = CandidateEvidence.read("c", accuracy=tmp_path)
    result = judge(rule(kind="ratio", margin=0.95), own, summary("t", {"hit_rate": 0.72}))
    assert result.result is Verdict.INVALID
    assert "hit_rate" in result.reason


@pytest.mark.parametrize("path", sorted(POLICIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_policies_are_valid_and_pass_nothing_without_evidence(path: Path) -> None:
    shipped = Policy.model_validate(yaml.safe_load(path.read_text()))
    (results,) = judge_all(shipped, {"c": CandidateEvidence("c")}, {}).values()
    assert verdict_of(results) is Verdict.INVALID


# -- kinds -----------------------------------------------------------------------------------


def test_non_inferiority_allows_an_absolute_loss() -> None:
    gate = rule(kind="non_inferiority", margin=0.05)
    teacher = measured("t", GOOD)
    assert judge(gate, measured("c", scores(356, 44)), teacher).result is Verdict.PASS
    close = judge(gate, measured("c", scores(343, 57)), teacher)
    assert close.result is Verdict.INCONCLUSIVE
    assert close.estimate == pytest.approx(-0.0425)
    assert (close.margin, close.limit) == (0.05, -0.05)
    assert close.ratio == pytest.approx(343 / 360)
    assert judge(gate, measured("c", scores(300, 100)), teacher).result is Verdict.FAIL


def test_lower_is_better_turns_the_comparison_round() -> None:
    gate = rule(kind="non_inferiority", margin=0.05, direction="lower")
    toxic = measured("t", scores(40, 360))
    assert judge(gate, measured("c", scores(42, 358)), toxic).result is Verdict.PASS
    worse = judge(gate, measured("c", scores(100, 300)), toxic)
    assert worse.result is Verdict.FAIL
    assert worse.limit == 0.05
    assert judge(gate, measured("c", scores(0, 400)), toxic).result is Verdict.PASS


def test_floor_and_ceiling_are_exact_for_proportions() -> None:
    evidence = measured("c", scores(380, 20))
    floor = judge(rule(kind="floor", margin=0.92), evidence)
    # Clopper-Pearson, scipy.stats.binomtest(380, 400).proportion_ci(0.90, "exact").low
    assert floor.bound == pytest.approx(0.9281714, abs=1e-7)
    assert floor.result is Verdict.PASS
    assert judge(rule(kind="floor", margin=0.93), evidence).result is Verdict.INCONCLUSIVE
    assert judge(rule(kind="floor", margin=0.98), evidence).result is Verdict.FAIL
    assert judge(rule(kind="ceiling", margin=0.97), evidence).result is Verdict.PASS
    assert judge(rule(kind="ceiling", margin=0.9), evidence).result is Verdict.FAIL


def test_regression_shows_flips_and_equal_is_not_enough() -> None:
    gate = rule(kind="regression", margin=0.01)
    champion = measured("old", GOOD)
    result = judge(gate, measured("c", scores(355, 45)), champion)
    # McNemar does not see a difference, and that is no proof that there is none.
    assert result.result is Verdict.INCONCLUSIVE
    assert result.flips is not None
    assert result.flips.mcnemar_p == pytest.approx(0.0625)
    assert result.flips.lost_items == ["0355", "0356", "0357", "0358", "0359"]
    itself = judge(gate, measured("old", GOOD), champion)
    assert itself.result is Verdict.PASS
    assert "is the champion itself" in itself.reason


def test_length_counts_output_tokens() -> None:
    rows = {"output_tokens": [100] * 200 + [120] * 200}
    longer = {"output_tokens": [150] * 200 + [180] * 200}
    gate = rule(kind="length", margin=1.2)
    assert gate.metric == "output_tokens"
    same = judge(gate, measured("c", GOOD, rows), measured("t", GOOD, rows))
    assert (same.result, same.estimate) == (Verdict.PASS, 1.0)
    assert same.limit == 1.2
    talks = judge(gate, measured("c", GOOD, longer), measured("t", GOOD, rows))
    assert talks.result is Verdict.FAIL
    assert talks.estimate == pytest.approx(1.5)
    none = judge(gate, measured("c", GOOD), measured("t", GOOD))
    assert none.result is Verdict.INVALID


def test_the_worst_slice_decides() -> None:
    segment = ["zh"] * 200 + ["en"] * 200
    rows = {"segment": segment}
    teacher = measured("t", scores(180, 20) * 2, rows)
    good = measured("c", scores(180, 20) * 2, rows)
    bad_en = measured("c", [*scores(196, 4), *scores(150, 50)], rows)
    gate = rule(kind="slice", margin=0.05)
    passed = judge(gate, good, teacher)
    assert (passed.result, passed.n) == (Verdict.PASS, 200)
    failed = judge(gate, bad_en, teacher)
    assert failed.result is Verdict.FAIL
    assert failed.slice == "segment=en"
    assert failed.estimate == pytest.approx(-0.15)
    # The mean alone does not show it.
    overall = judge(rule(kind="non_inferiority", margin=0.1), bad_en, teacher)
    assert overall.result is Verdict.PASS
    # Any kind can be asked slice by slice.
    retention = judge(rule(slices=["segment"]), bad_en, teacher)
    assert (retention.slice, retention.result) == ("segment=en", Verdict.FAIL)


def test_a_missing_slice_is_invalid() -> None:
    teacher, candidate = measured("t", GOOD), measured("c", GOOD)
    gate = rule(kind="slice", margin=0.1)
    assert "no column 'segment'" in judge(gate, candidate, teacher).reason
    rows = {"segment": ["zh"] * 400}
    pair = measured("c", GOOD, rows), measured("t", GOOD, rows)
    wanted = rule(kind="slice", margin=0.1, expected=["zh", "en"])
    result = judge(wanted, *pair)
    assert result.result is Verdict.INVALID
    assert "no item is in the slices en" in result.reason
    gap = {"segment": ["zh"] * 399 + [None]}
    assert judge(gate, measured("c", GOOD, gap), pair[1]).result is Verdict.INVALID


def test_small_slices_decide_nothing() -> None:
    rows = {"segment": ["zh"] * 350 + ["en"] * 50}
    pair = measured("c", GOOD, rows), measured("t", GOOD, rows)
    gate = rule(kind="slice", margin=0.2)
    result = judge(gate, *pair)
    assert result.result is Verdict.INCONCLUSIVE
    assert "50 items were scored in segment=en" in result.reason
    assert judge(rule(kind="slice", margin=0.2, min_items=50), *pair).result is Verdict.PASS


def test_conversations_count_as_one() -> None:
    rows = {"conversation": [f"c{i // 20}" for i in range(400)]}
    lost = [*([1.0] * 340), *([0.0] * 60)]
    alone = judge(rule(), measured("c", lost), measured("t", GOOD))
    together = judge(rule(), measured("c", lost, rows), measured("t", GOOD, rows))
    assert together.units == 20
    assert together.bound is not None
    assert alone.bound is not None
    assert together.bound < alone.bound
    assert "20 clusters" in together.method
    few = {"conversation": [f"c{i // 40}" for i in range(400)]}
    result = judge(rule(), measured("c", GOOD, few), measured("t", GOOD, few))
    assert result.result is Verdict.INCONCLUSIVE
    assert "10 clusters; fewer than 20" in result.reason
    wanted = rule(cluster="thread")
    assert judge(wanted, measured("c", GOOD), measured("t", GOOD)).result is Verdict.INVALID


# -- the same items --------------------------------------------------------------------------


def test_other_items_are_not_compared() -> None:
    own, theirs = table(hit_rate=scores(180, 20)), table(hit_rate=scores(190, 20))
    result = judge(rule(), own, theirs)
    assert result.result is Verdict.INVALID
    assert "10 items are missing of the candidate (0200, 0201, 0202)" in result.reason


def test_other_messages_are_not_compared() -> None:
    hashes = [f"h{i}" for i in range(400)]
    own = measured("c", GOOD, {"prompt_hash": hashes})
    theirs = measured("t", GOOD, {"prompt_hash": [*hashes[:-1], "another"]})
    result = judge(rule(), own, theirs)
    assert result.result is Verdict.INVALID
    assert "1 items were asked with other messages" in result.reason
    assert "0399" in result.reason


def test_a_table_passes_on_its_own_and_against_a_table_only() -> None:
    assert judge(rule(), table(hit_rate=GOOD), table(hit_rate=GOOD)).result is Verdict.PASS
    mixed = judge(rule(), table(hit_rate=GOOD), measured("t", GOOD))
    assert mixed.result is Verdict.INVALID
    assert "unknown settings of the candidate" in mixed.reason
    assert judge(rule(kind="floor", margin=0.8), table(hit_rate=GOOD)).result is Verdict.PASS


@pytest.mark.parametrize("cell", ["", "nan", "inf", "true", "high", None, math.nan, True])
def test_one_bad_cell_makes_the_metric_invalid(cell: Any) -> None:
    result = judge(rule(), table(hit_rate=[*GOOD[:-1], cell]), table(hit_rate=GOOD))
    assert result.result is Verdict.INVALID
    assert "hit_rate" in result.reason


def test_a_reference_without_anything_right_has_no_ratio() -> None:
    nothing = table(hit_rate=scores(0, 400))
    result = judge(rule(), nothing, nothing)
    assert result.result is Verdict.INVALID
    assert "no ratio to it exists" in result.reason


# -- several candidates, several looks, noise, waivers ---------------------------------------


def test_candidates_share_the_error() -> None:
    gates = policy(rule())
    teacher = {"teacher": measured("t", GOOD)}
    candidates = {name: measured(name, scores(right, 400 - right))
                  for name, right in (("good", 352), ("close", 334), ("bad", 250))}  # fmt: skip
    levels = {name: results[0].level for name, results in
              judge_all(gates, candidates, teacher).items()}  # fmt: skip
    assert levels == {
        "good": pytest.approx(0.05 / 3),
        "close": pytest.approx(0.05 / 2),
        "bad": pytest.approx(0.05 / 2),
    }
    alone = judge(rule(), candidates["close"], teacher["teacher"])
    assert alone.result is Verdict.PASS
    shared = judge_all(gates, candidates, teacher)["close"][0]
    assert shared.result is Verdict.INCONCLUSIVE
    assert judge(rule(), candidates["close"], teacher["teacher"], planned=5).level == (
        pytest.approx(0.01)
    )


def test_looks_are_planned_and_share_the_error() -> None:
    looks = [{"items": 400, "share": 0.4}, {"items": 1000, "share": 0.6}]
    pair = measured("c", scores(352, 48)), measured("t", GOOD)
    assert judge(rule(), *pair, looks=looks).level == pytest.approx(0.02)
    other = measured("c", scores(450, 50)), measured("t", scores(450, 50))
    result = judge(rule(), *other, looks=looks)
    assert result.result is Verdict.INVALID
    assert "500 items are no planned look (the policy plans 400, 1000)" in result.reason


def test_a_margin_below_the_noise_decides_nothing() -> None:
    again = [*scores(345, 15), *scores(15, 25)]
    repeated = measured("t", GOOD), measured("t", again)
    gate = rule(kind="non_inferiority", margin=0.02)
    pair = measured("c", GOOD), measured("t", GOOD)
    assert judge(gate, *pair).result is Verdict.PASS
    noisy = judge(gate, *pair, repeated=repeated)
    assert noisy.result is Verdict.INCONCLUSIVE
    assert "below the noise of the measurement" in noisy.reason
    wide = rule(kind="non_inferiority", margin=0.05)
    assert judge(wide, *pair, repeated=repeated).result is Verdict.PASS
    # 0.9 of 0.9 leaves 0.09.
    assert judge(rule(), *pair, repeated=repeated).result is Verdict.PASS
    demanded = judge(gate, *pair, noise_floor=True)
    assert demanded.result is Verdict.INVALID
    assert "demands an A/A run" in demanded.reason


def test_a_waiver_silences_a_gate_until_its_day() -> None:
    waiver = {"gate": "g", "owner": "release desk", "reason": "known", "expires": "2030-01-31"}
    gates = policy(rule(), rule(name="floor", kind="floor", margin=0.5), waivers=[waiver])
    bad = {"c": measured("c", scores(250, 150))}
    teacher = {"teacher": measured("t", GOOD)}

    def results(day: date) -> list[GateResult]:
        return judge_all(gates, bad, teacher, today=day)["c"]

    waived = results(date(2030, 1, 31))
    assert waived[0].result is Verdict.FAIL
    assert waived[0].waived is not None
    assert waived[0].waived.owner == "release desk"
    assert verdict_of(waived) is Verdict.PASS
    expired = results(date(2030, 2, 1))
    assert expired[0].waived is None
    assert verdict_of(expired) is Verdict.FAIL
    # Nothing is left to judge: that is no PASS.
    only = policy(rule(), waivers=[waiver])
    (left,) = judge_all(only, bad, teacher, today=date(2030, 1, 1)).values()
    assert verdict_of(left) is Verdict.INVALID


def test_summaries_without_rows_judge_no_bound() -> None:
    only = summary("c", {"hit_rate": 0.9})
    for gate in (rule(), rule(kind="floor", margin=0.1), rule(kind="non_inferiority", margin=0.9)):
        result = judge(gate, only, summary("t", {"hit_rate": 0.5}))
        assert result.result is Verdict.INVALID


def test_the_reference_itself_passes_only_what_it_clears() -> None:
    itself = measured("b", GOOD, {"output_tokens": [10] * 400})
    shorter = judge(rule(kind="length", margin=0.9), itself, itself)
    assert (shorter.result, shorter.estimate) == (Verdict.FAIL, 1.0)
    assert judge(rule(kind="length", margin=1.1), itself, itself).result is Verdict.PASS
    assert judge(rule(margin=1.0), itself, itself).result is Verdict.PASS


def test_slices_of_oddly_named_columns_do_not_share_their_draws() -> None:
    rows = {"a": ["b=c"] * 150 + ["x"] * 250, "a=b": ["c"] * 250 + ["x"] * 150}
    graded = [0.7, 0.9] * 200
    gate = rule(kind="slice", margin=0.2, slices=["a", "a=b"])
    result = judge(gate, measured("c", graded, rows), measured("t", graded, rows))
    assert (result.result, result.n) == (Verdict.PASS, 150)
