"""The recipe's template round a prompt."""

from __future__ import annotations

import pytest

from tasks.prompt_template import filled, taken_out

LABELS = "refund, card {prompt}"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{prompt}", "why {labels}?\nUSD."),
        ("About: {labels}?\n\nQ: {prompt}", f"About: {LABELS}?\n\nQ: why {{labels}}?\nUSD."),
        ("({prompt}) {labels} ({prompt}) {x}", None),
        ("[{labels}] {prompt} [{labels}].*", None),
    ],
)
def test_a_prompt_comes_out_as_it_went_in(template: str, wanted: str | None) -> None:
    prompt = "why {labels}?\nUSD."
    made = filled(template, prompt, LABELS)
    if wanted is not None:
        assert made == wanted
    assert made.count(LABELS) == template.count("{labels}")
    assert taken_out(template, made) == prompt


def test_a_text_of_no_template_stays() -> None:
    assert taken_out("Q: {prompt}", "an earlier turn") == "an earlier turn"
