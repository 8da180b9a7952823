"""Items that only one side got right, with both answers beside each other."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from registry.report_latency import Detail

TOKENS = re.compile(r"[A-Za-z0-9_]+|\s+|.", re.DOTALL)
"""Words and spaces; of Chinese every letter by itself."""

MOST_TOKENS = 1500
"""Longer answers are shown without marks: comparing them takes time in their square."""


class FlippedItem(Detail):
    """One item; lost: right with the reference only, gained: with the candidate only."""

    item_id: str
    side: Literal["lost", "gained"]
    segment: str = ""
    prompt: str
    expected: str = ""
    theirs: str = Field(description="The reference's answer.")
    ours: str = Field(description="The candidate's answer.")


class FlipTexts(Detail):
    """The first flipped items of one gate of one candidate."""

    candidate: str
    gate: str
    metric: str
    reference: str
    gained: int
    lost: int
    items: list[FlippedItem]


@dataclass(frozen=True)
class Piece:
    """A part of an answer; `differs` where the other answer has something else."""

    text: str
    differs: bool


def compared(theirs: str, ours: str) -> tuple[list[Piece], list[Piece]]:
    """Both answers in pieces, what they do not share marked."""
    first, second = TOKENS.findall(theirs), TOKENS.findall(ours)
    if max(len(first), len(second)) > MOST_TOKENS:
        return [Piece(theirs, False)], [Piece(ours, False)]
    left, right = [], []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, first, second, False).get_opcodes():
        left.append(Piece("".join(first[a:b]), tag != "equal"))
        right.append(Piece("".join(second[c:d]), tag != "equal"))
    return [one for one in left if one.text], [one for one in right if one.text]
