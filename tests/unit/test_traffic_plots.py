"""Pictures of traffic: what a reader sees of peaks, of a log's end, and of what is not known."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from registry.traffic_plots import Drawn, hours, in_flight, lengths, write_plots
from registry.traffic_requests import MICRO, Requests

T0 = datetime(2026, 10, 5, 16, tzinfo=UTC)
"""Midnight in Shanghai."""


def requests(seconds: float, count: int = 2000) -> Requests:
    begin = int(T0.timestamp()) * MICRO
    arrived = begin + np.linspace(0, seconds * MICRO, count).astype(np.int64)
    tokens = np.arange(1, count + 1, dtype=np.int32)
    return Requests(arrived, tokens, tokens, latency=np.full(count, 2 * MICRO))


def drawn(**changes: Any) -> Drawn:
    given: dict[str, Any] = {
        "about": "2000 requests of a test", "main_prompt": (5, 1900), "main_output": (7, 1800),
        "rates": [0.5] * 24, "dispersions": [1.0] * 24, "zone": ZoneInfo("Asia/Shanghai"),
        "zone_name": "Asia/Shanghai", "peak": 4, "peak_at": T0 + timedelta(minutes=7),
        "stable": 3.0, "stable_at": T0, "window_s": 300, "latency_from": "the log",
    }  # fmt: skip
    return Drawn(**(given | changes))


def labels(figure: Any) -> set[str]:
    return {text.get_text().replace("\n", " ") for one in figure.legends for text in one.texts}


@pytest.mark.parametrize(
    "seconds",
    [1, 90, 3600, 5 * 3600, 17.3 * 3600, 86_400, 2.5 * 86_400, 4.1 * 86_400, 9 * 86_400,
     40 * 86_400, 100 * 86_400, 400 * 86_400],
)  # fmt: skip
def test_every_length_of_a_log_has_dates_to_read(seconds: float) -> None:
    log = requests(seconds, count=200)
    figure = in_flight(log, log.latency, drawn())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    shown = [one.get_text() for one in figure.axes[1].get_xticklabels()]
    assert 2 <= len(shown) <= 10
    # A day is never a number alone.
    assert not [one for one in shown if one.isdigit() and len(one) < 4]


def test_files_are_small(tmp_path: Path) -> None:
    log = requests(3600)
    written = write_plots(log, log.latency, drawn(), tmp_path)
    assert len(written) == 3
    assert all(path.stat().st_size < 80_000 for path in written)


def test_a_peak_of_a_moment_is_marked_and_presses_nothing_to_the_ground() -> None:
    log = requests(3600)
    low, high = drawn(peak=9), drawn(peak=200)
    assert "peak 9" in labels(in_flight(log, log.latency, low))
    figure = in_flight(log, log.latency, high)
    assert "peak 200, above this axis" in labels(figure)
    assert figure.axes[1].get_ylim()[1] < 10


def test_the_last_step_is_no_end_of_the_traffic() -> None:
    """Even arrivals are a level line to its last point."""
    log = requests(17.3 * 3600, count=60_000)
    (line,) = in_flight(log, None, drawn()).axes[0].patches
    rates = line.get_data().values
    assert rates.min() > 0.9 * rates.max()


def test_without_latency_the_lower_panel_has_no_numbers() -> None:
    figure = in_flight(requests(3600), None, drawn(peak=None, stable=None))
    assert list(figure.axes[1].get_yticks()) == []


def test_panels_are_told_by_words_not_by_colour_alone() -> None:
    figure = lengths(requests(3600), drawn())
    assert [one.get_ylabel() for one in figure.axes] == [
        "prompts, % of requests", "outputs, % of requests",
    ]  # fmt: skip
    assert "main range of outputs, P5 to P95: 7 to 1800 tokens" in labels(figure)
    names = labels(hours(drawn(rates=[0.5] * 23 + [None])))
    assert {"not in the log", "variance/mean in spans of 10 s"} <= names
