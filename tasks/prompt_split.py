"""Split prompt records into the five parts, stratified by segment, no prompt in two of them.

Rows that are near-duplicates of each other, and rows of one conversation, come into one part: a
model is not judged on what it learned in other words, nor on the second half of what it learned.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.schema import Disjointness
from registry.errors import Problem, UserError
from tasks.conversations import user_text, with_prompt
from tasks.near_duplicates import clusters
from tasks.prompt_files import PARTS
from tasks.prompt_template import filled

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Split:
    """The parts, and the groups of rows that had to stay together."""

    parts: dict[str, list[dict[str, Any]]]
    groups: list[list[Row]]
    stratified: bool

    def counts(self) -> dict[str, Any]:
        """Of the groups with more than one row, of the largest, and whether segments were kept."""
        sizes = [len(group) for group in self.groups]
        return {
            "prompts": sum(sizes),
            "groups": sum(size > 1 for size in sizes),
            "in_groups": sum(size for size in sizes if size > 1),
            "largest": max(sizes, default=0),
            "stratified": self.stratified,
        }


def distinct(records: Iterable[Row]) -> list[Row]:
    """The first of all rows that are equal after folding case and white space."""
    found: dict[str, Row] = {}
    for record in records:
        found.setdefault(" ".join(user_text(record).casefold().split()), record)
    return list(found.values())


def check_enough(records: Iterable[Row], sizes: Mapping[str, int], source: str) -> None:
    """Raise `UserError` when there are fewer different prompts than are asked for."""
    wanted, found = sum(sizes.values()), len(distinct(records))
    if wanted > found:
        raise UserError.at(
            source,
            f"{wanted} different prompts are asked for, the file has {found}",
            "lower prompts.sizes, e.g. --set prompts.sizes.train=200",
        )


def grouped(rows: Sequence[Row], threshold: float, seed: int) -> list[list[Row]]:
    """Rows that must stay together: chains of near-duplicates and of shared conversations."""
    groups = clusters([user_text(row) for row in rows], threshold, seed)
    first: dict[str, int] = {}
    for place, row in enumerate(rows):
        if "conversation" in row:
            groups.join(first.setdefault(row["conversation"], place), place)
    return [[rows[place] for place in places] for places in groups.groups()]


def split(
    records: Sequence[Row],
    sizes: Mapping[str, int],
    seed: int,
    source: str,
    threshold: float = Disjointness().threshold,
) -> Split:
    """Parts of exactly the asked sizes, stratified by segment, that share no prompt and no group.

    Prompts that are equal after folding case and white space count as one and only the first is
    used. Rows of a group that its part has no room for are used nowhere. Where groups are so large
    that sizes and segments cannot both be kept, the sizes are. Raises `UserError` when there are
    too few prompts, or their groups are too large.
    """
    check_enough(records, sizes, source)
    groups = grouped(distinct(records), threshold, seed)
    for stratified in (True, False):
        order = random.Random(seed)
        deal = _Deal(groups, sizes, order, stratified)
        # Large groups first, while every part has room for them.
        ordered = sorted(deal.groups, key=len, reverse=True)
        deal.fill([group for group in ordered if not deal.place(group)])
        if not deal.problems(source):
            parts = {name: [dict(row) for row in _mixed(deal.parts[name], order)] for name in PARTS}
            return Split(parts, groups, stratified)
    raise UserError(deal.problems(source))


class _Deal:
    """Groups of rows on their way into the parts."""

    def __init__(
        self,
        groups: Sequence[list[Row]],
        sizes: Mapping[str, int],
        order: random.Random,
        stratified: bool,
    ) -> None:
        self._stratified = stratified
        self.groups = [order.sample(group, len(group)) for group in groups]
        order.shuffle(self.groups)
        self.sizes = {name: sizes.get(name, 0) for name in PARTS}
        self.parts: dict[str, list[Row]] = {name: [] for name in PARTS}
        self._order = order
        self._kept: dict[str, list[Row]] = {name: [] for name in PARTS}
        """Rows of a part's groups that it did not take yet; they may go nowhere else."""
        shares = Counter(self._segment(row) for group in groups for row in group)
        total = sum(shares.values())
        self._lack = {
            name: {segment: size * share / total for segment, share in sorted(shares.items())}
            for name, size in self.sizes.items()
        }
        """Rows of each segment that a part still needs to be like the whole."""

    def room(self, part: str) -> int:
        return self.sizes[part] - len(self.parts[part])

    def place(self, group: list[Row]) -> bool:
        """Give a group to the part that lacks its segment most; no, where none lacks a row."""
        segment = self._segment_of(group)
        able = [part for part in PARTS if self.room(part) and self._lack[part][segment] >= 1]
        if not able:
            return False
        fits = [part for part in able if self.room(part) >= len(group)]
        self._take(max(fits or able, key=lambda part: self._lack[part][segment]), group)
        return True

    def fill(self, late: Sequence[list[Row]]) -> None:
        """Complete the parts: own rows first, then groups that nobody took, by largest lack."""
        free: dict[str, list[list[Row]]] = defaultdict(list)
        for group in reversed(late):
            free[self._segment_of(group)].append(group)
        for part in PARTS:
            own: dict[str, list[Row]] = defaultdict(list)
            for row in self._kept[part]:
                own[self._segment(row)].append(row)
            segments = list(self._lack[part])
            self._order.shuffle(segments)
            while self.room(part):
                some = [segment for segment in segments if own[segment] or free[segment]]
                if not some:
                    break
                segment = max(some, key=self._lack[part].__getitem__)
                if own[segment]:
                    self._take(part, [own[segment].pop()])
                    continue
                self._kept[part] = []
                self._take(part, free[segment].pop())
                for row in self._kept[part]:
                    own[self._segment(row)].append(row)

    def problems(self, source: str) -> list[Problem]:
        largest = max(self.groups, key=len, default=[])
        return [
            Problem(
                f"{source}: prompts.sizes.{part}",
                f"is {self.sizes[part]}, only {len(rows)} are left: near-duplicates and rows of "
                f"one conversation stay in one part, and {sum(map(len, self.groups))} different "
                f"prompts are {len(self.groups)} such groups, the largest of {len(largest)} rows "
                f"(with id {largest[0]['id']!r})",
                "lower prompts.sizes, or raise prompts.disjoint.threshold",
            )
            for part, rows in self.parts.items()
            if len(rows) < self.sizes[part]
        ]

    def _segment(self, row: Row) -> str:
        return str(row["segment"]) if self._stratified else ""

    def _segment_of(self, group: Sequence[Row]) -> str:
        """The segment of most rows of a group."""
        return Counter(map(self._segment, group)).most_common(1)[0][0]

    def _take(self, part: str, group: list[Row]) -> None:
        """As many rows as the part lacks of the group's segment, one at least; keep the rest."""
        lack = max(1, math.floor(self._lack[part][self._segment_of(group)]))
        number = min(self.room(part), lack)
        for row in group[:number]:
            self.parts[part].append(row)
            self._lack[part][self._segment(row)] -= 1
        self._kept[part] += group[number:]


def _mixed(rows: Sequence[Row], order: random.Random) -> list[Row]:
    """Rows in an order whose every beginning has all segments in near their shares."""
    by_segment: dict[str, list[Row]] = defaultdict(list)
    for row in order.sample(rows, len(rows)):
        by_segment[row["segment"]].append(row)
    placed = sorted(
        ((place + 0.5) / len(members), segment, place)
        for segment, members in by_segment.items()
        for place in range(len(members))
    )
    return [by_segment[segment][place] for _, segment, place in placed]


def apply_template(
    records: Iterable[Mapping[str, Any]], template: str, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Records with the recipe's template round the last user message, and the labels at hand."""
    listed = ", ".join(labels)
    return [
        {
            **with_prompt(
                record,
                filled(template, record["prompt"], listed),
            ),
            "reference": {**record["reference"], "labels": list(labels)}
            if record["reference"]
            else None,
        }
        for record in records
    ]


def labels_of(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every intent that a reference names, in alphabetical order."""
    named = ((record["reference"] or {}).get("intent") for record in records)
    return sorted({str(intent) for intent in named if intent is not None})
