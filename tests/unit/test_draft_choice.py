"""Whether a draft stays: every combination of what is known, and how many tokens it guesses."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from eval_suites.draft_choice import DraftDecision, KeptInterval, best_tokens, decide
from eval_suites.turns import TurnRatio
from tests.unit.load_builders import Row, row

FASTER = TurnRatio(0.80, 0.75, 0.85, 5)
SAME = TurnRatio(1.0, 0.95, 1.05, 5)
SLOWER = TurnRatio(1.2, 1.1, 1.3, 5)
WIDE = TurnRatio(0.95, 0.48, 1.9, 3)
ONCE = TurnRatio(0.5, repeats=1)
NONE = TurnRatio(None, reason="tpot p50 of B in repeat 1 lies among failed requests")

WITHOUT: KeptInterval = (10.0, 12.0)
HIGHER: KeptInterval = (12.0, 14.0)
LOWER: KeptInterval = (8.0, 10.0)
NEAR: KeptInterval = (9.5, 11.5)
DROOPS: KeptInterval = (8.0, 10.5)
"""Overlaps, but its middle is 16 % lower."""
OPEN: KeptInterval = (11.0, None)
"""Not lost at any rate that was measured."""
NOWHERE: KeptInterval = (None, 0.5)
UNKNOWN: KeptInterval = (None, None)


def decided(**changes: Any) -> DraftDecision:
    known: dict[str, Any] = {
        "kept_with": NEAR,
        "kept_without": WITHOUT,
        "tpot": FASTER,
        "acceptance_length": 2.31,
        "agrees": True,
        "agreement": "64 of 64 greedy answers are equal",
    }
    return decide(**(known | changes))


@pytest.mark.parametrize(
    ("kept_with", "kept_without", "tpot", "stays"),
    [
        # The kept rate is higher beyond doubt: whatever TPOT says.
        (HIGHER, WITHOUT, FASTER, True),
        (HIGHER, WITHOUT, SLOWER, True),
        (HIGHER, WITHOUT, WIDE, True),
        (HIGHER, WITHOUT, NONE, True),
        (HIGHER, WITHOUT, None, True),
        ((12.0, None), WITHOUT, SAME, True),
        ((1.0, 2.0), NOWHERE, SAME, True),
        # It is lower beyond doubt.
        (LOWER, WITHOUT, FASTER, False),
        (LOWER, (10.0, None), FASTER, False),
        (NOWHERE, WITHOUT, FASTER, False),
        (LOWER, WITHOUT, WIDE, False),
        (LOWER, WITHOUT, None, False),
        # It is about the same: TPOT decides.
        (NEAR, WITHOUT, FASTER, True),
        (NEAR, WITHOUT, SAME, False),
        (NEAR, WITHOUT, SLOWER, False),
        (NEAR, WITHOUT, WIDE, None),
        (NEAR, WITHOUT, TurnRatio(0.97, 0.94, 1.0, 5), None),
        (NEAR, WITHOUT, ONCE, None),
        (NEAR, WITHOUT, NONE, None),
        (NEAR, WITHOUT, None, None),
        # It may be lower: a faster token does not help, no gain is no gain.
        (DROOPS, WITHOUT, FASTER, None),
        (DROOPS, WITHOUT, SAME, False),
        (DROOPS, WITHOUT, WIDE, None),
        # Nothing was lost with the draft; perhaps higher rates are kept too.
        (OPEN, WITHOUT, FASTER, True),
        (OPEN, WITHOUT, SAME, None),
        ((9.0, None), WITHOUT, FASTER, None),
        # Nothing was lost with or without it: not lower as far as measured.
        (OPEN, (11.0, None), FASTER, True),
        (OPEN, (11.0, None), SAME, None),
        (OPEN, (11.5, None), FASTER, None),
        ((10.5, 12.0), (10.0, None), FASTER, None),
        # No rate was kept, or nothing is known.
        (NOWHERE, NOWHERE, FASTER, None),
        (NOWHERE, NOWHERE, SAME, False),
        (UNKNOWN, WITHOUT, FASTER, None),
        (NEAR, UNKNOWN, FASTER, None),
        (NEAR, (None, 10.0), FASTER, None),
        (None, WITHOUT, FASTER, None),
        (NEAR, None, SAME, None),
        ((None, 11.0), WITHOUT, SAME, False),
        ((None, 13.0), WITHOUT, SAME, None),
    ],
)
def test_rates_and_times(
    kept_with: KeptInterval | None,
    kept_without: KeptInterval | None,
    tpot: TurnRatio | None,
    stays: bool | None,
) -> None:
    found = decided(kept_with=kept_with, kept_without=kept_without, tpot=tpot)
    assert found.stays is stays, found.reason


KEPT = [None, UNKNOWN, NOWHERE, LOWER, DROOPS, NEAR, HIGHER, OPEN, WITHOUT]
TIMES = [None, NONE, ONCE, WIDE, FASTER, SAME, SLOWER]


def test_disagreeing_answers_go_however_fast() -> None:
    for kept_with, kept_without, tpot in itertools.product(KEPT, KEPT, TIMES):
        known = {"kept_with": kept_with, "kept_without": kept_without, "tpot": tpot}
        assert decided(agrees=False, **known).stays is False


def test_answers_nobody_compared_let_no_draft_stay_and_save_none() -> None:
    for kept_with, kept_without, tpot in itertools.product(KEPT, KEPT, TIMES):
        known = {"kept_with": kept_with, "kept_without": kept_without, "tpot": tpot}
        agreed, unknown = decided(**known).stays, decided(agrees=None, **known).stays
        assert unknown is (None if agreed else agreed), known


def test_without_an_interval_of_tpot_only_the_kept_rate_can_keep_it() -> None:
    for kept_with, tpot in itertools.product(KEPT, (None, NONE, ONCE)):
        found = decided(kept_with=kept_with, tpot=tpot)
        assert found.stays is not True or kept_with == HIGHER


def test_the_reason_has_the_numbers() -> None:
    found = decided()
    assert found.reason == (
        "it lowers TPOT and keeps the rate: kept rate 9.5 to 11.5 requests/s with it and 10 to "
        "12 requests/s without; TPOT with over without at the SLA rate 0.800 (0.750 to 0.850, 5 "
        "repeats); 2.31 tokens per step; 64 of 64 greedy answers are equal"
    )
    unknown = decided(kept_with=None, tpot=NONE, acceptance_length=None).reason
    assert "whether it raises the kept rate is not known" in unknown
    assert "TPOT at the SLA rate has no ratio with an interval" in unknown
    assert "no ratio: tpot p50 of B in repeat 1 lies among failed requests" in unknown
    assert "no rate" not in decided(kept_with=OPEN).reason
    assert "too wide to see a gain or exclude one" in decided(tpot=WIDE).reason
    assert "at least 11 requests/s" in decided(kept_with=OPEN).reason


# -- how many tokens -------------------------------------------------------------------------


def turn(tpot: float, seed: int = 0, count: int = 60, failed: int = 0) -> list[Row]:
    """The same prompts: each has a time of its own, and noise of the turn's."""
    own, noise = random.Random(1), random.Random(seed)
    rows = []
    for index in range(count):
        time = tpot * own.lognormvariate(0, 0.5) * noise.lognormvariate(0, 0.05)
        known = {"request_id": str(index)}
        rows.append(row(index, None, **known) if index < failed else row(index, 4 * time, **known))
    return rows


