"""An answer taken apart: reasoning from what is said, prose from data and code. Pure, linear."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

WRAPPERS = ("<|begin_of_solution|>", "<|end_of_solution|>")
"""Sky-T1 and OpenThoughts put the answer itself into these."""


def split_reasoning(text: str, tags: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The answer and the reasoning of `text`.

    Reasoning is what stands between a pair of tags; what stands before a closing tag that none
    opens (a template opened it); and, where the text begins with a tag that none closes, all of
    it. A tag right behind a quote is spoken about and not meant. Without reasoning the answer is
    `text`, unchanged.
    """
    reasoning = []
    for opens, closes in ((_pattern(opening), _pattern(closing)) for opening, closing in tags):
        first = closes.search(text)
        begin = opens.search(text)
        if first and (begin is None or begin.start() > first.start()):
            reasoning.append(text[: first.start()])
            text = text[first.end() :]
        kept, at = [], 0
        while begin := opens.search(text, at):
            end = closes.search(text, begin.end())
            if end is None:
                break
            kept.append(text[at : begin.start()])
            reasoning.append(text[begin.end() : end.start()])
            at = end.end()
        text = "".join(kept) + text[at:]
        begin = opens.match(text.lstrip())
        if begin:
            reasoning.append(text.lstrip()[begin.end() :])
            text = ""
    if not reasoning:
        return text, ""
    for mark in WRAPPERS:
        text = text.replace(mark, "")
    return text.strip(), "\n".join(filter(None, (part.strip() for part in reasoning)))


def left_over(text: str, tags: Sequence[tuple[str, str]]) -> str | None:
    """A reasoning tag that still stands in an answer: nobody knows where its reasoning ends."""
    for tag in (mark for pair in tags for mark in pair):
        if found := _pattern(tag).search(text):
            return found.group()
    return None


@lru_cache(maxsize=256)
def _pattern(tag: str) -> re.Pattern[str]:
    return re.compile(r"(?<![`\"'“‘])" + re.escape(tag), re.IGNORECASE)


def prose_parts(text: str) -> Iterator[str]:
    """What of an answer is written language: the texts of a JSON answer, else all but closed code
    blocks and rows of tables."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            yield from _texts(json.loads(text))
            return
        except (ValueError, RecursionError):
            pass
    kept: list[str] = []
    fence = -1
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            if fence < 0:
                fence = len(kept)
            else:
                del kept[fence:]
                fence = -1
        elif not line.lstrip().startswith("|"):
            kept.append(line)
    yield "\n".join(kept)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
