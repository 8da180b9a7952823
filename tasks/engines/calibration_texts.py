"""Conversations for a quantizer: read, drawn, and turned into the token ids that an engine sees."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.conversations import for_template

Row = Mapping[str, Any]
"""`{"messages": [...]}`, with `tools` where the conversation has some."""


def read(file: str | None, samples: int, seed: int) -> list[Row]:
    """`samples` conversations of a JSONL file, drawn with `seed`; all of them when it has fewer.

    Raises `StageFailed` when there are fewer than half of what was asked.
    """
    if file is None:
        return []
    rows = _lines(file)
    if len(rows) < samples / 2:
        raise StageFailed(
            Problem(
                file,
                f"{samples} calibration samples were asked for, {len(rows)} rows are there",
                "lower calibration.samples, or give more prompts",
            )
        )
    random.Random(seed).shuffle(rows)
    return rows[:samples]


def read_held_out(file: str | None) -> list[Row]:
    """Every conversation of a JSONL file, in its order."""
    return _lines(file) if file is not None else []


def encode(
    rows: Sequence[Row], tokenizer: Any, max_length: int
) -> tuple[list[list[int]], dict[str, int]]:
    """Token ids of each conversation (the chat template's text, no special tokens added to it).

    With `rows`, `tokens` that are looked at, and `cut`: rows longer than `max_length`.
    """
    ids: list[list[int]] = []
    cut = 0
    for row in rows:
        text = _text(row, row["messages"], tokenizer)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        cut += len(whole) > max_length
        ids.append(whole[:max_length])
    return ids, {"rows": len(ids), "tokens": sum(map(len, ids)), "cut": cut}


def encode_answer(row: Row, tokenizer: Any, max_length: int) -> tuple[list[int], int]:
    """Token ids of a conversation, and where its last answer begins; 0 where that is unknown.

    A template may render a conversation without its answer in another way (reasoning models do),
    so the place counts only where one text begins with the other. Of a text longer than
    `max_length` its middle is taken: the end of the question, the beginning of the answer.
    """
    messages = row["messages"]
    whole = tokenizer(_text(row, messages, tokenizer), add_special_tokens=False)["input_ids"]
    begins = 0
    if messages[-1]["role"] == "assistant":
        asked = _text(row, messages[:-1], tokenizer)
        prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
        begins = len(prompt) if whole[: len(prompt)] == prompt else 0
    first = max(0, min(begins - max_length // 2, len(whole) - max_length))
    return whole[first : first + max_length], begins - first


def within(
    encoded: Sequence[tuple[list[int], int]], tokens: int, least: int
) -> list[tuple[list[int], int]]:
    """The first of these texts: as many as have `tokens` tokens together, but `least` of them."""
    counted = 0
    for number, (ids, _) in enumerate(encoded):
        counted += len(ids)
        if counted > tokens and number >= least:
            return list(encoded[:number])
    return list(encoded)


def question(row: Row, tokenizer: Any) -> str:
    """The conversation up to its last user message, as the model is asked to answer it."""
    messages = row["messages"]
    last = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=0)
    return _text(row, messages[: last + 1], tokenizer)


def dataset(ids: Sequence[Sequence[int]]) -> Any:
    """Token ids as the data set that llmcompressor takes; None for none."""
    from datasets import Dataset

    if not ids:
        return None
    return Dataset.from_list(
        [{"input_ids": list(row), "attention_mask": [1] * len(row)} for row in ids]
    )


def _text(row: Row, messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> str:
    last = messages[-1]["role"] if messages else "user"
    text: str = tokenizer.apply_chat_template(
        for_template(messages),
        tools=row.get("tools") or None,
        tokenize=False,
        add_generation_prompt=last != "assistant",
    )
    return text


def _lines(file: str) -> list[Row]:
    lines = Path(file).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]
