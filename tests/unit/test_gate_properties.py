"""What must hold of gates whatever the evidence: never better for worse, the same for the same."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from eval_suites.gates import judge_all
from eval_suites.statistics import PairedDifference, PairedTable
from eval_suites.verdicts import verdict_of
from registry.evidence_folders import CandidateEvidence
from registry.item_files import Table
from registry.items import Items, make_items
from registry.outcome import Verdict
from tests.unit.evidence_builders import SETTINGS, items, judge, measured, policy, rule, table

BETTER = {Verdict.FAIL: 0, Verdict.INCONCLUSIVE: 1, Verdict.PASS: 2}


def ordered(counts, segments=None):
    """A candidate and a reference of 0/1 scores: both right, only one, only the other, neither."""
    both, gained, lost, neither = counts
    own = [1.0] * (both + gained) + [0.0] * (lost + neither)
    theirs = [1.0] * both + [0.0] * gained + [1.0] * lost + [0.0] * neither
    more = {} if segments is None else {"segment": segments[: len(own)]}
    return table(hit_rate=own, **more), table(hit_rate=theirs, **more)


GATES = {
    "retention": rule(min_items=1),
    "non_inferiority": rule(kind="non_inferiority", margin=0.1, min_items=1),
    "regression": rule(kind="regression", margin=0.05, min_items=1),
    "floor": rule(kind="floor", margin=0.7, min_items=1),
}
SLICE = rule(kind="slice", margin=0.2, min_items=1)


# -- turning a right item wrong --------------------------------------------------------------


@pytest.mark.parametrize("kind", GATES)
def test_a_right_item_turned_wrong_never_helps_on_any_table_of_six(kind):
    gate, tables = GATES[kind], {}
    names = [t for t in itertools.product(range(7), repeat=4) if sum(t) == 6]
    for counts in names:
        evidence, reference = ordered(counts)
        result = judge(gate, evidence, reference).result
        tables[counts] = result
    compared = 0
    for (both, gained, lost, neither), before in tables.items():
        after = []
        if both:
            after.append(tables[both - 1, gained, lost + 1, neither])
        if gained:
            after.append(tables[both, gained - 1, lost, neither + 1])
        for result in after:
            if before is Verdict.INVALID or result is Verdict.INVALID:
                # Only a ratio to nothing is INVALID, and that lies in the reference alone.
                assert before is result
            else:
                compared += 1
                assert BETTER[result] <= BETTER[before]
    assert compared > 40


@settings(max_examples=60)
@given(
    counts=st.tuples(st.integers(1, 400), st.integers(0, 40), st.integers(0, 60),
                     st.integers(0, 200)),
    turned=st.integers(1, 30),
    kind=st.sampled_from([*GATES]),
)  # fmt: skip
def test_right_items_turned_wrong_never_help(counts, turned, kind):
    gate = GATES[kind]
    evidence, reference = ordered(counts)
    own = evidence.items.metric("hit_rate").copy()
    own[: min(turned, counts[0])] = 0.0
    before = judge(gate, evidence, reference)
    after = judge(gate, table(hit_rate=own), reference)
    assert BETTER[after.result] <= BETTER[before.result]
    assert after.p_value >= before.p_value - 1e-12
    assert after.estimate < before.estimate and after.bound <= before.bound + 1e-9


@settings(max_examples=40)
@given(
    data=st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from("abc")), min_size=20,
                  max_size=120),
    turned=st.integers(0, 119),
)  # fmt: skip
def test_a_right_item_turned_wrong_never_helps_the_worst_slice(data, turned):
    own, theirs, segments = (list(column) for column in zip(*data, strict=True))
    reference = table(hit_rate=np.array(theirs, float), segment=segments)
    before = judge(SLICE, table(hit_rate=np.array(own, float), segment=segments), reference)
    own[turned % len(own)] = False
    after = judge(SLICE, table(hit_rate=np.array(own, float), segment=segments), reference)
    assert BETTER[after.result] <= BETTER[before.result]


# -- what must not matter --------------------------------------------------------------------


def graded(seed=0, n=240):
    rng = np.random.default_rng(seed)
    reference = np.clip(rng.normal(0.7, 0.2, n), 0, 1)
    segments = rng.choice(["air", "road", "sea"], n)
    conversations = [f"c{i // 3}" for i in range(n)]
    rng.shuffle(conversations)
    candidate = np.clip(reference - 0.03 + rng.normal(0, 0.12, n), 0, 1)
    columns = {"segment": segments, "conversation": conversations}
    right = (rng.random(n) < 0.85).astype(float), (rng.random(n) < 0.9).astype(float)
    return (
        {"f1": candidate, "hit_rate": right[0], **columns},
        {"f1": reference, "hit_rate": right[1], **columns},
    )


def made(columns, order=None, ids=None) -> CandidateEvidence:
    """Evidence of a file with these columns, its rows in some order."""
    n = len(columns["f1"])
    order = np.arange(n) if order is None else order
    ids = [f"id{i:04d}" for i in range(n)] if ids is None else ids
    cells = {"item_id": [ids[i] for i in order]}
    cells |= {name: [column[i] for i in order] for name, column in columns.items()}
    items = make_items(Table("items.jsonl", cells, list(range(1, n + 1))))
    return CandidateEvidence("", items=items, source="table")


RULES = [
    {"name": "retention_f1", "metric": "f1", "kind": "retention", "reference": "teacher"},
    {"name": "loss_f1", "metric": "f1", "kind": "non_inferiority", "reference": "teacher",
     "margin": 0.05},
    {"name": "floor_f1", "metric": "f1", "kind": "floor", "margin": 0.6},
    {"name": "retention", "metric": "hit_rate", "kind": "retention", "reference": "teacher"},
    {"name": "plain_f1", "metric": "f1", "kind": "retention", "reference": "teacher",
     "cluster": None},
    {"name": "slices", "metric": "f1", "kind": "slice", "reference": "teacher", "margin": 0.1,
     "min_items": 10, "cluster": None},
]  # fmt: skip


def judged(rules, candidates, teacher):
    ruled = policy(*[rule(**one) for one in rules])
    return judge_all(ruled, candidates, {"teacher": teacher, "champion": teacher})


def numbers(result):
    """What a gate found, without what it is called."""
    found = result.model_dump(exclude={"name", "metric", "reason", "margin", "limit"})
    flips = found.pop("flips")
    return {**found, "flips": flips and (flips["gained"], flips["lost"])}


def test_the_order_of_the_rows_does_not_matter():
    own, theirs = graded()
    plain = judged(RULES, {"c": made(own)}, made(theirs))["c"]
    assert {result.result for result in plain} >= {Verdict.PASS}
    order, other = (np.random.default_rng(seed).permutation(240) for seed in (1, 2))
    shuffled = judged(RULES, {"c": made(own, order)}, made(theirs, other))["c"]
    assert shuffled == plain


def test_the_order_and_the_company_of_gates_do_not_matter():
    own, theirs = graded()
    plain = {one.name: one for one in judged(RULES, {"c": made(own)}, made(theirs))["c"]}
    turned = judged(RULES[::-1], {"c": made(own)}, made(theirs))["c"]
    assert {one.name: one for one in turned} == plain
    for one in RULES:
        (alone,) = judged([one], {"c": made(own)}, made(theirs))["c"]
        assert alone.result is plain[one["name"]].result
        for field in ("estimate", "bound", "opposite_bound", "p_value", "mde"):
            expected = getattr(plain[one["name"]], field)
            assert getattr(alone, field) == pytest.approx(expected, rel=1e-9)


def test_names_of_metrics_do_not_matter():
    own, theirs = graded()
    names = {"f1": "zeta", "hit_rate": "alpha"}
    plain = judged(RULES, {"c": made(own)}, made(theirs))["c"]
    rules = [{**one, "metric": names[one["metric"]]} for one in RULES]
    renamed = [{names.get(key, key): v for key, v in side.items()} for side in (own, theirs)]
    evidence = [
        CandidateEvidence("", items=_with(made(side).items, new), source="table")
        for side, new in zip((own, theirs), renamed, strict=True)
    ]
    again = judged(rules, {"c": evidence[0]}, evidence[1])["c"]
    for one, another in zip(plain, again, strict=True):
        first, second = numbers(one), numbers(another)
        for field, expected in first.items():
            if isinstance(expected, float):
                assert second[field] == pytest.approx(expected, rel=1e-9)
            else:
                assert second[field] == expected


def _with(items: Items, columns) -> Items:
    frame = pd.DataFrame({"item_id": items.frame["item_id"], **{
        name: list(cells) for name, cells in columns.items()}})  # fmt: skip
    return replace(items, frame=frame)


def test_names_and_order_of_candidates_do_not_matter():
    own, theirs = graded()
    worse, _ = graded(seed=9)
    plain = judged(RULES, {"a": made(own), "b": made(worse)}, made(theirs))
    again = judged(RULES, {"second": made(worse), "first": made(own)}, made(theirs))
    assert again["first"] == plain["a"] and again["second"] == plain["b"]


@pytest.mark.parametrize("factor", [100.0, 0.01, 7.0])
def test_scores_scaled_with_their_margins_give_the_same_verdicts(factor):
    own, theirs = graded()
    scaled = [{**side, "f1": factor * side["f1"], "hit_rate": factor * side["hit_rate"]}
              for side in (own, theirs)]  # fmt: skip
    ratios = ("retention", "ratio")
    rules = [one if one["kind"] in ratios else {**one, "margin": one["margin"] * factor}
             for one in RULES]  # fmt: skip
    plain = judged(RULES, {"c": made(own)}, made(theirs))["c"]
    again = judged(rules, {"c": made(scaled[0])}, made(scaled[1]))["c"]
    for one, another in zip(plain, again, strict=True):
        unit = 1.0 if one.kind in ratios else factor
        assert one.result is another.result
        # One replicate of 10,000 may change sides by rounding.
        assert another.p_value == pytest.approx(one.p_value, abs=2e-4)
        for field in ("estimate", "bound", "opposite_bound", "mde"):
            assert getattr(another, field) == pytest.approx(unit * getattr(one, field), rel=1e-4)


# -- PASS and the bound ----------------------------------------------------------------------


@settings(max_examples=60)
@given(
    counts=st.tuples(st.integers(20, 400), st.integers(0, 60), st.integers(0, 90),
                     st.integers(0, 200)),
    kind=st.sampled_from([*GATES]),
)  # fmt: skip
def test_the_verdict_is_where_the_bounds_are(counts, kind):
    evidence, reference = ordered(counts)
    result = judge(GATES[kind], evidence, reference)
    if result.result is Verdict.PASS:
        assert result.bound >= result.limit - 1e-9
    elif result.result is Verdict.FAIL:
        assert result.opposite_bound <= result.limit + 1e-9
    else:
        assert result.bound - 1e-9 <= result.limit <= result.opposite_bound + 1e-9
        assert result.needed is None or result.needed >= 1


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), gate=st.sampled_from(RULES))
def test_the_verdict_of_graded_scores_is_where_the_bounds_are(seed, gate):
    own, theirs = graded(seed, n=120)
    (result,) = judged([gate], {"c": made(own)}, made(theirs))["c"]
    if result.result is Verdict.PASS:
        assert result.bound >= result.limit - 1e-6
    elif result.result is Verdict.INCONCLUSIVE and result.p_value > result.level:
        assert result.bound <= result.limit + 1e-6


def test_a_slice_fails_at_its_part_of_the_level():
    """One slice in twenty would be beyond its limit by chance alone."""
    own, theirs = [1.0] * 36 + [0.0] * 14, [1.0] * 45 + [0.0] * 5
    gate = rule(kind="slice", margin=0.08, min_items=1)
    segment = ["s00"] * 50
    alone = judge(
        gate, table(hit_rate=own, segment=segment), table(hit_rate=theirs, segment=segment)
    )
    assert 0.05 / 20 < PairedDifference(PairedTable(36, 0, 9, 5)).p_below(-0.08) < 0.05
    assert alone.result is Verdict.FAIL
    rest = [1.0] * 45 * 19 + [0.0] * 5 * 19
    segment = segment + [f"s{i:02d}" for i in range(1, 20) for _ in range(50)]
    among = judge(
        gate,
        table(hit_rate=own + rest, segment=segment),
        table(hit_rate=theirs + rest, segment=segment),
    )
    assert (among.result, among.slice) == (Verdict.INCONCLUSIVE, "segment=s00")


# -- never PASS ------------------------------------------------------------------------------

GOOD = [1.0] * 380 + [0.0] * 20


def good(**changes) -> CandidateEvidence:
    return measured("candidate", GOOD, **changes)


TEACHER = measured("teacher", GOOD)


def test_the_evidence_that_is_spoiled_below_passes():
    assert judge(rule(), good(), TEACHER).result is Verdict.PASS
    own = judge(rule(), table(hit_rate=GOOD), table(hit_rate=GOOD))
    assert own.result is Verdict.PASS


def cell(value):
    cells: list = list(GOOD)
    cells[7] = value
    return replace(measured("candidate", GOOD), items=items(hit_rate=pd.array(cells, dtype=object)))


BROKEN = {
    "no evidence": CandidateEvidence("candidate"),
    "no items": replace(good(), items=None),
    "no summary": replace(good(), accuracy=None),
    "unreadable items": replace(good(), items=None, unreadable={"items": "broken"}),
    "unreadable summary": replace(good(), accuracy=None, unreadable={"accuracy": "broken"}),
    "an item missing": measured("candidate", GOOD[1:], items_asked=400, items_scored=400),
    "an item not scored": good(items_scored=399),
    "nothing asked": good(items_asked=0, items_scored=0),
    "a mean that is not the items'": good(metrics={"hit_rate": 0.99}),
    "a mean of NaN": good(metrics={"hit_rate": math.nan}),
    "another bundle": replace(good(), bundle="other"),
    "another suite": good(suite="other"),
    "another task": good(task="other.yaml"),
    "another task version": good(task_version="2"),
    "another harness": good(harness="lm-eval 0.5"),
    "other items": good(items_digest="other"),
    "no settings": good(settings={}),
    "another temperature": good(settings={**SETTINGS, "sampling": {"temperature": 0.7}}),
    "another few-shot": good(settings={**SETTINGS, "few_shot": 5}),
    "a limit": good(limited=True),
    "a smoke suite": good(smoke=True),
    "a table against settings": table(hit_rate=GOOD),
}  # fmt: skip
CELLS = {"null": None, "NaN": math.nan, "infinite": math.inf, "minus infinite": -math.inf,
         "a text": "1.0", "empty": "", "a boolean": True, "a list": [1.0]}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_no_broken_evidence_passes(fault, side):
    broken = BROKEN[fault]
    pair = (broken, TEACHER) if side == "candidate" else (good(), broken)
    result = judge(rule(), *pair)
    assert result.result is Verdict.INVALID and result.reason
    assert verdict_of([result]) is Verdict.INVALID


@pytest.mark.parametrize("value", CELLS)
@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_one_cell_that_is_no_number_is_invalid(value, side):
    one = cell(CELLS[value])
    result = judge(rule(), *((one, TEACHER) if side == "candidate" else (good(), one)))
    assert result.result is Verdict.INVALID
    assert "no finite number for 1 of 400 items" in result.reason


def test_items_twice_are_no_items():
    cells = {"item_id": ["a", "b", "a"], "hit_rate": [1.0, 1.0, 1.0]}
    with pytest.raises(Exception, match="a"):
        make_items(Table("items.csv", cells, [2, 3, 4]))


@settings(max_examples=40)
@given(spoiled=st.sampled_from([*BROKEN]), companions=st.integers(0, 3))
def test_no_company_makes_a_broken_candidate_pass(spoiled, companions):
    candidates = {f"good{i}": good() for i in range(companions)}
    results = judge_all(policy(rule()), {**candidates, "c": BROKEN[spoiled]}, {"teacher": TEACHER})
    assert verdict_of(results["c"]) is not Verdict.PASS


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=1, max_size=5),
)
def test_more_candidates_never_turn_a_refusal_into_pass(rows):
    """Each candidate is judged at most at its own level, whoever else is there."""
    teacher = table(hit_rate=[1.0] * 360 + [0.0] * 60)
    candidates = {
        f"c{i}": table(
            hit_rate=[1.0] * (360 - lost) + [0.0] * (lost + 60 - gained) + [1.0] * gained
        )
        for i, (gained, lost) in enumerate(rows)
    }
    ruled = policy(rule())
    together = judge_all(ruled, candidates, {"teacher": teacher})
    for name, evidence in candidates.items():
        (alone,) = judge_all(ruled, {name: evidence}, {"teacher": teacher})[name]
        (among,) = together[name]
        assert among.level <= alone.level
        assert BETTER[alone.result] >= BETTER[among.result] or alone.result is Verdict.FAIL
        if alone.result is not Verdict.PASS:
            assert among.result is not Verdict.PASS


def test_planned_candidates_that_are_not_here_keep_their_share():
    teacher = table(hit_rate=[1.0] * 360 + [0.0] * 40)
    own = table(hit_rate=[1.0] * 341 + [0.0] * 59)
    levels = [judge(rule(), own, teacher, planned=planned).level for planned in (0, 1, 2, 5)]
    assert levels == pytest.approx([0.05, 0.05, 0.025, 0.01])


# -- scores that try to be passed wrongly ----------------------------------------------------


def hostile(candidate, reference=None, gate=None, **rows):
    """The verdict of graded scores on a non-inferiority of 0.02, or another gate."""
    gate = gate or rule(kind="non_inferiority", margin=0.02)
    own = table(hit_rate=candidate, **rows)
    return judge(gate, own, None if reference is None else table(hit_rate=reference, **rows))


SAME = np.random.default_rng(1).uniform(0.1, 1.0, 120)


def test_too_few_items_to_see_a_rare_total_loss():
    assert hostile(SAME, SAME).result is Verdict.INCONCLUSIVE
    many = np.tile(SAME, 3)
    assert hostile(many, many).result is Verdict.PASS


def test_one_total_loser_among_many_alike():
    """2 of 300 lost everything: at most 6.3 / 300 of all do, which is more than 0.02."""
    reference = np.ones(300) * 0.5 + 0.5 * (np.arange(300) % 2)
    candidate = reference.copy()
    candidate[[1, 3]] = 0.0
    assert hostile(candidate, reference).result is Verdict.INCONCLUSIVE


def test_small_gains_everywhere_do_not_hide_rare_large_losses():
    reference = np.full(300, 0.8)
    candidate = reference + np.random.default_rng(2).normal(0.001, 0.001, 300)
    for losers in (1, 2, 5):
        candidate[:losers] = 0.0
        assert candidate.mean() > 0.8 - 0.02
        assert hostile(candidate, reference).result is Verdict.INCONCLUSIVE


def test_one_huge_conversation_counts_once():
    conversation = ["huge"] * 280 + [f"c{i}" for i in range(20)]
    own = np.concatenate([np.full(280, 0.9), np.linspace(0.2, 0.7, 20)])
    theirs = np.full(300, 0.8)
    result = hostile(own, theirs, conversation=conversation)
    assert (result.units, result.result) == (21, Verdict.INCONCLUSIVE)


def test_fewer_than_twenty_conversations_decide_nothing():
    conversation = [f"c{i // 20}" for i in range(300)]
    gains = SAME[np.arange(300) % 120]
    result = hostile(gains + 0.1, gains, conversation=conversation)
    assert result.result is Verdict.INCONCLUSIVE and "15 clusters" in result.reason


def test_one_losing_stratum_is_the_worst_slice():
    segment = ["air"] * 30 + ["road"] * 370
    candidate = [0.0] * 10 + [1.0] * 390
    gate = rule(kind="slice", margin=0.05, min_items=20)
    result = hostile(candidate, [1.0] * 400, gate, segment=segment)
    assert (result.result, result.slice) == (Verdict.FAIL, "segment=air")
    whole = hostile(candidate, [1.0] * 400, rule(kind="non_inferiority", margin=0.05))
    assert whole.result is Verdict.PASS


@pytest.mark.parametrize(("loss", "expected"), [(0.001, Verdict.PASS), (0.5, Verdict.FAIL)])
def test_negative_scores_are_compared_as_they_are(loss, expected):
    reference = -np.random.default_rng(3).uniform(0.5, 1.5, 500)
    result = hostile(reference - loss, reference, rule(kind="non_inferiority", margin=0.02))
    assert result.result is expected
    refused = hostile(reference - loss, reference, rule())
    assert refused.result is Verdict.INVALID and "no ratio to it exists" in refused.reason


def test_scores_above_one_are_compared_as_they_are():
    reference = np.random.default_rng(4).uniform(50, 100, 500)
    assert hostile(reference * 0.85, reference, rule()).result is Verdict.FAIL
    assert hostile(reference * 0.99, reference, rule()).result is Verdict.PASS


def test_a_constant_reference_hides_nothing():
    noisy = np.clip(np.random.default_rng(5).normal(0.79, 0.3, 200), 0, 1)
    assert hostile(noisy, np.full(200, 0.75)).result is not Verdict.PASS


@pytest.mark.parametrize("grouped", [False, True])
def test_all_zeros_pass_no_floor_and_have_no_ratio(grouped):
    zeros, rows = np.zeros(200), {}
    if grouped:
        rows = {"conversation": [f"c{i // 4}" for i in range(200)]}
    assert hostile(zeros, None, rule(kind="floor", margin=0.1), **rows).result is Verdict.FAIL
    assert hostile(zeros, zeros, rule(), **rows).result is Verdict.INVALID
    # Nothing lost, and too little seen to say so within 0.01.
    small = rule(kind="non_inferiority", margin=0.01)
    assert hostile(zeros, zeros, small, **rows).result is Verdict.INCONCLUSIVE


def test_heavy_ties_do_not_make_certainty():
    """All alike but 5 of 300 that lost all: too few to resample; Clopper-Pearson of 5 decides."""
    candidate, reference = np.full(300, 0.5), np.full(300, 0.5)
    candidate[:5], candidate[5], reference[5] = 0.0, 0.6, 0.6
    result = hostile(candidate, reference)
    # The largest loss that these scores allow is 0.6.
    assert result.bound == pytest.approx(-0.6 * beta.ppf(0.95, 6, 295), rel=1e-6)
    assert result.result is Verdict.INCONCLUSIVE
    candidate[4] = 0.5
    assert hostile(candidate, reference).result is Verdict.PASS
