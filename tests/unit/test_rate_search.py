"""The search for the largest kept rate, played against edges that are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from eval_suites.load import LoadProfile
from eval_suites.load_steps import requests_at
from eval_suites.loader import load_profile
from eval_suites.rate_search import Answer, KeptRate, RatePlan, kept_rate, next_rate
from tests.unit.load_builders import profile

Server = Callable[[float], Answer]


def edge_at(edge: float) -> Server:
    return lambda rate: "kept" if rate <= edge else "not kept"


def play(plan: RatePlan, server: Server, points: dict[float, Answer] | None = None) -> list[float]:
    """The rates that were measured, in order; `points` is added to."""
    points = {} if points is None else points
    asked: list[float] = []
    while (rate := next_rate(plan, points)) is not None:
        assert rate not in points, "no rate is measured twice"
        asked.append(rate)
        points[rate] = server(rate)
        assert len(asked) < 60, asked
    return asked


@pytest.mark.parametrize("edge", [0.7, 3.0, 17.7, 40.0, 151.0])
@pytest.mark.parametrize("start", [0.05, 1.0, 17.7, 900.0])
def test_a_known_edge_is_found_from_everywhere(edge: float, start: float) -> None:
    points: dict[float, Answer] = {}
    asked = play(RatePlan(start), edge_at(edge), points)
    found = kept_rate(points)
    assert found.low is not None
    assert found.high is not None
    assert found.width is not None
    assert found.low <= edge < found.high
    assert found.width <= 0.2
    assert found.contradictions == ()
    # The ramp's factors of 2, then bisection from a factor of 2 to one of 1.22.
    assert len(asked) <= abs(math.log2(edge / start)) + 2 + 3


@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.5])
def test_the_tolerance_is_kept(tolerance: float) -> None:
    points: dict[float, Answer] = {}
    play(RatePlan(1.0, factor=4.0, tolerance=tolerance), edge_at(23.0), points)
    found = kept_rate(points)
    assert found.width is not None
    assert tolerance / 3 < found.width <= tolerance, "and no requests are spent beyond it"


def test_everything_kept_ends_at_the_highest_rate() -> None:
    points: dict[float, Answer] = {}
    asked = play(RatePlan(30.0, highest=100.0), edge_at(math.inf), points)
    assert asked == [30.0, 60.0, 100.0]
    assert kept_rate(points) == KeptRate(100.0, None)
    assert kept_rate(points).width is None


def test_nothing_kept_ends_at_the_lowest_rate() -> None:
    points: dict[float, Answer] = {}
    asked = play(RatePlan(1.0, lowest=0.3), edge_at(0.0), points)
    assert asked == [1.0, 0.5, 0.3]
    assert kept_rate(points) == KeptRate(None, 0.3)


def test_nothing_measured_is_nothing_known() -> None:
    assert kept_rate({}) == KeptRate(None, None)
    assert next_rate(RatePlan(3.0), {}) == 3.0


def test_an_undecided_rate_is_stepped_over_and_no_bound() -> None:
    def server(rate: float) -> Answer:
        if 10 < rate < 14:
            return "undecided"
        return edge_at(12.0)(rate)

    points: dict[float, Answer] = {}
    play(RatePlan(3.0), server, points)
    found = kept_rate(points)
    assert "undecided" in points.values()
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 10
    assert found.high >= 14
    assert points[found.low] == "kept"
    assert points[found.high] == "not kept"


def test_a_ramp_of_undecided_rates_ends() -> None:
    points: dict[float, Answer] = {}
    asked = play(RatePlan(1.0, highest=10.0), lambda rate: "undecided", points)
    assert asked == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert kept_rate(points) == KeptRate(None, None)


def test_a_rate_kept_above_one_that_was_not_is_named_and_not_believed() -> None:
    found = kept_rate({2.0: "kept", 4.0: "not kept", 8.0: "kept", 16.0: "not kept"})
    assert (found.low, found.high) == (2.0, 4.0)
    assert found.contradictions == ("8 requests/s was kept, 4 was not",)
    below = next_rate(RatePlan(2.0), {4.0: "not kept", 8.0: "kept"})
    assert below == 2.0, "what is known holds below the lowest rate that was not kept"


@pytest.mark.parametrize("start", [0.5, 6.0, 200.0])
def test_a_search_goes_on_from_any_of_its_points(start: float) -> None:
    """The next rate depends on the points alone, not on the order in which they are read."""
    plan, server = RatePlan(start), edge_at(17.7)
    asked = play(plan, server)
    for taken in range(len(asked)):
        points = {rate: server(rate) for rate in asked[:taken]}
        for order in itertools.islice(itertools.permutations(points.items()), 24):
            assert next_rate(plan, dict(order)) == asked[taken]
        assert play(plan, server, points) == asked[taken:]


def requests_of(profile: LoadProfile, rates: list[float]) -> int:
    return sum(sum(requests_at(profile, rate)) for rate in rates)


def searched(written: LoadProfile, edge: float) -> tuple[KeptRate, int]:
    """The interval, and its requests: every step with all its looks, and the sustain run."""
    search = written.search
    assert search is not None
    # About what half of a burst's rate comes to.
    plan = RatePlan(edge / 1.7, search.factor, search.tolerance, search.lowest, search.highest)
    points: dict[float, Answer] = {}
    asked = play(plan, edge_at(edge), points)
    found = kept_rate(points)
    assert found.low is not None
    return found, requests_of(written, [*asked, found.low])


def scanned(written: LoadProfile, step: float, end: float) -> int:
    """Requests of a scan from the lowest rate to the first one at or above `end`."""
    assert written.search is not None
    lowest = written.search.lowest
    count = math.ceil((end - lowest) / step) + 1
    return requests_of(written, [lowest + step * index for index in range(count)])


@pytest.mark.parametrize("edge", [5.0, 17.7, 60.0, 150.0])
@pytest.mark.parametrize("written", [profile(), load_profile("mock_smoke")])
def test_a_third_of_a_scan_that_is_as_fine_wherever_the_edge_lies(
    written: LoadProfile, edge: float
) -> None:
    """A scan upwards, which stops as soon as a rate is not kept."""
    assert written.search is not None
    _, ours = searched(written, edge)
    step = written.search.tolerance * written.search.lowest
    assert 3 * ours <= scanned(written, step, edge)


@pytest.mark.parametrize("edge", [1.3, 5.0, 17.7, 40.0])
@pytest.mark.parametrize("written", [profile(), load_profile("mock_smoke")])
def test_a_third_of_a_scan_of_the_whole_range_in_steps_of_the_width_found(
    written: LoadProfile, edge: float
) -> None:
    """A scan that somehow knows how fine it must be at this edge, and not where it is."""
    assert written.search is not None
    found, ours = searched(written, edge)
    assert found.low is not None
    assert found.high is not None
    assert 3 * ours <= scanned(written, found.high - found.low, written.search.highest)
