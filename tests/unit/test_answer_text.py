"""Reasoning is kept apart from the answer, and what nobody can tell apart is not learned."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from recipes.quality_recipe import REASONING_TAGS
from tasks.answer_text import split_reasoning
from tests.unit.test_answer_quality import ROW, answer, judge


@pytest.mark.parametrize(
    ("text", "said", "thought"),
    [
        ("Yes.", "Yes.", ""),
        ("  Yes.\n", "  Yes.\n", ""),
        ("<think>Is it?</think>\n\nYes.", "Yes.", "Is it?"),
        ("<THINK>Is it?</Think>Yes.", "Yes.", "Is it?"),
        ("<think>\n\n</think>\n\nYes.", "Yes.", ""),
        ("Is it?</think>Yes.", "Yes.", "Is it?"),
        ("<think>Is it? So", "", "Is it? So"),
        ("\n<thinking>a</thinking>One. <thinking>b</thinking>Two.", "One. Two.", "a\nb"),
        ("a</think>One. <think>b</think>Two.", "One. Two.", "a\nb"),
        (
            "<|begin_of_thought|>a<|end_of_thought|>\n<|begin_of_solution|>4<|end_of_solution|>",
            "4",
            "a",
        ),
        ("◁think▷想◁/think▷好的。", "好的。", "想"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>4",
            "4",
            "a<|end|><|start|>assistant",
        ),
        ("Close it with `</think>` please.", "Close it with `</think>` please.", ""),
        ("Use 5 < 6 and <b>think</b>.", "Use 5 < 6 and <b>think</b>.", ""),
        # Reasoning that ends with a quote, or with code.
        ('<think>It says "hi"</think>Yes.', "Yes.", 'It says "hi"'),
        ('It says "hi"</think>Yes.', "Yes.", 'It says "hi"'),
        ('<think>It says "hi"</think>"Yes."', '"Yes."', 'It says "hi"'),
        ("<think>It's 'so'</think>'Tis.", "'Tis.", "It's 'so'"),
        ("<think>`ls`</think>`ls` lists.", "`ls` lists.", "`ls`"),
        ("他说“好”</think>好的。", "好的。", "他说“好”"),
        ("use `ls</think>Try `ls`.", "Try `ls`.", "use `ls"),
        ("<think>a</think><think>b</think>Yes.", "Yes.", "a\nb"),
        ("<think>a</think> <think>b", "", "a\nb"),
    ],
)
def test_reasoning_is_kept_apart(text: str, said: str, thought: str) -> None:
    assert split_reasoning(text, REASONING_TAGS) == (said, thought)


@pytest.mark.parametrize(
    "text",
    [
        "Reasoning stands in `<think>...</think>` there.",
        'It begins with "<think>" and ends with "</think>".',
        "它以“<think>”开头，以“</think>”结尾。",
        "Messages end with `<|im_end|>`.",
        "Use <b>, a |> b and <|.",
    ],
)
def test_what_is_spoken_about_is_learned_as_it_is(text: str) -> None:
    found = judge().classify(answer(text), ROW)
    assert (found.kind, found.text, found.reasoning) == ("accepted", text, "")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('"<think>plan</think>Yes."', "<think>"),
        ("“<think>想</think>您好”", "<think>"),
        ('{"reply": "<think>plan</think>Yes."}', "<think>"),
        ('re.sub(r"<think>.*?</think>", "", text)', "<think>"),
        ("<think>a</think>b</think>Yes.", "</think>"),
        ("Yes.<|im_end|>\n<|im_start|>user\nThanks", "<|im_end|>"),
        ("Yes.<|return|>", "<|return|>"),
        ("Yes.</s>", "</s>"),
        ("Yes.<end_of_turn>", "<end_of_turn>"),
    ],
)
def test_where_nobody_knows_what_is_meant_nothing_is_cut_out_and_nothing_learned(
    text: str, left: str
) -> None:
    own = judge(format={"kind": "regex", "pattern": "(?s).*", "keep": True})
    found = own.classify(answer(text), ROW)
    assert (found.kind, found.why) == ("wrong_format", f"{left} is left in it")
    assert found.text in text
    assert not own.keeps(found)


def test_reasoning_of_the_server_and_of_the_text_are_both_kept() -> None:
    found = judge().classify(answer("<think>b</think>Yes.", reasoning="a"), ROW)
    assert (found.kind, found.text, found.reasoning) == ("accepted", "Yes.", "a\nb")


def test_tags_of_the_recipe() -> None:
    own = judge(reasoning_tags=[["<plan>", "</plan>"]])
    assert own.classify(answer("<plan>a</plan>Yes."), ROW).text == "Yes."
    assert own.classify(answer("<think>a</think>Yes."), ROW).text == "<think>a</think>Yes."
    with pytest.raises(ValidationError, match="tag is empty"):
        judge(reasoning_tags=[["<plan>", " "]])
