"""Which of the candidates that passed is chosen, by which numbers, and what is only noise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eval_suites.selection import choose
from recipes.schema import Promotion
from registry.errors import UserError
from registry.evidence import LoadPoint
from registry.outcome import CandidateOutcome, ComparedAxis, GateResult, Selection, Verdict
from tasks.planning import resolve

TIMES: dict[str, float | None] = {"p50": 1.0, "p90": 1.0, "p95": 1.0, "p99": 1.0}


def gate(name: str = "retention", bound: float | None = 0.93, **changes: Any) -> GateResult:
    known: dict[str, Any] = {
        "name": name,
        "kind": "retention",
        "metric": "accuracy.hit_rate",
        "tier": "critical",
        "result": Verdict.PASS,
        "estimate": 0.98,
        "bound": bound,
        "opposite_bound": 1.03,
        "margin": 0.9,
        "level": 0.05,
        "candidate": 0.9,
        "reference_name": "teacher",
        "n": 600,
        "reason": "",
    }
    return GateResult.model_validate(known | changes)


def slow(value: float, low: float | None, high: float | None, percent: int = 90) -> GateResult:
    """The ceiling on an end-to-end time at 4 requests/s."""
    return gate(
        "sla", high, kind="ceiling", metric=f"latency.e2el_p{percent}_ms", estimate=value,
        opposite_bound=low, margin=1000.0, reference_name=None, rate=4.0,
    )  # fmt: skip


def point(rate: float = 4.0, p99: float | None = 1.0, **changes: Any) -> LoadPoint:
    known: dict[str, Any] = {
        "rate": rate,
        "achieved_rate": rate,
        "total": 60,
        "ok": 60,
        "failed": 0,
        "duration_s": 15.0,
        "ttft_ms": TIMES,
        "tpot_ms": TIMES,
        "itl_ms": TIMES,
        "e2el_ms": TIMES | {"p99": p99},
        "output_tokens_per_s": 100.0,
    }
    return LoadPoint.model_validate(known | changes)


def candidate(
    name: str,
    *gates: GateResult,
    verdict: Verdict = Verdict.PASS,
    size: int | None = 100,
    kept: tuple[float | None, float | None] | None = None,
    cost: float | None = None,
    **changes: Any,
) -> CandidateOutcome:
    steps = []
    if kept is not None and kept[0] is not None:
        costs = {"per_million_output_tokens": cost} if cost is not None else {}
        steps = [point(kept[0], answer="kept", cost=costs)]
    known: dict[str, Any] = {
        "name": name,
        "bundle": f"bundle of {name}",
        "verdict": verdict,
        "reasons": [],
        "gates": list(gates),
        "kept_rate": kept,
        "latency": steps,
        "size_bytes": size,
    }
    return CandidateOutcome.model_validate(known | changes)


def axis(selection: Selection, key: str) -> ComparedAxis:
    return next(one for one in selection.axes if one.key == key)


def numbers(selection: Selection, key: str) -> dict[str, float | None]:
    return {name: one.value for name, one in axis(selection, key).values.items()}


# -- accuracy --------------------------------------------------------------------------------


def test_the_accuracy_bound_is_that_of_the_worst_metric() -> None:
    first = candidate("a", gate("hit", 0.97), gate("f1", 0.93))
    second = candidate("b", gate("hit", 0.95), gate("f1", 0.94))
    found = choose([first, second], "most_accurate")
    assert numbers(found, "accuracy") == {"a": 0.93, "b": 0.94}
    assert found.chosen == "b"
    assert "b was chosen as the most accurate of 2 that passed: accuracy lower bound 0.940 " in (
        found.reason
    )
    assert "the smallest of hit, f1, as a ratio to the teacher's" in found.notes[0]


def test_bounds_of_other_scales_and_gates_without_a_say_are_left_out() -> None:
    gates = [
        gate("length", 1.1, kind="length", opposite_bound=0.9, metric="output_tokens"),
        gate("hit", 0.97),
        gate("shown", 0.5, tier="supporting"),
        gate("student", -0.02, kind="non_inferiority", reference_name="student"),
        gate("other", 0.6, reference_name="champion"),
        gate("lower", 0.04, kind="non_inferiority", opposite_bound=-0.1),
    ]
    assert numbers(choose([candidate("a", *gates)], "most_accurate"), "accuracy") == {"a": 0.97}


def test_levels_of_holm_are_moved_to_the_strictest() -> None:
    """Equal scores: one candidate's bound is higher only because it was judged at 0.05."""
    loose = candidate("loose", gate("hit", 0.98 - 1.6449 * 0.02, level=0.05))
    strict = candidate("strict", gate("hit", 0.98 - 2.3263 * 0.02, level=0.01))
    found = choose([loose, strict], "most_accurate")
    assert numbers(found, "accuracy") == {"loose": 0.933, "strict": 0.933}
    assert found.equal == ["strict"]
    assert "at the error 0.01, the strictest" in found.notes[0]


