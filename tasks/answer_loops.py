"""Answers that go round in circles: a rule for what stands in a row, one for what comes again.

In a row. The same piece (a period) follows itself, as greedy decoding of a small model ends when it
degenerates (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020). A loop is at
least `STRETCH` characters long, in at least `REPEATS` pieces (`SHORT_REPEATS` where a piece is
shorter than `SHORT`), and either ends the answer or makes up a fifth of it. Pieces without a letter
(rules of hyphens, zeros of a matrix) need `SYMBOLS` characters.

Again and again. More than half of the characters stand in sentences or lines that stood before,
word by word, in the same answer, at least `SAME` of them. The measure is "fraction of characters in
duplicate lines" of Rae et al., "Scaling Language Models" (Gopher, 2021), table A1, with 0.5 where
they take 0.2: they filter web pages, an answer may well quote itself. Their n-grams would be
another such measure, but lists of records ("order A: status open, carrier ...") have the same words
again and again and are no loops.

Both are linear in the length of the text. A character of Chinese, Japanese or Korean says as much
as about three Latin letters and counts as three.
"""

from __future__ import annotations

import re
from collections import Counter

STRETCH = 48
REPEATS = 4
SHORT = 20
SHORT_REPEATS = 10
SYMBOLS = 200
SHARE = 0.2
COPIED = 0.5
SAME = 3
SENTENCE = 20
"""A shorter sentence ("Yes.", "N/A") may stand anywhere again."""
LOOKED_AT = 50_000
"""Characters, the last ones: a loop does not end by itself."""

_GRAM = 8
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|[。！？\n]")


def loop_in(text: str) -> str | None:
    """What repeats itself in `text`, said for people; None where nothing does."""
    text = text[-LOOKED_AT:]
    if found := _again_and_again(text):
        return found
    text = " ".join(text.split())
    return next(filter(None, (_in_a_row(text, period) for period in _periods(text))), None)


def _periods(text: str) -> list[int]:
    """How far back the same characters stand, the commonest distances first."""
    last: dict[str, int] = {}
    distances: Counter[int] = Counter()
    for at in range(len(text) - _GRAM + 1):
        gram = text[at : at + _GRAM]
        before = last.get(gram)
        if before is not None:
            distances[at - before] += 1
        last[gram] = at
    return [period for period, count in distances.most_common(8) if count >= _GRAM]


def _in_a_row(text: str, period: int) -> str | None:
    """The longest stretch in which every character is that of `period` characters before."""
    best_end = best = run = 0
    for at in range(period, len(text)):
        run = run + 1 if text[at] == text[at - period] else 0
        if run > best:
            best, best_end = run, at + 1
    stretch = text[best_end - best - period : best_end]
    piece = stretch[:period]
    repeats = len(stretch) / period
    needed = REPEATS if _weight(piece) >= SHORT else SHORT_REPEATS
    least = STRETCH if any(char.isalpha() for char in piece) else SYMBOLS
    if repeats < needed or _weight(stretch) < least:
        return None
    # A last piece may be cut anywhere; a full stop behind it does not end a loop either.
    at_end = len(text) - best_end <= min(period, 3)
    if not at_end and len(stretch) < SHARE * len(text):
        return None
    return f"{piece.strip()[:40]!r} {int(repeats)} times in a row"


def _again_and_again(text: str) -> str | None:
    sentences = [" ".join(part.split()).casefold() for part in _SENTENCE_END.split(text)]
    counts = Counter(part for part in sentences if _weight(part) >= SENTENCE)
    copied = sum(len(part) * (count - 1) for part, count in counts.items())
    if copied <= COPIED * sum(map(len, sentences)):
        return None
    sentence, count = counts.most_common(1)[0]
    if counts.total() - len(counts) < SAME:
        return None
    return f"{sentence[:40]!r} {count} times"


def _weight(text: str) -> int:
    return len(text) + 2 * len(_CJK.findall(text))
