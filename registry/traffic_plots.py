"""Pictures of a log's traffic: lengths, hours of the day, and requests in flight over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from registry import plot_style as style
from registry.traffic_levels import areas_of, starts_and_ends
from registry.traffic_requests import MICRO, NO_TIME, Requests, binned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTHS, HOURS, TIME = "traffic_lengths.png", "traffic_hours.png", "traffic_in_flight.png"
POINTS = 600
"""Of a line over time; finer is not seen."""

BINS = 60

ABOVE = 3
"""So many times what lasts, a peak of a moment is marked and not drawn to scale."""


@dataclass(frozen=True)
class Drawn:
    """What a picture says of a profile beside the requests themselves."""

    about: str
    main_prompt: tuple[int, int]
    main_output: tuple[int, int]
    rates: Sequence[float | None]
    """By hour of the day."""

    dispersions: Sequence[float | None]
    zone: tzinfo
    zone_name: str
    peak: int | None
    peak_at: datetime | None
    stable: float | None
    stable_at: datetime | None
    window_s: float
    latency_from: str


def write_plots(
    requests: Requests, latency: NDArray[Any] | None, what: Drawn, out: Path
) -> list[Path]:
    """PNG files in `out`; `latency` in microseconds, None: nothing is drawn in flight."""
    return [
        style.save(lengths(requests, what), out / LENGTHS),
        style.save(hours(what), out / HOURS),
        style.save(in_flight(requests, latency, what), out / TIME),
    ]


def lengths(requests: Requests, what: Drawn) -> Figure:
    """Histograms on a logarithmic axis, the main range shaded."""
    figure = style.new_figure(5.6)
    panels = style.new_axes(figure, 2)
    named = (
        ("prompt", requests.prompt, what.main_prompt, style.BLUE),
        ("output", requests.output, what.main_output, style.GREEN),
    )
    largest = max(int(requests.prompt.max()), int(requests.output.max()), 2)
    smallest = max(1, min(int(requests.prompt.min()), int(requests.output.min())))
    edges = np.unique(np.round(np.geomspace(smallest, largest + 1, BINS)))
    for axes, (name, values, main, colour) in zip(panels, named, strict=True):
        counts, _ = np.histogram(np.maximum(values, 1), edges)
        axes.stairs(counts / len(values) * 100, edges, fill=True, color=colour, alpha=0.75,
                    label=f"{name} tokens")  # fmt: skip
        words = f"main range of {name}s, P5 to P95: {main[0]} to {main[1]} tokens"
        axes.axvspan(*main, color=style.SKY, alpha=0.2, linewidth=0, zorder=0, label=words)
        axes.set_ylabel(f"{name}s, % of requests", fontsize=9)
        axes.set_ylim(bottom=0)
    style.scale(panels[-1], "x", [smallest, largest], room=0.02)
    panels[-1].set_xlabel("tokens of a request", fontsize=9)
    style.title(figure, "Lengths of prompts and outputs", what.about)
    style.legend(figure, panels)
    return figure


def hours(what: Drawn) -> Figure:
    """Arrival rate by hour of the day, and the index of dispersion below it."""
    figure = style.new_figure(5.2)
    panels = style.new_axes(figure, 2, [2, 1])
    known = [(hour, rate) for hour, rate in enumerate(what.rates) if rate is not None]
    panels[0].bar([hour for hour, _ in known], [rate for _, rate in known], width=0.8,
                  color=style.BLUE, label="requests per second")  # fmt: skip
    missing = [hour for hour, rate in enumerate(what.rates) if rate is None]
    style.at_the_top(panels[0], missing, "v", style.GREY, "not in the log", size=5, height=0.96)
    style.scale(panels[0], "y", [rate for _, rate in known], log_above=1e9)
    panels[0].set_ylabel("requests/s", fontsize=9)
    bursts = [(hour, one) for hour, one in enumerate(what.dispersions) if one is not None]
    panels[1].plot([hour for hour, _ in bursts], [one for _, one in bursts], "o", markersize=4,
                   color=style.VERMILION, label="variance/mean in spans of 10 s")  # fmt: skip
    panels[1].axhline(1, color=style.BLACK, linewidth=1, linestyle="--",
                      label="1: as Poisson arrivals are")  # fmt: skip
    style.scale(panels[1], "y", [1, *(one for _, one in bursts)])
    panels[1].set_ylabel("index of dispersion", fontsize=9)
    panels[1].set_xticks(range(0, 24, 2))
    panels[1].set_xlim(-0.6, 23.6)
    panels[1].set_xlabel(f"hour of the day ({what.zone_name})", fontsize=9)
    style.title(figure, "Arrivals by hour of the day", what.about)
    style.legend(figure, panels)
    return figure


def in_flight(requests: Requests, latency: NDArray[Any] | None, what: Drawn) -> Figure:
    """Arrival rate over time, and below it the mean in flight, with the stable peak's window."""
    figure = style.new_figure(5.6)
    panels = style.new_axes(figure, 2)
    begin, last = int(requests.arrived.min()), int(requests.arrived.max())
    arrived = starts = ends = requests.arrived
    if latency is not None:
        known = latency != NO_TIME
        if not known.all():
            arrived, latency = arrived[known], latency[known]
        starts, ends = starts_and_ends(arrived, latency)
        last = max(last, int(ends[-1]))
    # The last step is whole too: what it lacks would look like an end of the traffic.
    step = max(MICRO, -(-(last - begin + 1) // POINTS))
    counts = binned(requests.arrived, begin, step)
    _line(panels[0], counts / step * MICRO, begin, step, what.zone, style.BLUE, "arrivals")
    panels[0].set_ylabel("requests/s", fontsize=9)
    if latency is not None:
        means = areas_of(starts, ends, step) / step
        label = "in flight, mean" if what.latency_from == "the log" else "in flight, ASSUMED times"
        _line(panels[1], means, int(starts[0]), step, what.zone, style.GREEN, label)
        highest = max(float(means.max()), what.stable or 0)
        if what.peak is not None and what.peak_at is not None and what.peak > ABOVE * highest:
            # A line that high would press all others to the ground.
            style.at_the_top(panels[1], [_number(what.peak_at)], "^", style.VERMILION,
                             f"peak {what.peak}, above this axis")  # fmt: skip
        elif what.peak is not None:
            panels[1].axhline(what.peak, color=style.VERMILION, linewidth=1, linestyle="--",
                              label=f"peak {what.peak}")  # fmt: skip
        if what.stable is not None and what.stable_at is not None:
            panels[1].axhline(what.stable, color=style.BLACK, linewidth=1,
                              linestyle=style.DASHES[2],
                              label=f"stable peak {style.plain(what.stable)}")  # fmt: skip
            panels[1].axvspan(
                _number(what.stable_at),
                _number(what.stable_at + timedelta(seconds=what.window_s)),
                color=style.ORANGE, alpha=0.6, linewidth=1, zorder=0,
                label=f"its window of {what.window_s:g} s",
            )  # fmt: skip
    else:
        panels[1].text(0.5, 0.5, "no latency and no end in the log", ha="center", fontsize=9,
                       color=style.GREY, transform=panels[1].transAxes)  # fmt: skip
        panels[1].set_yticks([])
    panels[1].set_ylabel("requests in flight", fontsize=9)
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
    _dates(panels[1], what)
    words = f"lines are means of {style.plain(step / MICRO)} s; {what.about}"
    style.title(figure, "Arrivals and requests in flight", words)
    style.legend(figure, panels)
    return figure


def _line(
    axes: Axes, values: Any, begin: int, step: int, zone: tzinfo, colour: str, label: str
) -> None:
    times = [_number(_time(begin + index * step, zone)) for index in range(len(values) + 1)]
    axes.stairs(values, times, color=colour, linewidth=1.2, label=label, baseline=None)


def _time(us: int, zone: tzinfo) -> datetime:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).astimezone(zone)


def _number(time: datetime) -> float:
    from matplotlib.dates import date2num

    return float(date2num(time))


def _dates(axes: Axes, what: Drawn) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    # With more than three at least, some lengths have no interval that it knows.
    locator = AutoDateLocator(tz=what.zone, minticks=3, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    # The dates are in the title; a date in the corner would be that of the last tick.
    named = ConciseDateFormatter(locator, tz=what.zone, show_offset=False)
    # A day is never a number alone.
    named.formats[2] = named.zero_formats[3] = "%d %b"
    axes.xaxis.set_major_formatter(named)
    axes.set_xlabel(f"time ({what.zone_name})", fontsize=9)