def test_without_bounds_means_are_compared_and_that_is_said() -> None:
    found = choose(
        [candidate("a", metrics={"hit": 0.9, "f1": 0.7}), candidate("b", metrics={"hit": 0.85})],
        "most_accurate",
    )
    assert axis(found, "accuracy").label == "mean of the accuracy metrics"
    assert found.chosen == "b"
    assert any("means were compared" in note for note in found.notes)


# -- speed -----------------------------------------------------------------------------------


def test_overlapping_kept_rates_are_equal_and_the_smaller_is_taken() -> None:
    ours = [
        candidate("big", kept=(5.7, 8.0), size=200),
        candidate("small", kept=(5.0, 6.0), size=50),
        candidate("slow", kept=(4.0, 5.0), size=10),
    ]
    found = choose(ours, "fastest")
    assert found.chosen == "small"
    assert found.equal == ["big"]
    assert found.reason == (
        "small was chosen as the fastest of 3 that passed: request rate that keeps the SLA "
        "5 requests/s; big (5.7 requests/s) may be as good within the noise of the measurement, "
        "and small is the smallest of them with 0.0 MB of weights."
    )


def test_a_rate_that_one_keeps_and_the_other_loses_is_a_difference() -> None:
    found = choose([candidate("a", kept=(4.0, 5.7)), candidate("b", kept=(5.7, 8.0))], "fastest")
    assert found.chosen == "b"
    assert found.equal == []
    assert found.dominated == {"a": ["b"]}


def test_rates_that_are_open_or_not_known() -> None:
    ours = [
        candidate("none", kept=(None, 2.0)),
        candidate("unknown", kept=(None, None)),
        candidate("all", kept=(8.0, None)),
    ]
    found = choose(ours, "fastest")
    assert numbers(found, "kept_rate") == {"none": 0.0, "unknown": None, "all": 8.0}
    assert found.chosen == "all"
    assert found.front == ["unknown", "all"], "what is not known is not dominated"
    assert any(
        "not known of unknown: request rate that keeps the SLA;" in note for note in found.notes
    )


def test_fixed_rates_are_compared_by_the_percentile_of_the_policy_with_its_bounds() -> None:
    ours = [
        candidate("a", slow(213, 195, 300), size=10),
        candidate("b", slow(142, 129, 163), size=30),
        candidate("c", slow(157, 144, 217), size=20),
        candidate("d", slow(170, 150, None), size=40),
    ]
    found = choose(ours, "fastest", rate=1.0)
    assert axis(found, "latency").label == "P90 E2EL at 4 requests/s"
    assert "kept_rate" not in {one.key for one in found.axes}
    assert found.chosen == "c"
    assert found.equal == ["b"]
    assert found.dominated == {"d": ["b", "c"]}


