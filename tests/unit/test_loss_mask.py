"""Which tokens are learned, where padding and end token are one id (2) and where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines import loss_mask
from tasks.engines.loss_mask import Example, Refused, build, pad

END, OFF = 2, -100
CONVERSATIONS: dict[str, list[loss_mask.Segment]] = {
    "one turn": [("user", [1, 10, 11]), ("assistant", [20, 21, 2])],
    "short": [("user", [1, 12]), ("assistant", [22, 2])],
    "two turns": [
        ("user", [1, 13]),
        ("assistant", [23, 2]),
        ("user", [14]),
        ("assistant", [24, 2]),
    ],
}
EXPECTED = {
    "one turn": ([1, 10, 11, 20, 21, 2, 2], [1, 1, 1, 1, 1, 1, 0], [OFF] * 3 + [20, 21, 2, OFF]),
    "short": ([1, 12, 22, 2, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0], [OFF, OFF, 22, 2, OFF, OFF, OFF]),
    "two turns": (
        [1, 13, 23, 2, 14, 24, 2],
        [1, 1, 1, 1, 1, 1, 1],
        [OFF, OFF, 23, 2, OFF, 24, 2],
    ),
}


@pytest.mark.parametrize("pad_id", [END, 0])
def test_the_end_of_every_turn_is_learned_once_and_padding_never(pad_id: int) -> None:
    examples = [build(name, segments, [END]) for name, segments in CONVERSATIONS.items()]
    batch = pad(examples, pad_id, length=7)
    for row, (ids, mask, labels) in enumerate(EXPECTED.values()):
        filled = [token if seen else pad_id for token, seen in zip(ids, mask, strict=True)]
        assert batch["input_ids"][row] == filled
        assert batch["attention_mask"][row] == mask
        assert batch["labels"][row] == labels


def test_a_turn_that_does_not_end_is_refused() -> None:
    with pytest.raises(Refused, match="assistant turn without an end-of-turn token"):
        build("no end of turn", [("user", [1, 15]), ("assistant", [25])], [END])
    with pytest.raises(Refused, match="inside its text"):
        build("twice", [("user", [1]), ("assistant", [25, 2, 26, 2])], [END])
    with pytest.raises(Refused, match="no assistant turn"):
        build("silent", [("user", [1])], [END])


def test_the_last_turn_is_told_from_what_came_before() -> None:
    example = build("two turns", CONVERSATIONS["two turns"], [END])
    assert (example.prompt_ids, example.answer_ids) == ([1, 13, 23, 2, 14], [24, 2])
    assert example.supervised == 4


class Characters:
    """A tokenizer of single characters; `{` opens a turn, `}` (id 125) ends it."""

    def __init__(self, end: str = "}", tail: str = "\n") -> None:
        self.end, self.tail = end, tail

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "".join(
            f"{{{message['role'][0]}:{message['content']}{self.end}{self.tail}"
            for message in messages
        )
        return text + ("{a:" if add_generation_prompt else "")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def learned(example: Example) -> str:
    return "".join(chr(label) if label != OFF else "." for label in example.labels)


MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "ok"},
]


def test_a_template_is_cut_at_the_assistants_turns() -> None:
    segments = loss_mask.segments(MESSAGES, Characters(), [ord("}")])
    example = build("r", segments, [ord("}")])
    assert "".join(map(chr, example.input_ids)) == "{u:hi}\n{a:yo}\n{u:so}\n{a:ok}\n"
    assert learned(example) == "..........yo}...........ok}."


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"id": f"r{at}", "messages": messages}) + "\n"
            for at, messages in enumerate(rows)
        ),
        encoding="utf-8",
    )
    return path


def test_a_file_is_refused_by_id_with_the_share_that_does_not_end(tmp_path: Path) -> None:
    smuggled = [MESSAGES[0], {"role": "assistant", "content": "a}b"}]
    path = write(tmp_path / "rows.jsonl", [MESSAGES, MESSAGES[:2], smuggled, MESSAGES[:1]])
    data = loss_mask.load(path, Characters(), [ord("}")], 100)
    assert data.refused == [
        ("r2", "assistant turn with an end-of-turn token inside its text"),
        ("r3", "the last message is not the assistant's"),
    ]
    with pytest.raises(StageFailed, match="row r2"):
        data.check(str(path), 0.0)

    endless = loss_mask.load(
        write(tmp_path / "endless.jsonl", [MESSAGES[:2]]), Characters(end=""), [ord("}")], 100
    )
    assert endless.last_token_not_end == 1.0
    with pytest.raises(StageFailed) as refusal:
        endless.check("endless", 0.0)
    assert "row r0: assistant turn without an end-of-turn token" in str(refusal.value)
    assert "1 of 1 rows is not the end-of-turn token (100.0%)" in str(refusal.value)


def test_rows_that_are_too_long_are_counted_and_never_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [MESSAGES[:2]] * 3 + [MESSAGES])
    data = loss_mask.load(path, Characters(), [ord("}")], 20)
    assert data.too_long == [("r3", 28)]
    assert [len(example.input_ids) for example in data.examples] == [14] * 3
    data.check("rows", 0.25)
    with pytest.raises(StageFailed, match="1 of 4 rows are longer than max_length"):
        data.check("rows", 0.2)


def test_rows_with_one_prompt_are_never_on_both_sides() -> None:
    examples = [
        build(f"{prompt}-{answer}", [("user", [prompt]), ("assistant", [answer, END])], [END])
        for prompt in range(10, 30)
        for answer in range(3, 6)
    ]
    train, held_out = loss_mask.split(examples, 0.2, seed=0)
    assert len(train) + len(held_out) == 60
    assert 12 <= len(held_out) <= 14
    assert not {e.prompt_hash for e in train} & {e.prompt_hash for e in held_out}
    assert loss_mask.split(examples, 0.2, seed=0) == (train, held_out)
    assert loss_mask.split(examples, 0.2, seed=1) != (train, held_out)
    with pytest.raises(StageFailed):
        loss_mask.split(examples[:3], 0.5, seed=0)


def test_a_prompt_with_most_of_the_rows_is_trained_on() -> None:
    """Where the seed would hold it out, the training would be over a rest."""
    prompts = [10] * 80 + list(range(11, 31))
    examples = [
        build(f"{at}", [("user", [prompt]), ("assistant", [3, END])], [END])
        for at, prompt in enumerate(prompts)
    ]
    for seed in range(30):
        train, held_out = loss_mask.split(examples, 0.05, seed=seed)
        assert len(held_out) == 5 and len(train) == 95
    large = [example for example in examples if example.name in map(str, range(75, 82))]
    train, held_out = loss_mask.split(large, 0.05, seed=0)  # 5 of one prompt, 2 of one row
    assert len(held_out) == 1
