"""Business metrics on hand-worked values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eval_suites.scoring import (
    METRICS,
    WEIGHTS,
    label_named,
    normalised_label,
    rubric,
    score,
    score_label,
)

PROMPT = "please send FT4821 to Wuhan instead, 300 yuan ok"
REFERENCE = {
    "intent": "change_address",
    "slots": {"order": "FT4821", "destination": "Wuhan"},
    "facts": ["FT4821", "Wuhan"],
    "language": "en",
}
GOOD = {
    "intent": "change_address",
    "slots": {"order": "FT4821", "destination": "Wuhan"},
    "reply": "Thank you, FT4821 now goes to Wuhan.",
}


def scored(**changes: Any) -> dict[str, float]:
    return score(json.dumps({**GOOD, **changes}), REFERENCE, PROMPT)


def test_weights_add_up_to_one() -> None:
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)


def test_perfect() -> None:
    assert scored() == dict.fromkeys(METRICS, 1.0)
    assert score(f"\n {json.dumps(GOOD, indent=2)} \n", REFERENCE, PROMPT)["format_valid"] == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   ",
        "nan",
        "NaN",
        "null",
        "1e999",
        "[]",
        '"text"',
        "Thank you, FT4821 now goes to Wuhan.",
        json.dumps(GOOD)[:-1],
        json.dumps(GOOD)[:40],
        json.dumps(GOOD) + " ok",
        json.dumps(GOOD) + json.dumps(GOOD),
        f"```json\n{json.dumps(GOOD)}\n```",
        '{"intent":"change_address","intent":"change_address","slots":{},"reply":"x"}',
        '{"intent":"change_address","slots":{"order":"A","order":"B"},"reply":"x"}',
        '{"intent":"change_address","slots":{},"reply":NaN}',
        '{"a":' * 5000,
        "[" * 100_000,
        "\ufffd\ud800\x00",
        "9" * 5000,
    ],
)
def test_what_a_strict_parser_refuses_scores_nothing(response: str) -> None:
    assert score(response, REFERENCE, PROMPT) == dict.fromkeys(METRICS, 0.0)


def test_extra_key_spoils_the_format_only() -> None:
    assert scored(confidence=0.9) == {**dict.fromkeys(METRICS, 1.0), "format_valid": 0.0}


def test_missing_keys() -> None:
    assert score("{}", REFERENCE, PROMPT) == dict.fromkeys(METRICS, 0.0)
    only_intent = score('{"intent":"change_address"}', REFERENCE, PROMPT)
    assert only_intent == {**dict.fromkeys(METRICS, 0.0), "hit_rate": 1.0}


def test_wrong_types() -> None:
    assert scored(intent=["change_address"])["hit_rate"] == 0.0
    assert scored(intent=None)["format_valid"] == 0.0
    assert scored(slots=["FT4821"])["slot_f1"] == 0.0
    assert scored(reply={"text": "Thank you"})["satisfaction"] == 0.0
    nested = scored(slots={"order": {"id": "FT4821"}, "destination": "Wuhan"})
    assert nested["format_valid"] == 0.0
    assert nested["slot_f1"] == pytest.approx(0.5)  # 1 right of 2 given, of 2 wanted


@pytest.mark.parametrize(
    ("slots", "f1"),
    [
        ({"order": "FT4821"}, 2 * 1 / (1 + 2)),
        ({"order": "FT4821", "destination": "Jinan"}, 2 * 1 / (2 + 2)),
        ({"order": "FT4821", "destination": "Wuhan", "time": "today"}, 2 * 2 / (3 + 2)),
        ({"destination": "FT4821", "order": "Wuhan"}, 0.0),
        ({}, 0.0),
        ({"order": " ＦＴ４８２１ ", "destination": "Wuhan"}, 1.0),
    ],
)
def test_slot_f1(slots: dict[str, str], f1: float) -> None:
    assert scored(slots=slots)["slot_f1"] == pytest.approx(f1)


def test_no_slots_wanted() -> None:
    reference = {"intent": "complain", "slots": {}, "facts": [], "language": "en"}
    answer = {"intent": "complain", "slots": {}, "reply": "We are sorry about that."}
    assert score(json.dumps(answer), reference, "bad service") == dict.fromkeys(METRICS, 1.0)
    answer["slots"] = {"order": "FT1"}
    assert score(json.dumps(answer), reference, "bad service")["slot_f1"] == 0.0


@pytest.mark.parametrize(
    ("reply", "satisfaction"),
    [
        ("", 0.0),
        ("  \n", 0.0),
        ("FT4821 now goes to Wuhan.", 0.9),  # not polite
        ("Thank you, FT4821 is changed.", 0.75),  # one fact of two
        ("Thank you.", 0.5),  # no fact
        ("Thank you, FT4822 now goes to Wuhan.", 0.55),  # a wrong order number, one fact
        ("Thank you, FT48215 now goes to Wuhan.", 0.55),  # a longer number is another number
        ("Thank you, FT4821 goes to Wuhan for 900 yuan.", 0.8),  # an invented amount
        ("Thank you, FT4821 goes to Wuhan for 300 yuan.", 1.0),  # an amount of the prompt
        ("您好，FT4821已改送Wuhan。", 0.8),  # the other language, and not polite in it
        ("Thank you, FT4821 goes to Wuhan. " + "We care. " * 40, 0.9),  # too long
    ],
)
def test_satisfaction(reply: str, satisfaction: float) -> None:
    assert scored(reply=reply)["satisfaction"] == pytest.approx(satisfaction)


def test_rubric_in_chinese() -> None:
    reference = {"slots": {"delay": "2小时"}, "facts": ["2小时"], "language": "zh"}
    assert set(rubric("收到，晚到2小时已登记。", reference, "晚2小时").values()) == {1.0}
    assert rubric("收到，晚到12小时已登记。", reference, "晚2小时")["facts"] == 0.0
    assert rubric("收到，晚到12小时已登记。", reference, "晚2小时")["none_wrong"] == 0.0


def test_language_falls_back_to_the_prompt() -> None:
    assert rubric("您好", {}, "我的货在哪")["language"] == 1.0
    assert rubric("您好", {}, "where is my freight")["language"] == 0.0


# -- labels --------------------------------------------------------------------------------

LABEL = {"intent": "card_arrival", "labels": ["card_arrival", "card_linking"]}


@pytest.mark.parametrize(
    ("response", "hit", "valid"),
    [
        ("card_arrival", 1.0, 1.0),
        (" Card Arrival.\n", 1.0, 1.0),
        ('"card-arrival"', 1.0, 1.0),
        ("card_linking", 0.0, 1.0),
        ("card_lost", 0.0, 0.0),
        ("card_arrival\nbecause", 0.0, 0.0),
        ("the label is card_arrival", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("...", 0.0, 0.0),
        ("NaN", 0.0, 0.0),
    ],
)
def test_labels(response: str, hit: float, valid: float) -> None:
    assert score_label(response, LABEL) == {"hit_rate": hit, "format_valid": valid}


def test_labels_without_a_list() -> None:
    assert score_label("anything", {"intent": "x"}) == {"hit_rate": 0.0, "format_valid": 1.0}


def test_normalised_label() -> None:
    assert normalised_label("**Why verify - Identity?**") == "why_verify_identity?"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("This is about a change PIN request.", 1.0),
        ("change-pin", 1.0),
        ("Changing the pin.", 0.0),
        ("Either change_pin or age limit.", 0.0),
        ("exchange pin", 0.0),
        ("", 0.0),
    ],
)
def test_a_reply_in_sentences_names_one_label(response: str, expected: float) -> None:
    reference = {"intent": "change_pin", "labels": ["change_pin", "age_limit"]}
    assert label_named(response, reference) == expected
