"""The candidates that passed against each other: two axes as a drawing, all of them as a table."""

from __future__ import annotations

from dataclasses import dataclass

from registry.outcome import AXES_OF, ComparedAxis, Measure, Selection
from registry.report_gates import ticks
from registry.report_numbers import measured, number

WIDTH, HEIGHT = 400.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 14.0, 24.0, 40.0
LETTER, LINE = 5.9, 12.0
"""Pixels of a letter and of a line of text in the drawing."""

IN_PLAY = ("accuracy", "kept_rate", "latency", "memory", "cost")


@dataclass(frozen=True)
class Spot:
    """A candidate; whiskers are the ends of its intervals, clipped at the edges."""

    name: str
    look: str
    x: float
    y: float
    across: tuple[float, float]
    upright: tuple[float, float]
    label: tuple[float, float, str]


@dataclass(frozen=True)
class Scatter:
    """The two axes most in play, in words with the side that is better."""

    x_title: str
    y_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    spots: list[Spot]
    missing: list[str]


@dataclass(frozen=True)
class Row:
    """A candidate in the table of all axes."""

    name: str
    cells: list[tuple[str, str]]
    """The number, and its interval where there is one."""
    place: str
    beaten: bool


def table(selection: Selection) -> list[Row]:
    """One row per candidate that passed, those on the front first."""
    names = list(selection.axes[0].values) if selection.axes else []
    rows = []
    for name in sorted(names, key=lambda one: one in selection.dominated):
        cells = [_cell(axis.values[name], axis.key) for axis in selection.axes]
        if selection.scores:
            cells.append((number(selection.scores[name].value), ""))
        rows.append(Row(name, cells, _place(selection, name), name in selection.dominated))
    return rows


def _cell(found: Measure, key: str) -> tuple[str, str]:
    if found.value is None or (found.low == found.high == found.value):
        return measured(found.value, key), ""
    low, high = measured(found.low, key), measured(found.high, key)
    if found.low is None or found.high is None:
        return measured(
            found.value, key
        ), f"up to {high}" if found.low is None else f"{low} or more"
    if low.partition(" ")[2] == high.partition(" ")[2]:
        low = low.partition(" ")[0]
    return measured(found.value, key), f"{low} to {high}"


def _place(selection: Selection, name: str) -> str:
    if name in selection.dominated:
        return f"dominated by {', '.join(selection.dominated[name])}"
    nearly = selection.nearly.get(name)
    if nearly:
        return f"front; no better than {', '.join(nearly)} anywhere, within the noise"
    return "front"


def scatter(selection: Selection) -> Scatter | None:
    """The objective's axis and the next on which somebody differs.

    None without two axes or two candidates.
    """
    order = {key: place for place, key in enumerate(_in_play(selection))}
    axes = sorted(selection.axes, key=lambda axis: (not _differs(axis), order[axis.key]))[:2]
    if len(axes) < 2:
        return None
    # Accuracy upright, as people draw it.
    x, y = axes if axes[1].key == "accuracy" else reversed(axes)
    names = [name for name in x.values if _known(x, name) and _known(y, name)]
    if len(names) < 2:
        return None
    xs, ys = _Scale(x, names, LEFT, WIDTH - RIGHT), _Scale(y, names, HEIGHT - BOTTOM, TOP)
    spots = [
        Spot(
            name=name,
            look=_look(selection, name),
            x=xs.at(x.values[name].value),
            y=ys.at(y.values[name].value),
            across=xs.whisker(x.values[name]),
            upright=ys.whisker(y.values[name]),
            label=(0, 0, "start"),
        )
        for name in names
    ]
    return Scatter(
        x_title=f"{x.label}: {'→' if x.better == 'higher' else '←'} better",
        y_title=f"{y.label}: {'↑' if y.better == 'higher' else '↓'} better",
        x_ticks=xs.ticks(),
        y_ticks=ys.ticks(),
        spots=_labelled(spots),
        missing=[name for name in x.values if name not in names],
    )


def _in_play(selection: Selection) -> list[str]:
    weighed = sorted(selection.weights, key=lambda key: -selection.weights[key])
    return list(dict.fromkeys([*AXES_OF.get(selection.objective, weighed), *IN_PLAY]))


def _differs(axis: ComparedAxis) -> bool:
    return len({one.value for one in axis.values.values()} - {None}) > 1


def _known(axis: ComparedAxis, name: str) -> bool:
    return axis.values[name].value is not None


def _look(selection: Selection, name: str) -> str:
    if name == selection.chosen:
        return "chosen"
    return "beaten" if name in selection.dominated else "front"


class _Scale:
    """From an axis's numbers to pixels, the ends of the intervals included."""

    def __init__(self, axis: ComparedAxis, names: list[str], start: float, end: float) -> None:
        known = [axis.values[name] for name in names]
        values = [v for one in known for v in (one.value, one.low, one.high) if v is not None]
        room = 0.12 * ((max(values) - min(values)) or abs(max(values)) or 1.0)
        self.key = axis.key
        self.low, self.high = min(values) - room, max(values) + room
        if min(values) >= 0:
            self.low = max(self.low, 0.0)
        self.start, self.end = start, end

    def at(self, value: float | None) -> float:
        assert value is not None
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def whisker(self, found: Measure) -> tuple[float, float]:
        low = self.start if found.low is None else self.at(found.low)
        high = self.end if found.high is None else self.at(found.high)
        return low, high

    def ticks(self) -> list[tuple[float, str]]:
        return [(self.at(value), self.written(value)) for value in ticks(self.low, self.high)]

    def written(self, value: float) -> str:
        """As short as the axis allows, whose title has the unit."""
        if self.key in ("accuracy", "kept_rate"):
            return f"{value:g}"
        return measured(value, self.key) if value else "0"


def _labelled(spots: list[Spot]) -> list[Spot]:
    """With each name beside its spot, over no other spot or name where there is room."""
    taken = [(s.x - 6, s.y - 6, s.x + 6, s.y + 6) for s in spots]
    done = []
    for spot in spots:
        wide = LETTER * len(spot.name)
        places = [
            (spot.x + dx, spot.y + dy, anchor)
            for far in (0, 12, 24)
            for dx, dy, anchor in (
                (9, 4, "start"), (0, -9 - far, "middle"), (-9, 4, "end"), (0, 18 + far, "middle"),
                (9, -8 - far, "start"), (9, 16 + far, "start"), (-9, -8 - far, "end"),
                (-9, 16 + far, "end"),
            )
        ]  # fmt: skip
        boxes = [_box(place, wide) for place in places]
        free = [
            (place, box)
            for place, box in zip(places, boxes, strict=True)
            if _inside(box) and not any(_over(box, other) for other in taken)
        ]
        inside = [pair for pair in zip(places, boxes, strict=True) if _inside(pair[1])]
        place, box = next(iter(free or inside), (places[0], boxes[0]))
        taken.append(box)
        done.append(Spot(spot.name, spot.look, spot.x, spot.y, spot.across, spot.upright, place))
    return done


Box = tuple[float, float, float, float]


def _box(place: tuple[float, float, str], wide: float) -> Box:
    x, y, anchor = place
    left = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
    return left, y - LINE + 2, left + wide, y + 2


def _inside(box: Box) -> bool:
    return box[0] >= LEFT and box[2] <= WIDTH and box[1] >= TOP - 6 and box[3] <= HEIGHT - BOTTOM


def _over(one: Box, other: Box) -> bool:
    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    return not apart
