"""What a person should know of the teacher's answers: data_card.json and data_card.md.

Filled while the rows are written, a row at a time: counters, and the first few examples. Lengths
are counted by value, so that percentiles are exact; memory grows with the number of different
lengths and segments, never with the rows.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.schema import TeacherRecipe
from tasks.answer_quality import SureLanguage
from tasks.answer_text import prose_parts
from tasks.conversations import messages_of
from tasks.data_card_page import page_of
from tasks.teacher_budget import cost_of
from tasks.teacher_parts import Answered

CONTENT = "data_card.json"
PAGE = "data_card.md"

EXAMPLES = 3
SHOWN = 300
"""Characters of a prompt or an answer in an example."""

MOST_SEGMENTS = 1000
OTHERS = "(other segments)"
"""A column of ids taken for the segment must not fill the memory."""

LANGUAGES_OF = 2000
"""Answers whose language is looked at, the first ones."""

TEXTS = 2000
WORDS_SHOWN = 12
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+")
_SCRIPTS = {
    "Chinese": re.compile(r"[\u3400-\u9fff\uf900-\ufaff]"),
    "Japanese": re.compile(r"[\u3040-\u30ff]"),
    "Korean": re.compile(r"[\uac00-\ud7af]"),
    "Cyrillic": re.compile(r"[\u0400-\u04ff]"),
    "Arabic": re.compile(r"[\u0600-\u06ff]"),
    "Latin": re.compile(r"[A-Za-z\u00c0-\u024f]"),
}


class DataCard:
    """Watches the rows of one stage go by."""

    def __init__(self, recipe: TeacherRecipe, language: SureLanguage | None = None) -> None:
        self._recipe = recipe
        self._language = language
        self._classes: Counter[tuple[str, str, str]] = Counter()
        """Answers by part, segment and class."""
        self._prompts: Counter[tuple[str, str]] = Counter()
        self._kept: Counter[tuple[str, str]] = Counter()
        self._lengths: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._segments: set[str] = set()
        self._languages: Counter[str] = Counter()
        self._scripts: Counter[str] = Counter()
        self._flaws: Counter[str] = Counter()
        """What the text of cut answers would be otherwise."""
        self._tokens: Counter[str] = Counter()
        self._good: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._bad: dict[str, dict[str, Any]] = {}
        self._picks: Counter[str] = Counter()
        self._scores: dict[str, Counter[float]] = {"best": Counter(), "all": Counter()}
        self._business = Texts()
        self.judge_tokens: int | None = None
        """Prompt and answer tokens of the model that judged, where one did."""

    def watch(self, rows: Iterable[Answered]) -> Iterator[Answered]:
        """The same rows, each looked at."""
        for answered in rows:
            self._look_at(answered)
            yield answered

    def _look_at(self, answered: Answered) -> None:
        row, part = answered.row, answered.part
        segment = str(row["segment"])
        if segment not in self._segments:
            if len(self._segments) >= MOST_SEGMENTS:
                segment = OTHERS
            self._segments.add(segment)
        self._prompts[part, segment] += 1
        self._kept[part, segment] += answered.is_kept
        self._lengths["prompt characters"][_characters_of(row)] += 1
        for one in answered.answers:
            self._classes[part, segment, one.kind] += 1
            if one.flaw:
                self._flaws[one.flaw] += 1
            self._count_tokens(one.result.prompt_tokens, one.result.completion_tokens)
            self._tokens["answers with reasoning"] += bool(one.reasoning)
            if one.kind != "accepted" and one.kind not in self._bad:
                example = _example(row, one.text or one.reasoning)
                self._bad[one.kind] = example | ({"why": one.why} if one.why else {})
        if answered.is_kept:
            self._look_at_kept(answered, segment)
        if self._recipe.pick is not None:
            self._look_at_scores(answered)

    def _look_at_kept(self, answered: Answered, segment: str) -> None:
        best = answered.outcome
        text = best.text or json.dumps(best.result.tool_calls, ensure_ascii=False)
        self._lengths["learned answer characters"][len(text)] += 1
        if best.result.completion_tokens is not None:
            self._lengths["learned answer tokens"][best.result.completion_tokens] += 1
        self._scripts[script_of("\n".join(prose_parts(best.text)))] += 1
        if self._language is not None and self._languages.total() < LANGUAGES_OF:
            self._languages[self._language(prose_parts(best.text)) or "not sure"] += 1
        if len(self._good[segment]) < EXAMPLES:
            self._good[segment].append(_example(answered.row, text))
        if answered.part == "calibration":
            self._business.add(f"{answered.row['prompt']}\n{text}")

    def _count_tokens(self, prompt: int | None, completion: int | None) -> None:
        self._tokens["answers not counted by the endpoint"] += None in (prompt, completion)
        for name, count in (("prompt", prompt), ("answer", completion)):
            if count is not None:
                self._tokens[name] += count
                self._lengths[f"{name} tokens"][count] += 1

    def _look_at_scores(self, answered: Answered) -> None:
        choice = answered.choice
        self._picks["prompts"] += 1
        if choice.best is None:
            self._picks["no answer kept"] += 1
            return
        best = choice.scores[choice.best]
        alone = sum(answered.kept) == 1
        self._picks["only one answer kept"] += alone
        self._picks["no score, the first taken"] += best is None and not alone
        self._picks["tied, the first taken"] += choice.tied
        self._picks["another than the first is best"] += choice.best != answered.kept.index(True)
        if best is not None:
            self._scores["best"][round(best, 3)] += 1
            self._scores["all"].update(
                round(score, 3) for score in choice.scores if score is not None
            )

    def write(self, folder: Path, prompts: Path, rejected: Mapping[str, int]) -> None:
        """Both files. `prompts` is the folder that was asked from, `rejected` what its file had."""
        content = self.content(prompts, rejected)
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / CONTENT).write_text(text + "\n", encoding="utf-8")
        (folder / PAGE).write_text(page_of(content), encoding="utf-8")

    def content(self, prompts: Path, rejected: Mapping[str, int]) -> dict[str, Any]:
        recipe = self._recipe
        classes = Counter[str]()
        for (_, _, kind), count in self._classes.items():
            classes[kind] += count
        asked = classes.total()
        cost = cost_of(self._tokens["prompt"], self._tokens["answer"], recipe)
        foreign = Texts()
        if (file := prompts / "foreign.jsonl").is_file():
            foreign.add_rows(file)
        return {
            "prompts": self._prompts.total(),
            "learned": self._kept.total(),
            "samples": recipe.samples,
            "answers": {name: classes[name] for name, _ in classes.most_common()},
            "parts": self._by_part(),
            "truncation": {
                "cut": classes["length"],
                "share": round(classes["length"] / asked, 4) if asked else 0.0,
                "allowed": recipe.max_truncated_share,
                "also": dict(self._flaws.most_common()),
                "learned": recipe.keep_truncated,
            },
            "lengths": {name: percentiles(self._lengths[name]) for name in sorted(self._lengths)},
            "scripts": dict(self._scripts.most_common()),
            "languages": dict(self._languages.most_common()),
            "tokens": dict(sorted(self._tokens.items())),
            "cost": None if cost is None else {"amount": cost, "currency": recipe.currency},
            "rejected_prompts": dict(rejected),
            "picks": self._picked(),
            "examples": dict(self._good),
            "bad_examples": self._bad,
            "calibration": {
                "business": self._business.facts(),
                "foreign": foreign.facts(),
                "difference": difference(self._business, foreign),
            },
        }

    def _by_part(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for (part, segment), prompts in sorted(self._prompts.items()):
            learned = self._kept[part, segment]
            facts = {"prompts": prompts, "learned": learned, "answers": {}}
            found.setdefault(part, {})[segment] = facts
        for (part, segment, kind), count in sorted(self._classes.items()):
            found[part][segment]["answers"][kind] = count
        return found

    def _picked(self) -> dict[str, Any] | None:
        if self._recipe.pick is None:
            return None
        return {
            "scorer": self._recipe.pick.scorer,
            **dict(self._picks),
            **({} if self.judge_tokens is None else {"tokens of the judge": self.judge_tokens}),
            "scores": {name: percentiles(scores) for name, scores in self._scores.items()},
        }


class Texts:
    """Word frequencies and lengths of the first `TEXTS` texts."""

    def __init__(self) -> None:
        self.words: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()

    def add(self, text: str) -> None:
        if self.lengths.total() < TEXTS:
            self.lengths[len(text)] += 1
            self.words.update(_WORD.findall(text[: SHOWN * 10].casefold()))

    def add_rows(self, file: Path) -> None:
        with file.open(encoding="utf-8") as lines:
            for line, _ in zip(lines, range(TEXTS), strict=False):
                self.add(json.loads(line)["prompt"])

    def facts(self) -> dict[str, Any]:
        return {
            "texts": self.lengths.total(),
            "characters": percentiles(self.lengths),
            "different_words": len(self.words),
            "frequent_words": [word for word, _ in self.words.most_common(WORDS_SHOWN)],
        }


def difference(business: Texts, foreign: Texts) -> dict[str, float] | None:
    """How unlike two sets of texts are; None where one of them is empty.

    `divergence`: Jensen-Shannon divergence of the word frequencies (Lin, 1991), base 2: 0 for equal
    ones, 1 where no word is shared. `unknown_words`: share of the business words, as often as they
    stand there, that the foreign texts do not have.
    """
    ours, theirs = business.words.total(), foreign.words.total()
    if not ours or not theirs:
        return None
    total = 0.0
    for word in business.words.keys() | foreign.words.keys():
        p, q = business.words[word] / ours, foreign.words[word] / theirs
        middle = (p + q) / 2
        total += sum(share * math.log2(share / middle) for share in (p, q) if share) / 2
    unknown = sum(count for word, count in business.words.items() if word not in foreign.words)
    return {"divergence": round(total, 4), "unknown_words": round(unknown / ours, 4)}


def percentiles(counts: Counter[Any]) -> dict[str, float]:
    """Nearest-rank percentiles of values that are counted; the mean too. Empty for none."""
    total = counts.total()
    if not total:
        return {}
    mean = sum(value * count for value, count in counts.items()) / total
    found: dict[str, float] = {"mean": round(mean, 3)}
    values = sorted(counts)
    for percent in PERCENTILES:
        rank, passed = max(1, math.ceil(total * percent / 100)), 0
        for value in values:
            passed += counts[value]
            if passed >= rank:
                found[f"p{percent}"] = value
                break
    return found


def script_of(text: str) -> str:
    """In which script most of a text is written; a text with Japanese kana is Japanese."""
    found = {name: len(pattern.findall(text)) for name, pattern in _SCRIPTS.items()}
    if found["Japanese"] * 10 > found["Chinese"]:
        found["Japanese"] += found.pop("Chinese")
    # Such a character is about as much as three Latin letters.
    weights = {"Chinese": 3, "Japanese": 3, "Korean": 3}
    name = max(found, key=lambda one: found[one] * weights.get(one, 1))
    return name if found[name] else "none"


def _characters_of(row: dict[str, Any]) -> int:
    return sum(len(str(message.get("content") or "")) for message in messages_of(row))


def _example(row: dict[str, Any], answer: str) -> dict[str, Any]:
    return {"id": row["id"], "prompt": row["prompt"][:SHOWN], "answer": answer[:SHOWN]}
