"""Pictures of a load test, drawn from its evidence folder and from nothing else.

`write_plots(folder)` draws three kinds: percentiles against the request rate, a timeline of the
steps that decided, and throughput against the speed that one user sees. `compare_plots` lays
several folders over each other. What cannot be drawn (a percentile among failed requests, an
answer without a time) is marked at the upper edge or named, never left out silently.

Times are milliseconds, rates requests per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry import plot_style as style
from registry.evidence import PERCENTILES, LatencyEvidence, LoadPoint
from registry.measured_steps import (
    Clause,
    clauses_of,
    deciding,
    decisive,
    read_latency,
    read_steps,
)
from registry.step_timeline import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOTS = "plots"
BY_RATE, BY_SPEED = "latency_by_rate.png", "throughput_by_speed.png"
LOOKS: dict[str | None, tuple[str, str, str, str]] = {
    "kept": ("o", style.GREEN, style.GREEN, "kept"),
    "not kept": ("X", style.VERMILION, style.VERMILION, "not kept"),
    "undecided": ("D", style.ORANGE, "white", "undecided"),
    "void": ("s", style.GREY, "white", "void: did not measure what it should"),
    None: ("o", style.BLUE, style.BLUE, "measured"),
}
"""Shape, edge, face and words of a step's answer."""

NO_TIME = "no such time (too many failed, or none measured)"


def write_plots(folder: Path, out: Path | None = None) -> list[Path]:
    """Draw an evidence folder into `out`, by default its own `plots/`.

    Raises `UserError` where there is no evidence.
    """
    evidence = read_latency(folder)
    out = out or folder / PLOTS
    for old in out.glob("*.png"):
        old.unlink()
    written = [
        style.save(by_rate(evidence), out / BY_RATE),
        style.save(by_speed({"": evidence}), out / BY_SPEED),
    ]
    for step in deciding(evidence, read_steps(folder, evidence)):
        drawn = timeline(step, clauses_of(evidence))
        written.append(style.save(drawn, out / _timeline_name(step.number, step.point)))
    return written


def telling(evidence: LatencyEvidence) -> dict[str, str]:
    """Of the files of `write_plots`, those that say most, with a title: `{file name: title}`.

    Percentiles against the rate, and over time the step that was kept and the one that was not;
    at fixed rates the fastest.
    """
    found = {BY_RATE: "latency against request rate"}
    numbers = decisive(evidence)
    for number in numbers if evidence.kept_rate is not None else numbers[-1:]:
        point = evidence.points[number - 1]
        answer = f", {point.answer}" if point.answer else ""
        found[_timeline_name(number, point)] = f"step {number} over time: {_rate(point)}{answer}"
    return found


def _timeline_name(number: int, point: LoadPoint) -> str:
    return f"timeline_step{number:03d}_{point.rate:.4g}_per_s.png"


def compare_plots(folders: Mapping[str, Path], out: Path) -> list[Path]:
    """Several evidence folders by name, over each other, written into `out`."""
    read = {name: read_latency(folder) for name, folder in folders.items()}
    found = {f"{name} (emulated)" if one.emulated else name: one for name, one in read.items()}
    return [
        style.save(compared_by_rate(found), out / BY_RATE),
        style.save(by_speed(found), out / BY_SPEED),
    ]


# -- percentiles against the rate ------------------------------------------------------------


def by_rate(evidence: LatencyEvidence) -> Figure:
    """P50 to P99 of each metric of the SLA (E2EL without one), the steps' answers marked."""
    clauses = clauses_of(evidence)
    metrics = list(dict.fromkeys(clause.metric for clause in clauses)) or ["e2el"]
    points = sorted(evidence.points, key=lambda point: point.rate)
    figure = style.new_figure(1.4 + 3.3 * len(metrics))
    panels = style.new_axes(figure, len(metrics))
    for axes, metric in zip(panels, metrics, strict=True):
        _percentiles(axes, points, metric, [one for one in clauses if one.metric == metric])
    _rate_axis(panels, points)
    for axes in panels:
        ends = _edge(axes, evidence.kept_rate)
        if ends is not None:
            words = f"in between: {_kept_words(evidence.kept_rate)}"
            axes.axvspan(*ends, color=style.SKY, alpha=0.22, linewidth=0, zorder=0, label=words)
    style.title(figure, f"{evidence.profile}: latency against request rate", _about(evidence))
    style.legend(figure, panels)
    return figure


