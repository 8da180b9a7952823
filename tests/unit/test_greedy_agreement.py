"""Greedy answers of two servers: asked one at a time, judged where they part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from registry.errors import InfrastructureError
from tasks.engines.greedy_agreement import (
    NEAR_TIE,
    Answer,
    Token,
    compare,
    greedy_answers,
    read_answers,
    write_answers,
)
from tests.unit.pretend_chat import PretendChat, Top, pretending

ROWS = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(3)]
SURE: Top = {"yes": -0.01, "no": -5.0}
END: Top = {"<end>": -0.02, "more": -4.0}


def ask(chat: PretendChat, rows: list[dict[str, Any]] = ROWS, **changes: Any) -> list[Answer]:
    with pretending(chat) as url:
        return greedy_answers(url, "secret", "m", rows, 16, sleep=lambda _: None, **changes)


def answers(*said: list[Top], logprobs: bool = True) -> list[Answer]:
    chat = PretendChat({f"q{i}": one for i, one in enumerate(said)}, logprobs=logprobs)
    return ask(chat, ROWS[: len(said)])


def test_every_prompt_is_asked_once_greedily_and_alone() -> None:
    chat = PretendChat({f"q{i}": [SURE, END] for i in range(3)})
    found = ask(chat)
    assert [one.id for one in found] == ["p0", "p1", "p2"]
    assert found[0].text == "yes<end>"
    assert found[0].tokens[0] == Token(
        token="token_id:yes",
        text="yes",
        logprob=-0.01,
        top={"token_id:yes": -0.01, "token_id:no": -5.0},
    )
    assert chat.most_open == 1
    assert set(chat.keys) == {"Bearer secret"}
    for body in chat.asked:
        assert body["path"] == "/v1/chat/completions"
        assert (body["temperature"], body["logprobs"], body["top_logprobs"]) == (0.0, True, 5)
        assert (body["max_tokens"], body["repetition_penalty"]) == (16, 1.0)


def test_tools_are_sent_and_their_calls_are_the_answer() -> None:
    class Calling(PretendChat):
        def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            function = {"name": "track", "arguments": f'{{"n": {len(self.asked)}}}'}
            message = {"content": None, "tool_calls": [{"id": "drawn", "function": function}]}
            return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    tools = [{"type": "function", "function": {"name": "track"}}]
    chat = Calling({})
    found = ask(chat, [{**ROWS[0], "tools": tools}, {**ROWS[0], "id": "other"}])
    assert [body.get("tools") for body in chat.asked] == [tools, None]
    assert [one.text for one in found] == [
        '[{"name": "track", "arguments": "{\\"n\\": 1}"}]',
        '[{"name": "track", "arguments": "{\\"n\\": 2}"}]',
    ]


def test_a_url_may_end_with_v1_and_other_engines_get_no_fields_of_vllm() -> None:
    chat = PretendChat({"q0": [SURE]})
    with pretending(chat) as url:
        greedy_answers(f"{url}/v1", "", "m", ROWS[:1], 4, extra={})
    assert chat.asked[0]["path"] == "/v1/chat/completions"
    assert "return_tokens_as_token_ids" not in chat.asked[0]
    assert chat.keys == [None]


def test_a_busy_server_is_asked_again_and_a_silent_one_given_up() -> None:
    chat = PretendChat({f"q{i}": [SURE] for i in range(3)}, busy=2)
    assert len(ask(chat)) == 3
    assert len(chat.asked) == 5
    with pytest.raises(InfrastructureError, match="503"):
        ask(PretendChat({}, busy=99))
    with pytest.raises(InfrastructureError, match="401"):
        ask(PretendChat({"q0": 401}))
    with pytest.raises(InfrastructureError, match="p0"):
        greedy_answers("http://127.0.0.1:9", "", "m", ROWS, 4, sleep=lambda _: None)


def test_answers_are_kept_as_they_are(tmp_path: Path) -> None:
    found = answers([SURE, END])
    file = tmp_path / "answers.json"
    assert read_answers(file) is None
    write_answers(file, found)
    assert read_answers(file) == found
    file.write_text("[{")
    assert read_answers(file) is None


# -- compare ---------------------------------------------------------------------------------


def test_equal_answers_agree() -> None:
    found = compare(answers([SURE, END], [SURE, END]), answers([SURE, END], [SURE, END]))
    assert found.agrees is True
    assert (found.equal, found.tokens) == (2, 4)
    assert found.words == "2 of 2 greedy answers are equal"
    assert (found.noise.places, found.noise.largest) == (4, 0.0)
    assert found.noise.smallest_margin == pytest.approx(3.98)


def test_a_near_tie_is_no_disagreement_and_ends_the_comparison() -> None:
    one = answers([SURE, {"a": -0.70, "b": -0.80}, SURE, END])
    two = answers([SURE, {"b": -0.72, "a": -0.75}, {"else": -0.1, "yes": -9.0}])
    found = compare(one, two)
    assert found.agrees is True
    (part,) = found.near_ties
    assert (part.id, part.position) == ("p0", 1)
    assert (part.reference_token, part.other_token) == ("a", "b")
    assert part.reference_logprobs == (-0.70, -0.80)
    assert part.other_logprobs == (-0.75, -0.72)
    assert "'a' against 'b', 0.100 and 0.030 nats apart" in part.reason
    assert (found.equal, found.tokens) == (0, 1)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        # Clear in both, clear in one of them only, not among the most likely at all.
        ({"a": -0.1, "b": -3.0}, {"b": -0.1, "a": -3.0}),
        ({"a": -0.70, "b": -0.72}, {"b": -0.1, "a": -3.0}),
        ({"a": -0.1, "b": -3.0}, {"b": -0.70, "a": -0.72}),
        ({"a": -0.70, "c": -0.72}, {"b": -0.70, "a": -0.72}),
    ],
)
def test_a_clear_choice_that_differs_is_a_disagreement(one: Top, two: Top) -> None:
    found = compare(answers([one, END], [SURE]), answers([two, END], [SURE]))
    assert found.agrees is False
    (part,) = found.disagreements
    assert (part.id, part.position) == ("p0", 0)
    assert "1 disagree (p0, token 0" in found.words


def test_the_threshold_is_two_steps_of_bfloat16() -> None:
    at = answers([{"a": -0.5, "b": -0.5 - NEAR_TIE}])
    beyond = answers([{"a": -0.5, "b": -0.5 - NEAR_TIE - 1 / 32}])
    other = answers([{"b": -0.5, "a": -0.625}])
    assert compare(at, other).agrees is True
    assert compare(beyond, other).agrees is False
    assert compare(beyond, other, threshold=0.5).agrees is True


def test_an_answer_that_ends_earlier_is_judged_by_its_end_token() -> None:
    near = ({"<end>": -0.6, "more": -0.7}, {"more": -0.6, "<end>": -0.7})
    found = compare(answers([SURE, near[0]]), answers([SURE, near[1], END]))
    assert found.agrees is True
    # An engine that does not list it gives nothing to judge by.
    found = compare(answers([SURE]), answers([SURE, near[1]]))
    assert found.agrees is False
    assert "without an end token" in found.words


def test_without_log_probabilities_only_equal_texts_agree() -> None:
    plain = answers([SURE, END], [SURE, END], logprobs=False)
    found = compare(answers([SURE, END], [SURE, END]), plain)
    assert found.agrees is True
    assert "2 answers came without log-probabilities: only equal texts agree" in found.words
    assert found.noise.places == 0
    differing = answers([SURE, {"no": -0.7, "yes": -0.71}], [SURE, END], logprobs=False)
    found = compare(plain, differing)
    assert found.agrees is False
    assert found.disagreements[0].position is None


def test_a_refused_prompt_counts_only_where_both_refuse_it() -> None:
    both = [ask(PretendChat({"q0": 400, "q1": [SURE]}), ROWS[:2]) for _ in range(2)]
    found = compare(both[0], both[1])
    assert (found.agrees, found.equal, found.refused) == (True, 1, 1)
    found = compare(both[0], answers([SURE], [SURE]))
    assert found.agrees is False
    assert "refuses it: HTTP 400" in found.words
    nothing = ask(PretendChat({"q0": 413}), ROWS[:1])
    assert compare(nothing, nothing).agrees is None
    assert compare([], []).agrees is None


def test_a_token_that_is_not_the_most_likely_one_is_not_greedy() -> None:
    """Also behind a near-tie, where the answers cannot be compared any more."""
    tie, other_tie = {"a": -0.7, "b": -0.7}, {"b": -0.7, "a": -0.7}
    sampled: Top = {"odd": -4.0, "even": -0.02}
    found = compare(answers([tie, END]), answers([other_tie, sampled]))
    assert found.agrees is False
    assert found.not_greedy == {"reference": 0, "other": 1}
    assert "at 1 places the other's token is not its most likely one" in found.words
    assert compare(answers([sampled]), answers([sampled])).agrees is None


def test_answers_to_other_prompts_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="same prompts"):
        compare(answers([SURE], [SURE]), answers([SURE]))


def test_noise_is_the_change_of_the_margin_where_all_is_equal() -> None:
    one = answers([{"a": -0.25, "b": -2.0}, {"a": -0.25, "b": -1.0}])
    two = answers([{"a": -0.25, "b": -2.125}, {"a": -0.5, "b": -1.0}])
    found = compare(one, two)
    noise = found.noise
    assert "0.25 nats, more than rounding" in found.words
    assert noise.places == 2
    assert (noise.p50, noise.largest) == (pytest.approx(0.125), pytest.approx(0.25))
    assert noise.smallest_margin == pytest.approx(0.75)
