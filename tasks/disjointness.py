"""What the parts of the prompts have in common: measured for every pair of parts, then judged.

Four measures, from strict to wide. `exact`: the same text. `normalized`: equal once folded (NFKC,
case, white space, punctuation). `near_duplicate`: Jaccard similarity of character shingles at
least `threshold` (near_duplicates.py). A prompt counts in the first of these three that finds it.
`ngram` stands by itself: a run of n words in common, n = 13 as in Brown et al. 2020 (GPT-3,
appendix C) and in lm-eval's decontamination. A prompt of fewer words has no such run; it is counted
as too short and compared by the other measures alone.

Texts are all that the user says, before the recipe's template. Sets and bands of signatures are
met, never all pairs: time and memory are linear in the prompts.

Threshold 0.85, from all 10,003 x 3,080 pairs of BANKING77's train and test, dozens read by eye: 26
prompts of test are in train once folded, 75 more are near-duplicates. Above 0.85 stands the same
question with a typo, a contraction or a filler word ("Someone stole my cards!", "Can I edit my
personal details?" and "How can I edit ..."), and 97 % of pairs have one label. Between 0.80 and
0.85 begin pairs that one word makes another question ("using a card?", "using an ATM?"): 91 %. The
demo's messages from one template with other facts ("heavy rain, FT1152 about 40 minutes behind")
reach 0.73 between train and calibration, and 0.47 between train and eval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from recipes.schema import Disjointness
from registry.errors import Problem
from tasks.conversations import user_text
from tasks.near_duplicates import Pair, folded, near_pairs, words_of

MEASURES = ("exact", "normalized", "near_duplicate", "ngram")
LEARNED = ("pretrain", "train", "calibration", "draft")
MEASURED = ("eval", "load")

SHOWN = 5
"""Matches that are shown of one cell."""

TEXT_SHOWN = 160
"""Characters of a prompt that are shown."""

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]


@dataclass(frozen=True)
class Match:
    """A prompt of the first part, one of the second, and what they have in common."""

    ids: tuple[str, str]
    texts: tuple[str, str]
    similarity: float | None = None
    shared: str | None = None

    def record(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"ids": list(self.ids), "texts": list(self.texts)}
        if self.similarity is not None:
            shown["similarity"] = round(self.similarity, 3)
        if self.shared is not None:
            shown["shared"] = self.shared
        return shown


class Place(NamedTuple):
    """A row and its number in its part."""

    number: int
    row: Row


@dataclass
class Cell:
    """One measure of one pair of parts. `prompts`: how many of either part have a match."""

    parts: tuple[str, str]
    measure: str
    action: str
    prompts: list[int] = field(default_factory=lambda: [0, 0])
    matches: list[Match] = field(default_factory=list)
    _listed: set[tuple[int, int]] = field(default_factory=set)

    def count(self, side: int, own: Place, there: Place, **common: Any) -> None:
        """Count a prompt; a match that was met from its other side is not listed again."""
        self.prompts[side] += 1
        one, other = (own, there) if side == 0 else (there, own)
        if (one.number, other.number) in self._listed:
            return
        self._listed.add((one.number, other.number))
        ids = one.row["id"], other.row["id"]
        self.matches.append(Match(ids, (_shown(one.row), _shown(other.row)), **common))

    def blocks(self) -> bool:
        return self.action == "block" and any(self.prompts)

    def record(self) -> dict[str, Any]:
        return {
            "parts": list(self.parts),
            "measure": self.measure,
            "action": self.action,
            "prompts": self.prompts,
            "matches": [match.record() for match in self.matches[:SHOWN]],
        }


@dataclass(frozen=True)
class Matrix:
    """Every cell, in the order of the parts, and how far the measures reach."""

    sizes: dict[str, int]
    cells: list[Cell]
    too_short: dict[str, int]
    """Prompts by part with fewer words than an n-gram."""
    given_up: int
    """Different texts with so many alike ones that near-duplicates of them may be missed."""

    def record(self, rules: Disjointness) -> dict[str, Any]:
        return {
            "prompts": self.sizes,
            "rules": rules.model_dump(mode="json"),
            "too_short": self.too_short,
            "given_up": self.given_up,
            "cells": [cell.record() for cell in self.cells],
        }

    def every_match(self) -> list[dict[str, Any]]:
        """One line for each prompt with a match, not only those that are shown."""
        return [
            {"parts": list(cell.parts), "measure": cell.measure, **match.record()}
            for cell in self.cells
            for match in cell.matches
        ]


def action_of(rules: Disjointness, measure: str, parts: tuple[str, str]) -> str:
    """`exact` is answered for all five parts; the rest where one learns and one is measured."""
    across = len({part in MEASURED for part in parts}) == 2
    if across or (measure == "exact" and "pretrain" not in parts):
        return str(getattr(rules, measure))
    return "report"


def measure(parts: Rows, rules: Disjointness, seed: int) -> Matrix:
    """The matrix of all pairs of parts. Parts are rows by name, in the order to be shown."""
    texts = {name: [user_text(row) for row in rows] for name, rows in parts.items()}
    plain = {name: [folded(text) for text in found] for name, found in texts.items()}
    first = {name: _first(found) for name, found in texts.items()}
    first_plain = {name: _first(found) for name, found in plain.items()}
    near, given_up = _near(plain, rules.threshold, seed)
    cells: list[Cell] = []
    for pair in combinations(parts, 2):
        found = {name: Cell(pair, name, action_of(rules, name, pair)) for name in MEASURES}
        runs = _shared_runs(plain[pair[0]], plain[pair[1]], rules.n)
        for side, (own, other) in enumerate((pair, pair[::-1])):
            for number, row in enumerate(parts[own]):
                text, short = texts[own][number], plain[own][number]
                hits: list[tuple[str, int, dict[str, Any]]] = []
                if text in first[other]:
                    hits.append(("exact", first[other][text], {}))
                elif short in first_plain[other]:
                    hits.append(("normalized", first_plain[other][short], {}))
                elif (close := near.get((short, other))) is not None:
                    at = first_plain[other][close[0]]
                    hits.append(("near_duplicate", at, {"similarity": close[1]}))
                if (run := runs[side].get(number)) is not None:
                    hits.append(("ngram", run[0], {"shared": run[1]}))
                for name, at, common in hits:
                    there = Place(at, parts[other][at])
                    found[name].count(side, Place(number, row), there, **common)
        cells += found.values()
    for cell in cells:
        cell.matches.sort(key=lambda match: -(match.similarity or 0))
    return Matrix(
        sizes={name: len(rows) for name, rows in parts.items()},
        cells=cells,
        too_short={
            name: sum(len(words_of(text)) < rules.n for text in found)
            for name, found in plain.items()
        },
        given_up=given_up,
    )


def problems(matrix: Matrix, rules: Disjointness, everything: str) -> list[Problem]:
    """What blocks, with its first matches. `everything` is where all matches are written."""
    found = []
    for cell in matrix.cells:
        if not cell.blocks():
            continue
        one, other = cell.parts
        counts = ", ".join(
            f"{number} of {matrix.sizes[part]} of {part}"
            for part, number in zip(cell.parts, cell.prompts, strict=True)
        )
        lines = [f"{_spoken(cell.measure, rules)}: {counts}"]
        for match in cell.matches[:SHOWN]:
            alike = "" if match.similarity is None else f"  similarity {match.similarity:.2f}"
            lines += [
                f"      {part} {name}: {text}"
                for part, name, text in zip(cell.parts, match.ids, match.texts, strict=True)
            ]
            lines[-1] += alike
        found.append(
            Problem(
                f"prompts {one} and {other}",
                "\n".join(lines),
                f"take these prompts out of one part (all are in {everything}), or allow it with "
                f"--set prompts.disjoint.{cell.measure}=report",
            )
        )
    return found


def lines_of(matrix: Matrix, rules: Disjointness) -> list[str]:
    """The matrix as Markdown: a table of counts, then the matches of each cell."""
    shown = "|".join(f" {_spoken(name, rules)} " for name in MEASURES)
    lines = [
        "## What the parts have in common",
        "",
        "Prompts of the first part + of the second that have a match in the other. A prompt counts "
        "in the first of the three measures on the left that finds it. **Bold** would stop a "
        "release.",
        "",
        f"| parts |{shown}|",
        "|---|" + "--:|" * len(MEASURES),
    ]
    by_pair: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in matrix.cells:
        by_pair[cell.parts].append(cell)
    for (one, other), cells in by_pair.items():
        counts = []
        for cell in cells:
            text = " + ".join(map(str, cell.prompts)) if any(cell.prompts) else "0"
            counts.append(f"**{text}**" if cell.action == "block" else text)
        lines.append(f"| {one}, {other} | {' | '.join(counts)} |")
    short = ", ".join(f"{part} {number}" for part, number in matrix.too_short.items())
    lines += [
        "",
        f"Shorter than {rules.n} words (a Chinese character is one), so not compared by words in a "
        f"row: {short}.",
    ]
    if matrix.given_up:
        lines.append(
            f"{matrix.given_up} texts are like so many others that near-duplicates of theirs may "
            "be missed."
        )
    for cell in matrix.cells:
        if not cell.matches:
            continue
        lines += [
            "",
            f"### {cell.parts[0]} and {cell.parts[1]}: {_spoken(cell.measure, rules)}",
            "",
        ]
        for match in cell.matches[:SHOWN]:
            left, right = (
                f"{name}: {_cell(text)}" for name, text in zip(match.ids, match.texts, strict=True)
            )
            alike = "" if match.similarity is None else f" ({match.similarity:.2f})"
            lines.append(f"- {left} — {right}{alike}")
    return lines


# -- parts -----------------------------------------------------------------------------------


def _near(
    plain: Mapping[str, Sequence[str]], threshold: float, seed: int
) -> tuple[dict[tuple[str, str], tuple[str, float]], int]:
    """By folded text and other part: a near-duplicate there, and the similarity."""
    names = list(plain)
    holders: dict[str, int] = {}
    for bit, name in enumerate(names):
        for text in plain[name]:
            holders[text] = holders.get(text, 0) | 1 << bit
    distinct, held = list(holders), list(holders.values())
    # Parts where a text needs no further search: those that hold it, then those with a match.
    done = list(held)
    found: dict[tuple[str, str], tuple[str, float]] = {}

    def needless(one: int, other: int) -> bool:
        return not (held[other] & ~done[one] or held[one] & ~done[other])

    def keep(pair: Pair) -> None:
        for own, other in ((pair.first, pair.second), (pair.second, pair.first)):
            for bit, name in enumerate(names):
                if held[other] & ~done[own] & 1 << bit:
                    found[distinct[own], name] = (distinct[other], pair.similarity)
        done[pair.first] |= held[pair.second]
        done[pair.second] |= held[pair.first]

    return found, near_pairs(distinct, threshold, seed, keep, needless)


def _first(texts: Sequence[str]) -> dict[str, int]:
    """The first row of each text."""
    found: dict[str, int] = {}
    for number, text in enumerate(texts):
        found.setdefault(text, number)
    return found


def _shared_runs(
    ones: Sequence[str], others: Sequence[str], n: int
) -> tuple[dict[int, tuple[int, str]], dict[int, tuple[int, str]]]:
    """For both sides, by row: the first row of the other side with an n-gram of it, and that.

    Only the n-grams of the shorter side are kept.
    """
    if len(others) > len(ones):
        there, here = _shared_runs(others, ones, n)
        return here, there
    known: dict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(others):
        for run in _runs(text, n):
            known[run].append(number)
    found: dict[int, tuple[int, str]] = {}
    back: dict[int, tuple[int, str]] = {}
    for number, text in enumerate(ones):
        for run in _runs(text, n):
            if run not in known:
                continue
            found.setdefault(number, (known[run][0], run))
            for other in known[run]:
                back.setdefault(other, (number, run))
            # All of these have their match now: a run in every row must not cost rows squared.
            del known[run][1:]
    return found, back


def _runs(text: str, n: int) -> Iterator[str]:
    words = words_of(text)
    return (" ".join(words[at : at + n]) for at in range(len(words) - n + 1))


def _shown(row: Row) -> str:
    text = " ".join(user_text(row).split())
    return text if len(text) <= TEXT_SHOWN else text[: TEXT_SHOWN - 1] + "…"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


def _spoken(measure: str, rules: Disjointness) -> str:
    return {
        "exact": "the same text",
        "normalized": "equal but for case, space and punctuation",
        "near_duplicate": f"near-duplicates (Jaccard >= {rules.threshold:g})",
        "ngram": f"{rules.n} words in a row",
    }[measure]