def _percentiles(
    axes: Axes, points: Sequence[LoadPoint], metric: str, clauses: Sequence[Clause]
) -> None:
    seen = [clause.limit_ms for clause in clauses]
    for point in points:
        seen += [value for value in getattr(point, f"{metric}_ms").values() if value is not None]
        for known in (point.values, point.bounds):
            of_clauses = (known.get(clause.text) for clause in clauses)
            seen += [value for value in of_clauses if value is not None]
    style.scale(axes, "y", seen)
    shades = dict(zip(PERCENTILES, ("#9ecae1", "#6baed6", "#3182bd", "#08519c"), strict=True))
    for index, percent in enumerate(PERCENTILES):
        values = [_time(getattr(point, f"{metric}_ms"), f"p{percent}") for point in points]
        look = {"color": shades[percent], "linestyle": style.DASHES[index], "linewidth": 1.4}
        _line(axes, points, values, ".", 4, label=f"P{percent} of all requests", **look)
        lost = _lost(points, values)
        # Below the edge, which is the answers' place.
        style.at_the_top(axes, lost, "^", shades[percent], NO_TIME, size=5, height=0.96)
    for clause in clauses:
        axes.axhline(clause.limit_ms, color=style.BLACK, linewidth=1.1, linestyle="--")
        axes.annotate(
            f"limit of {clause.whose}P{clause.percent:g}: {style.plain(clause.limit_ms)} ms",
            (0, clause.limit_ms), (4, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=9, zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
        )  # fmt: skip
    for point in points:
        # Without an SLA nothing is judged; the P99 stands for the step.
        for clause in clauses or [Clause(metric, 99, math.inf, "")]:
            _answer(axes, point, clause)
    axes.set_ylabel(f"{metric.upper()}, ms")


def _answer(axes: Axes, point: LoadPoint, clause: Clause) -> None:
    """The judged percentile in the shape of the step's answer, its bound as a whisker."""
    shape, edge, face, words = LOOKS[point.answer]
    judged = clause.text in point.values
    # A void step has no judged value; its place is by the nearest percentile of all requests.
    nearest = max((p for p in PERCENTILES if p <= clause.percent), default=PERCENTILES[0])
    value = (
        _time(point.values, clause.text)
        if judged
        else _time(getattr(point, f"{clause.metric}_ms"), f"p{nearest}")
    )
    marker: dict[str, Any] = {
        "marker": shape, "markersize": 8, "markeredgecolor": edge, "markerfacecolor": face,
        "markeredgewidth": 1.4, "linestyle": "none", "zorder": 4, "label": words,
    }  # fmt: skip
    if not math.isfinite(value):
        axes.plot([point.rate], [1], transform=axes.get_xaxis_transform(), clip_on=False, **marker)
        return
    axes.plot([point.rate], [value], **marker)
    if not judged:
        return
    bound = point.bounds.get(clause.text)
    if bound is not None:
        axes.errorbar(
            [point.rate], [value], yerr=[[0.0], [max(0.0, bound - value)]], capsize=5, fmt="none",
            label="upper confidence bound", ecolor=edge, elinewidth=1.4, zorder=3,
        )  # fmt: skip
    else:
        axes.plot(
            [point.rate, point.rate], [value, axes.get_ylim()[1]], linestyle=":", color=edge,
            linewidth=1.4, zorder=3, label="no upper bound from these requests",
        )  # fmt: skip


def compared_by_rate(found: Mapping[str, LatencyEvidence]) -> Figure:
    """Per metric, the highest percentile that an SLA names (P99 where not all have it).

    Where it was judged it is that of the steady part, else of all requests. The bars at the foot
    go from the highest rate kept to the lowest not kept.
    """
    clauses = list({c.text: c for one in found.values() for c in clauses_of(one)}.values())
    metrics = list(dict.fromkeys(clause.metric for clause in clauses)) or ["e2el"]
    figure = style.new_figure(1.4 + 3.3 * len(metrics))
    panels = style.new_axes(figure, len(metrics))
    for axes, metric in zip(panels, metrics, strict=True):
        limits = [clause for clause in clauses if clause.metric == metric]
        percent = _shared_percent(list(found.values()), metric, limits)
        seen = [clause.limit_ms for clause in limits]
        for index, (name, one) in enumerate(found.items()):
            points = sorted(one.points, key=lambda point: point.rate)
            values = [_judged(one, point, metric, percent) for point in points]
            seen += values
            look = {"color": _of(style.SERIES, index), "linestyle": _of(style.DASHES, index)}
            label = f"{name}: {_kept_words(one.kept_rate)}" if one.kept_rate else name
            shape = _of(style.SHAPES, index)
            _line(axes, points, values, shape, 6, label=label, **look)
            style.at_the_top(axes, _lost(points, values), shape, look["color"], "")
        style.scale(axes, "y", seen)
        for clause in limits:
            words = (
                f"limit of {clause.whose}{metric.upper()} P{clause.percent:g}: "
                f"{clause.limit_ms:g} ms"
            )
            axes.axhline(clause.limit_ms, color=style.BLACK, linestyle="--", label=words)
        axes.set_ylabel(f"P{percent:g} of {metric.upper()}, ms")
    _rate_axis(panels, [point for one in found.values() for point in one.points])
    for index, one in enumerate(found.values()):
        for axes in panels:
            ends = _edge(axes, one.kept_rate)
            if ends is not None:
                axes.plot(
                    ends, [0.02 + 0.03 * index] * 2, transform=axes.get_xaxis_transform(),
                    color=_of(style.SERIES, index), linewidth=5, solid_capstyle="butt", alpha=0.8,
                )  # fmt: skip
    bars = "bars at the foot: from the highest rate kept to the lowest not kept"
    below = f"{bars}; upper edge: {NO_TIME}"
    if any(point.answer == "void" for one in found.values() for point in one.points):
        below += "; hollow: void"
    style.title(figure, "Latency against request rate, compared", below)
    style.legend(figure, panels)
    return figure


# -- throughput against speed ----------------------------------------------------------------


def by_speed(found: Mapping[str, LatencyEvidence]) -> Figure:
    """Output tokens/s of the server against tokens/s of the median request, one dot per step.

    A request's speed is 1000 / median TPOT in ms. A single evidence without a name has the shapes
    of its answers, several have a colour each.
    """
    figure = style.new_figure(5.2)
    (axes,) = style.new_axes(figure, 1)
    labels, undrawn = [], []
    for index, (name, one) in enumerate(found.items()):
        points = sorted(one.points, key=lambda point: point.rate)
        drawn = [(point, xy) for point in points if (xy := _speed(point)) is not None]
        undrawn += [f"{name} {_rate(p)}".strip() for p in points if _speed(p) is None]
        colour = _of(style.SERIES, index)
        line: dict[str, Any] = {"color": colour if name else style.GREY, "linewidth": 1.1}
        dashes = _of(style.DASHES, index)
        # A void step did not measure what it should: a dot, and no part in the line.
        joined = [xy for point, xy in drawn if point.answer != "void"]
        x, y = [xy[0] for xy in joined], [xy[1] for xy in joined]
        if name:
            shape = _of(style.SHAPES, index)
            axes.plot(x, y, linestyle=dashes, marker=shape, markersize=7, label=name, **line)
        else:
            axes.plot(x, y, linestyle=dashes, **line)
        for point, xy in [] if name else drawn:
            shape, edge, face, words = LOOKS[point.answer]
            axes.plot(
                *xy, marker=shape, markeredgecolor=edge, markerfacecolor=face, markersize=9,
                markeredgewidth=1.4, linestyle="none", label=words, zorder=4,
            )  # fmt: skip
        colour = colour if name else style.BLACK
        labels += [(*xy, _rate(point), colour) for point, xy in drawn]
    style.scale(axes, "x", [x for x, _, _, _ in labels], room=0.12)
    style.scale(axes, "y", [y for _, y, _, _ in labels], room=0.12)
    axes.set_xlabel("speed of the median request, output tokens/s (1000 / median TPOT in ms)")
    axes.set_ylabel("throughput of the server, output tokens/s")
    below = f"not drawn, no median TPOT or throughput: {', '.join(undrawn)}" if undrawn else ""
    (single,) = found if len(found) == 1 else ("several",)
    head = "Throughput against the speed that one user sees"
    style.title(figure, head if single else f"{found[''].profile}: {head.lower()}", below)
    style.legend(figure, [axes])
    style.place_labels(figure, axes, labels)
    return figure


def _speed(point: LoadPoint) -> tuple[float, float] | None:
    tpot, speed = point.tpot_ms.get("p50"), point.output_tokens_per_s
    return (1000 / tpot, speed) if tpot and speed else None


def _rate(point: LoadPoint) -> str:
    if point.concurrency is not None:
        return f"{point.concurrency} in flight"
    return f"{style.plain(point.rate)}/s"


# -- parts -----------------------------------------------------------------------------------


def _time(times: Mapping[str, float | None], name: str) -> float:
    """A time in ms; infinite where it is null (among failed requests), NaN where nobody looked."""
    value = times.get(name, math.nan)
    return math.inf if value is None else value


def _judged(evidence: LatencyEvidence, point: LoadPoint, metric: str, percent: float) -> float:
    """Of the steady part where it was judged there, else of all requests."""
    for clause in clauses_of(evidence):
        if (clause.metric, clause.percent) == (metric, percent) and clause.text in point.values:
            return _time(point.values, clause.text)
    return _time(getattr(point, f"{metric}_ms"), f"p{percent:g}")


def _shared_percent(
    found: Sequence[LatencyEvidence], metric: str, clauses: Sequence[Clause]
) -> float:
    highest = max((clause.percent for clause in clauses), default=99.0)
    known = all(
        any(not math.isnan(_judged(one, point, metric, highest)) for point in one.points)
        for one in found
    )
    return highest if known else 99.0


def _line(
    axes: Axes,
    points: Sequence[LoadPoint],
    values: Sequence[float],
    shape: str,
    size: int,
    label: str,
    **look: Any,
) -> None:
    """A mark for each step, and a line through them, through the slower of two at the same rate.

    Void steps have a hollow mark and no part in the line.
    """
    finite = [value if math.isfinite(value) else math.nan for value in values]
    worst: dict[float, float] = {}
    for point, value in zip(points, values, strict=True):
        if point.answer != "void":
            worst[point.rate] = max(worst.get(point.rate, value), value)
    drawn = [value if math.isfinite(value) else math.nan for value in worst.values()]
    axes.plot(list(worst), drawn, marker=shape, markersize=size, label=label, **look)
    for void in (False, True):
        found = [
            (point.rate, value)
            for point, value in zip(points, finite, strict=True)
            if (point.answer == "void") == void
        ]
        face = "white" if void else look["color"]
        marks = look | {"linestyle": "none", "markerfacecolor": face}
        if found:
            axes.plot(*zip(*found, strict=True), marker=shape, markersize=size, **marks)


def _lost(points: Sequence[LoadPoint], values: Sequence[float]) -> list[float]:
    return [point.rate for point, value in zip(points, values, strict=True) if math.isinf(value)]


def _rate_axis(panels: Sequence[Axes], points: Sequence[LoadPoint]) -> None:
    rates = [point.rate for point in points]
    style.scale(panels[-1], "x", rates, room=0.06, from_zero=False)
    panels[-1].set_xlabel("request rate, requests/s")


def _edge(
    axes: Axes, kept_rate: tuple[float | None, float | None] | None
) -> tuple[float, float] | None:
    """From the highest rate kept to the lowest not kept, to the axis' end where one is unknown."""
    low, high = kept_rate or (None, None)
    if low is None and high is None:
        return None
    left, right = axes.get_xlim()
    return (left if low is None else low, right if high is None else high)


def _kept_words(kept_rate: tuple[float | None, float | None] | None) -> str:
    low, high = kept_rate or (None, None)
    if low is None and high is None:
        return "no rate was decided"
    words = [f"kept {style.plain(low)}/s"] if low is not None else ["none kept"]
    words += [f"not {style.plain(high)}/s"] if high is not None else ["none lost"]
    return ", ".join(words)


def _of(series: Sequence[Any], index: int) -> Any:
    return series[index % len(series)]


def _about(evidence: LatencyEvidence) -> str:
    bundle = f"bundle {evidence.bundle[:12]}" if evidence.bundle else ""
    flag = "emulated kernel" if evidence.emulated else ""
    return " · ".join(filter(None, [bundle, evidence.engine, evidence.harness, flag]))
