"""An answer taken apart: reasoning from what is said, prose from data and code. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

WRAPPERS = ("<|begin_of_solution|>", "<|end_of_solution|>")
"""Sky-T1 and OpenThoughts put the answer itself into these."""

TEMPLATE_TOKEN = re.compile(r"<\|[a-z][a-z0-9_]*\|>|<(?:start|end)_of_turn>|</s>")
"""Of ChatML and Qwen, Llama 3, gpt-oss and Phi; of Gemma; of Llama 2 and Mistral."""

LINE = 2000
"""Characters of a line that are looked at for quotes."""

_QUOTES = {"`": "`", '"': '"', "'": "'", "“": "”", "‘": "’", "「": "」", "『": "』", "«": "»"}


def split_reasoning(text: str, tags: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The answer and the reasoning of `text`.

    Reasoning is what stands between a pair of tags; what stands before a closing tag that none
    opens (a template opened it); and, where the text begins with a tag that none closes, all of
    it. A tag in quotes or in code is spoken about and not meant (`_marks`). Without reasoning the
    answer is `text`, unchanged.
    """
    reasoning = []
    for opening, closing in tags:
        kept: list[str] = []
        at = 0
        begin: re.Match[str] | None = None
        for mark, opens in _marks(text, opening, closing):
            if opens:
                begin = begin or mark
            elif begin or not (kept or at):
                kept.append(text[at : begin.start()] if begin else "")
                reasoning.append(text[begin.end() if begin else 0 : mark.start()])
                begin, at = None, mark.end()
        rest = text[at:]
        if begin and not "".join((*kept, text[at : begin.start()])).strip():
            reasoning.append(text[begin.end() :])
            rest = ""
        text = "".join(kept) + rest
    if not reasoning:
        return text, ""
    for mark_of_all in WRAPPERS:
        text = text.replace(mark_of_all, "")
    return text.strip(), "\n".join(filter(None, (part.strip() for part in reasoning)))


def left_over(text: str, tags: Sequence[tuple[str, str]]) -> str | None:
    """A reasoning tag or a token of a chat template that still stands in an answer.

    Nobody knows where the reasoning of such a tag ends, and a tokenizer takes such a token for the
    end of a turn. What is spoken about (between two quotes, or in code on one line) is none.
    """
    for tag in (mark for pair in tags for mark in pair):
        for found in _pattern(tag).finditer(text):
            if not _spoken_about(text, found):
                return found.group()
    tokens = (found for found in TEMPLATE_TOKEN.finditer(text) if not _spoken_about(text, found))
    return next((found.group() for found in tokens), None)


def _marks(text: str, opening: str, closing: str) -> Iterator[tuple[re.Match[str], bool]]:
    """The tags of one pair that are meant, and whether each opens; in order.

    Behind a quote that opens (`"<think>...`) nobody knows whether a tag is meant: a model may put
    its answer in quotes, a program may look for tags. Such a one is passed over with the one that
    closes it: nothing is cut out, and it is left over.
    """
    both = re.compile(f"(?P<opens>{re.escape(opening)})|{re.escape(closing)}", re.IGNORECASE)
    passed = meant = False
    for found in both.finditer(text):
        opens = found["opens"] is not None
        if _spoken_about(text, found):
            continue
        if opens and not meant and _in_quotes(text, found.start()):
            passed = True
        elif not opens and passed and not meant:
            passed = False
        else:
            meant = opens
            yield found, opens


def _spoken_about(text: str, found: re.Match[str]) -> bool:
    """Whether a tag stands alone between two quotes, or in code on one line that is all tags."""
    quote = _in_quotes(text, found.start())
    if quote and text.startswith(_QUOTES[quote], found.end()):
        return True
    line = _line_before(text, found.start())
    if line.count("`") % 2 == 0:
        return False
    code = line.rpartition("`")[2] + found.group()
    behind = text[found.end() : found.end() + LINE].partition("\n")[0]
    return code[0] == found.group()[0] and "`" in behind


def _in_quotes(text: str, at: int) -> str:
    """The quote directly before a place, where it opens: of straight ones the odd ones do."""
    quote = text[at - 1 : at]
    if quote not in _QUOTES:
        return ""
    if quote in "\"`'":
        # An apostrophe within a word is no quote.
        line = re.sub(r"(?<=\w)'(?=\w)", "", _line_before(text, at))
        return quote if line.count(quote) % 2 else ""
    return quote


def _line_before(text: str, at: int) -> str:
    return text[max(text.rfind("\n", 0, at) + 1, at - LINE) : at]


@lru_cache(maxsize=256)
def _pattern(tag: str) -> re.Pattern[str]:
    return re.compile(re.escape(tag), re.IGNORECASE)


def prose_parts(text: str) -> Iterator[str]:
    """What of an answer is written language: the texts of a JSON answer, else all but closed code
    blocks and rows of tables."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            yield from map(writable, _texts(json.loads(text)))
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


def writable(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair, as JSON's \\u escapes may
    hold: neither a file nor a tokenizer takes one."""
    return text.encode("utf-8", "replace").decode()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
