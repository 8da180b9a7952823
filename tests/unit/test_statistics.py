"""Bounds of 0/1 scores, held against other implementations and published examples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import binomtest, norm
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from eval_suites.statistics import (
    ExactProportion,
    PairedDifference,
    PairedRatio,
    PairedTable,
    Scaled,
    difference_statistic,
    exact_mcnemar,
    holm_shares,
    ratio_statistic,
)

counts = st.integers(0, 60)
levels = st.sampled_from([0.05, 0.025, 0.01, 0.001])


def published_level(alpha: float, n: int) -> float:
    """Our level whose bound is the published one: theirs has no factor n / (n - 1)."""
    return float(norm.cdf(norm.ppf(alpha) * math.sqrt((n - 1) / n)))


# -- one proportion --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 100, 2000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_clopper_pearson_is_scipys_and_statsmodels(n, share, alpha):
    hits = round(share * n)
    ours = ExactProportion(hits, n)
    scipys = binomtest(hits, n).proportion_ci(1 - 2 * alpha, "exact")
    statsmodels = proportion_confint(hits, n, 2 * alpha, "beta")
    found = (ours.lower(alpha), ours.upper(alpha))
    assert found == pytest.approx((scipys.low, scipys.high), abs=1e-9)
    assert found == pytest.approx(statsmodels, abs=1e-9)


@pytest.mark.parametrize(("hits", "n"), [(0, 9), (1, 1), (3, 9), (9, 9), (880, 1000)])
@pytest.mark.parametrize("limit", [0.05, 0.5, 0.87, 0.95])
def test_p_of_a_proportion_is_scipys_binomial_test(hits, n, limit):
    ours = ExactProportion(hits, n)
    above = binomtest(hits, n, limit, alternative="greater").pvalue
    below = binomtest(hits, n, limit, alternative="less").pvalue
    assert ours.p_above(limit) == pytest.approx(above, abs=1e-9)
    assert ours.p_below(limit) == pytest.approx(below, abs=1e-9)


@pytest.mark.parametrize(
    ("hits", "limit", "above", "below"),
    [
        (0, 0.0, 1.0, 1.0),
        (0, -0.1, 0.0, 1.0),
        (4, 0.0, 0.0, 1.0),
        (4, 1.0, 1.0, 0.0),
        (9, 1.0, 1.0, 1.0),
        (9, 1.1, 1.0, 0.0),
    ],
)
def test_p_of_a_proportion_at_its_ends(hits, limit, above, below):
    """One right item is proof of a share above 0."""
    ours = ExactProportion(hits, 9)
    assert (ours.p_above(limit), ours.p_below(limit)) == (above, below)


# -- published intervals of two proportions --------------------------------------------------

BENTUR = PairedTable(1, 1, 7, 12)
CAVO = PairedTable(59, 6, 16, 80)
AGRESTI_MIN = PairedTable(53, 16, 8, 9)
MENTEES = PairedTable(0, 28, 25, 565)


@pytest.mark.parametrize(
    ("table", "alpha", "low", "high", "places"),
    [
        # Airway hyper-responsiveness (Bentur et al. 2009) in Fagerland, Lydersen and Laake 2014,
        # BMC Med Res Methodol 13:91, as the tests of the R package ratesci have it.
        (BENTUR, 0.025, -0.517, -0.026, 3),
        # Response to consolidation (Cavo et al. 2012), as the tests of the R package
        # contingencytables to Fagerland, Lydersen and Laake 2017, chapter 8, have it.
        (CAVO, 0.025, -0.1240, -0.0054, 4),
        # Agresti and Min 2005, as the tests of ratesci have it.
        (AGRESTI_MIN, 0.025, -0.020, 0.207, 3),
        # A run of R's PropCIs::scoreci.mp(25, 28, 618, 0.90), pinned by a public test.
        (MENTEES, 0.05, -0.0148, 0.0247, 4),
    ],
    ids=["Bentur", "Cavo", "Agresti-Min", "PropCIs"],
)
def test_tangos_interval_as_published(table, alpha, low, high, places):
    ours, level = PairedDifference(table), published_level(alpha, table.n)
    assert round(ours.lower(level), places) == low
    assert round(ours.upper(level), places) == high


@pytest.mark.parametrize(
    ("table", "ratio", "low", "high", "places"),
    [(BENTUR, 0.25, 0.065, 0.907, 3), (CAVO, 0.8667, 0.7476, 0.9876, 4)],
    ids=["Bentur", "Cavo"],
)
def test_tangs_interval_as_published(table, ratio, low, high, places):
    """Sources as for Tango's."""
    ours, level = PairedRatio(table), published_level(0.025, table.n)
    assert round(ours.value, places) == ratio
    assert round(ours.lower(level), places) == low
    assert round(ours.upper(level), places) == high


