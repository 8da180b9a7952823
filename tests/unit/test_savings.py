"""The saving of a released bundle: worked numbers, intervals, and when nothing is said."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eval_suites.plan_gate import KV_AS_PLANNED, with_plan_gate
from recipes.schema import ReleaseRecipe
from registry import report
from registry.machines import Machine
from registry.outcome import CandidateOutcome, Savings, Verdict
from registry.release_summary import markdown
from registry.report_savings import count, percent, spread, statement
from registry.savings import Asked, Side, machines_of, replicas_of, savings
from registry.settings import CHECKOUT
from registry.topology import Disaggregated, gpus_of
from tasks import saving
from tasks.planning import resolve
from tasks.release_traffic import traffic_of, traffic_problems
from tasks.saving import limits_of, savings_of
from tests.unit.test_candidate_memory import evidence
from tests.unit.test_report import candidate, details, found, page_of, release, searched_details
from tests.unit.test_report import searched_release as searched
from tests.unit.traffic_builders import written_traffic

SLA = "e2el p99 2000ms"
CARD = Machine("nvidia_l20", "NVIDIA L20", 1 << 35, 1, price_per_hour=1.2, currency="USD")
NAMES = ("int4", "bf16")
PEAK = Asked(42.0, "traffic.yaml, over 300 s")


def side(name: str, kept: tuple[float | None, float | None], **changes: Any) -> Side:
    outcome = found(name, kept).model_copy(update={"emulated": False})
    known = {"hardware": "h", "gpus": 1, "sustained": True, "sla": [SLA]}
    return Side(outcome, **(known | changes))


def stated(
    ours: Side | None, theirs: Side | None, machine: Machine | None = CARD, asked: Asked = PEAK
) -> Savings:
    return savings(ours, theirs, NAMES, machine, "h", asked)


# -- worked out ------------------------------------------------------------------------------


def test_at_a_peak() -> None:
    """42 requests/s: 42/5.657 = 7.4 and 42/8 = 5.25; 42/4 = 10.5 and 42/5 = 8.4; 876 USD a month
    a card (1.2 x 730)."""
    one = stated(side("int4", (5.657, 8.0)), side("bf16", (4.0, 5.0)))
    ours, theirs = one.sides
    assert (ours.replicas.value, ours.replicas.low, ours.replicas.high) == (8, 6, 8)
    assert (theirs.replicas.value, theirs.replicas.low, theirs.replicas.high) == (11, 9, 11)
    assert ours.cost_per_month is not None
    assert ours.cost_per_month.value == pytest.approx(8 * 876)
    assert one.saving_per_month is not None
    assert one.saving_per_month.value == pytest.approx(3 * 876)
    # 9 - 8 at the least, 11 - 6 at the most.
    assert (one.saving_per_month.low, one.saving_per_month.high) == pytest.approx((876, 5 * 876))
    assert one.saving_share is not None
    assert one.saving_share.value == pytest.approx(3 / 11)
    assert (one.saving_share.low, one.saving_share.high) == pytest.approx((1 / 9, 5 / 11))
    assert statement(one) == (
        "int4 against bf16 at the peak of 42 requests/s (traffic.yaml, over 300 s), same limits "
        "(E2EL P99 ≤ 2 s): 8 (6 to 8) replicas instead of 11 (9 to 11); 2,630 (876 to 4,380) USD "
        "a month less; saves 27 % (11 % to 45 %)"
    )


def test_without_traffic_nothing_is_rounded_and_that_is_said() -> None:
    one = stated(side("int4", (5.0, 8.0)), side("bf16", (4.0, 5.0)), asked=Asked())
    ours, theirs = one.sides
    assert (ours.replicas.value, ours.replicas.low) == (0.2, 0.125)
    assert (theirs.replicas.value, theirs.replicas.low) == (0.25, 0.2)
    assert one.saving_per_month is not None
    assert one.saving_per_month.value == pytest.approx(0.05 * 876)
    assert one.notes[0].startswith("for each request/s, nothing rounded: the release names no")
    assert "for each request/s" in statement(one)


def test_no_price_is_null_with_a_note() -> None:
    plain = replace(CARD, price_per_hour=None, currency=None)
    one = stated(side("int4", (5.657, 8.0)), side("bf16", (4.0, 5.0)), plain)
    assert one.saving_per_month is one.sides[0].cost_per_month is None
    assert one.saving_share is not None
    assert one.saving_share.value == pytest.approx(3 / 11)
    assert one.notes == ["no costs: hardware nvidia_l20 has no `price_per_hour`"]
    assert "USD" not in statement(one)
    nowhere = stated(side("int4", (5.657, 8.0)), side("bf16", (4.0, 5.0)), None)
    assert nowhere.notes == ["no costs: the load profile names no hardware file"]


def test_a_rate_that_was_never_lost_leaves_an_end_open() -> None:
    one = stated(side("int4", (8.0, None)), side("bf16", (4.0, 5.0)), asked=Asked())
    assert one.sides[0].replicas.low is None
    assert one.saving_per_month is not None
    assert one.saving_per_month.high is None
    assert one.saving_per_month.low is not None
    assert "(from " in statement(one)
    # Of whole replicas one is the least.
    assert stated(side("int4", (8.0, None)), side("bf16", (4.0, 5.0))).sides[0].replicas.low == 1


def test_a_saving_may_be_a_loss() -> None:
    one = stated(side("int4", (4.0, 5.0)), side("bf16", (5.657, 8.0)))
    assert one.saving_per_month is not None
    assert one.saving_per_month.value == pytest.approx(-3 * 876)


def test_replicas_are_counted_in_decimals() -> None:
    assert replicas_of((0.1, 0.2), 1.1) == (11, 6)
    assert replicas_of((3.0, 4.0), 3.0) == (1, 1)
    assert replicas_of((3.0, 4.0), 3.1) == (2, 1)


def test_the_rate_that_was_not_kept_is_not_enough() -> None:
    """30/10: of three each would have the 10 that were lost, so it is 4 and nothing else."""
    assert replicas_of((9.0, 10.0), 30.0) == (4, 4)
    assert replicas_of((8.0, 10.0), 29.9) == (4, 3)


def test_without_a_price_gpus_are_compared_and_not_replicas() -> None:
    """Kept 8 on 2 GPUs against 4 on one: half of the replicas, and as many GPUs (6 x 2, 11 x 1)."""
    plain = replace(CARD, price_per_hour=None, currency=None)
    one = stated(side("int4", (8.0, 9.0), gpus=2), side("bf16", (4.0, 4.5)), plain, Asked())
    assert one.saving_share is not None
    assert one.saving_share.value == pytest.approx(0)
    # 1 - (2/8) / (1/4.5) and 1 - (2/9) / (1/4).
    assert (one.saving_share.low, one.saving_share.high) == pytest.approx((-0.125, 1 / 9))
    assert "0.25 (0.222 to 0.25) GPUs instead of 0.25 (0.222 to 0.25)" in statement(one)
    whole = stated(side("int4", (8.0, 9.0), gpus=2), side("bf16", (4.0, 4.5)), plain)
    assert whole.saving_share is not None
    assert whole.saving_share.value == pytest.approx(1 - 12 / 11)


def test_machines() -> None:
    eight = replace(CARD, accelerators=8)
    assert machines_of(eight, 4, Fraction(3), whole=True) == 2
    assert machines_of(eight, 4, Fraction(3), whole=False) == Fraction(3, 2)
    assert machines_of(CARD, 4, Fraction(3), whole=True) == 12
    cpu = Machine("cpu", "cpu", 1 << 33)
    assert machines_of(cpu, 0, Fraction(3), whole=True) == 3


def test_gpus_of_an_engine() -> None:
    assert gpus_of({}) == 1
    assert gpus_of({"tensor-parallel-size": 4, "pipeline-parallel-size": "2"}) == 8
    apart = Disaggregated(prefill=3, decode=1, decode_args={"tensor-parallel-size": 8})
    assert gpus_of({"tensor-parallel-size": 2, "max-num-seqs": 64}, apart) == 3 * 2 + 8


# -- always ----------------------------------------------------------------------------------

rates = st.integers(1, 10_000).map(lambda one: one / 100)


@st.composite
def kept(draw: st.DrawFn) -> tuple[float, float | None]:
    low = draw(rates)
    wide = draw(st.one_of(st.none(), st.integers(1, 500)))
    return low, None if wide is None else round(low + wide / 100, 2)


@given(kept(), kept(), st.one_of(st.none(), rates), st.sampled_from([CARD, None]))
def test_the_interval_contains_the_value_and_whatever_may_be_true(
    ours: tuple[float, float | None],
    theirs: tuple[float, float | None],
    rate: float | None,
    machine: Machine | None,
) -> None:
    assume(ours != theirs or ours[1] is not None)
    one = stated(side("int4", ours), side("bf16", theirs), machine, Asked(rate))
    for measure in (one.replicas, one.saving_per_month, one.saving_share):
        if measure is None:
            assert machine is None
            continue
        assert measure.value is not None
        low = -math.inf if measure.low is None else measure.low
        high = math.inf if measure.high is None else measure.high
        assert low <= measure.value + 1e-9
        assert measure.value <= high + 1e-9
    # Replicas at any rate between the two lie in the interval of each side.
    for each, (low, top) in zip(one.sides, (ours, theirs), strict=True):
        assert each.replicas.value is not None
        between = low if top is None else (low + top) / 2
        need = 1 / between if rate is None else math.ceil(rate / between - 1e-9)
        assert (each.replicas.low or 0) - 1e-9 <= need <= each.replicas.value + 1e-9


@given(kept(), rates, rates)
def test_more_traffic_never_takes_fewer(
    one: tuple[float, float | None], first: float, second: float
) -> None:
    less, more = sorted((first, second))
    assert replicas_of(one, less)[0] <= replicas_of(one, more)[0]


@given(rates, rates, rates)
def test_who_keeps_more_never_takes_more(rate: float, first: float, second: float) -> None:
    slow, fast = sorted((first, second))
    assert replicas_of((fast, None), rate)[0] <= replicas_of((slow, None), rate)[0]


# -- when nothing is said --------------------------------------------------------------------


GOOD = side("bf16", (4.0, 5.0))


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        (None, "int4 has no load test"),
        (side("int4", (None, 1.0)), "int4 kept no rate that was measured"),
        (side("int4", (None, None)), "int4 kept no rate that was measured"),
        (side("int4", (4.0, 5.0), sustained=False), "was not confirmed by the longer run"),
        (side("int4", (4.0, 5.0), sustained=None), "was not confirmed by the longer run"),
        (side("int4", (4.0, 5.0), smoke=True), "int4 was measured with a smoke profile"),
        (side("int4", (4.0, 5.0), hardware="o"), "measured on other hardware (o) than this (h)"),
        (side("int4", (4.0, 5.0), sla=["ttft p95 1s"]), "not measured against the same limits"),
    ],
)
def test_evidence_that_cannot_say_it(ours: Side | None, why: str) -> None:
    one = stated(ours, GOOD)
    assert why in one.reason
    assert (one.sides, one.saving_per_month, one.replicas) == ([], None, None)
    assert statement(one).startswith("No statement about savings against bf16: ")


@pytest.mark.parametrize(
    ("emulated", "why"),
    [(True, "are those of an emulated kernel"), (None, "it is not known whether")],
)
def test_times_of_no_real_kernel_say_nothing(emulated: bool | None, why: str) -> None:
    ours = side("int4", (4.0, 5.0))
    fake = replace(ours, outcome=ours.outcome.model_copy(update={"emulated": emulated}))
    assert why in stated(fake, GOOD).reason
    assert why in stated(GOOD, fake).reason


def test_the_reference_saves_nothing_against_itself() -> None:
    one = savings(GOOD, GOOD, ("bf16", "bf16"), CARD, "h", PEAK)
    assert one.reason == "the reference itself was released"


# -- fixed rates -----------------------------------------------------------------------------


def fixed(name: str, **results: Verdict) -> Side:
    """Latency gates at rates: `r2=PASS`."""
    outcome = candidate(name, 0.0, 300.0).model_copy(update={"emulated": False})
    one = next(gate for gate in outcome.gates if gate.metric.startswith("latency."))
    gates = [
        one.model_copy(update={"rate": float(rate[1:]), "result": result})
        for rate, result in results.items()
    ]
    return Side(outcome.model_copy(update={"gates": gates}), "h", 1, None, [])


def test_fixed_rates_that_passed() -> None:
    ours = fixed("int4", r1=Verdict.PASS, r2=Verdict.PASS, r4=Verdict.FAIL)
    theirs = fixed("bf16", r1=Verdict.PASS, r2=Verdict.FAIL, r4=Verdict.FAIL)
    one = stated(ours, theirs)
    assert [each.kept_rate for each in one.sides] == [(2.0, 4.0), (1.0, 2.0)]
    assert [each.replicas.value for each in one.sides] == [21, 42]
    assert "passed its latency gates at no rate" in stated(fixed("int4"), theirs).reason
    open_gate = fixed("int4", r1=Verdict.INCONCLUSIVE)
    assert "passed its latency gates at no rate" in stated(open_gate, theirs).reason


def test_a_fixed_rate_that_passed_above_one_that_failed_is_not_believed() -> None:
    theirs = fixed("bf16", r1=Verdict.PASS, r2=Verdict.FAIL)
    ours = fixed("int4", r1=Verdict.PASS, r2=Verdict.FAIL, r4=Verdict.PASS)
    assert stated(ours, theirs).sides[0].kept_rate == (1.0, 2.0)
    never = stated(fixed("int4", r2=Verdict.FAIL, r4=Verdict.PASS), theirs)
    assert never.reason == (
        "int4 passed its latency gates at no rate below 2 requests/s, where one failed"
    )


def test_the_same_fixed_rate_says_nothing() -> None:
    both = fixed("int4", r2=Verdict.PASS), fixed("bf16", r2=Verdict.PASS)
    assert stated(*both).reason.startswith("both kept 2 requests/s, the highest that was measured")


def test_gates_are_the_limits_of_fixed_rates() -> None:
    limits = limits_of(candidate("bf16", 0.0, 300.0))
    assert limits
    assert all(re.fullmatch(r"e2el_p99_ms ≤ [\d.e+]+ at \d+/s", one) for one in limits)


# -- in a release ----------------------------------------------------------------------------


def recipe(named: str | None) -> ReleaseRecipe:
    one = resolve("freight_demo").release
    return one.model_copy(update={"traffic": named})


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)
    monkeypatch.setattr("tasks.accuracy.engine_version", lambda: "0.0.test")


@pytest.mark.usefixtures("checkout")
def test_the_traffic_of_a_release(tmp_path: Path) -> None:
    assert traffic_of(recipe(None)) == Asked()
    asked = traffic_of(recipe(str(written_traffic(tmp_path, peak_rate=2.5))))
    assert (asked.rate, asked.source) == (2.5, "traffic.yaml, over 60 s")
    missing = traffic_problems(recipe(str(tmp_path / "none.yaml")))
    assert "none.yaml" in missing[0].where
    [flat] = traffic_problems(recipe(str(written_traffic(tmp_path, peak_rate=None))))
    assert flat.where.endswith("traffic.yaml: peak_rate")


@pytest.mark.usefixtures("checkout")
def test_traffic_is_no_part_of_a_releases_digest(tmp_path: Path) -> None:
    named = resolve("freight_demo", [f"traffic={written_traffic(tmp_path)}"])
    assert named.release.traffic is not None
    assert named.digest == resolve("freight_demo").digest


def test_a_profile_meant_for_another_machine_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "this_machine", lambda: Machine("here", "here", 1 << 33))
    todo: Any = SimpleNamespace(
        resolved=SimpleNamespace(
            load=SimpleNamespace(hardware="nvidia_a10"),
            release=SimpleNamespace(reference_candidate="bf16", traffic=None),
        )
    )
    found = savings_of(todo, searched(), [])
    assert found is not None
    assert found.reason == ("the load profile is meant for nvidia_a10, and this machine is here")
    nothing = searched().model_copy(update={"promoted": None})
    assert savings_of(todo, nothing, []) is None


# -- shown -----------------------------------------------------------------------------------


def test_the_page_and_the_summary_say_it() -> None:
    one = stated(side("int4", (5.657, 8.0)), side("bf16", (4.0, 5.0)))
    outcome = searched().model_copy(update={"savings": one})
    page = page_of(report.render(outcome, searched_details()))
    text = re.sub(r"\s+", " ", " ".join(page.text))
    for words in (
        statement(one),
        "int4 released 5.657, not 8 8 (6 to 8) 8 (6 to 8) 7,010 (5,260 to 7,010)",
        "saved 3 (1 to 5) 2,630 (876 to 4,380)",
        "nvidia_l20 at 1.2 USD an hour, 730 hours a month",
    ):
        assert words in text, words
    assert "Savings: int4 against bf16 at the peak of 42 requests/s" in markdown(outcome)


def test_what_is_not_said_is_shown_with_its_reason_and_as_text() -> None:
    told = Savings(released="int4", reference="bf16", reason="<b>no</b> load test")
    outcome = release().model_copy(update={"savings": told})
    text = " ".join(page_of(report.render(outcome, details())).text)
    assert "No statement about savings against bf16: <b>no</b> load test." in text
    assert "Savings: No statement about savings against bf16" in markdown(outcome)
    assert "Savings" not in markdown(release())


def test_a_plan_that_was_wrong_is_on_the_page() -> None:
    gates = with_plan_gate(release().candidates[0].gates, evidence(9_000, 10_000))
    one: CandidateOutcome = (
        release().candidates[0].model_copy(update={"gates": gates, "verdict": Verdict.ANOMALOUS})
    )
    outcome = release().model_copy(update={"candidates": [one, *release().candidates[1:]]})
    text = " ".join(page_of(report.render(outcome, details())).text)
    assert KV_AS_PLANNED in text
    assert "the engine has room for 9000 KV tokens" in text


def test_spreads() -> None:
    one = stated(side("int4", (5.657, 8.0)), side("bf16", (4.0, 5.0)))
    assert spread(one.replicas, count) == "3 (1 to 5)"
    assert spread(None, count) == "–"
    assert (percent(-0.004), percent(-0.2), percent(0.274)) == ("0 %", "-20 %", "27 %")
    lost_nowhere = stated(side("int4", (8.0, None)), side("bf16", (4.0, 5.0)), asked=Asked())
    assert spread(lost_nowhere.sides[0].replicas, count) == "0.125 or less"
    # 1/4 - 1/8, and 1/5 - 1/8 at the least.
    assert spread(lost_nowhere.replicas, count) == "0.125 (from 0.075)"
