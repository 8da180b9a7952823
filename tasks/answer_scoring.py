"""Which of several answers to one prompt is the best: scores in [0, 1], or a judge's own numbers.

Only answers that are kept are compared. A scorer may have no score for an answer (no reference, a
judge's number that cannot be read): such an answer is chosen only where none has a score. Of
equals the first is taken. Pure; the judge's numbers come from `answer_judge.py`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval_suites.scoring import METRICS, normalised_label, score, stands_in, strict_json
from recipes.quality_recipe import ReferencePick, RubricPick, RubricRule
from tasks.answer_quality import Judged

Scorer = Callable[[Judged, Mapping[str, Any]], float | None]
"""Score of an answer to a prompt row; None where there is none."""

_WORD = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3400-\u9fff\uf900-\ufaff]+")


@dataclass(frozen=True)
class Choice:
    """The answer of one prompt that is learned."""

    best: int | None
    """Place among the prompt's answers; None where none is kept."""
    scores: list[float | None]
    """Of every answer, by place."""
    tied: bool = False
    """Another kept answer has the same score and other words."""


def choose(
    judged: Sequence[Judged], kept: Sequence[bool], scores: Sequence[float | None]
) -> Choice:
    """The best of the kept answers: highest score, then the first."""
    places = [place for place, keep in enumerate(kept) if keep]
    if not places:
        return Choice(None, list(scores))

    def rank(place: int) -> float:
        value = scores[place]
        return float("-inf") if value is None else value

    best = max(places, key=lambda place: (rank(place), -place))
    tied = scores[best] is not None and any(
        scores[place] == scores[best] and judged[place].text != judged[best].text
        for place in places
        if place != best
    )
    return Choice(best, list(scores), tied)


def scorer_of(pick: ReferencePick | RubricPick) -> Scorer:
    if isinstance(pick, ReferencePick):
        return by_reference
    rules = [(rule.weight, _check(rule)) for rule in pick.rules]
    total = sum(weight for weight, _ in rules)

    def by_rubric(judged: Judged, row: Mapping[str, Any]) -> float | None:
        return round(sum(weight * check(judged, row) for weight, check in rules) / total, 6)

    return by_rubric


# -- reference -------------------------------------------------------------------------------


def by_reference(judged: Judged, row: Mapping[str, Any]) -> float | None:
    """Agreement with the row's reference in [0, 1]; None where it has none.

    A reference with slots or facts: the mean of the evaluation's business metrics. One text (a
    label, a sentence): 1 where it is equal but for case, quotes and white space, else the F1 over
    words (Rajpurkar et al., SQuAD, 2016), a Chinese character being a word. Any other object: the
    share of its fields that stand in the answer's JSON object with an equal value.
    """
    reference = row.get("reference")
    if not reference:
        return None
    if "slots" in reference or "facts" in reference:
        marks = score(judged.text, reference, row["prompt"])
        return round(sum(marks.values()) / len(METRICS), 6)
    if set(reference) <= {"intent", "labels"}:
        wanted = str(reference["intent"])
        if normalised_label(judged.text) == normalised_label(wanted):
            return 1.0
        return round(_word_f1(judged.text, wanted), 6)
    return round(_fields_equal(judged.text, reference), 6)


def _word_f1(text: str, wanted: str) -> float:
    given, right = (Counter(_WORD.findall(_plain(part))) for part in (text, wanted))
    both = (given & right).total()
    return 2 * both / (given.total() + right.total()) if both else 0.0


def _fields_equal(text: str, reference: Mapping[str, Any]) -> float:
    try:
        answer = strict_json(text)
    except ValueError:
        return 0.0
    if not isinstance(answer, dict):
        return 0.0
    equal = sum(
        name in answer and _plain(answer[name]) == _plain(value)
        for name, value in reference.items()
    )
    return equal / len(reference)


def _plain(value: Any) -> str:
    return " ".join(unicodedata.normalize("NFKC", str(value)).casefold().split())


# -- rubric ----------------------------------------------------------------------------------


def _check(rule: RubricRule) -> Callable[[Judged, Mapping[str, Any]], float]:
    """How far an answer fulfils one rule, in [0, 1]."""
    name, value = rule.check
    if name in ("has", "has_not"):
        pattern = re.compile(value)
        wanted = name == "has"
        return lambda judged, row: float((pattern.search(judged.text) is not None) == wanted)
    if name == "shortest":
        return lambda judged, row: float(len(judged.text) >= value)
    if name == "longest":
        return lambda judged, row: float(len(judged.text) <= value)
    if name == "json_valid":
        return lambda judged, row: _is_json(judged.text)
    return lambda judged, row: _share_named(judged.text, row)


def _is_json(text: str) -> float:
    try:
        strict_json(text)
    except ValueError:
        return 0.0
    return 1.0


def _share_named(text: str, row: Mapping[str, Any]) -> float:
    """Share of the reference's values that stand in `text`; 1 where it has none."""
    reference = row.get("reference") or {}
    wanted = [value for value in _values(reference) if value]
    plain = unicodedata.normalize("NFKC", text)
    return sum(stands_in(value, plain) for value in wanted) / len(wanted) if wanted else 1.0


def _values(reference: Mapping[str, Any]) -> Iterator[str]:
    """What a right answer says: slots and facts where there are, else every plain value."""
    slots, facts = reference.get("slots") or {}, reference.get("facts") or []
    if "slots" in reference or "facts" in reference:
        found = [*slots.values(), *facts]
    else:
        found = [value for name, value in reference.items() if name != "labels"]
    for value in dict.fromkeys(
        map(str, (one for one in found if not isinstance(one, list | dict)))
    ):
        yield unicodedata.normalize("NFKC", value).strip()