def test_the_factor_is_the_one_of_ratesci():
    """Vignette of ratesci, pairbinci(c(1, 1, 7, 12)): the test of no difference.

    Its correction for skewness is 0 there, so what is left is the factor n / (n - 1).
    """
    difference, ratio = PairedDifference(BENTUR), PairedRatio(BENTUR)
    assert float(difference_statistic(BENTUR, 0.0)[0]) == pytest.approx(-2.070197, abs=5e-7)
    assert difference.p_below(0.0) == pytest.approx(0.01921697, abs=5e-9)
    assert ratio.p_below(1.0) == pytest.approx(0.01921697, abs=5e-9)


# -- score statistics against a search -------------------------------------------------------


def constrained_variance(table: PairedTable, ratio: float, difference: float) -> float:
    """Variance of one item's `candidate - ratio * reference` under the likeliest probabilities.

    They obey `candidate = ratio * reference + difference`, found by a search over the
    probabilities of an item that both, or only the reference, have right.
    """
    seen = np.array([table.both, table.candidate_only, table.reference_only, table.neither])

    def cells(free):
        both, lost = free
        gained = ratio * (both + lost) + difference - both
        return np.array([both, gained, lost, 1 - both - gained - lost])

    def loss(free):
        p = cells(free)
        if p.min() < -1e-12:
            return 1e6 * (1 - p.min())
        return -float((seen * np.log(np.maximum(p, 1e-300))).sum())

    grid = np.linspace(0.002, 0.996, 70)
    start = min(itertools.product(grid, grid), key=loss)
    best = minimize(loss, start, method="Nelder-Mead",
                    options={"xatol": 1e-11, "fatol": 1e-13, "maxiter": 6000})  # fmt: skip
    both, gained, lost, _ = cells(best.x)
    second = gained + ratio**2 * lost + (1 - ratio) ** 2 * both
    return float(second - difference**2)


TABLES = [(30, 5, 9, 6), (1, 1, 7, 12), (59, 6, 16, 80), (80, 3, 14, 3), (12, 9, 2, 7)]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("ratio", [0.8, 0.9, 1.0, 1.2])
def test_ratio_statistic_is_the_likeliest_one_found_by_search(table, ratio):
    table = PairedTable(*table)
    statistic, variance = ratio_statistic(table, ratio)
    searched = constrained_variance(table, ratio, 0.0) * table.n / (table.n - 1)
    assert float(variance) == pytest.approx(searched, rel=1e-4)
    numerator = table.candidate - ratio * table.reference
    assert float(statistic) == pytest.approx(numerator / math.sqrt(table.n * searched), rel=1e-4)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("difference", [-0.1, -0.03, 0.0, 0.05])
def test_difference_statistic_is_the_likeliest_one_found_by_search(table, difference):
    table = PairedTable(*table)
    statistic, variance = difference_statistic(table, difference)
    searched = constrained_variance(table, 1.0, difference) * table.n / (table.n - 1)
    assert float(variance) == pytest.approx(searched, rel=1e-4)
    numerator = table.candidate_only - table.reference_only - table.n * difference
    assert float(statistic) == pytest.approx(numerator / math.sqrt(table.n * searched), rel=1e-4)


