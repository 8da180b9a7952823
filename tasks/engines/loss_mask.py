"""Which tokens are learned: the assistant's, each turn with its end token, and nothing else.

A conversation is rendered with the model's own chat template and cut where an assistant turn
begins (after the generation prompt) and ends (after its end-of-turn token). Every piece is
tokenized by itself, as an engine tokenizes a prompt and then generates, and labelled by *where it
stands*, never by its token ids: it makes no difference whether padding and end token are one.
Works with and without `{% generation %}` in the template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed

IGNORE = -100
"""Label that cross-entropy leaves out."""

Segment = tuple[str, list[int]]
"""Role ("assistant", or any other for what is only read) and token ids."""


class Refused(Exception):
    """Why one conversation cannot be trained on."""


@dataclass(frozen=True)
class Example:
    """One conversation as tokens; `labels` are the ids where supervised, else `IGNORE`."""

    name: str
    input_ids: list[int]
    labels: list[int]
    prompt_hash: str = ""

    @property
    def supervised(self) -> int:
        return sum(label != IGNORE for label in self.labels)

    @property
    def prompt_ids(self) -> list[int]:
        """Everything before the last assistant turn, its generation prompt included."""
        return self.input_ids[: self._last_turn()[0]]

    @property
    def answer_ids(self) -> list[int]:
        """The last assistant turn with its end token."""
        first, end = self._last_turn()
        return self.input_ids[first:end]

    def _last_turn(self) -> tuple[int, int]:
        end = max(at for at, label in enumerate(self.labels) if label != IGNORE) + 1
        first = end
        while first > 0 and self.labels[first - 1] != IGNORE:
            first -= 1
        return first, end


@dataclass
class Dataset:
    """A training file as examples, and what was left out of it."""

    rows: int
    end_ids: list[int]
    examples: list[Example] = field(default_factory=list)
    too_long: list[tuple[str, int]] = field(default_factory=list)
    """Row id and its number of tokens."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Row id and reason."""
    not_ended: int = 0
    """Rows whose last supervised token is no end-of-turn token."""

    @property
    def last_token_not_end(self) -> float:
        return self.not_ended / self.rows if self.rows else 0.0

    def check(self, where: str, max_too_long_share: float) -> None:
        """Raise `StageFailed` with every reason not to train on this file."""
        problems = [Problem(f"{where}, row {name}", reason) for name, reason in self.refused[:20]]
        if self.not_ended:
            problems.append(
                Problem(
                    where,
                    f"the last supervised token of {self.not_ended} of {self.rows} rows is not "
                    f"the end-of-turn token ({self.last_token_not_end:.1%})",
                    "a model trained on them would not learn to stop",
                )
            )
        if self.rows and len(self.too_long) > max_too_long_share * self.rows:
            name, length = max(self.too_long, key=lambda row: row[1])
            problems.append(
                Problem(
                    where,
                    f"{len(self.too_long)} of {self.rows} rows are longer than max_length; the "
                    f"longest is {name} with {length} tokens",
                    "raise max_length; rows are never cut",
                )
            )
        if not problems and len(self.examples) < 2:
            problems.append(Problem(where, f"{len(self.examples)} usable rows; at least 2 needed"))
        if problems:
            raise StageFailed(problems)


def build(name: str, segments: Sequence[Segment], end_ids: Sequence[int]) -> Example:
    """Join segments; supervise the assistant's. Raises `Refused` for a turn that does not end.

    Each assistant segment must hold exactly one end-of-turn token, as its last.
    """
    input_ids: list[int] = []
    labels: list[int] = []
    for role, ids in segments:
        if role == "assistant":
            if not ids or ids[-1] not in end_ids:
                raise Refused("assistant turn without an end-of-turn token")
            if any(token in end_ids for token in ids[:-1]):
                raise Refused("assistant turn with an end-of-turn token inside its text")
        input_ids += ids
        labels += ids if role == "assistant" else [IGNORE] * len(ids)
    if all(label == IGNORE for label in labels):
        raise Refused("no assistant turn")
    first = labels.index(next(label for label in labels if label != IGNORE))
    prompt = json.dumps(input_ids[:first]).encode()
    return Example(name, input_ids, labels, hashlib.sha256(prompt).hexdigest())


