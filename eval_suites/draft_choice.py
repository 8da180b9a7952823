"""Does a draft pay? Decided from kept rates, times at the SLA rate and greedy answers.

The draft has to show its worth: where the measurements exclude a gain, the bundle goes on without
it. Where one is missing or too coarse to say, nothing is decided (None), and the reason says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval_suites.load_steps import times_of
from eval_suites.percentiles import Percentile
from eval_suites.turns import LEVEL, TurnRatio, percentile_ratio

Row = Mapping[str, Any]

KeptInterval = tuple[float | None, float | None]
"""Highest rate kept and lowest not kept, requests/s, as in `LatencyEvidence.kept_rate`."""

TOLERANCE = 0.1
"""A middle that is lower by this share is not called lowered.

A search ends with intervals up to 0.2 of their middle wide, so no middle is known to better than
half of that."""


WORTHWHILE = 0.05
"""TPOT that is lower by less than this share is no gain to look for.

Where the interval leaves room for more, it is too wide to say that there is none."""


@dataclass(frozen=True)
class DraftDecision:
    """`stays` None: it cannot be decided, for want of what `reason` says."""

    stays: bool | None
    reason: str


def decide(
    *,
    kept_with: KeptInterval | None,
    kept_without: KeptInterval | None,
    tpot: TurnRatio | None,
    acceptance_length: float | None,
    agrees: bool | None,
    agreement: str,
    tolerance: float = TOLERANCE,
) -> DraftDecision:
    """Whether the draft stays.

    `tpot` is with over without at the SLA rate; `agrees` whether greedy answers agree apart from
    near-ties, `agreement` that in words with numbers. In this order:

    1. Answers disagree: it goes, however fast it is.
    2. The kept rate is lowered beyond doubt: it goes, whatever TPOT says.
    3. The kept rate is raised beyond doubt, or TPOT is lowered beyond doubt and the kept rate is
       not lowered: it stays, provided the answers are known to agree (None otherwise).
    4. The kept rate is known and not raised beyond doubt, and TPOT not lower by a worthwhile share
       beyond doubt: it goes.
    5. Anything else is not decided; a TPOT interval that is too wide wants more repeats.
    """
    raised = _raised(kept_with, kept_without)
    lowered = _lowered(kept_with, kept_without, tolerance)
    faster = _faster(tpot)
    numbers = _numbers(kept_with, kept_without, tpot, acceptance_length, agreement)

    def decided(stays: bool | None, why: str) -> DraftDecision:
        return DraftDecision(stays, f"{why}: {numbers}")

    if agrees is False:
        return decided(False, "its greedy answers are not the target's")
    if lowered:
        return decided(False, "it lowers the kept rate")
    if raised or (faster and lowered is False):
        gain = "raises the kept rate" if raised else "lowers TPOT and keeps the rate"
        if agrees:
            return decided(True, f"it {gain}")
        return decided(None, f"it {gain}, but whether its greedy answers agree is not known")
    if raised is False and faster is False:
        return decided(False, "no gain is seen, neither in the kept rate nor in TPOT")
    missing = []
    if raised is None:
        missing.append("whether it raises the kept rate is not known")
    if lowered is None:
        missing.append("whether it lowers the kept rate is not known")
    if faster is None:
        wide = tpot is not None and tpot.low is not None
        missing.append(
            "the interval of TPOT is too wide to see a gain or exclude one, more repeats narrow it"
            if wide
            else "TPOT at the SLA rate has no ratio with an interval"
        )
    return decided(None, ", ".join(missing))


def _faster(tpot: TurnRatio | None) -> bool | None:
    """True: beyond doubt. False: a worthwhile gain is excluded. None: not known."""
    if tpot is None or tpot.low is None or tpot.high is None:
        return None
    if tpot.high < 1:
        return True
    return False if tpot.low >= 1 - WORTHWHILE else None


def _raised(with_: KeptInterval | None, without: KeptInterval | None) -> bool | None:
    """True: beyond doubt. False: not shown although both ends are known. None: not known."""
    if with_ is None or without is None:
        return None
    (low, high), (_, lost_without) = with_, without
    if lost_without is None:
        # Without the draft no rate was lost: none above it was measured to compare with.
        return None
    if low is not None and low >= lost_without:
        return True
    if low is None:
        # No rate was kept with the draft; below its lowest lost one it may still keep some.
        return False if high is not None and high <= lost_without else None
    # Where no rate was lost with the draft, higher ones may be kept.
    return False if high is not None else None


def _lowered(
    with_: KeptInterval | None, without: KeptInterval | None, tolerance: float
) -> bool | None:
    """True: beyond doubt. False: not, as far as the intervals can say. None: not known."""
    if with_ is None or without is None:
        return None
    (low, high), (low_without, lost_without) = with_, without
    if high is not None and low_without is not None and high <= low_without:
        return True
    if low is None:
        return None
    if lost_without is not None and low >= lost_without:
        return False
    if low_without is None:
        return None
    if lost_without is None:
        # Neither lost a rate, and the draft kept as high a one: not lowered as far as measured.
        return False if high is None and low >= low_without else None
    # Where no rate was lost with the draft, its middle is at least the highest kept one.
    middle = low if high is None else (low + high) / 2
    return False if middle >= (1 - tolerance) * (low_without + lost_without) / 2 else None


def _numbers(
    with_: KeptInterval | None,
    without: KeptInterval | None,
    tpot: TurnRatio | None,
    acceptance_length: float | None,
    agreement: str,
) -> str:
    told = [
        f"kept rate {kept_in_words(with_)} with it and {kept_in_words(without)} without",
        f"TPOT with over without at the SLA rate {tpot or 'not measured'}",
    ]
    if acceptance_length is not None:
        told.append(f"{acceptance_length:.2f} tokens per step")
    return "; ".join([*told, agreement])


def kept_in_words(kept: KeptInterval | None) -> str:
    """For people: between which two rates the SLA was lost."""
    if kept is None:
        return "not measured"
    low, high = kept
    if low is None:
        return "unknown" if high is None else f"below {high:.4g} requests/s"
    if high is None:
        return f"at least {low:.4g} requests/s"
    return f"{low:.4g} to {high:.4g} requests/s"


# -- how many tokens to speculate ------------------------------------------------------------


@dataclass(frozen=True)
class TokensTried:
    """One number of speculative tokens: its median TPOT in ms, over all its requests.

    The interval is of the median over these requests, by order statistics: it does not know how
    another start of the server would differ. None: too few requests, or failed ones.
    """

    tokens: int
    tpot_ms: float | None
    low_ms: float | None
    high_ms: float | None


@dataclass(frozen=True)
class BestTokens:
    """`tokens` None: nothing tried has a median TPOT."""

    tokens: int | None
    tried: tuple[TokensTried, ...]
    reason: str


def best_tokens(turns: Mapping[int, Sequence[Sequence[Row]]], level: float = LEVEL) -> BestTokens:
    """The number of speculative tokens with the lowest median TPOT; ties go to fewer tokens.

    `turns` has the rows of each number's turns, one per round, empty where that was void; in a
    round all are on the same prompts. A number ties with the fastest one when it is not slower
    beyond doubt. With one round that is judged by TPOT over the fastest one's prompt by prompt,
    whose median is bounded by order statistics; with more, round by round as in
    `eval_suites.turns`.
    """
    alpha = (1 - level) / 2
    tried = tuple(_tried(tokens, turns[tokens], alpha) for tokens in sorted(turns))
    known = {one.tokens: one.tpot_ms for one in tried if one.tpot_ms is not None}
    if not known:
        return BestTokens(None, tried, "nothing tried has a median TPOT")
    fastest = min(known, key=lambda tokens: (known[tokens], tokens))
    chosen = next(
        tokens
        for tokens in sorted(known)
        if tokens == fastest or not _slower(turns[tokens], turns[fastest], level)
    )
    reason = f"{chosen} has the lowest median TPOT, {known[chosen]:.4g} ms"
    if chosen != fastest:
        reason = (
            f"{chosen} is not slower than {fastest} beyond doubt "
            f"({known[chosen]:.4g} and {known[fastest]:.4g} ms), and takes fewer tokens"
        )
    return BestTokens(chosen, tried, reason)


def _tried(tokens: int, turns: Sequence[Sequence[Row]], alpha: float) -> TokensTried:
    rows = [row for turn in turns for row in turn]
    times = times_of(rows, "tpot")
    if not len(times):
        return TokensTried(tokens, None, None, None)
    median = Percentile(times, 50)
    # A lower bound of 0 is none: so few requests bound nothing.
    found = (median.value, median.lower(alpha) or math.inf, median.upper(alpha))
    value, low, high = (one if math.isfinite(one) else None for one in found)
    return TokensTried(tokens, value, low, high)


def _slower(turns: Sequence[Sequence[Row]], fastest: Sequence[Sequence[Row]], level: float) -> bool:
    pairs = [(one, two) for one, two in zip(fastest, turns, strict=True) if one and two]
    if len(pairs) > 1:
        found = percentile_ratio(pairs, "tpot", 50, level)
        # Without a ratio, requests of a turn failed: that is no tie.
        return found.low is None or found.low > 1
    before = {row["request_id"]: row for turn in fastest for row in turn}
    ratios = []
    for turn in turns:
        for row in turn:
            other = before.get(row["request_id"])
            mine, its = (_tpot(one) if one is not None else None for one in (row, other))
            # Prompts that fail or end at once with one of them say nothing of the other's speed.
            if mine is not None and its is not None:
                ratios.append(mine / its)
    if not ratios:
        return False
    return Percentile(np.array(ratios), 50).lower((1 - level) / 2) > 1


def _tpot(row: Row) -> float | None:
    return row["tpot_ms"] if row["ok"] else None