def test_statistics_of_arrays_are_those_of_numbers():
    columns = PairedTable(*np.array(TABLES).T)
    for make, limit in ((ratio_statistic, 0.9), (difference_statistic, -0.05)):
        found = make(columns, limit)
        for place, table in enumerate(TABLES):
            one = make(PairedTable(*table), limit)
            assert [float(column[place]) for column in found] == pytest.approx(
                [float(number) for number in one], rel=1e-12
            )


# -- what every estimate promises ------------------------------------------------------------


def estimates(both: int, gained: int, lost: int, neither: int) -> list:
    table = PairedTable(both, gained, lost, neither)
    found = [ExactProportion(both + gained, table.n), Scaled(PairedDifference(table), 2.5)]
    found += [PairedDifference(table)] + ([PairedRatio(table)] if table.reference else [])
    return found


@settings(max_examples=150)
@given(both=counts, gained=counts, lost=counts, neither=counts, alpha=levels)
def test_bounds_enclose_the_value_and_belong_to_the_p_values(both, gained, lost, neither, alpha):
    if both + gained + lost + neither == 0:
        return
    for one in estimates(both, gained, lost, neither):
        lower, upper = one.lower(alpha), one.upper(alpha)
        assert lower <= one.value + 1e-9 and one.value <= upper + 1e-9
        assert one.lower(alpha / 2) <= lower + 1e-9 and upper <= one.upper(alpha / 2) + 1e-9
        ends = (0.0, 1.0, -1.0, 2.5, -2.5, math.inf)
        if lower not in ends:
            assert one.p_above(lower) == pytest.approx(alpha, rel=1e-4)
        if upper not in ends:
            assert one.p_below(upper) == pytest.approx(alpha, rel=1e-4)
        for limit in (0.05, 0.5, 0.9, 0.95):
            sides = one.p_above(limit), one.p_below(limit)
            assert all(0 <= p <= 1 for p in sides) and sum(sides) >= 1 - 1e-9
            assert one.unit_sd(limit) >= 0
        assert one.unit_sd(one.value) >= 0


@settings(max_examples=100)
@given(both=counts, gained=counts, lost=counts, neither=counts, alpha=levels)
def test_mirrored_questions_have_mirrored_answers(both, gained, lost, neither, alpha):
    if both + gained + lost + neither < 2:
        return
    one = PairedDifference(PairedTable(both, gained, lost, neither))
    other = PairedDifference(PairedTable(both, lost, gained, neither))
    assert one.lower(alpha) == pytest.approx(-other.upper(alpha), abs=1e-9)
    assert one.p_above(-0.05) == pytest.approx(other.p_below(0.05), abs=1e-9)
    hits, n = both + gained, both + gained + lost + neither
    right, wrong = ExactProportion(hits, n), ExactProportion(n - hits, n)
    assert right.lower(alpha) == pytest.approx(1 - wrong.upper(alpha), abs=1e-9)
    if both + gained and both + lost:
        up = PairedRatio(PairedTable(both, gained, lost, neither))
        down = PairedRatio(PairedTable(both, lost, gained, neither))
        assert up.p_above(0.9) == pytest.approx(down.p_below(1 / 0.9), abs=1e-9)


def test_scaled_scores_scale_everything():
    plain, scaled = PairedDifference(CAVO), Scaled(PairedDifference(CAVO), 100.0)
    assert scaled.value == 100 * plain.value
    assert scaled.lower(0.05) == 100 * plain.lower(0.05)
    assert scaled.upper(0.05) == 100 * plain.upper(0.05)
    assert scaled.p_above(-10.0) == plain.p_above(-0.1)
    assert scaled.p_below(-10.0) == plain.p_below(-0.1)
    assert scaled.unit_sd(-10.0) == 100 * plain.unit_sd(-0.1)
    assert scaled.method == plain.method


