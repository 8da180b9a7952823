"""What a sample says about a percentile, against the binomial distribution and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from eval_suites.percentiles import Percentile, design_effect, requests_for

Array = NDArray[np.float64]


def sample(n: int, over: int = 0) -> Percentile:
    """Requests of 1 s, some of 3 s at equal distances; the limit is 2 s."""
    times = np.ones(n)
    if over:
        times[((np.arange(over) + 0.5) * n / over).astype(int)] = 3.0
    return Percentile(times, 99)


def test_299_requests_with_none_over_show_a_p99_and_fewer_do_not() -> None:
    assert sample(299).p_below(2) <= 0.05
    assert sample(299).upper(0.05) == 1.0
    for n in (298, 100, 20, 1):
        assert sample(n).p_below(2) > 0.05
        assert sample(n).upper(0.05) == math.inf
    assert requests_for(99, 0.05) == 299


def test_with_one_over_473_requests_are_needed() -> None:
    assert sample(473, over=1).p_below(2) <= 0.05 < sample(472, over=1).p_below(2)
    assert requests_for(99, 0.05, over=1) == 473


@pytest.mark.parametrize(
    ("percent", "alpha"), [(50, 0.05), (90, 0.05), (90, 0.025), (95, 0.05), (99.9, 0.05)]
)
def test_requests_for_is_the_fewest(percent: float, alpha: float) -> None:
    n = requests_for(percent, alpha)
    assert (percent / 100) ** n <= alpha < (percent / 100) ** (n - 1)


def test_a_failed_request_is_over_every_limit() -> None:
    times = np.ones(400)
    times[[50, 130, 210, 290, 370]] = math.inf
    failing = Percentile(times, 99)
    assert failing.value == math.inf, "five of 400 are more than 1 %"
    assert failing.upper(0.05) == math.inf
    assert failing.p_below(1e9) == pytest.approx(binom.cdf(5, 400, 0.01))
    few = Percentile(np.append(np.ones(999), math.inf), 99)
    assert (few.value, few.upper(0.05)) == (1.0, 1.0)


@pytest.mark.parametrize("percent", [50, 90, 99])
def test_bounds_are_the_order_statistics_of_the_binomial(percent: float) -> None:
    # 1 to 600, each spread more evenly than by chance: nothing hints at dependence.
    times = 1.0 + np.argsort(np.argsort(np.arange(600) * math.sqrt(5) % 1)).astype(np.float64)
    found, share, n = Percentile(times, percent), percent / 100, len(times)
    assert found.value == math.ceil(share * n)
    for alpha in (0.05, 0.01):
        # The r-th smallest is an upper bound where at least r below it has a chance of alpha.
        rank = next(r for r in range(1, n + 1) if binom.sf(r - 1, n, share) <= alpha)
        assert found.upper(alpha) == rank
        rank = next(r for r in range(n, 0, -1) if binom.cdf(r - 1, n, share) <= alpha)
        assert found.lower(alpha) == pytest.approx(rank)


def test_p_values_are_the_binomials() -> None:
    found = sample(600, over=9)
    assert found.p_below(2) == pytest.approx(binom.cdf(9, 600, 0.01))
    assert found.p_above(2) == pytest.approx(binom.sf(8, 600, 0.01))
    assert sample(600).p_above(2) == 1.0


@pytest.mark.parametrize("n", [400, 1500])
def test_the_bounds_hold_their_error(n: int) -> None:
    drawn = np.random.default_rng(n)
    truth, runs = math.log(100), 1500
    samples = [Percentile(drawn.exponential(1.0, n), 99) for _ in range(runs)]
    below = sum(one.upper(0.05) < truth for one in samples) / runs
    above = sum(one.lower(0.05) > truth for one in samples) / runs
    # Three standard errors of 1500 runs above 5 %.
    assert below <= 0.067
    assert above <= 0.067


def stalls(n: int, share: float, length: int) -> NDArray[np.bool_]:
    """The share of requests that is over, in blocks at equal distances."""
    over = np.zeros(n, bool)
    blocks = round(n * share / length)
    for start in np.linspace(length, n - 2 * length, blocks).astype(int):
        over[start : start + length] = True
    return over


def test_requests_of_one_stall_count_less_than_independent_ones() -> None:
    n = 2000
    scattered = np.random.default_rng(3).random(n) < 0.02
    assert design_effect(scattered) < 2
    assert design_effect(stalls(n, 0.02, 20)) > 10
    assert design_effect(stalls(n, 0.02, 20)) > design_effect(stalls(n, 0.02, 5))

    spread = np.ones(n)
    spread[:: n // 10] = 3.0
    blocked = np.ones(n)
    blocked[stalls(n, 0.005, 10)] = 3.0
    assert (spread > 2).sum() == (blocked > 2).sum() == 10
    assert Percentile(spread, 99).p_below(2) <= 0.025, "half of what a P99 allows"
    assert Percentile(blocked, 99).p_below(2) > 0.025, "the same in one stall proves little"


def test_too_few_to_see_dependence_have_no_design_effect() -> None:
    assert design_effect(np.zeros(0, bool)) == 1
    assert design_effect(np.zeros(1000, bool)) == 1
    assert design_effect(np.ones(1000, bool)) == 1
    assert design_effect(np.arange(99) < 10) == 1


def test_a_request_over_the_limit_never_disappears() -> None:
    """However dependent the requests: one over is not none."""
    times = np.ones(4000)
    times[100:140] = 3.0
    found = Percentile(times, 99)
    assert found.p_below(2) > found.p_below(4)
    assert found.upper(0.05) in (1.0, 3.0)


def test_better_requests_never_prove_less() -> None:
    drawn = np.random.default_rng(5)
    for _ in range(50):
        times = drawn.exponential(1.0, 80)
        slower = times * (1 + drawn.random(80))
        limit = float(drawn.choice(times))
        assert Percentile(times, 90).p_below(limit) <= Percentile(slower, 90).p_below(limit)
        assert Percentile(times, 90).upper(0.05) <= Percentile(slower, 90).upper(0.05)
