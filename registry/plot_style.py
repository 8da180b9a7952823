"""How plots look: colours, scales, numbers on axes, and files that are the same every time.

PNG, because its size does not grow with the number of requests (a timeline of 20 000 dots is 3 MB
as SVG), because the letters are in it and so look alike on every machine, and because MLflow
and a `data:` URI in one HTML page both show it. Figures are made without pyplot: no state is
shared between threads, and no window system is asked for.

Colours are Okabe and Ito's, which people with any colour vision tell apart; shapes say the same.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
WIDTH = 9.5
"""Inches; 1140 pixels."""

BLACK, GREY, LIGHT = "#222222", "#777777", "#dddddd"
BLUE, SKY, GREEN, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
VERMILION, PURPLE, YELLOW = "#d55e00", "#cc79a7", "#f0e442"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
SHAPES = ("o", "s", "^", "D", "v", "P", "X")

FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "SimHei")
"""The first comes with matplotlib; the others, where a machine has one, for Chinese names."""


def new_figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def new_axes(figure: Figure, rows: int, heights: Sequence[float] | None = None) -> list[Axes]:
    """Panels below each other with one x axis."""
    found = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=heights)
    panels: list[Axes] = list(found[:, 0])
    for axes in panels:
        axes.grid(True, color=LIGHT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return panels


def title(figure: Figure, head: str, below: str = "") -> None:
    """A line in bold and one in grey, at the left; cut where they do not fit."""
    figure.suptitle(_cut(head, 95), x=0.01, ha="left", fontsize=12, fontweight="bold")
    if below:
        text = textwrap.fill(_cut(below, 170), 88)
        figure.axes[0].set_title(text, loc="left", fontsize=9, color=GREY, pad=10)


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend at the right of all panels, each label once."""
    entries: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(
            list(entries.values()),
            [textwrap.fill(label, 32) for label in entries],
            loc="outside right upper",
            fontsize=9,
            frameon=False,
            labelspacing=0.7,
        )


def scale(
    axes: Axes,
    axis: str,
    values: Iterable[float],
    *,
    log_above: float = 10,
    room: float = 0.08,
    from_zero: bool = True,
) -> None:
    """Limits around the values; logarithmic where they span more than `log_above` times.

    `room` is the share left free at both ends. Ticks are plain numbers at 1, 2 and 5.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    found = [value for value in values if math.isfinite(value) and value > 0]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    line = axes.xaxis if axis == "x" else axes.yaxis
    set_limits = axes.set_xlim if axis == "x" else axes.set_ylim
    if found and high > log_above * low:
        (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
        span = (high / low) ** room
        set_limits(low / span, high * span)
        many = high / low > 3000
        line.set_major_locator(LogLocator(subs=(1.0,) if many else (1.0, 2.0, 5.0), numticks=99))
        line.set_minor_formatter(NullFormatter())
    else:
        # From 0, so that lengths can be compared.
        start = 0.0 if from_zero else low
        margin = room * ((high - start) or high)
        set_limits(0.0 if from_zero else max(0.0, low - margin), high + margin)
        line.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    line.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def at_the_top(
    axes: Axes,
    x: Iterable[float],
    shape: str,
    colour: str,
    label: str,
    *,
    size: float = 8,
    height: float = 1,
) -> None:
    """Marks at the upper edge (`height` 1) for what has no place on the axis."""
    where = list(x)
    if where:
        axes.plot(
            where, [height] * len(where), linestyle="none", marker=shape, color=colour,
            markersize=size, transform=axes.get_xaxis_transform(), clip_on=False, zorder=5,
            label=label or None,
        )  # fmt: skip


def place_labels(
    figure: Figure, axes: Axes, labels: Sequence[tuple[float, float, str, str]]
) -> None:
    """Write each (x, y, text, colour) beside its point, over no point and no other text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    _as_written(figure)
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    points = [axes.transData.transform((x, y)) for x, y, _, _ in labels]
    taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in points]
    # Near places first; a text that finds none takes the farthest and is tied by its line.
    places = [
        (distance * across, distance * up)
        for distance in (8, 18, 30, 44, 60)
        for across, up in ((1, 0.6), (1, -0.6), (-1, 0.6), (-1, -0.6), (0, 1.1), (0, -1.1))
    ]
    for x, y, text, colour in labels:
        written = axes.annotate(
            text, (x, y), (0, 0), fontsize=9, color=colour, textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkB": 4},
        )  # fmt: skip
        written.set_in_layout(False)
        for across, up in places:
            written.set_position((across, up))
            written.set_horizontalalignment(
                "left" if across > 0 else "right" if across < 0 else "center"
            )
            written.set_verticalalignment("bottom" if up > 0 else "top")
            box = _text_box(written, renderer)
            inside = axes.bbox.padded(2).contains(box.x0, box.y0) and axes.bbox.padded(2).contains(
                box.x1, box.y1
            )
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(_text_box(written, renderer))
        if written.arrow_patch is not None:
            # Beside its point, a text needs no line to it.
            written.arrow_patch.set_visible(max(abs(across), abs(up)) > 20)


def _text_box(written: Any, renderer: Any) -> Any:
    """Of the letters alone, without the line to the point."""
    from matplotlib.text import Text

    written.update_positions(renderer)
    return Text.get_window_extent(written, renderer).padded(1)


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG. Equal figures give equal bytes: no version and no time is written into it.

    With a palette of 256 colours, which changes none visibly and takes a third of the bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    _as_written(figure)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))
    # Of the methods the one that keeps rare colours: a few failed requests are few pixels.
    small = image.convert("RGB").quantize(
        256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )
    small.save(path, "png")
    return path


def _as_written(figure: Figure) -> None:
    """Texts as people wrote them: `$` is no formula here, and a name may be Chinese."""
    from matplotlib.text import Text

    fonts = _fonts()
    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_fontfamily(fonts)


def _fonts() -> list[str]:
    from matplotlib import font_manager

    known = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in FONTS if name in known]


def plain(value: float) -> str:
    """A number as short as it can be said: `0.25`, `6.7`, `1500`."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cut(text: str, length: int) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= length else f"{one_line[: length - 1]}…"
