"""What of the store may go: nothing that is referred to, and nothing that such a thing was made of.

Pure: who refers to what is gathered elsewhere (`tasks/pruning.py`). A kept artifact keeps its
whole lineage, the data and prompts included, so that every question about it has an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from graphlib import CycleError, TopologicalSorter

GRACE = timedelta(days=1)
"""Whatever was made or used within it stays: a release that runs now has recorded nothing yet."""

_IN_USE = "made or used within a day"

Name = tuple[str, str]
"""Stage and key of an entry."""


@dataclass(frozen=True)
class Kept:
    """An entry that stays, and who refers to it or to something that was made of it."""

    name: Name
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A finished artifact. `used_at` is never before `made_at`; `size` in bytes on disk."""

    stage: str
    key: str
    digest: str
    label: str
    size: int
    made_at: datetime
    used_at: datetime
    parents: tuple[Name, ...] = ()

    @property
    def name(self) -> Name:
        return self.stage, self.key

    @property
    def title(self) -> str:
        return f"{self.stage} {self.label}".strip()


@dataclass(frozen=True)
class Plan:
    """`remove` in the order of removal: what was made of something goes before it."""

    keep: list[Kept]
    remove: list[Entry]


def plan(entries: Sequence[Entry], roots: Mapping[Name, Sequence[str]], now: datetime) -> Plan:
    """Which entries stay and which go. `roots`: the reasons by which an entry is referred to."""
    known = {entry.name: entry for entry in entries}
    reasons: dict[Name, dict[str, None]] = {}
    for name, why in roots.items():
        _spread(name, why, known, reasons)
    for entry in entries:
        if now - entry.used_at < GRACE:
            _spread(entry.name, [_IN_USE], known, reasons)
    return Plan(
        keep=[Kept(name, tuple(reasons[name])) for name in known if name in reasons],
        remove=_children_first([entry for entry in entries if entry.name not in reasons]),
    )


def _spread(
    start: Name,
    why: Iterable[str],
    known: Mapping[Name, Entry],
    reasons: dict[Name, dict[str, None]],
) -> None:
    """Give the reasons to an entry and to everything that it was made of."""
    new = dict.fromkeys(why)
    seen: set[Name] = set()
    open_ = [start]
    while open_:
        name = open_.pop()
        if name in seen or name not in known:
            continue
        seen.add(name)
        reasons.setdefault(name, {}).update(new)
        open_ += known[name].parents


def _children_first(entries: Sequence[Entry]) -> list[Entry]:
    by_name = {entry.name: entry for entry in entries}
    sorter = TopologicalSorter[Name]()
    for entry in entries:
        sorter.add(entry.name, *(parent for parent in entry.parents if parent in by_name))
    try:
        ordered = list(sorter.static_order())
    except CycleError:
        # Keys hold the keys of their parents; only a manifest that somebody wrote can do this.
        ordered = list(by_name)
    return [by_name[name] for name in reversed(ordered)]
