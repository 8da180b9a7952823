"""How many items a decision needs: by formula, and as simulated releases bear it out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import norm
from statsmodels.stats.proportion import power_proportions_2indep

from eval_suites.bootstrap import Bootstrap, Resampling, Scores
from eval_suites.power import (
    distance_to_see,
    items_for,
    minimum_detectable,
    needed_items,
    units_to_see,
)
from eval_suites.power_plan import plan_power
from eval_suites.power_releases import MOST_UNITS, Draws, power_at, truth_of
from eval_suites.questions import Question
from eval_suites.statistics import (
    ExactProportion,
    PairedDifference,
    PairedRatio,
    PairedTable,
    difference_statistic,
    ratio_statistic,
)
from tests.unit.evidence_builders import policy, rule, table

RELEASES = 4000
CLOSE = 0.05
"""Points that the power stated may be off."""


def plan(gate, evidence, reference=None, effect=0.95, **options):
    settings_of_policy = {key: options.pop(key) for key in ("looks",) if key in options}
    gates = [gate, rule(name="decides", kind="floor", margin=0.0)]
    row, _ = plan_power(
        policy(*gates, **settings_of_policy), effect, evidence, reference, **options
    )
    return row


def pilot(both, gained, lost, neither):
    """Two runs of 0/1 scores with these counts."""
    own = [1.0] * both + [1.0] * gained + [0.0] * lost + [0.0] * neither
    theirs = [1.0] * both + [0.0] * gained + [1.0] * lost + [0.0] * neither
    return table(hit_rate=own), table(hit_rate=theirs)


# -- the formulas ----------------------------------------------------------------------------


def power_of(
    n: int, distance: float, sd_at_limit: float, sd_at_truth: float, level: float
) -> float:
    """What `items_for` inverts: the share of runs on `n` units that pass."""
    beyond = distance * math.sqrt(n) + float(norm.ppf(level)) * sd_at_limit
    if sd_at_truth <= 0:
        return float(distance > 0 and beyond >= 0)
    return float(ndtr(beyond / sd_at_truth))


@settings(max_examples=100)
@given(
    distance=st.floats(0.005, 0.5),
    at_limit=st.floats(0.01, 1.0),
    at_truth=st.floats(0.01, 1.0),
    level=st.sampled_from([0.05, 0.01, 0.005]),
)
def test_the_items_asked_for_are_the_first_with_that_power(distance, at_limit, at_truth, level):
    n = items_for(distance, at_limit, at_truth, level)
    assert power_of(n, distance, at_limit, at_truth, level) >= 0.8 - 1e-9
    if n > 1:
        assert power_of(n - 1, distance, at_limit, at_truth, level) < 0.8


def test_a_worked_example_of_the_normal_formula():
    """(1.645 + 0.842)^2 * 0.3^2 / 0.05^2 = 222.6."""
    assert items_for(0.05, 0.3, 0.3, 0.05) == 223
    assert items_for(0.05, 0.3, 0.3, 0.05, power=0.9) == math.ceil(
        ((norm.ppf(0.95) + norm.ppf(0.9)) * 6) ** 2
    )


def test_power_of_two_groups_is_statsmodels():
    """Two independent proportions, 60 % against 50 %, 200 each: an outside check of the tails."""
    pooled = 0.55 * 0.45
    ours = power_of(200, 0.1, math.sqrt(2 * pooled), math.sqrt(0.24 + 0.25), 0.05)
    theirs = power_proportions_2indep(0.1, 0.5, 200, alpha=0.05, alternative="larger")
    assert ours == pytest.approx(theirs.power, abs=2e-3)


@pytest.mark.parametrize("distance", [0.0, -0.02])
def test_no_number_of_items_shows_what_is_not_so(distance):
    assert items_for(distance, 0.3, 0.3, 0.05) is None
    assert power_of(10_000, distance, 0.3, 0.3, 0.05) <= 0.05 + 1e-9


def test_what_would_take_ten_million_items_is_no_plan():
    assert items_for(1e-5, 0.3, 0.3, 0.05) is None


def test_a_certain_truth_still_has_to_clear_its_limit():
    """Without spread under the truth, all runs pass or none."""
    enough = math.ceil((norm.ppf(0.95) * 0.3 / 0.05) ** 2)
    assert power_of(enough, 0.05, 0.3, 0.0, 0.05) == 1.0
    assert power_of(enough - 1, 0.05, 0.3, 0.0, 0.05) == 0.0
    assert items_for(0.05, 0.3, 0.0, 0.05) == enough


def test_units_to_see_is_the_rule_of_three():
    assert units_to_see(0.01, -0.99, 0.05) == pytest.approx(math.log(0.05) / math.log(0.99))
    assert 295 < units_to_see(0.01, -0.99, 0.05) < 300
    assert units_to_see(0.01, 0.2, 0.05) == 0.0
    assert units_to_see(0.0, -1.0, 0.05) == math.inf
    for units in (20, 300):
        distance = distance_to_see(units, -0.8, 0.05)
        assert units_to_see(distance, -0.8, 0.05) == pytest.approx(units)


@pytest.mark.parametrize(
    ("estimate", "limit"),
    [
        (PairedRatio(PairedTable(800, 40, 60, 100)), 0.90),
        (PairedDifference(PairedTable(800, 40, 60, 100)), -0.04),
        (ExactProportion(850, 1000), 0.82),
    ],
)
def test_needed_and_detectable_agree(estimate, limit):
    """On as many items as a truth needs, that truth is about what can be detected."""
    n = 1000
    for units in (500, 2000, 10_000):
        truth = minimum_detectable(estimate, limit, 1, 0.05, units)
        spread = estimate.unit_sd(limit)
        assert items_for(truth - limit, spread, spread, 0.05) == pytest.approx(units, abs=1)
    further = needed_items(estimate, limit, 0.05, n)
    wanted = items_for(
        estimate.value - limit, estimate.unit_sd(limit), estimate.unit_sd(estimate.value), 0.05
    )
    assert further == (wanted - n if wanted > n else n)


def test_detectable_lies_on_the_passing_side():
    one = PairedDifference(PairedTable(800, 40, 60, 100))
    above, below = (minimum_detectable(one, 0.02 * -side, side, 0.05, 1000) for side in (1, -1))
    assert above > -0.02 and below < 0.02
    assert minimum_detectable(one, -0.02, 1, 0.05, 4000) < above


def test_the_same_estimate_on_as_many_items_as_needed_would_decide():
    both, gained, lost, neither = 166, 8, 20, 26
    one = PairedRatio(PairedTable(both, gained, lost, neither))
    assert one.p_above(0.90) > 0.05
    n = 220
    times = (n + needed_items(one, 0.90, 0.05, n)) / n
    more = PairedRatio(PairedTable(*(count * times for count in (both, gained, lost, neither))))
    assert more.p_above(0.90) < 0.05
    # Right at the estimate, 80 % power leaves the statistic 0.84 beyond the level's.
    assert norm.isf(more.p_above(0.90)) == pytest.approx(norm.isf(0.05) + 0.84, abs=0.1)


def test_with_clusters_the_items_needed_come_in_whole_clusters():
    one = PairedDifference(PairedTable(300, 20, 30, 50))
    alone = needed_items(one, -0.05, 0.05, 400)
    wanted = items_for(0.025, one.unit_sd(-0.05), one.unit_sd(-0.025), 0.05)
    assert alone == wanted - 400
    assert needed_items(one, -0.05, 0.05, 400, 100) == 4 * wanted - 400


# -- 0/1 scores, simulated -------------------------------------------------------------------


def simulated(shares, n, statistic, limit, level=0.05, seed=1):
    """Share of releases of `n` items that pass, with these true shares of a table."""
    drawn = np.random.default_rng(seed).multinomial(n, shares, RELEASES)
    drawn = drawn[drawn[:, 0] + drawn[:, 2] > 0]
    z = statistic(PairedTable(*drawn.T), limit)[0]
    return float(np.mean(ndtr(-z) <= level))


PILOTS = [(600, 30, 60, 110), (850, 20, 40, 90), (300, 100, 150, 250), (930, 5, 15, 50)]


@pytest.mark.parametrize("counts", PILOTS)
@pytest.mark.parametrize("effect", [0.94, 0.97, 1.0])
def test_a_retention_of_right_items_has_the_power_promised(counts, effect):
    evidence, reference = pilot(*counts)
    row = plan(rule(min_items=1), evidence, reference, effect)
    n = sum(counts)
    theirs, gained = (counts[0] + counts[2]) / n, counts[1] / n
    own = effect * theirs
    gained = max(gained, own - theirs)
    shares = [own - gained, gained, gained + theirs - own, 1 - gained - theirs]
    assert row.truth == pytest.approx(own) and row.reference == pytest.approx(theirs)
    assert simulated(shares, row.items, ratio_statistic, 0.90) == pytest.approx(0.8, abs=CLOSE)
    assert row.evidence_items == n
    assert simulated(shares, n, ratio_statistic, 0.90) == pytest.approx(row.power, abs=CLOSE)


@pytest.mark.parametrize("counts", PILOTS)
@pytest.mark.parametrize(("margin", "effect"), [(0.03, 1.0), (0.05, 0.98)])
def test_a_non_inferiority_of_right_items_has_the_power_promised(counts, margin, effect):
    evidence, reference = pilot(*counts)
    gate = rule(kind="non_inferiority", margin=margin, min_items=1)
    row = plan(gate, evidence, reference, effect)
    n = sum(counts)
    theirs, gained = (counts[0] + counts[2]) / n, counts[1] / n
    own = effect * theirs
    shares = [own - gained, gained, gained + theirs - own, 1 - gained - theirs]
    found = simulated(shares, row.items, difference_statistic, -margin)
    assert found == pytest.approx(0.8, abs=CLOSE)


@pytest.mark.parametrize("share", [0.6, 0.85])
def test_from_one_run_alone_the_other_is_independent(share):
    right = round(1000 * share)
    evidence = table(hit_rate=[1.0] * right + [0.0] * (1000 - right))
    own = 0.96 * share
    shares = [own * share, own * (1 - share), (1 - own) * share, (1 - own) * (1 - share)]
    row = plan(rule(min_items=1), evidence, effect=0.96)
    assert simulated(shares, row.items, ratio_statistic, 0.90) == pytest.approx(0.8, abs=CLOSE)
    gate = rule(kind="non_inferiority", margin=0.08, min_items=1)
    row = plan(gate, evidence, effect=0.96)
    found = simulated(shares, row.items, difference_statistic, -0.08)
    assert found == pytest.approx(0.8, abs=CLOSE)


@pytest.mark.parametrize(("limit", "truth"), [(0.80, 0.85), (0.90, 0.95), (0.50, 0.60)])
def test_a_floor_has_the_power_promised(limit, truth):
    evidence = table(hit_rate=[1.0] * 900 + [0.0] * 100)
    row = plan(rule(kind="floor", margin=limit, min_items=1), evidence, effect=truth / 0.9)
    hits = np.random.default_rng(2).binomial(row.items, truth, RELEASES)
    passed = {int(k): ExactProportion(int(k), row.items).p_above(limit) <= 0.05
              for k in np.unique(hits)}  # fmt: skip
    # Whole items make the power a saw: the number asked for lies on or above 80 %.
    assert 0.8 - 0.02 <= np.mean([passed[int(k)] for k in hits]) <= 0.8 + CLOSE + 0.02


def test_a_ceiling_is_a_floor_upside_down():
    low = table(hit_rate=[1.0] * 100 + [0.0] * 900)
    high = table(hit_rate=[1.0] * 900 + [0.0] * 100)
    ceiling = plan(rule(kind="ceiling", margin=0.14, min_items=1), low, effect=1.0)
    floor = plan(rule(kind="floor", margin=0.86, min_items=1), high, effect=1.0)
    assert ceiling.items == floor.items > 100


def test_scores_of_another_unit_need_as_many_items():
    evidence, reference = pilot(600, 30, 60, 110)
    percent = [table(hit_rate=100 * one.items.metric("hit_rate")) for one in (evidence, reference)]
    for kind, margin in (("non_inferiority", 0.03), ("floor", 0.75)):
        plain = plan(rule(kind=kind, margin=margin), evidence, reference, 0.99)
        scaled = plan(rule(kind=kind, margin=100 * margin), *percent, 0.99)
        assert scaled.items == plain.items > 100


# -- graded scores, simulated ----------------------------------------------------------------


def graded_pilot(n=600, seed=3, conversation=0.0):
    rng = np.random.default_rng(seed)
    reference = rng.beta(6, 2, n)
    shared = np.repeat(rng.normal(0, conversation, n // 4), 4)
    candidate = np.clip(0.95 * reference + rng.normal(0, 0.12, n) + shared, 0, 1)
    return candidate, reference


def passing(candidate, reference, n, scale, limit, releases=1500, size=1):
    """Share of releases that pass: rows (or conversations of `size` rows) drawn from a pilot."""
    rng, passed = np.random.default_rng(4), 0
    starts = rng.integers(0, len(candidate) // size, (releases, math.ceil(n / size)))
    rows = (starts[:, :, None] * size + np.arange(size)).reshape(releases, -1)
    clusters = np.repeat(np.arange(rows.shape[1] // size), size) if size > 1 else None
    resampling = Resampling(rows.shape[1], None, clusters, replicates=200)
    for part in np.split(rows, range(100, releases, 100)):
        scores, pairs = {}, []
        for i, chosen in enumerate(part):
            scores[f"c{i}"] = candidate[chosen]
            if reference is not None:
                scores[f"r{i}"] = reference[chosen]
            pairs.append((f"c{i}", f"r{i}" if reference is not None else None))
        for pair, means in resampling.means(scores, pairs).items():
            other = scores[pair[1]] if pair[1] else None
            spread = Scores.of(scores[pair[0]], other, resampling)
            passed += Bootstrap(scale, spread, *means, "").p_above(limit) <= 0.05
    return passed / releases


def test_a_graded_retention_has_the_power_promised():
    candidate, reference = graded_pilot()
    evidence = table(hit_rate=candidate), table(hit_rate=reference)
    row = plan(rule(min_items=1, margin=0.93), *evidence, 0.95)
    truth = candidate * 0.95 * reference.mean() / candidate.mean()
    found = passing(truth, reference, row.items, "ratio", 0.93)
    assert found == pytest.approx(0.8, abs=CLOSE)


def test_a_graded_non_inferiority_has_the_power_promised():
    candidate, reference = graded_pilot(seed=5)
    evidence = table(hit_rate=candidate), table(hit_rate=reference)
    row = plan(rule(kind="non_inferiority", margin=0.03, min_items=1), *evidence, 0.98)
    truth = candidate * 0.98 * reference.mean() / candidate.mean()
    found = passing(truth, reference, row.items, "difference", -0.03)
    assert found == pytest.approx(0.8, abs=CLOSE)


def test_a_graded_floor_has_the_power_promised():
    candidate, _ = graded_pilot(seed=6)
    gate = rule(kind="floor", margin=float(candidate.mean()) - 0.03, min_items=1)
    row = plan(gate, table(hit_rate=candidate), effect=1.0)
    found = passing(candidate, None, row.items, "mean", gate.margin)
    assert found == pytest.approx(0.8, abs=CLOSE)


def test_dependent_items_are_counted_as_the_gate_counts_them():
    candidate, reference = graded_pilot(seed=7, conversation=0.12)
    conversation = [f"c{i // 4}" for i in range(len(candidate))]
    evidence = (table(hit_rate=candidate, conversation=conversation),
                table(hit_rate=reference, conversation=conversation))  # fmt: skip
    gate = rule(kind="non_inferiority", margin=0.03, min_items=1)
    row = plan(gate, *evidence, 0.99)
    alone = plan(
        rule(kind="non_inferiority", margin=0.03, min_items=1, cluster=None), *evidence, 0.99
    )
    assert row.items > 1.5 * alone.items
    assert "conversation" in row.note and alone.note == ""
    truth = candidate * 0.99 * reference.mean() / candidate.mean()
    found = passing(truth, reference, row.items, "difference", -0.03, 1000, 4)
    assert found == pytest.approx(0.8, abs=CLOSE)
    assert passing(truth, reference, alone.items, "difference", -0.03, 300, 4) < 0.7


def test_scores_alike_need_items_to_rule_out_what_was_never_seen():
    same = np.random.default_rng(8).uniform(0, 1, 400)
    gate = rule(kind="non_inferiority", margin=0.01, min_items=1)
    row = plan(gate, table(hit_rate=same), table(hit_rate=same), 1.0)
    share = 0.01 / same.max()
    assert row.items == pytest.approx(math.log(0.05) / math.log1p(-share), rel=0.05)
    assert row.power == float(row.items <= 400)


def test_whole_conversations_that_fail_are_counted_as_the_gate_counts_them():
    """Of right or wrong items in conversations of unlike sizes, one in twenty of which fails."""
    rng = np.random.default_rng(9)
    sizes = rng.integers(1, 8, 300)
    conversation = np.repeat(np.arange(300), sizes)
    reference = (rng.random(len(conversation)) < 0.8).astype(float)
    candidate = np.where((rng.random(300) < 0.05)[conversation], 0.0, reference)
    effect, n = candidate.mean() / reference.mean(), len(candidate)
    question = Question("ratio", 0.9, 1, candidate, reference, clusters=conversation)
    starts, passed = np.cumsum(sizes) - sizes, 0
    for _ in range(300):
        drawn = rng.integers(0, 300, 300)
        rows = np.concatenate([np.arange(starts[u], starts[u] + sizes[u]) for u in drawn])
        labels = np.repeat(np.arange(300), sizes[drawn])
        resampling = Resampling(len(rows), None, labels, replicates=400)
        scores = {"own": candidate[rows], "other": reference[rows]}
        (means,) = resampling.means(scores, [("own", "other")]).values()
        spread = Scores.of(scores["own"], scores["other"], resampling)
        passed += Bootstrap("ratio", spread, *means, "").p_above(0.9) <= 0.05
    assert power_at(question, effect, n, 0.05) == pytest.approx(passed / 300, abs=0.1)
    # Losses that the evidence lacks strike whole conversations; others are taken back.
    for wanted in (0.97, 0.92):
        truth = truth_of(question, wanted)
        assert truth.distance == pytest.approx((wanted - 0.9) * reference.mean())
        other = truth.other
        lost = {unit for unit, a, b in zip(np.repeat(np.arange(300), truth.sizes), truth.own,
                                           other, strict=True) if a < b}  # fmt: skip
        assert abs(len(lost) / 300 - (1 - wanted)) < 0.02


@pytest.mark.parametrize("size", [1, 3])
def test_the_moments_of_drawn_releases_are_those_of_a_resampling(size):
    rng = np.random.default_rng(10)
    sizes = np.full(60, 1) if size == 1 else rng.integers(1, 2 * size, 60)
    labels = np.repeat(np.arange(60), sizes)
    contrast = rng.normal(0.03, 0.2, len(labels))
    draws = Draws(rng, 60, 800)
    sums = np.bincount(labels, contrast)
    ((one, many),) = draws.means(sums[None], sizes[None] if size > 1 else None)
    resampling = Resampling(len(labels), None, labels, replicates=4000)
    ((observed, drawn),) = resampling.means({"own": contrast}, [("own", None)]).values()
    assert one.standard_error(0.9) == pytest.approx(observed.standard_error(0.9))
    assert one.contrast(0.9) == pytest.approx(0, abs=1e-12)
    for power in (1, 2):
        ours = (many.contrast(0.9) ** power / many.standard_error(0.9)).mean()
        theirs = (drawn.contrast(0.9) ** power / drawn.standard_error(0.9)).mean()
        assert ours == pytest.approx(theirs, abs=0.2 if power == 1 else 0.005)


def test_a_graded_truth_that_takes_many_items_is_formula_and_releases_together():
    rng = np.random.default_rng(11)
    reference = rng.beta(8, 2, 4000) * (rng.random(4000) < 0.3)
    candidate = np.where(rng.random(4000) < 0.08, 0.0, reference)
    effect = candidate.mean() / reference.mean()
    truth = truth_of(Question("ratio", 0.9, 1, candidate, reference), effect)
    beyond = truth.power(MOST_UNITS + 1, 0.05)
    assert beyond == pytest.approx(truth.power(MOST_UNITS, 0.05), abs=0.04)
    assert truth.power(20_000, 0.05) > truth.power(5000, 0.05)


# -- the plan's rows -------------------------------------------------------------------------


def test_candidates_and_looks_share_the_level():
    evidence, reference = pilot(*PILOTS[0])
    looks = [{"items": 400, "share": 0.25}, {"items": 800, "share": 0.75}]
    alone = plan(rule(), evidence, reference)
    assert plan(rule(confidence=0.99), evidence, reference).level == pytest.approx(0.01)
    five = plan(rule(), evidence, reference, candidates=5)
    assert (alone.level, five.level) == (pytest.approx(0.05), pytest.approx(0.01))
    assert five.items == plan(rule(confidence=0.99), evidence, reference).items > alone.items
    looking = plan(rule(), evidence, reference, looks=looks)
    assert looking.level == pytest.approx(0.05 * 0.75)
    assert "last planned look" in looking.note


def test_the_smallest_slice_decides_and_counts_for_all_items():
    own = [1.0] * 270 + [0.0] * 30 + [1.0] * 90 + [0.0] * 10
    segment = ["road"] * 300 + ["air"] * 100
    evidence = table(hit_rate=own, segment=segment)
    row = plan(rule(kind="slice", margin=0.1, min_items=1), evidence, evidence, 0.97)
    air = plan(rule(kind="non_inferiority", margin=0.1, min_items=1), table(hit_rate=own[300:]),
               table(hit_rate=own[300:]), 0.97)  # fmt: skip
    assert row.items == 4 * air.items and row.slice == "segment=air"
    assert row.evidence_items == 400


def test_min_items_is_the_least():
    evidence, reference = pilot(*PILOTS[0])
    row = plan(rule(margin=0.5), evidence, reference)
    assert (row.items, row.note) == (100, "min_items decides")
    row = plan(rule(margin=0.5, min_items=801), evidence, reference)
    assert (row.items, row.power) == (801, 0.0)
    assert row.note.endswith("the evidence has fewer than 801 items, which never pass")


def test_the_level_has_no_float_noise():
    evidence, reference = pilot(*PILOTS[0])
    assert plan(rule(), evidence, reference).level == 0.05
    assert plan(rule(), evidence, reference, candidates=5).level == 0.01


@pytest.mark.parametrize("kind", ["retention", "non_inferiority", "floor"])
@pytest.mark.parametrize("scores", [[0.0, 0.0, 0.0], [-1.5, -2.0, 0.2]])
def test_a_reference_of_nothing_has_no_ratio(kind, scores):
    row = plan(rule(kind=kind, margin=0.3), table(hit_rate=scores), effect=0.95)
    assert (row.items, row.power) == (None, None)
    assert row.note.endswith("no ratio exists")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["retention", "non_inferiority", "floor"])
@pytest.mark.parametrize("score", [1.0, 0.7])
def test_one_item_is_a_pilot_without_warnings(kind, score):
    one = table(hit_rate=[score])
    for reference in (None, table(hit_rate=[0.9])):
        row = plan(rule(kind=kind, margin=0.5, min_items=1), one, reference, 0.95)
        assert row.power is not None and 0 <= row.power <= 1


def test_an_effect_on_the_wrong_side_has_no_number():
    evidence, reference = pilot(*PILOTS[0])
    row = plan(rule(), evidence, reference, 0.90)
    assert row.items is None and row.power <= 0.05 + 1e-9
    assert row.note == "the effect named is not on the passing side of the margin"


@pytest.mark.parametrize("kind", ["ratio", "implausible"])
def test_gates_without_a_bound_have_no_number(kind):
    evidence, reference = pilot(*PILOTS[0])
    row = plan(rule(kind=kind, margin=0.9), evidence, reference)
    assert (row.items, row.power) == (None, None)
    assert row.note == "has no bound, so no number of items belongs to it"


@pytest.mark.parametrize("gate", [rule(), rule(kind="floor", margin=0.8)])
def test_more_than_all_items_right_is_no_effect(gate):
    row = plan(gate, table(hit_rate=[1.0] * 90 + [0.0] * 10), effect=1.2)
    assert row.items is None
    assert row.note.startswith("1.2 times ")


def test_evidence_that_cannot_be_used_is_a_note():
    row = plan(rule(metric="slot_f1"), table(hit_rate=[1.0, 0.0]))
    assert row.items is None and "no metric 'slot_f1'" in row.note


@settings(max_examples=40)
@given(
    counts=st.tuples(*[st.integers(0, 40)] * 4).filter(lambda c: c[0] + c[2] > 0),
    effect=st.floats(0.5, 1.3),
    kind=st.sampled_from(["retention", "non_inferiority", "floor"]),
)
def test_no_pilot_makes_a_nan_or_an_error(counts, effect, kind):
    evidence, reference = pilot(*counts)
    row = plan(rule(kind=kind, margin=0.3, min_items=1), evidence, reference, effect)
    if row.power is not None:
        assert 0 <= row.power <= 1
        assert row.items is None or row.items >= 1