@pytest.mark.parametrize("table", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_a_single_item_says_nothing_about_a_comparison(table):
    one = PairedDifference(PairedTable(*table))
    assert (one.p_above(-0.1), one.p_below(0.1)) == (0.5, 0.5)
    assert (one.lower(0.05), one.upper(0.05)) == (-1.0, 1.0)
    if PairedTable(*table).reference:
        ratio = PairedRatio(PairedTable(*table))
        assert ratio.p_above(0.9) == 0.5
        assert (ratio.lower(0.05), ratio.upper(0.05)) == (0.0, math.inf)


def test_every_small_table_gives_numbers():
    """No table of up to five items makes an error, a NaN or a warning."""
    with np.errstate(all="raise"):
        for table in itertools.product(range(6), repeat=4):
            if not 1 <= sum(table) <= 5:
                continue
            for one in estimates(*table):
                found = [one.value, one.lower(0.05), one.upper(0.05), one.unit_sd(one.value)]
                found += [one.p_above(0.9), one.p_below(0.9), one.p_above(-0.1), one.unit_sd(0.9)]
                assert not any(math.isnan(number) for number in found), (table, one)


def test_no_discordance_still_leaves_doubt():
    """All alike: the bound is that of the constrained model, not the estimate itself."""
    n, z = 400, norm.ppf(0.95)
    alike = PairedTable(360, 0, 0, 40)
    # Under a difference of -d only losses remain, each with probability d.
    d = -PairedDifference(alike).lower(0.05)
    assert z == pytest.approx(math.sqrt((n - 1) * d / (1 - d)), rel=1e-6)
    # Under a ratio of r, items that the reference has right are lost with probability 1 - r.
    r = PairedRatio(alike).lower(0.05)
    assert r / (1 - r) == pytest.approx(360 * (n - 1) / n / z**2, rel=1e-6)


# -- McNemar and Holm ------------------------------------------------------------------------


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (0, 1), (3, 3), (6, 16), (1, 7), (120, 90)])
def test_mcnemar_is_statsmodels(gained, lost):
    theirs = mcnemar([[5, gained], [lost, 5]], exact=True).pvalue
    assert exact_mcnemar(gained, lost) == pytest.approx(min(1.0, theirs) if gained + lost else 1.0)


def test_mcnemar_as_published():
    """Cavo et al. 2012: exact conditional P = 0.052479 (R package contingencytables)."""
    assert exact_mcnemar(6, 16) == pytest.approx(0.052479, abs=5e-7)


@settings(max_examples=60)
@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=8), levels)
def test_holm_rejects_what_statsmodels_rejects(p_values, level):
    relative = [p / level for p in p_values]
    ours = [p <= share for p, share in zip(relative, holm_shares(relative), strict=True)]
    assert ours == multipletests(p_values, level, "holm")[0].tolist()


@pytest.mark.parametrize(
    ("relative", "shares"),
    [
        ([0.1], [1.0]),
        ([2.0], [1.0]),
        ([0.1, 0.2, 0.3], [1 / 3, 1 / 2, 1.0]),
        ([0.3, 0.2, 0.1], [1.0, 1 / 2, 1 / 3]),
        ([0.1, 0.6, 0.7], [1 / 3, 1 / 2, 1 / 2]),
        ([0.6, 0.6, 0.6], [1 / 3, 1 / 3, 1 / 3]),
        ([0.1, math.inf, math.inf], [1 / 3, 1 / 2, 1 / 2]),
        ([math.inf, math.inf], [1 / 2, 1 / 2]),
    ],
)
def test_the_level_that_each_candidate_is_judged_at(relative, shares):
    assert holm_shares(relative) == pytest.approx(shares)