def test_without_a_gate_the_p99_at_the_rate_and_void_steps_have_none() -> None:
    ours = [
        candidate("a", latency=[point(2.0, 700.0), point(4.0, 1.0)]),
        candidate("b", latency=[point(2.0, 500.0, answer="void")]),
        candidate("c", latency=[point(2.0, None, failed=9)]),
        candidate("d", latency=[point(4.0, 1.0)]),
    ]
    found = choose(ours, "fastest", rate=2.0)
    assert numbers(found, "latency") == {"a": 700.0, "b": None, "c": None, "d": None}
    assert found.chosen == "a"
    assert any("P99 E2EL at 2 requests/s of a has no interval" in note for note in found.notes)


# -- memory and cost -------------------------------------------------------------------------


def test_a_draft_counts_as_memory_and_one_of_unknown_size_as_unknown() -> None:
    ours = [
        candidate("plain", size=100),
        candidate("drafted", size=90, draft=True, draft_bytes=20),
        candidate("older", size=10, draft=True),
    ]
    found = choose(ours, "smallest")
    assert numbers(found, "memory") == {"plain": 100, "drafted": 110, "older": None}
    assert found.chosen == "plain"


def test_cost_at_the_kept_rate_and_how_far_it_may_be_lower() -> None:
    ours = [candidate("a", kept=(4.0, 8.0), cost=2.0), candidate("b", kept=(4.0, 4.4), cost=1.9)]
    found = choose(ours, "cheapest")
    measured = axis(found, "cost").values["a"]
    assert (measured.low, measured.value, measured.high) == (1.0, 2.0, 2.0)
    assert found.chosen == "b"
    assert found.equal == ["a"], "its cost may be as low as 1"


def test_cost_is_no_axis_at_fixed_rates_nor_without_a_price() -> None:
    fixed = candidate("a", slow(213, 195, 300), latency=[point(cost={"per_request": 1.0})])
    found = choose([fixed, fixed.model_copy(update={"name": "b"})], "cheapest")
    assert found.chosen is None
    assert "cheapest needs cost, and it was not measured" in found.reason
    assert any("all are paid for the same load" in note for note in found.notes)
    unpriced = choose([candidate("a", kept=(4.0, 8.0))], "cheapest")
    assert unpriced.chosen is None
    assert any("no price is known" in note for note in unpriced.notes)


# -- domination ------------------------------------------------------------------------------


def test_dominated_by_whom_and_what_is_only_nearly() -> None:
    ours = [
        candidate("best", gate(bound=0.95), slow(100, 90, 110), size=50),
        candidate("worse", gate(bound=0.94), slow(150, 140, 160), size=60),
        candidate("near", gate(bound=0.95), slow(105, 95, 120), size=50),
        candidate("small", gate(bound=0.92), slow(150, 140, 160), size=10),
    ]
    found = choose(ours, "fastest")
    assert found.dominated == {"worse": ["best", "near"]}
    assert found.nearly == {"near": ["best"]}
    assert found.front == ["best", "near", "small"]


# -- the champion ----------------------------------------------------------------------------


def test_the_champion_stays_among_equals_and_only_there() -> None:
    ours = [
        candidate("small", gate(bound=0.93), slow(100, 90, 110), size=10),
        candidate("champion", gate(bound=0.94), slow(105, 95, 120), size=50),
        candidate("slow", gate(bound=0.92), slow(300, 290, 310), size=5),
    ]
    assert choose(ours, "fastest").chosen == "small"
    kept = choose(ours, "fastest", incumbent="bundle of champion")
    assert kept.chosen == "champion"
    assert kept.reason.endswith("and champion is the champion already.")
    assert choose(ours, "fastest", incumbent="bundle of slow").chosen == "small"
    assert choose(ours, "fastest", incumbent="bundle of another release").chosen == "small"


# -- memory ----------------------------------------------------------------------------------


def floor(gib: int, gpus: int = 1) -> dict[str, Any]:
    plan = {"gpus": gpus, "weights_bytes": 1, "activation_bytes": 0, "graph_bytes": 0}
    return {"planned_memory": plan | {"floor_bytes": gib * 10}}