def ends(segments: Sequence[Segment], end_ids: Sequence[int]) -> bool:
    """Whether the last supervised token is an end-of-turn token."""
    last = [ids for role, ids in segments if role == "assistant" and ids]
    return bool(last) and last[-1][-1] in end_ids


def pad(
    examples: Sequence[Example], pad_id: int, length: int | None = None
) -> dict[str, list[list[int]]]:
    """A batch of equal rows, filled on the right: `input_ids`, `attention_mask`, `labels`."""
    width = length or max(len(example.input_ids) for example in examples)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for example in examples:
        fill = width - len(example.input_ids)
        batch["input_ids"].append(example.input_ids + [pad_id] * fill)
        batch["attention_mask"].append([1] * len(example.input_ids) + [0] * fill)
        batch["labels"].append(example.labels + [IGNORE] * fill)
    return batch


def tensors(examples: Sequence[Example], pad_id: int) -> dict[str, Any]:
    """`pad` as int64 tensors of shape (rows, longest row)."""
    import torch

    return {key: torch.tensor(rows) for key, rows in pad(examples, pad_id).items()}


def split(
    examples: Sequence[Example], held_out_share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Training and held-out part. Rows with one prompt stay together; the order is the seed's."""

    def rank(example: Example) -> str:
        return hashlib.sha256(f"{seed}:{example.prompt_hash}".encode()).hexdigest()

    ordered = sorted(examples, key=lambda example: (rank(example), example.name))
    cut = max(1, round(len(ordered) * held_out_share))
    while cut < len(ordered) and rank(ordered[cut]) == rank(ordered[cut - 1]):
        cut += 1
    if cut >= len(ordered):
        raise StageFailed(Problem("held_out_share", "no training rows with another prompt left"))
    return ordered[cut:], ordered[:cut]


# -- from messages to segments ---------------------------------------------------------------


def segments(
    messages: Sequence[dict[str, Any]], tokenizer: Any, end_ids: Sequence[int]
) -> list[Segment]:
    """Tokens of a conversation, cut at the assistant's turns.

    Raises `Refused` where the template does not let the turns be told apart.
    """

    def rendered(upto: int, prompt: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages[:upto]), tokenize=False, add_generation_prompt=prompt
        )
        return text

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    if not messages or messages[-1].get("role") != "assistant":
        raise Refused("the last message is not the assistant's")
    full = rendered(len(messages), False)
    pieces: list[Segment] = []
    done = 0
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = rendered(at, True), rendered(at + 1, False)
        if not full.startswith(before) or not full.startswith(after) or len(after) <= len(before):
            raise Refused("the chat template renders this turn differently once others follow")
        pieces.append(("prompt", tokens(full[done : len(before)])))
        turn = tokens(full[len(before) : len(after)])
        # Behind the end token a template may put more (a line break) that is never generated.
        last = max((i for i, token in enumerate(turn) if token in end_ids), default=len(turn) - 1)
        pieces += [("assistant", turn[: last + 1]), ("template", turn[last + 1 :])]
        done = len(after)
    pieces.append(("template", tokens(full[done:])))
    joined = [token for _, ids in pieces for token in ids]
    if joined != tokens(full) and tokenizer.decode(joined, skip_special_tokens=False) != full:
        raise Refused("the tokenizer gives other text when the turns are tokenized one by one")
    return pieces


def load(path: Path, tokenizer: Any, end_ids: Sequence[int], max_length: int) -> Dataset:
    """Every row of a JSONL file as an example, or counted as too long, or refused by id."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    data = Dataset(rows=len(lines), end_ids=list(end_ids))
    for line in lines:
        row = json.loads(line)
        name = str(row["id"])
        try:
            pieces = segments(row["messages"], tokenizer, end_ids)
            data.not_ended += not ends(pieces, end_ids)
            example = build(name, pieces, end_ids)
        except Refused as reason:
            data.refused.append((name, str(reason)))
            continue
        if len(example.input_ids) > max_length:
            data.too_long.append((name, len(example.input_ids)))
        else:
            data.examples.append(example)
    return data
