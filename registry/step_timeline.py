"""One step of a load test over time: what each request waited, and how many were there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from registry import plot_style as style
from registry.measured_steps import Clause, Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def timeline(step: Step, clauses: Sequence[Clause] = ()) -> Figure:
    """TTFT of each request over its start, and below it requests in flight and waiting."""
    point, start = step.point, step.start_s
    figure = style.new_figure(5.4)
    upper, lower = style.new_axes(figure, 2, heights=(3, 2))
    timed = step.ok & np.isfinite(step.ttft_ms)
    limits = [clause for clause in clauses if clause.metric == "ttft"]
    times = step.ttft_ms[timed]
    upper.plot(
        start[timed], times, ".", markersize=4 if len(times) < 3000 else 2, color=style.BLUE,
        alpha=0.7, label=f"TTFT of {len(times)} requests",
    )  # fmt: skip
    failed, untimed = start[~step.ok], start[step.ok & ~timed]
    style.at_the_top(upper, failed, "|", style.VERMILION, f"{len(failed)} failed")
    style.at_the_top(upper, untimed, "|", style.GREY, f"{len(untimed)} answered without a TTFT")
    for clause in limits:
        words = f"limit of P{clause.percent:g}: {style.plain(clause.limit_ms)} ms"
        upper.axhline(clause.limit_ms, color=style.BLACK, linestyle="--", linewidth=1, label=words)
    # A queue that grows is seen best on a linear axis; single stalls would flatten it.
    spread = np.percentile(times, [50, 100]) if len(times) else [1, 1]
    wide = spread[1] > 30 * spread[0]
    seen = [*times.tolist(), *(clause.limit_ms for clause in limits)]
    style.scale(upper, "y", seen, log_above=1 if wide else math.inf)
    upper.set_ylabel("TTFT, ms")

    ended = step.ok & np.isfinite(step.e2el_ms)
    at, in_flight = _in_flight(start[ended], start[ended] + step.e2el_ms[ended] / 1000)
    without = f", {len(failed)} failed not counted" if len(failed) else ""
    lower.plot(
        at, in_flight, drawstyle="steps-post", color=style.BLUE, linewidth=1.1,
        label=f"in flight (from the requests{without})",
    )  # fmt: skip
    if step.waiting:
        lower.plot(
            *zip(*step.waiting, strict=True), color=style.VERMILION, linestyle=style.DASHES[1],
            marker=".", markersize=4, linewidth=1.1, label="waiting (shown by the engine)",
        )  # fmt: skip
    counts = [*in_flight.tolist(), *(count for _, count in step.waiting if math.isfinite(count))]
    style.scale(lower, "y", counts, log_above=math.inf)
    lower.set_ylabel("requests")
    lower.set_xlabel("seconds after the step's first request")
    lower.set_xlim(0, max([1e-3, *start.tolist(), *at.tolist()]) * 1.01)
    if point.steady_window_s is not None:
        for axes in (upper, lower):
            axes.axvspan(
                *point.steady_window_s, color=style.GREEN, alpha=0.1, linewidth=0, zorder=0,
                label="steady window, which is judged",
            )  # fmt: skip
    answer = point.answer or "measured"
    head = f"Step {step.number}: {style.plain(point.rate)} requests/s, {answer}"
    style.title(figure, head, point.cause)
    style.legend(figure, (upper, lower))
    return figure


def _in_flight(
    starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Moments at which the number of unanswered requests changes, and the number from then on."""
    at = np.concatenate([[0.0], starts, ends])
    change = np.concatenate([[0.0], np.ones(len(starts)), -np.ones(len(ends))])
    # Of equal moments the ends first: a request that follows another is not beside it.
    order = np.lexsort((change, at))
    return at[order], np.cumsum(change[order])
