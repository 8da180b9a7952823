"""Ratios of bundles measured in turn: what they say, what they leave open, how sure they are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval_suites.turns import (
    TurnRatio,
    all_ratios,
    drift_of_turns,
    percentile_of,
    percentile_ratio,
    ratio,
)
from tests.unit.load_builders import Row, row

REPEATS = 6
TRUTH = 0.8


def rows(e2el: float, count: int = 20, failed: int = 0) -> list[Row]:
    answered = [row(float(i), e2el * (1 + i / 100)) for i in range(count - failed)]
    return answered + [row(float(count + i), None) for i in range(failed)]


def test_a_ratio_is_the_geometric_mean_with_students_interval() -> None:
    """By hand: logarithms -0.1, -0.2, -0.3; t of two degrees of freedom is 4.3027."""
    found = ratio([(1.0, math.exp(-0.1)), (1.0, math.exp(-0.2)), (1.0, math.exp(-0.3))])
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert found.value == pytest.approx(math.exp(-0.2))
    assert found.low == pytest.approx(math.exp(-0.2 - half))
    assert found.high == pytest.approx(math.exp(-0.2 + half))


def test_one_repeat_has_a_ratio_and_no_interval() -> None:
    found = percentile_ratio([(rows(100), rows(50))], "e2el", 50)
    assert found.value == pytest.approx(0.5)
    assert (found.low, found.high, found.repeats) == (None, None, 1)
    assert "no interval" in str(found)


def test_a_percentile_among_failed_requests_gives_no_ratio() -> None:
    pairs = [(rows(100), rows(100)), (rows(100), rows(100, failed=1))]
    assert percentile_ratio(pairs, "e2el", 50).value == pytest.approx(1, rel=0.05)
    lost = percentile_ratio(pairs, "e2el", 99)
    assert lost == TurnRatio(
        None, repeats=2, reason="e2el p99 of B in repeat 2 lies among failed requests"
    )
    assert percentile_of(rows(100, failed=1), "e2el", 99) == math.inf


def test_without_repeats_or_requests_there_is_a_reason() -> None:
    assert percentile_ratio([], "tpot", 50).reason == "no repeat was measured"
    assert "A in repeat 1 has no request" in percentile_ratio([([], rows(9))], "tpot", 50).reason
    one_token = [row(0.0, 100.0, tpot_ms=None)]
    assert "has no request" in percentile_ratio([(one_token, one_token)], "tpot", 50).reason
    assert ratio([(1.0, 0.0)]).value is None


def test_all_metrics_and_percentiles_are_there() -> None:
    found = all_ratios([(rows(100), rows(50)), (rows(200), rows(100))])
    assert set(found) == {
        f"{metric}_p{percent}" for metric in ("ttft", "tpot", "e2el") for percent in (50, 90, 99)
    }
    assert found["ttft_p90"].value == pytest.approx(0.5)


def measured(
    drawn: np.random.Generator, order: str, host: float, drift: float
) -> list[tuple[float, float]]:
    """Times of turns in an order like ABAB: noise shared by neighbours, own noise, a drift."""
    shared = drawn.normal(0, host, len(order) // 2)
    times: dict[str, list[float]] = {"A": [], "B": []}
    for place, name in enumerate(order):
        own = drawn.normal(0, 0.05)
        log = shared[place // 2] + own + drift * place + (math.log(TRUTH) if name == "B" else 0)
        times[name].append(math.exp(log))
    return list(zip(times["A"], times["B"], strict=True))


def coverage(order: str, host: float, drift: float) -> tuple[float, float]:
    """Share of intervals that hold the truth, and the median of high over low."""
    drawn = np.random.default_rng(7)
    found = [ratio(measured(drawn, order, host, drift)) for _ in range(3000)]
    held = [one for one in found if one.low and one.high and one.low <= TRUTH <= one.high]
    widths = [one.high / one.low for one in found if one.low and one.high]
    return len(held) / len(found), float(np.median(widths))


def test_intervals_of_turns_hold_the_truth_on_a_noisy_host() -> None:
    """3000 runs: 95 % have a standard error of 0.4 %."""
    held, _ = coverage("AB" * REPEATS, host=0.3, drift=0.0)
    assert 0.94 <= held <= 0.96
    # A drift of 1 % a turn stands in the ratio as a bias of 1 %, a third of its standard error.
    held, _ = coverage("AB" * REPEATS, host=0.3, drift=0.01)
    assert 0.92 <= held <= 0.955


def test_all_of_a_before_all_of_b_would_be_off() -> None:
    in_turn, width = coverage("AB" * REPEATS, host=0.0, drift=0.01)
    apart, _ = coverage("A" * REPEATS + "B" * REPEATS, host=0.0, drift=0.01)
    assert in_turn > 0.92
    assert apart < 0.75
    _, wide = coverage("A" * REPEATS + "B" * REPEATS, host=0.3, drift=0.0)
    assert wide - 1 > 3 * (width - 1)


def test_a_drift_is_measured_and_its_part_in_every_ratio() -> None:
    steady = drift_of_turns([100.0 * 1.02 ** (2 * i) for i in range(5)])
    assert steady.per_turn == pytest.approx(0.02)
    assert steady.whole == pytest.approx(1.02**8 - 1)
    assert steady.p is not None
    assert steady.p < 1e-6
    drawn = np.random.default_rng(1)
    p_values = [
        found
        for _ in range(500)
        if (found := drift_of_turns(list(np.exp(drawn.normal(0, 0.1, 6)))).p) is not None
    ]
    assert len(p_values) == 500
    assert 0.02 <= float(np.mean(np.array(p_values) < 0.05)) <= 0.08


def test_two_repeats_show_a_spread_and_no_drift() -> None:
    found = drift_of_turns([100.0, 110.0])
    assert found.spread == pytest.approx(0.1)
    assert (found.per_turn, found.p) == (None, None)
    assert drift_of_turns([]).spread is None
    assert drift_of_turns([5.0, 5.0, 5.0]).p == 1.0