def test_memory_is_the_floor_where_all_have_a_plan() -> None:
    ours = [candidate("a", size=100, **floor(3)), candidate("b", size=50, **floor(2, gpus=2))]
    found = choose(ours, "smallest")
    assert numbers(found, "memory") == {"a": 30.0, "b": 40.0}
    assert axis(found, "memory").label == "memory floor (plan)"
    assert found.chosen == "a"
    assert any(note.startswith("memory is the floor of each plan") for note in found.notes)


def test_a_floor_is_not_compared_with_weights() -> None:
    ours = [candidate("a", size=100, **floor(3)), candidate("b", size=50)]
    found = choose(ours, "smallest")
    assert numbers(found, "memory") == {"a": 100.0, "b": 50.0}
    assert axis(found, "memory").label == "weights"


def test_weights_count_in_every_engine() -> None:
    """Prefill and decode apart hold them twice: 2 x 60 are more than 100."""
    ours = [candidate("one", size=100), candidate("apart", size=60, weight_copies=2)]
    found = choose(ours, "smallest")
    assert numbers(found, "memory") == {"one": 100.0, "apart": 120.0}
    assert found.chosen == "one"


# -- weights ---------------------------------------------------------------------------------


def test_weights_are_exponents_of_ratios() -> None:
    ours = [candidate("a", gate(bound=0.95), size=200), candidate("b", gate(bound=0.93), size=100)]
    accurate = choose(ours, "weights", weights={"accuracy": 99, "memory": 1})
    assert accurate.chosen == "a", "half the memory is worth less than 0.7 % of accuracy"
    assert accurate.scores["a"].value == pytest.approx(0.5**0.01)
    assert accurate.scores["b"].value == pytest.approx((0.93 / 0.95) ** 0.99)
    assert accurate.weights == {"accuracy": 0.99, "memory": 0.01}
    small = choose(ours, "weights", weights={"accuracy": 1, "memory": 1})
    assert small.chosen == "b"
    assert "its score by the weights accuracy 0.5, memory 0.5 is 0.989" in small.reason


def test_weights_say_themselves_what_size_is_worth() -> None:
    ours = [candidate("big", kept=(5.7, 8.0), size=200), candidate("s", kept=(5.0, 6.0), size=50)]
    found = choose(ours, "weights", weights={"kept_rate": 1})
    assert found.chosen == "big"
    assert found.equal == ["s"]
    assert found.reason.endswith("noise of the measurement, and big is the best of them.")
    again = choose(ours, "weights", weights={"kept_rate": 1}, incumbent="bundle of s")
    assert again.chosen == "s"


def test_differences_in_accuracy_count_as_what_is_left_of_one() -> None:
    def against(name: str, bound: float, size: int) -> CandidateOutcome:
        return candidate(name, gate(bound=bound, kind="non_inferiority", estimate=0.0), size=size)

    ours = [against("a", -0.02, 100), against("b", -0.04, 100)]
    found = choose(ours, "weights", weights={"accuracy": 1})
    assert found.scores["b"].value == pytest.approx(0.96 / 0.98)


def test_an_axis_with_weight_that_nobody_has_chooses_nobody() -> None:
    found = choose([candidate("a", gate())], "weights", weights={"accuracy": 1, "cost": 1})
    assert found.chosen is None
    assert found.reason == (
        "Nothing was chosen of 1 that passed: the weights need cost, and it was not measured."
    )


def test_an_axis_with_weight_that_one_lacks_leaves_that_one_out() -> None:
    ours = [candidate("a", gate(), size=None), candidate("b", gate(bound=0.92))]
    found = choose(ours, "weights", weights={"accuracy": 1, "memory": 1})
    assert found.chosen == "b"
    assert found.scores["a"].value is None


# -- edges -----------------------------------------------------------------------------------


def test_none_or_one_passed() -> None:
    refused = candidate("a", verdict=Verdict.FAIL)
    none = choose([refused], "fastest")
    assert (none.chosen, none.front, none.reason) == (None, [], "No candidate passed.")
    one = choose([refused, candidate("b", slow(100, 90, 110))], "fastest")
    assert one.reason == "b was chosen because no other candidate passed."
    assert list(axis(one, "latency").values) == ["b"]


