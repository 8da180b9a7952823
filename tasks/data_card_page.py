"""data_card.md: the content of a data card as a page for people. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from registry.gate_report import escaped

MOST_SEGMENTS = 40
MOST_EXAMPLES = 12
"""Segments on the page; data_card.json holds the rest."""


def page_of(card: Mapping[str, Any]) -> str:
    sections = [
        ["# Data card of the teacher's answers", "", *_overview(card)],
        ["## Answers by class", "", *_classes(card)],
        ["## Parts and segments", "", *_segments(card)],
        ["## Lengths", "", *_lengths(card["lengths"])],
        ["## Languages", "", *_languages(card)],
        *([["## Choice among samples", "", *_picks(card["picks"])]] if card["picks"] else []),
        ["## Calibration text", "", *_calibration(card["calibration"])],
        ["## Examples", "", *_examples(card["examples"])],
        *([["## What was not learned", "", *_bad(card)]] if card["bad_examples"] else []),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _overview(card: Mapping[str, Any]) -> Iterator[str]:
    tokens, cost, cut = card["tokens"], card["cost"], card["truncation"]
    answers = sum(card["answers"].values())
    yield f"- {card['prompts']} prompts asked, {answers} answers, {card['learned']} learned"
    asked, said = tokens.get("prompt", 0), tokens.get("answer", 0)
    line = f"- {asked + said} tokens: {asked} of prompts, {said} of answers"
    if lacking := tokens.get("answers not counted by the endpoint"):
        line += f"; the endpoint did not count {lacking} answers"
    yield line
    if cost:
        yield f"- cost: {cost['amount']:.6g} {cost['currency']} by the prices of the recipe"
    else:
        yield "- cost: the recipe names no prices"
    what = "their text is learned, without an end" if cut["learned"] else "not learned"
    share = f"{cut['share']:.1%}, allowed {percent(cut['allowed'])}"
    yield f"- cut at the token limit: {cut['cut']} ({share}), {what}"
    if cut["also"]:
        yield f"- of these by their text also: {_counted(cut['also'])}"
    if reasoning := tokens.get("answers with reasoning"):
        yield f"- reasoning was taken out of {reasoning} answers; it stands in responses.jsonl"
    rejected = card["rejected_prompts"]
    why = ", ".join(f"{count} {name}" for name, count in rejected.items())
    yield f"- rows of the prompts file that were left out: {why or 'none'}"


def _classes(card: Mapping[str, Any]) -> Iterator[str]:
    total = sum(card["answers"].values())
    rows = [(name, count, f"{count / total:.1%}") for name, count in card["answers"].items()]
    return table(["class", "answers", "share"], rows)


def _segments(card: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for part, segments in card["parts"].items():
        ordered = sorted(segments.items(), key=lambda one: -one[1]["prompts"])
        for name, facts in ordered[:MOST_SEGMENTS]:
            others = {kind: n for kind, n in facts["answers"].items() if kind != "accepted"}
            said = ", ".join(f"{kind} {n}" for kind, n in others.items())
            rows.append((part, named(name), facts["prompts"], facts["learned"], said or "-"))
        if (more := len(segments) - MOST_SEGMENTS) > 0:
            rows.append((part, f"and {more} more in data_card.json", "", "", ""))
    return table(["part", "segment", "prompts", "learned", "other answers"], rows)


def _lengths(lengths: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    names = list(next(iter(lengths.values()), {}))
    rows = [(what, *(f"{found[name]:g}" for name in names)) for what, found in lengths.items()]
    return table(["", *names], rows)


def _languages(card: Mapping[str, Any]) -> Iterator[str]:
    yield "Learned answers by script: " + _counted(card["scripts"])
    if card["languages"]:
        looked_at = sum(card["languages"].values())
        yield ""
        yield f"By language, the first {looked_at}: " + _counted(card["languages"])


def _picks(picks: Mapping[str, Any]) -> Iterator[str]:
    yield f"Scorer: {picks['scorer']}. Only answers that may be learned are compared."
    yield ""
    for name, count in picks.items():
        if name not in ("scorer", "scores"):
            yield f"- {name}: {count}"
    scores = {name: found for name, found in picks["scores"].items() if found}
    if scores:
        yield ""
        yield from _lengths(scores)


def _calibration(facts: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name in ("business", "foreign"):
        one = facts[name]
        middle = one["characters"].get("p50", "-")
        words = " ".join(one["frequent_words"])
        rows.append((name, one["texts"], middle, one["different_words"], in_code(words)))
    yield "Business: prompts and learned answers of the calibration part. Foreign: foreign.jsonl."
    yield ""
    yield from table(["text", "texts", "characters (median)", "words", "most frequent"], rows)
    if apart := facts["difference"]:
        yield ""
        yield (
            f"Divergence of the word frequencies: {apart['divergence']:.3f} (0: the same, 1: no "
            f"word in common). {apart['unknown_words']:.1%} of the business words do not stand in "
            "the foreign text."
        )


def _examples(examples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for segment in list(examples)[:MOST_EXAMPLES]:
        yield f"### {named(segment)}"
        yield ""
        for one in examples[segment]:
            yield from _example(one)
        yield ""
    if len(examples) > MOST_EXAMPLES:
        yield f"{len(examples) - MOST_EXAMPLES} more segments in data_card.json."


def _bad(card: Mapping[str, Any]) -> Iterator[str]:
    for kind, one in card["bad_examples"].items():
        yield f"### {kind}"
        yield ""
        yield from _example(one)
        if one.get("why"):
            yield f"  - why: {in_code(one['why'])}"
        yield ""


def _example(one: Mapping[str, Any]) -> Iterator[str]:
    yield f"- {in_code(one['id'])}"
    yield f"  - prompt: {in_code(one['prompt'])}"
    yield f"  - answer: {in_code(one['answer'])}"


def _counted(counts: Mapping[str, int]) -> str:
    counter = Counter(counts)
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_plain(cell) for cell in row) + " |"


def percent(share: float) -> str:
    """As many digits as tell a share from the one that is allowed: 10.1%, and 30% as 30%."""
    return f"{100 * share:.4g}%"


def in_code(text: object) -> str:
    """A text of anybody's in one line that Markdown shows as it is."""
    line = " ".join(str(text).split())
    longest = max(map(len, re.findall(r"`+", line)), default=0)
    marks = "`" * (longest + 1)
    space = " " if line[:1] == "`" or line[-1:] == "`" else ""
    return f"{marks}{space}{line}{space}{marks}" if line else "(nothing)"


def named(name: str) -> str:
    """A name that somebody gave, on one line: no markup, no link."""
    return escaped(" ".join(name.split()))


def _plain(cell: object) -> str:
    """A cell of a table: one line, no column mark."""
    return re.sub(r"(?<!\\)\|", r"\|", " ".join(str(cell).split()))
