"""Which of several answers is taken, and with what score."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from recipes.quality_recipe import Pick, ReferencePick, RubricPick
from tasks.answer_quality import Judged
from tasks.answer_scoring import by_reference, choose, scorer_of
from tasks.engines.openai_chat import ChatResult

STRUCTURED = {"intent": "track", "slots": {"order": "FT1"}, "facts": ["FT1"], "language": "en"}


def said(text: str) -> Judged:
    result = ChatResult(id="a", state="done", text=text, finish_reason="stop")
    return Judged(result, "accepted", text)


def row(reference: Any = None) -> dict[str, Any]:
    return {"id": "a", "segment": "s", "prompt": "Where is FT1?", "reference": reference}


@pytest.mark.parametrize(
    ("scores", "kept", "best", "tied"),
    [
        ([0.1, 0.9, 0.5], [True, True, True], 1, False),
        ([0.1, 0.9, 0.5], [True, False, True], 2, False),
        ([0.5, 0.5, 0.1], [True, True, True], 0, True),
        ([None, 0.0, None], [True, True, True], 1, False),
        ([None, None], [True, True], 0, False),
        ([None, None], [False, True], 1, False),
        ([0.9, 0.9], [False, False], None, False),
    ],
)
def test_the_best_of_what_is_kept(
    scores: list[float | None], kept: list[bool], best: int | None, tied: bool
) -> None:
    choice = choose([said(str(place)) for place in range(len(scores))], kept, scores)
    assert (choice.best, choice.tied, choice.scores) == (best, tied, scores)


def test_equal_answers_are_no_tie() -> None:
    assert not choose([said("x"), said("x")], [True, True], [1.0, 1.0]).tied


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("anything", None, None),
        # The mean of hit_rate, slot_f1, format_valid and satisfaction.
        (
            json.dumps(
                {"intent": "track", "slots": {"order": "FT1"}, "reply": "Thanks, FT1 left."}
            ),
            STRUCTURED,
            1.0,
        ),
        (
            json.dumps({"intent": "x", "slots": {"order": "FT1"}, "reply": "Thanks, FT1 left."}),
            STRUCTURED,
            0.75,
        ),
        ("FT1", STRUCTURED, 0.0),
        ("Card arrival.", {"intent": "card_arrival"}, 1.0),
        # 2 of 5 and 2 of 2 words: 2 * 2 / (5 + 2).
        ("This is about card arrival", {"intent": "card_arrival", "labels": []}, 0.571429),
        ("The PIN", {"intent": "card_arrival"}, 0.0),
        # 4 of 5 characters, and 4 of 4.
        ("退货流程吗", {"intent": "退货流程"}, 0.888889),
        ('{"city": "Berlin ", "days": 3}', {"city": "berlin", "days": "3"}, 1.0),
        ('{"city": "Berlin"}', {"city": "Berlin", "days": 3}, 0.5),
        ("Berlin", {"city": "Berlin"}, 0.0),
        ("[]", {"city": "Berlin"}, 0.0),
    ],
)
def test_agreement_with_the_reference(text: str, reference: Any, score: float | None) -> None:
    assert by_reference(said(text), row(reference)) == score
    assert scorer_of(ReferencePick(scorer="reference"))(said(text), row(reference)) == score


def rubric(*rules: dict[str, Any]) -> RubricPick:
    return RubricPick.model_validate({"scorer": "rubric", "rules": rules})


@pytest.mark.parametrize(
    ("rule", "text", "score"),
    [
        ({"has": r"\bFT\d"}, "It is FT1.", 1.0),
        ({"has": r"\bFT\d"}, "It left.", 0.0),
        ({"has_not": "(?i)sorry"}, "Sorry!", 0.0),
        ({"has_not": "(?i)sorry"}, "It left.", 1.0),
        ({"shortest": 3}, "ab", 0.0),
        ({"shortest": 3}, "abc", 1.0),
        ({"longest": 3}, "abcd", 0.0),
        ({"longest": 3}, "abc", 1.0),
        ({"json_valid": True}, "[1]", 1.0),
        ({"json_valid": True}, "[1", 0.0),
        ({"has_reference": True}, "FT1 left", 1.0),
        ({"has_reference": True}, "FT12 left", 0.0),
    ],
)
def test_rules_of_a_rubric(rule: dict[str, Any], text: str, score: float) -> None:
    assert scorer_of(rubric(rule))(said(text), row(STRUCTURED)) == score


def test_a_rubric_is_the_weighted_share_of_its_rules() -> None:
    score = scorer_of(rubric({"has": "a", "weight": 3}, {"has": "b"}, {"longest": 1}))
    assert [score(said(text), row()) for text in ("ab", "a", "b", "xx")] == [0.8, 0.8, 0.4, 0.0]
    named = scorer_of(rubric({"has_reference": True}))
    assert named(said("FT1"), row({"slots": {"order": "FT1", "to": "Kiel"}})) == 0.5
    assert named(said("anything"), row()) == 1.0


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        ({"scorer": "taste"}, "taste"),
        ({"scorer": "rubric", "rules": []}, "at least 1"),
        ({"scorer": "rubric", "rules": [{"weight": 1}]}, "exactly one check"),
        ({"scorer": "rubric", "rules": [{"has": "a", "longest": 1}]}, "exactly one check"),
        ({"scorer": "rubric", "rules": [{"has": "("}]}, "no regular expression"),
        ({"scorer": "rubric", "rules": [{"has": "a", "weight": 0}]}, "greater than 0"),
        ({"scorer": "judge", "url": "http://h", "served_model": "m", "prompt": "?"}, "{answer}"),
        (
            {
                "scorer": "judge",
                "url": "http://key@h",
                "served_model": "m",
                "prompt": "{answer}",
            },
            "pattern",
        ),
        (
            {
                "scorer": "judge",
                "url": "http://h",
                "served_model": "m",
                "prompt": "{answer}",
                "lowest": 5,
                "highest": 5,
            },
            "below `highest`",
        ),
        (
            {
                "scorer": "judge",
                "url": "http://h",
                "served_model": "m",
                "prompt": "{answer}",
                "lowest": float("nan"),
            },
            "finite",
        ),
    ],
)
def test_a_pick_that_cannot_be(pick: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Pick).validate_python(pick)
    assert message in str(caught.value)