@pytest.mark.parametrize(
    "written", [{"objective": "fastest", "weights": {"memory": 1}}, {"objective": "weights"},
                {"weights": {"speed": 1}}, {"weights": {"memory": 0}}],
)  # fmt: skip
def test_either_an_objective_or_weights(written: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Promotion.model_validate(written)


def test_weights_alone_are_enough_and_read_back() -> None:
    made = Promotion.model_validate({"weights": {"memory": 1}})
    assert made.objective == "weights"
    assert Promotion.model_validate_json(made.model_dump_json()) == made
    assert Promotion().objective == "fastest"


# -- whatever the numbers --------------------------------------------------------------------

GRID = (0.0, 1.0, 2.0, 3.0, 5.0)
OBJECTIVES = ("fastest", "most_accurate", "smallest", "cheapest", "weights")


@st.composite
def candidates(draw: Any) -> list[CandidateOutcome]:
    made = []
    searched = draw(st.booleans())
    for number in range(draw(st.integers(1, 6))):
        low = draw(st.sampled_from(GRID))
        wide = draw(st.sampled_from(GRID))
        gates = [gate(bound=draw(st.sampled_from([0.91, 0.92, 0.93])))]
        kept = None
        if searched:
            kept = draw(st.sampled_from([(None, None), (None, 2.0), (low + 1, low + 2 + wide)]))
        else:
            gates.append(slow(10 + low, 10 + low - wide, 10 + low + wide))
        made.append(
            candidate(
                f"c{number}", *gates, kept=kept,
                verdict=draw(st.sampled_from([Verdict.PASS, Verdict.PASS, Verdict.FAIL])),
                cost=draw(st.sampled_from([None, 1.0, 2.0])),
                size=draw(st.sampled_from([None, 10, 20, 30])),
            )
        )  # fmt: skip
    return made


def chosen_by(ours: list[CandidateOutcome], objective: str, **more: Any) -> Selection:
    weights = {"accuracy": 3.0, "memory": 1.0} if objective == "weights" else None
    return choose(ours, objective, weights=weights, **more)


@settings(max_examples=300)
@given(candidates(), st.sampled_from(OBJECTIVES))
def test_what_holds_of_every_selection(ours: list[CandidateOutcome], objective: str) -> None:
    found = chosen_by(ours, objective)
    passed = [one for one in ours if one.verdict is Verdict.PASS]
    names = [one.name for one in passed]
    assert bool(found.front) == bool(passed), "somebody is undominated"
    assert sorted([*found.front, *found.dominated]) == sorted(names)
    assert all(set(by) <= set(names) - {name} for name, by in found.dominated.items())
    if found.chosen is not None:
        assert found.chosen in found.front
        assert found.chosen in found.reason
        assert set(found.equal) <= set(found.front) - {found.chosen}
    for one in found.axes:
        assert list(one.values) == names
    assert Selection.model_validate_json(found.model_dump_json()) == found
    others = [one for one in ours if one.verdict is not Verdict.PASS]
    assert chosen_by(passed, objective) == found, "who failed changes nothing"
    assert chosen_by([*others, *passed], objective) == found


@settings(max_examples=150)
@given(candidates(), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_the_order_of_candidates_decides_only_among_equals(
    ours: list[CandidateOutcome], objective: str, shuffled: Any
) -> None:
    found = chosen_by(ours, objective)
    other = list(ours)
    shuffled.shuffle(other)
    again = chosen_by(other, objective)
    assert set(again.front) == set(found.front)
    assert {k: set(v) for k, v in again.dominated.items()} == {
        k: set(v) for k, v in found.dominated.items()
    }
    assert {again.chosen, *again.equal} == {found.chosen, *found.equal}


@settings(max_examples=150)
@given(candidates(), st.sampled_from(OBJECTIVES))
def test_nobody_dominates_in_a_circle_nor_better_than_the_chosen(
    ours: list[CandidateOutcome], objective: str
) -> None:
    found = chosen_by(ours, objective)
    for first, second in itertools.permutations(found.dominated, 2):
        assert not (first in found.dominated[second] and second in found.dominated[first])
    for name, by in found.dominated.items():
        assert set(by) & set(found.front), f"{name} is dominated by somebody on the front, too"


@settings(max_examples=150)
@given(candidates(), st.sampled_from(OBJECTIVES))
def test_a_champion_stays_a_champion(ours: list[CandidateOutcome], objective: str) -> None:
    """Released again with the same evidence, whoever is chosen stays chosen."""
    found = chosen_by(ours, objective)
    for name in [found.chosen, *found.equal]:
        if name is not None:
            assert chosen_by(ours, objective, incumbent=f"bundle of {name}").chosen == name


# -- mistakes that are found before anything is measured -------------------------------------


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["promotion.objective=cheapest"], ["has no search", "has no `price_per_hour`"]),
        (["promotion={weights: {kept_rate: 1}}"], ["needs kept_rate, and load profile"]),
        (["promotion={weights: {latency: 1}}", "load=freight_cpu_2core"], ["searches its rates"]),
        (["promotion={weights: {cost: 1}}", "load=freight_cpu_2core"], ["`price_per_hour`"]),
    ],
)
def test_an_objective_that_will_not_be_measured(assignments: list[str], said: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        resolve("freight_demo", assignments)
    found = [one for one in raised.value.problems if ": promotion." in one.where]
    assert len(found) == len(said)
    for words, problem in zip(said, found, strict=True):
        assert words in problem.what


@pytest.mark.parametrize(
    "written", ["promotion.objective=most_accurate", "promotion={weights: {latency: 1, memory: 2}}"]
)
def test_an_objective_that_will_be(written: str) -> None:
    resolve("freight_demo", [written])


def test_of_two_with_one_value_the_one_known_better_rules_others_out_in_any_order() -> None:
    ours = [
        candidate("wide", slow(10.0, 9.0, 11.0)),
        candidate("exact", slow(10.0, 10.0, 10.0)),
        candidate("behind", slow(11.0, 10.0, 12.0), size=10),
    ]
    for order in itertools.permutations(ours):
        found = choose(list(order), "fastest")
        assert {found.chosen, *found.equal} == {"wide", "exact"}


# -- emulated kernels ------------------------------------------------------------------------


def emulated(name: str, *gates: GateResult, production: bool, **changes: Any) -> CandidateOutcome:
    return candidate(name, *gates, emulated=True, times_count=not production, **changes)


def test_emulated_times_are_never_the_fastest_in_production() -> None:
    real = candidate("real", slow(200.0, 190.0, 210.0))
    quick = emulated("quick", slow(100.0, 95.0, 105.0), production=True, size=10)
    found = choose([real, quick], "fastest")
    assert found.chosen == "real"
    assert numbers(found, "latency") == {"real": 200.0, "quick": None}
    assert any(note.startswith("times of quick are of an emulated kernel") for note in found.notes)
    alone = choose([quick], "fastest")
    assert alone.chosen is None
    assert choose([quick], "smallest").chosen == "quick"


def test_emulated_rates_and_costs_are_not_compared_in_production() -> None:
    real = candidate("real", kept=(4.0, 5.0), cost=2.0)
    quick = emulated("quick", kept=(9.0, 10.0), cost=1.0, production=True)
    assert choose([real, quick], "fastest").chosen == "real"
    assert choose([real, quick], "cheapest").chosen == "real"


def test_elsewhere_they_are_compared_and_said() -> None:
    real = candidate("real", slow(200.0, 190.0, 210.0))
    quick = emulated("quick", slow(100.0, 95.0, 105.0), production=False)
    found = choose([real, quick], "fastest")
    assert found.chosen == "quick"
    assert any("times of quick are of an emulated kernel" in note for note in found.notes)
    assert not any("emulated" in note for note in choose([real], "fastest").notes)