def test_the_lowest_median_wins() -> None:
    found = best_tokens({1: [turn(20, 1)], 2: [turn(16, 2)], 3: [turn(12, 3)], 4: [turn(14, 4)]})
    assert found.tokens == 3
    assert [one.tokens for one in found.tried] == [1, 2, 3, 4]
    for one in found.tried:
        assert one.low_ms is not None
        assert one.tpot_ms is not None
        assert one.high_ms is not None
        assert one.low_ms <= one.tpot_ms <= one.high_ms
    assert "3 has the lowest median TPOT" in found.reason


def test_ties_within_noise_go_to_fewer_tokens() -> None:
    """Prompt by prompt: 0.5 % is within the noise of 5 %, 15 % is not, however wide the medians."""
    found = best_tokens({2: [turn(15.0, 2)], 3: [turn(12.06, 3)], 5: [turn(12.0, 6)]})
    assert found.tokens == 3
    assert best_tokens({3: [turn(13.8, 3)], 5: [turn(12.0, 5)]}).tokens == 5


def test_with_several_turns_the_noise_between_them_counts() -> None:
    host = [1.0, 1.3, 0.9]
    fewer = [turn(12 * busy * own, 1) for busy, own in zip(host, (1.05, 1.0, 1.01), strict=True)]
    more = [turn(12 * busy * own, 2) for busy, own in zip(host, (1.0, 1.02, 1.0), strict=True)]
    assert best_tokens({2: fewer, 4: more}).tokens == 2
    clearly = [turn(14 * busy, 1) for busy in host]
    assert best_tokens({2: clearly, 4: more}).tokens == 4


def test_void_turns_are_left_out_of_their_rounds() -> None:
    """Empty ones: what is compared are turns of the same round."""
    fewer = [[], turn(24, 1), turn(12, 1)]
    more = [turn(10, 2), turn(20, 2), turn(10, 2)]
    assert best_tokens({2: fewer, 4: more}).tokens == 4
    assert best_tokens({2: [[], turn(10.1, 1)], 4: [turn(9, 2), turn(10, 2)]}).tokens == 2


def test_failed_turns_win_nothing() -> None:
    found = best_tokens({1: [turn(20)], 2: [turn(10, failed=40)]})
    assert found.tokens == 1
    assert found.tried[1].tpot_ms is None
    none = best_tokens({2: [turn(10, failed=60)], 3: [[]]})
    assert none.tokens is None
    assert best_tokens({}).reason == "nothing tried has a median TPOT"


def test_few_requests_have_a_median_and_no_interval() -> None:
    (one,) = best_tokens({3: [turn(10, count=4)]}).tried
    assert one.tpot_ms is not None
    assert (one.low_ms, one.high_ms) == (None, None)
