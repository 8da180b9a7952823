"""The paired bootstrap against formulas, scipy and what must not change its numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eval_suites.bootstrap import (
    FEW,
    MIN_STRATUM,
    REPLICATES,
    Bootstrap,
    Means,
    Resampling,
    Scores,
    _counts,
)
from eval_suites.power import minimum_detectable, needed_items

RNG = np.random.default_rng


def ask(scale, candidate, reference=None, strata=None, clusters=None, replicates=2000):
    """The estimate that a gate would make of these scores."""
    candidate = np.asarray(candidate, float)
    reference = None if reference is None else np.asarray(reference, float)
    resampling = Resampling(len(candidate), strata, clusters, replicates)
    scores = {"c": candidate} | ({} if reference is None else {"r": reference})
    pair = ("c", None if reference is None else "r")
    means = resampling.means(scores, [pair])[pair]
    spread = Scores.of(candidate, reference, resampling)
    return Bootstrap(scale, spread, *means, resampling.described)


def pair_of(n, seed=0, loss=0.03, noise=0.15):
    """Graded scores from 0 to 1: the candidate a little worse, and like the reference."""
    rng = RNG(seed)
    reference = np.clip(rng.normal(0.7, 0.2, n), 0, 1)
    return np.clip(reference - loss + rng.normal(0, noise, n), 0, 1), reference


def observed(candidate, reference, **design):
    return ask("difference", candidate, reference, replicates=1, **design).observed


# -- against other implementations -----------------------------------------------------------


def test_bounds_of_a_mean_are_those_of_student_on_normal_scores():
    scores = RNG(1).normal(0.6, 0.2, 400)
    one = ask("mean", scores, replicates=REPLICATES)
    error = scores.std(ddof=1) / math.sqrt(400)
    reach = stats.t.ppf(0.95, 399) * error
    assert one.lower(0.05) == pytest.approx(scores.mean() - reach, abs=0.15 * error)
    assert one.upper(0.05) == pytest.approx(scores.mean() + reach, abs=0.15 * error)


def test_bounds_of_a_difference_are_near_those_of_scipys_bootstrap():
    candidate, reference = pair_of(400, seed=2)
    one = ask("difference", candidate, reference, replicates=REPLICATES)
    scipys = stats.bootstrap(
        (candidate - reference,), np.mean, confidence_level=0.9, n_resamples=4000,
        method="BCa", random_state=RNG(3),
    )  # fmt: skip
    interval, error = scipys.confidence_interval, scipys.standard_error
    assert one.lower(0.05) == pytest.approx(interval.low, abs=0.2 * error)
    assert one.upper(0.05) == pytest.approx(interval.high, abs=0.2 * error)


def test_bounds_of_a_ratio_are_near_those_of_scipys_bootstrap():
    candidate, reference = pair_of(400, seed=4)
    one = ask("ratio", candidate, reference, replicates=REPLICATES)
    scipys = stats.bootstrap(
        (candidate, reference), lambda c, r, axis: c.mean(axis) / r.mean(axis), paired=True,
        confidence_level=0.9, n_resamples=4000, method="BCa", random_state=RNG(5),
    )  # fmt: skip
    interval, error = scipys.confidence_interval, scipys.standard_error
    assert one.lower(0.05) == pytest.approx(interval.low, abs=0.2 * error)
    assert one.upper(0.05) == pytest.approx(interval.high, abs=0.2 * error)


# -- standard errors -------------------------------------------------------------------------


def test_the_plain_standard_error_is_that_of_a_paired_t_test():
    candidate, reference = pair_of(150, seed=6)
    found = observed(candidate, reference)
    for ratio in (1.0, 0.9):
        by_hand = (candidate - ratio * reference).std(ddof=1) / math.sqrt(150)
        assert float(found.standard_error(ratio)) == pytest.approx(by_hand, rel=1e-9)


def test_the_stratified_standard_error_is_the_textbooks():
    """Cochran 1977, 5.3, without finite population: sum of (n_h / n)^2 s_h^2 / n_h."""
    candidate, reference = pair_of(260, seed=7)
    strata = np.array(["a"] * 30 + ["b"] * 80 + ["c"] * 150)
    candidate[:30] -= 0.4
    difference = candidate - reference
    variance = sum(
        (size / 260) ** 2 * difference[strata == name].var(ddof=1) / size
        for name, size in (("a", 30), ("b", 80), ("c", 150))
    )
    found = float(observed(candidate, reference, strata=strata).standard_error(1.0))
    assert found == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert found < float(observed(candidate, reference).standard_error(1.0))


def test_the_clustered_standard_error_is_the_linearized_one():
    """Cochran 1977, 6.11: clusters of unequal size, the mean per item as a ratio."""
    rng = RNG(8)
    clusters = rng.integers(0, 40, 300)
    candidate, reference = pair_of(300, seed=9)
    candidate += rng.normal(0, 0.1, 40)[clusters]
    difference = candidate - reference
    names = np.unique(clusters)
    residual = np.array([(difference - difference.mean())[clusters == c].sum() for c in names])
    k = len(names)
    by_hand = math.sqrt(k / (k - 1) * (residual**2).sum()) / 300
    found = float(observed(candidate, reference, clusters=clusters).standard_error(1.0))
    assert found == pytest.approx(by_hand, rel=1e-9)


def test_items_said_three_times_in_one_cluster_count_once():
    candidate, reference = pair_of(90, seed=10)
    once = ask("ratio", candidate, reference)
    thrice = ask(
        "ratio", np.repeat(candidate, 3), np.repeat(reference, 3), clusters=np.repeat(range(90), 3)
    )
    for alpha in (0.05, 0.01):
        assert thrice.lower(alpha) == pytest.approx(once.lower(alpha), rel=1e-9)
        assert thrice.upper(alpha) == pytest.approx(once.upper(alpha), rel=1e-9)
    assert thrice.p_above(0.9) == pytest.approx(once.p_above(0.9), rel=1e-9)
    naive = ask("ratio", np.repeat(candidate, 3), np.repeat(reference, 3))
    assert naive.lower(0.05) > thrice.lower(0.05)


# -- the design ------------------------------------------------------------------------------


def test_small_strata_are_drawn_together():
    strata = np.array(["a"] * 50 + ["b"] * (MIN_STRATUM - 1) + ["c"] * 3 + ["d"] * 40)
    assert Resampling(len(strata), strata).sizes == [50, MIN_STRATUM - 1 + 3, 40]


def test_a_stratum_of_one_item_joins_the_largest():
    strata = np.array(["one"] + ["a"] * 30 + ["b"] * 60)
    assert sorted(Resampling(91, strata).sizes) == [30, 61]
    candidate, reference = pair_of(91, seed=11)
    assert math.isfinite(ask("difference", candidate, reference, strata=strata).lower(0.05))


def test_nothing_but_small_strata_is_no_stratification():
    one = Resampling(12, np.repeat(np.arange(4), 3))
    assert (one.sizes, one.stratified) == ([12], False)


def test_a_cluster_of_several_strata_leaves_the_clusters_alone():
    strata, clusters = np.tile(["a", "b"], 60), np.repeat(np.arange(30), 4)
    mixed = Resampling(120, strata, clusters)
    assert (mixed.stratified, mixed.clustered, mixed.sizes) == (False, True, [30])
    whole = Resampling(120, np.repeat(["a", "b"], 60), clusters)
    assert (whole.stratified, whole.sizes) == (True, [15, 15])
    assert whole.described == "studentized paired bootstrap, 2 strata, 30 clusters"


def test_names_of_strata_and_clusters_do_not_matter():
    candidate, reference = pair_of(120, seed=12)
    strata, clusters = np.repeat(["a", "b"], 60), np.repeat(np.arange(30), 4)
    one = ask("ratio", candidate, reference, strata, clusters)
    same = ask("ratio", candidate, reference, np.repeat(["x1", "x2"], 60), clusters + 1000)
    assert one.lower(0.05) == same.lower(0.05)


def test_what_is_asked_together_changes_no_number():
    candidate, reference = pair_of(200, seed=13)
    other = pair_of(200, seed=14)[0]
    resampling = Resampling(200, replicates=500)
    alone = resampling.means({"c": candidate, "r": reference}, [("c", "r")])["c", "r"]
    scores = {"a": other, "c": candidate, "r": reference}
    pairs = [("a", "r"), ("a", None), ("c", "r"), ("c", None), ("c", "a")]
    among = resampling.means(scores, pairs)["c", "r"]
    for one, another in zip(alone, among, strict=True):
        for name in vars(one):
            assert np.allclose(getattr(one, name), getattr(another, name), rtol=1e-10, atol=1e-18)


def test_candidates_that_share_draws_have_the_numbers_that_they_have_alone():
    asked = []
    for seed, pairs in ((17, [("c", "r"), ("c", None)]), (18, [("c", "r")]), (19, [("r", None)])):
        candidate, reference = pair_of(130, seed=seed)
        asked.append(({"c": candidate, "r": reference}, pairs))
    resampling = Resampling(130, np.repeat(["a", "b"], 65), np.repeat(np.arange(26), 5), 700)
    together = resampling.means_of_each(asked)
    for (scores, pairs), found in zip(asked, together, strict=True):
        alone = resampling.means(scores, pairs)
        assert alone.keys() == found.keys()
        for pair in pairs:
            for one, another in zip(alone[pair], found[pair], strict=True):
                for name in vars(one):
                    assert np.array_equal(getattr(one, name), getattr(another, name))


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 1), (700, 3), (150, 601), (2, 40_000)])
def test_replicates_counted_in_blocks_are_those_drawn_one_by_one(rows, size):
    one, other = RNG(3), RNG(3)
    expected = [np.bincount(other.integers(0, size, size), minlength=size) for _ in range(rows)]
    assert np.array_equal(_counts(one, rows, size), expected)
    assert one.integers(0, 1 << 40) == other.integers(0, 1 << 40)


def test_designs_are_equal_where_draws_are():
    strata = np.repeat(["a", "b"], 60)
    design = Resampling(120, strata).design
    assert design == Resampling(120, np.repeat(["x", "y"], 60)).design
    clusters = np.repeat(np.arange(30), 4)
    for other in (
        Resampling(120),
        Resampling(120, strata[::-1].copy()[np.r_[0, 60:119, 1:60, 119]]),
        Resampling(120, strata, clusters),
        Resampling(120, strata, replicates=7),
        Resampling(120, strata, seed=7),
        Resampling(121, np.append(strata, "b")),
    ):
        assert design != other.design


def test_the_same_scores_give_the_same_numbers_again():
    candidate, reference = pair_of(200, seed=15)
    first, again = ask("ratio", candidate, reference), ask("ratio", candidate, reference)
    assert first.lower(0.05) == again.lower(0.05) and first.p_above(0.9) == again.p_above(0.9)


def test_replicates_beyond_one_batch_are_all_there(monkeypatch):
    candidate, reference = pair_of(50, seed=16)
    monkeypatch.setattr("eval_suites.bootstrap.BATCH_ENTRIES", 50 * 300)
    one = ask("difference", candidate, reference, replicates=1000)
    assert one.replicates.candidate.shape == (1000,)
    assert len(np.unique(one.replicates.candidate)) > 990


# -- scale -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.01, 3.0, 1000.0])
def test_scores_scaled_with_their_limits_change_nothing(factor):
    candidate, reference = pair_of(150, seed=17)
    for scale in ("ratio", "difference", "mean"):
        other = None if scale == "mean" else reference
        one = ask(scale, candidate, other)
        scaled = ask(scale, factor * candidate, None if other is None else factor * other)
        unit = 1.0 if scale == "ratio" else factor
        for bound in ("lower", "upper"):
            expected = unit * getattr(one, bound)(0.05)
            assert getattr(scaled, bound)(0.05) == pytest.approx(expected, rel=1e-6)
        limit = {"ratio": 0.93, "difference": -0.04, "mean": 0.64}[scale]
        assert scaled.p_above(unit * limit) == pytest.approx(one.p_above(limit), abs=2e-3)
        assert scaled.unit_sd(unit * limit) == pytest.approx(unit * one.unit_sd(limit), rel=1e-9)


def test_mirrored_differences_have_mirrored_bounds():
    candidate, reference = pair_of(150, seed=18)
    one, other = ask("difference", candidate, reference), ask("difference", reference, candidate)
    assert one.lower(0.05) == pytest.approx(-other.upper(0.05), rel=1e-9)
    assert one.p_above(-0.05) == other.p_below(0.05)


# -- what was never seen ---------------------------------------------------------------------


def test_a_loss_that_no_item_showed_may_still_be_there():
    """400 items alike: a total loss may befall 1 - 0.05 ** (1 / 400) of all items."""
    same = RNG(19).uniform(0, 1, 400)
    one, share = ask("difference", same, same), 1 - 0.05 ** (1 / 400)
    reach = share * (same.max() - 0.0)
    assert one.lower(0.05) == pytest.approx(-reach, rel=1e-6)
    assert one.upper(0.05) == pytest.approx(reach, rel=1e-6)
    assert one.p_above(-0.02) == pytest.approx((1 - 0.02 / same.max()) ** 400, rel=1e-9)


def test_a_constant_gain_without_spread_is_bounded_by_what_was_never_seen():
    """Rounding makes the differences unlike each other; subtraction leaves no spread."""
    reference = RNG(20).uniform(0.2, 0.9, 300)
    one = ask("difference", reference + 0.1, reference)
    assert one.scores.below + one.scores.above >= FEW
    top = reference.max() + 0.1
    # The limit is 0.01 below the estimate, and an item may lose all of `top`.
    expected = (1 - 0.01 / (0.01 + top + 0.09)) ** 300
    assert one.p_above(0.09) == pytest.approx(expected, rel=1e-6)
    assert one.lower(0.05) == pytest.approx(0.1 - (top + 0.1) * (1 - 0.05 ** (1 / 300)), abs=1e-6)


def test_a_contrast_that_is_constant_at_the_limit_alone():
    reference = RNG(21).uniform(0.2, 0.9, 300)
    one = ask("ratio", 0.9 * reference + 0.05, reference)
    assert one.p_above(0.9) == pytest.approx(1 / 2001)
    assert one.p_above(0.9) <= one.p_above(0.95) < 0.05 < one.p_above(1.0)


def test_clusters_that_cancel_out_have_no_spread_and_no_certainty():
    reference = RNG(22).uniform(0.3, 0.7, 200)
    candidate = reference + np.tile([0.1, -0.1], 100)
    one = ask("difference", candidate, reference, clusters=np.repeat(np.arange(100), 2))
    assert one.p_above(-0.01) > 0.05 > one.p_above(-0.1)


def test_few_items_that_differ_are_counted_as_total_losses():
    """Clopper-Pearson of 4 losers of 500, times the largest loss that scores allow."""
    reference = RNG(23).uniform(0, 1, 500)
    candidate = reference.copy()
    candidate[:4] = 0.0
    one = ask("difference", candidate, reference)
    share = stats.beta.ppf(0.95, 5, 496)
    assert one.lower(0.05) == pytest.approx(-share * reference.max(), rel=1e-6)
    assert one.p_above(-0.03) == pytest.approx(
        stats.binom.cdf(4, 500, 0.03 / reference.max()), rel=1e-9
    )


def test_a_retention_of_few_losers_leaves_room_for_a_tenth_of_the_reference():
    reference = RNG(24).uniform(0, 1, 500)
    candidate = reference.copy()
    candidate[:4] = 0.0
    room = 0.1 * reference.mean() / reference.max()
    p = ask("ratio", candidate, reference).p_above(0.9)
    assert p == pytest.approx(stats.binom.cdf(4, 500, room), rel=1e-9)


def test_constant_scores_are_counted_from_their_floor():
    """All 0.8: at most 3 in n may be at 0, and the mean is at least 0.8 of the rest."""
    one = ask("mean", np.full(300, 0.8))
    assert one.lower(0.05) == pytest.approx(0.8 * 0.05 ** (1 / 300), rel=1e-6)
    assert one.p_above(0.79) == pytest.approx((0.79 / 0.8) ** 300, rel=1e-9)


@pytest.mark.parametrize(("scale", "limit"), [("difference", -0.05), ("mean", 0.05)])
def test_all_zero_scores_in_clusters_end(scale, limit):
    """They have no scale of their own; a right item is taken to score 1."""
    zeros, clusters = np.zeros(200), np.repeat(np.arange(50), 4)
    one = ask(scale, zeros, None if scale == "mean" else zeros, clusters=clusters)
    share = 1 - 0.05 ** (1 / 50)
    assert one.upper(0.05) == pytest.approx(share, rel=1e-6)
    if scale == "difference":
        assert one.lower(0.05) == pytest.approx(-share, rel=1e-6)
        assert one.p_above(limit) == pytest.approx(0.95**50, rel=1e-9)
    else:
        assert one.p_above(limit) == 1.0


def test_a_large_cluster_weighs_what_it_can_lose():
    clusters = np.concatenate([np.zeros(50, int), np.arange(1, 51)])
    same = np.ones(100)
    one = ask("difference", same, same, clusters=clusters)
    stretch = 50 / (100 / 51)
    assert one.scores.stretch == pytest.approx(stretch)
    assert one.lower(0.05) == pytest.approx(-(1 - 0.05 ** (1 / 51)) * stretch, rel=1e-6)


def test_rare_large_losses_are_not_resampled_away():
    """One loser in 50 of the truth; the sample of 150 has 1 and nine small differences."""
    reference = np.full(150, 0.8)
    candidate = reference.copy()
    candidate[0], candidate[1:60] = 0.0, 0.8 + RNG(25).normal(0, 0.002, 59)
    one = ask("difference", candidate, reference, replicates=REPLICATES)
    # Resamples miss the loser in (1 - 1 / 150) ** 150 = 37 % of all cases.
    assert one.p_above(-0.016) > 0.3


def test_resamples_without_the_only_loser_speak_against_it():
    """They have no spread at all, and nothing is as extreme as that."""
    reference = RNG(29).uniform(0.2, 0.8, 200)
    candidate = reference + 0.1
    candidate[0] = 0.0
    one = ask("difference", candidate, reference, replicates=REPLICATES)
    assert one.scores.below + one.scores.above >= FEW
    assert one.p_above(-0.5) == pytest.approx((1 - 1 / 200) ** 200, abs=0.02)


# -- what a decision would need --------------------------------------------------------------


def test_items_needed_where_nothing_but_the_unseen_stands_against_it():
    same = RNG(26).uniform(0, 1, 200)
    one, limit = ask("difference", same, same), -0.01
    assert one.p_above(limit) > 0.05
    further = needed_items(one, limit, 0.05, 200)
    more = np.tile(same, 3)[: 200 + further]
    more[0] = same.max()
    assert ask("difference", more, more).p_above(limit) <= 0.05
    fewer = more[: 200 + further - 15]
    assert ask("difference", fewer, fewer).p_above(limit) > 0.05


def test_what_so_many_items_can_show_is_no_less_than_what_they_cannot_see():
    same = RNG(27).uniform(0, 1, 200)
    one = ask("difference", same, same)
    for limit in (-0.05, -0.2):
        reach = minimum_detectable(one, limit, 1, 0.05, 200) - limit
        # A loss of all from there, by a share of 1 - 0.05 ** (1 / 200).
        assert reach == pytest.approx((same.max() + limit) * (0.05 ** (-1 / 200) - 1), rel=1e-9)


def test_items_needed_with_ordinary_spread_are_those_of_the_spread():
    candidate, reference = pair_of(200, seed=28, loss=0.05)
    one = ask("difference", candidate, reference)
    spread, gap = (candidate - reference).std(ddof=1), one.value + 0.06
    reach = stats.norm.ppf(0.95) + stats.norm.ppf(0.8)
    wanted = math.ceil((reach * spread / gap) ** 2)
    assert needed_items(one, -0.06, 0.05, 200) == (wanted - 200 if wanted > 200 else 200)


# -- numbers, always -------------------------------------------------------------------------

values = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.1, 0.3, 1.0, 1.0, 7.0])


@settings(max_examples=120)
@given(
    rows=st.lists(st.tuples(values, values, st.sampled_from("ab"), st.integers(0, 6)), min_size=1,
                  max_size=40),
    scale=st.sampled_from(["ratio", "difference", "mean"]),
    designed=st.booleans(),
)  # fmt: skip
def test_no_scores_make_a_nan_or_an_error(rows, scale, designed):
    candidate, reference, strata, clusters = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    if scale == "ratio" and reference.mean() <= 0:
        return
    design = {"strata": strata, "clusters": clusters} if designed else {}
    other = None if scale == "mean" else reference
    with np.errstate(all="raise", under="ignore"):
        one = ask(scale, candidate, other, replicates=60, **design)
        numbers = [one.value, one.lower(0.05), one.upper(0.05)]
        for limit in (-0.05, 0.9, 1.2):
            sides = one.p_above(limit), one.p_below(limit)
            assert all(0 <= p <= 1 for p in sides)
            numbers += [*sides, one.unit_sd(limit), one.unseen_units(limit, 0.05)]
    assert not any(math.isnan(number) for number in numbers)
    assert one.lower(0.05) <= one.value + 1e-6 and one.value <= one.upper(0.05) + 1e-6
    assert one.lower(0.02) <= one.lower(0.05) + 1e-6


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from(["ratio", "difference", "mean"]))
def test_p_is_within_the_level_exactly_where_the_bound_is_beyond_the_limit(seed, scale):
    candidate, reference = pair_of(60, seed)
    one = ask(scale, candidate, None if scale == "mean" else reference, replicates=300)
    bound = one.lower(0.05)
    assert one.p_above(bound - 1e-6) <= 0.05 + 1e-9 <= one.p_above(bound + 1e-6) + 1e-2
    assert one.p_above(bound - 0.05) <= 0.05 < one.p_above(bound + 0.02)
    assert one.p_above(one.value) == 1.0


def test_what_is_left_of_equal_numbers_is_no_spread():
    means = Means(0.1, 0.1, 0.04, 0.04 - 1e-17, 0.04)
    assert float(means.standard_error(1.0)) == 0.0
    assert float(means.standard_error(0.5)) == pytest.approx(math.sqrt(0.04 - 0.04 + 0.01))
