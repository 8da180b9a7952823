"""What may stand in a load profile, and the words with which the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from eval_suites.load import SlaClause
from eval_suites.loader import load_profile, shipped
from registry.errors import UserError
from tests.unit.load_builders import profile

CLAUSE = TypeAdapter(SlaClause)


@pytest.mark.parametrize(
    ("written", "metric", "percent", "limit_ms", "shown"),
    [
        ("e2el p99 2s", "e2el", 99, 2000, "e2el p99 2000ms"),
        ("ttft p95 500ms", "ttft", 95, 500, "ttft p95 500ms"),
        ("  TPOT  P99.9   0.05 s ", "tpot", 99.9, 50, "tpot p99.9 50ms"),
        ("itl p50 12.5ms", "itl", 50, 12.5, "itl p50 12.5ms"),
    ],
)
def test_clauses_are_read_and_shown(
    written: str, metric: str, percent: float, limit_ms: float, shown: str
) -> None:
    clause = CLAUSE.validate_python(written)
    assert (clause.metric, clause.percent, clause.limit_ms) == (metric, percent, limit_ms)
    assert str(clause) == shown
    assert CLAUSE.validate_python(shown) == clause
    parts = {"metric": metric, "percent": percent, "limit_ms": limit_ms}
    assert CLAUSE.validate_python(parts) == clause


def test_a_clause_may_be_of_one_scenario() -> None:
    clause = CLAUSE.validate_python("customer_service ttft p95 500ms")
    assert (clause.scenario, clause.metric, clause.limit_ms) == ("customer_service", "ttft", 500)
    assert str(clause) == "customer_service ttft p95 500ms"
    assert CLAUSE.validate_python(str(clause)) == clause


@pytest.mark.parametrize(
    "written",
    ["", "e2el", "e2el p99", "e2el p99 2", "e2el p99 2m", "latency p99 2s", "e2el 99 2s",
     "e2el p99 -2s", "e2el p99 < 2s", "e2el p99 2s 3s", "e2elp99 2s", "a b e2el p99 2s"],
)  # fmt: skip
def test_other_words_are_refused(written: str) -> None:
    with pytest.raises(ValidationError, match="METRIC PERCENTILE LIMIT"):
        CLAUSE.validate_python(written)


@pytest.mark.parametrize("written", ["e2el p0 2s", "e2el p100 2s", "e2el p120 2s", "e2el p99 0s"])
def test_impossible_percentiles_and_limits_are_refused(written: str) -> None:
    with pytest.raises(ValidationError, match=r"percent|limit_ms"):
        CLAUSE.validate_python(written)


def test_rates_or_a_search() -> None:
    fixed = profile(search=None, rates=[1, 2.5], sla=[])
    assert fixed.rates == [1, 2.5]
    assert profile().search is not None
    for changes in ({"rates": [1.0]}, {"search": None}):
        with pytest.raises(ValidationError, match="give one of `rates`, a `search`"):
            profile(**changes)
    with pytest.raises(ValidationError, match="a search needs an `sla`"):
        profile(sla=[])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"search": None, "rates": [2, 1]}, "rates must rise"),
        ({"search": None, "rates": [1, 1]}, "rates must rise"),
        ({"search": None, "rates": [0, 1]}, "above 0"),
        ({"search": None, "rates": [20_000]}, "at most 10000"),
        ({"cache_band": [0.5, 0.2]}, "the lower one first"),
        ({"cache_band": [0.5, 1.2]}, "two shares"),
        ({"cache_band": [-0.1, 0.2]}, "two shares"),
        ({"looks": 0}, "looks"),
        ({"looks": 6}, "looks"),
        ({"confidence": 1.0}, "confidence"),
        ({"confidence": 0.5}, "confidence"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"burstiness": 0}, "burstiness"),
        ({"seconds_per_rate": float("inf")}, "seconds_per_rate"),
        ({"scenarios": {"a": {"input": 0}}}, "input"),
        ({"scenarios": {"a": {"input": 1, "output": []}}}, "an empty list"),
        ({"scenarios": {"a": {"input": 1, "output": [3, 0]}}}, "output"),
        ({"scenarios": {"a": {"input": 1, "weight": 0}}}, "weight"),
        ({"scenarios": {"A b": {"input": 1}}}, "small letters"),
        ({"scenarios": {"ttft": {"input": 1}}}, "cannot be called"),
        ({"sla": ["chat e2el p99 2s"]}, "no scenario of this profile: chat e2el p99 2000ms"),
        ({"sla": ["e2el p99 2s", "e2el p99 2000ms"]}, "stands twice"),
        ({"search": {"minutes": 1, "lowest": 5, "highest": 5}}, "must be below highest"),
        ({"search": {"minutes": 1, "start": 300, "highest": 200}}, "must lie between"),
        ({"search": None, "concurrencies": [4, 2]}, "rising"),
        ({"search": None, "concurrencies": [0, 2]}, "from 1 to 10000"),
        ({"search": None, "rates": [1], "concurrencies": [2]}, "give one of"),
        ({"sustain": 0.5}, "sustain"),
        ({"repeats": 0}, "repeats"),
        ({"search": {}}, "minutes"),
        ({"search": {"minutes": 1, "factor": 1.0}}, "factor"),
        ({"search": {"minutes": 1, "tolerance": 0.0}}, "tolerance"),
        ({"search": {"minutes": 1, "start": 0}}, "start"),
        ({"seconds": 10}, "seconds"),
    ],
)
def test_faults_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        profile(**changes)


def test_the_shipped_profiles_are_valid() -> None:
    names = shipped("load")
    assert "mock_smoke" in names
    for name in names:
        load_profile(name)


def test_the_profile_for_endpoints_without_a_tokenizer() -> None:
    smoke = load_profile("mock_smoke")
    assert smoke.smoke
    assert [str(clause) for clause in smoke.sla] == ["e2el p99 2000ms"]
    assert smoke.search is not None
    assert smoke.search.minutes == 10
    assert smoke.search.tolerance <= 0.25
    assert {one.unit for one in smoke.scenarios.values()} == {"words"}


def test_a_fault_in_a_file_names_the_file() -> None:
    with pytest.raises(UserError, match="METRIC PERCENTILE LIMIT"):
        load_profile("mock_smoke", {"sla": ["e2el p99 two seconds"]})


def test_an_endless_limit_is_shown_cut() -> None:
    with pytest.raises(UserError) as told:
        load_profile("mock_smoke", {"sla": ["e2el p99 " + "2" * 5000 + "z"]})
    assert len(str(told.value)) < 500


def test_a_profile_is_of_production_unless_it_says_otherwise() -> None:
    of_production = {name for name in shipped("load") if load_profile(name).production}
    assert of_production == {name for name in shipped("load") if "_nvidia_" in name}
    assert profile().production
