"""The search against a uniform scan, on a queue whose edge is known."""

from __future__ import annotations

import pytest

from benchmarks.simulate_search import play, scan
from eval_suites.loader import load_profile
from registry.outcome import Verdict


def test_a_search_is_right_within_a_third_of_a_scan() -> None:
    """Of the profile's whole range, with steps as wide as the interval that was found."""
    played = [play("mock_smoke", 0.05, seed) for seed in range(1000, 1004)]
    assert sum(one.right for one in played) >= 3
    for one in played:
        assert one.verdict is Verdict.PASS
        assert not one.outside
        assert one.requests <= one.scan_all / 3
        assert one.scan_to_first_loss < one.scan_all
        assert one.seconds <= 600


def test_a_scan_covers_the_profiles_range() -> None:
    rates = list(scan(load_profile("mock_smoke"), 10))
    assert rates[0] == 0.5
    assert rates[-1] == pytest.approx(190.5)
    assert len(rates) == 20
