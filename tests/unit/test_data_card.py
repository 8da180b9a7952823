"""The data card says what is there: counts that add up, exact percentiles, examples as they are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import TeacherRecipe
from tasks import data_card
from tasks.answer_quality import Judge
from tasks.answer_scoring import choose
from tasks.data_card import DataCard, Texts, difference, percentiles, script_of
from tasks.data_card_page import in_code, page_of
from tasks.engines.openai_chat import ChatResult
from tasks.teacher_parts import Answered
from tests.unit.teacher_builders import recipe_for


def answered(
    name: str,
    *texts: str,
    finish: str = "stop",
    part: str = "train",
    segment: str = "s",
    scores: tuple[float | None, ...] = (),
    recipe: TeacherRecipe | None = None,
    **more: Any,
) -> Answered:
    recipe = recipe or recipe_for("http://host")
    judge = Judge(recipe.quality, recipe.keep_truncated)
    row = {"id": name, "segment": segment, "prompt": f"p {name}"}
    results = [
        ChatResult(
            id=name,
            state="done",
            text=text,
            finish_reason=finish,
            prompt_tokens=more.get("asked", 10),
            completion_tokens=len(text),
        )
        for text in texts
    ]
    judged = [judge.classify(result, row) for result in results]
    kept = [judge.keeps(one) for one in judged]
    choice = choose(judged, kept, scores or [None] * len(texts))
    return Answered(part, row, judged, kept, choice)


def card_of(
    rows: list[Answered], recipe: TeacherRecipe | None = None, folder: Path | None = None
) -> dict[str, Any]:
    card = DataCard(recipe or recipe_for("http://host"))
    assert list(card.watch(rows)) == rows
    return card.content(folder or Path("nowhere"), {"not UTF-8": 2})


ROWS = [
    answered("a", "One."),
    answered("b", "Two two two.", segment="t"),
    answered("c", "<think>hm</think>Three."),
    answered("d", "The report is a report of " * 8, finish="length"),
    answered("e", "I can't help with that.", segment="t"),
    answered("f", "您好，订单已发出。", part="calibration"),
]


def test_the_counts_add_up() -> None:
    card = card_of(ROWS)
    assert (card["prompts"], card["learned"]) == (6, 4)
    assert card["answers"] == {"accepted": 4, "length": 1, "refused": 1}
    assert card["parts"]["train"]["s"] == {
        "prompts": 3,
        "learned": 2,
        "answers": {"accepted": 2, "length": 1},
    }
    assert card["parts"]["train"]["t"]["learned"] == 1
    assert card["parts"]["calibration"]["s"]["prompts"] == 1
    assert card["truncation"] == {
        "cut": 1,
        "share": 0.1667,
        "allowed": 0.5,
        "also": {"looping": 1},
        "learned": False,
    }
    assert card["tokens"]["prompt"] == 60
    assert card["tokens"]["answers with reasoning"] == 1
    assert card["scripts"] == {"Latin": 3, "Chinese": 1}
    assert card["cost"] is None
    assert [one["id"] for one in card["examples"]["s"]] == ["a", "c", "f"]
    assert card["examples"]["s"][1]["answer"] == "Three."
    assert card["bad_examples"]["refused"] == {
        "id": "e",
        "prompt": "p e",
        "answer": "I can't help with that.",
        "why": "I can't help with that",
    }


def test_a_cost_is_that_of_the_prices() -> None:
    recipe = recipe_for(
        "http://host",
        price_per_million_prompt_tokens=2.0,
        price_per_million_completion_tokens=10.0,
        currency="EUR",
    )
    rows = [answered("a", "x" * 100, asked=50)]
    assert card_of(rows, recipe)["cost"] == {"amount": pytest.approx(0.0011), "currency": "EUR"}


def test_what_the_scorer_did() -> None:
    recipe = recipe_for(
        "http://host",
        samples=2,
        sampling={"max_tokens": 9, "temperature": 1.0},
        pick={"scorer": "reference"},
    )
    rows = [
        answered("a", "x", "y", scores=(0.25, 0.75)),
        answered("b", "x", "y", scores=(0.5, 0.5)),
        answered("c", "x", "y", scores=(None, None)),
        answered("d", "", "y", scores=(None, 1.0)),
        answered("e", "", "", scores=(None, None)),
    ]
    picks = card_of(rows, recipe)["picks"]
    assert picks["prompts"] == 5
    assert picks["no answer kept"] == 1
    assert picks["only one answer kept"] == 1
    assert picks["no score, the first taken"] == 1
    assert picks["tied, the first taken"] == 1
    assert picks["another than the first is best"] == 1
    assert picks["scores"]["best"]["mean"] == 0.75
    assert picks["scores"]["all"]["p50"] == 0.5


def test_memory_does_not_grow_with_what_a_person_took_for_a_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_card, "MOST_SEGMENTS", 3)
    card = card_of([answered(str(n), "Yes.", segment=f"s{n}") for n in range(10)])
    segments = card["parts"]["train"]
    assert {name: facts["prompts"] for name, facts in segments.items()} == {
        "s0": 1,
        "s1": 1,
        "s2": 1,
        data_card.OTHERS: 7,
    }
    assert len(card["examples"][data_card.OTHERS]) == data_card.EXAMPLES


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], {}),
        ([7], {"mean": 7, "p0": 7, "p50": 7, "p100": 7}),
        (range(1, 101), {"mean": 50.5, "p0": 1, "p5": 5, "p50": 50, "p95": 95, "p100": 100}),
    ],
)
def test_percentiles_are_exact(values: Any, expected: dict[str, float]) -> None:
    found = percentiles(Counter(values))
    assert {name: found[name] for name in expected} == expected


def texts(*given: str) -> Texts:
    made = Texts()
    for text in given:
        made.add(text)
    return made


@pytest.mark.parametrize(
    ("business", "foreign", "expected"),
    [
        (texts("the order is late"), texts("late is the order"), (0.0, 0.0)),
        (texts("订单在哪"), texts("alpha beta"), (1.0, 1.0)),
        # p = (1/2, 1/2, 0), q = (1/2, 0, 1/2): half of the weight is shared.
        (texts("a b"), texts("a c"), (0.5, 0.5)),
    ],
)
def test_how_unlike_texts_are(
    business: Texts, foreign: Texts, expected: tuple[float, float]
) -> None:
    found = difference(business, foreign)
    assert found is not None
    assert (found["divergence"], found["unknown_words"]) == expected
    assert difference(Texts(), foreign) is None


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Your order is late.", "Latin"),
        ("您的订单WL3316由DHL Express承运", "Chinese"),
        ("ご注文ありがとうございます。発送しました。", "Japanese"),
        ("주문해 주셔서 감사합니다.", "Korean"),
        ("Спасибо за ваш заказ.", "Cyrillic"),
        ("1234", "none"),
    ],
)
def test_scripts(text: str, script: str) -> None:
    assert script_of(text) == script


def test_the_page_shows_what_the_card_holds(tmp_path: Path) -> None:
    foreign = [{"prompt": "alpha beta"}, {"prompt": "gamma"}]
    (tmp_path / "foreign.jsonl").write_text("\n".join(map(json.dumps, foreign)) + "\n")
    card = DataCard(recipe_for("http://host"))
    list(card.watch(ROWS))
    card.write(tmp_path, tmp_path, {"not UTF-8": 2})
    content = json.loads((tmp_path / "data_card.json").read_text(encoding="utf-8"))
    page = (tmp_path / "data_card.md").read_text(encoding="utf-8")
    assert page == page_of(content)
    assert content["calibration"]["foreign"]["texts"] == 2
    assert content["calibration"]["difference"]["divergence"] == 1.0
    assert "- 6 prompts asked, 6 answers, 4 learned" in page
    assert "- cut at the token limit: 1 (16.7%, allowed 50%), not learned" in page
    assert "- of these by their text also: looping 1" in page
    assert "2 not UTF-8" in page
    assert "| refused | 1 | 16.7% |" in page
    assert "| train | t | 2 | 1 | refused 1 |" in page
    assert "  - answer: `您好，订单已发出。`" in page


def test_a_text_of_anybodys_cannot_break_the_page() -> None:
    assert in_code("a\n\n# b | c") == "`a # b | c`"
    assert in_code("`code` and ``more``") == "``` `code` and ``more`` ```"
    assert in_code("") == "(nothing)"
    row = answered("a|b", "Yes.\n\n# Head\n| x |", segment="<b>|`x`\n# y")
    page = page_of(card_of([row]))
    assert "\n# Head" not in page and "\n# y" not in page
    assert "| train | &lt;b&gt;\\|\\`x\\` \\# y | 1 | 1 | - |" in page
    assert "### &lt;b&gt;\\|\\`x\\` \\# y\n" in page


def test_a_card_of_nothing_learned_is_a_page_too() -> None:
    page = page_of(card_of([answered("a", "")]))
    assert "- 1 prompts asked, 1 answers, 0 learned" in page
