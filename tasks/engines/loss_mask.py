"""Which tokens are learned: the assistant's, each turn with its end token, and nothing else.

A conversation is rendered with the model's own chat template and cut where an assistant turn
begins (after the generation prompt) and ends (after its end-of-turn token). Every piece is
tokenized by itself, as an engine tokenizes a prompt and then generates, and labelled by *where it
stands*, never by its token ids: it makes no difference whether padding and end token are one.
Works with and without `{% generation %}` in the template.

Some templates (Qwen3's) render an earlier turn differently once others follow: the reasoning is
taken out. Such a turn is only read there, and learned in an example of its own that ends with it,
so that every turn is trained as the model would have to write it.

A row with `"truncated": true` holds an answer that was cut at a token limit: no end is learned.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed

IGNORE = -100
"""Label that cross-entropy leaves out."""

Segment = tuple[str, list[int]]
"""Role and token ids: `assistant` is learned with its end, `cut` is learned and does not end, any
other role is only read."""

LEARNED = ("assistant", "cut")

DAY = datetime(2026, 1, 1)
"""The date of every row for a chat template that writes today's (Llama 3): a run that goes on after
midnight would otherwise have other tokens, and by them another held-out part."""


class Refused(Exception):
    """Why one conversation cannot be trained on."""


class NotEnded(Refused):
    """A turn has no end-of-turn token: a model trained on it would not learn to stop."""


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
    """Rows whose last supervised token is no end-of-turn token, though their answer ended."""
    truncated: int = 0
    """Rows whose answer was cut at a token limit and is kept all the same."""
    own_turns: int = 0
    """Earlier turns that are learned in an example of their own."""

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

    Each assistant segment must hold exactly one end-of-turn token, as its last; a cut one none.
    """
    input_ids: list[int] = []
    labels: list[int] = []
    for role, ids in segments:
        if role == "assistant" and (not ids or ids[-1] not in end_ids):
            raise NotEnded("assistant turn without an end-of-turn token")
        if role in LEARNED:
            text = ids[:-1] if role == "assistant" else ids
            if any(token in end_ids for token in text):
                raise Refused("assistant turn with an end-of-turn token inside its text")
        input_ids += ids
        labels += ids if role in LEARNED else [IGNORE] * len(ids)
    if all(label == IGNORE for label in labels):
        raise Refused("no assistant turn")
    first = next(at for at, label in enumerate(labels) if label != IGNORE)
    return Example(name, input_ids, labels, _hash(input_ids[:first]))


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


def tensors(examples: Sequence[Example], pad_id: int, *, partial: bool = False) -> dict[str, Any]:
    """`pad` as int64 tensors of shape (rows, longest row), with `shift_labels`.

    `shift_labels` holds for each position the label of the next token. `partial` leaves out the
    positions where no row has one: with `logits_to_keep` (their numbers) the model computes no
    logits there, which for a large vocabulary is most of the memory and much of the time.
    """
    import torch

    batch = {key: torch.tensor(rows) for key, rows in pad(examples, pad_id).items()}
    return shifted(batch, partial=partial)


def shifted(batch: dict[str, Any], *, partial: bool) -> dict[str, Any]:
    """`batch` with `shift_labels`, and with `logits_to_keep` where `partial`."""
    shift_labels = batch["labels"].roll(-1, dims=1)
    shift_labels[:, -1] = IGNORE
    if not partial:
        return {**batch, "shift_labels": shift_labels}
    kept = (shift_labels != IGNORE).any(dim=0).nonzero().flatten()
    return {**batch, "shift_labels": shift_labels[:, kept], "logits_to_keep": kept}


def takes_positions(model: Any) -> bool:
    """Whether the model computes logits at chosen positions only (transformers' causal models)."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(type(plain).forward).parameters


def split(
    examples: Sequence[Example], held_out_share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Training and held-out part. Rows with one prompt stay together; the order is the seed's.

    The held-out part is at most twice its share where prompts allow it.
    """

    def rank(example: Example) -> str:
        return hashlib.sha256(f"{seed}:{example.prompt_hash}".encode()).hexdigest()

    groups: dict[str, list[Example]] = {}
    for example in sorted(examples, key=lambda example: (rank(example), example.name)):
        groups.setdefault(rank(example), []).append(example)
    wanted = max(1, round(len(examples) * held_out_share))
    chosen: list[str] = []
    count = 0
    for place, group in groups.items():
        # A prompt with very many rows is trained on: held out, it would be most of the data.
        if count < wanted and count + len(group) <= 2 * wanted:
            chosen.append(place)
            count += len(group)
    if not chosen:
        chosen = [min(groups, key=lambda place: len(groups[place]))]
    if len(chosen) == len(groups):
        raise StageFailed(Problem("held_out_share", "no training rows with another prompt left"))
    held_out = [example for place in chosen for example in groups[place]]
    train = [example for place, group in groups.items() if place not in chosen for example in group]
    return train, held_out


# -- from messages to segments ---------------------------------------------------------------


def segments(
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    end_ids: Sequence[int],
    tools: Sequence[dict[str, Any]] = (),
    truncated: bool = False,
) -> list[Segment]:
    """Tokens of a conversation, cut at the assistant's turns; the last one is always learned.

    An earlier turn that the template renders differently once others follow has the role `earlier`
    and is part of what is read. `truncated`: the last turn was cut, so its end token is only read.
    Raises `Refused` where the template does not let the turns be told apart.
    """
    messages = [_with_parsed_arguments(message) for message in messages]
    given: dict[str, Any] = {"tools": list(tools)} if tools else {}
    if "strftime_now" in str(getattr(tokenizer, "chat_template", None)):
        given["strftime_now"] = DAY.strftime

    def rendered(upto: int, prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: str = tokenizer.apply_chat_template(
                messages[:upto], tokenize=False, add_generation_prompt=prompt, **given
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise Refused(f"the chat template cannot show it: {error}") from None
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
        is_last = at == len(messages) - 1
        before, after = rendered(at, True), rendered(at + 1, False)
        if not full.startswith(before) or not full.startswith(after) or len(after) <= len(before):
            if is_last:
                raise Refused("the chat template does not put this turn behind its own prompt")
            pieces.append(("earlier", []))
            continue
        pieces.append(("prompt", tokens(full[done : len(before)])))
        turn = tokens(full[len(before) : len(after)])
        # Behind the end token a template may put more (a line break) that is never generated.
        last = max((i for i, token in enumerate(turn) if token in end_ids), default=len(turn) - 1)
        if truncated and is_last:
            text = turn[:last] if turn[last] in end_ids else turn
            pieces += [("cut", text), ("template", turn[len(text) :])]
        else:
            pieces += [("assistant", turn[: last + 1]), ("template", turn[last + 1 :])]
        done = len(after)
    pieces.append(("template", tokens(full[done:])))
    joined = [token for _, ids in pieces for token in ids]
    if joined != tokens(full) and tokenizer.decode(joined, skip_special_tokens=False) != full:
        raise Refused("the tokenizer gives other text when the turns are tokenized one by one")
    return pieces


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Tool calls with their arguments as an object: OpenAI writes them as JSON text, and chat
    templates, as vLLM calls them, take the object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                raise Refused("the arguments of a tool call are not JSON") from None
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def conversation(row: dict[str, Any], tokenizer: Any, end_ids: Sequence[int]) -> list[Example]:
    """The examples of one row. Raises `Refused`.

    The first example is the whole conversation. Each earlier turn that is not learned in it
    follows as an example of its own. All carry the hash of what stands before the first turn, so
    that the parts of one conversation never stand on both sides of a split.
    """
    name, messages = str(row["id"]), row["messages"]
    tools, truncated = row.get("tools") or [], bool(row.get("truncated"))
    pieces = segments(messages, tokenizer, end_ids, tools, truncated)
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    marks = [role for role, _ in pieces if role in (*LEARNED, "earlier")]
    found = [build(name, pieces, end_ids)]
    for at, mark in zip(turns, marks, strict=True):
        if mark != "earlier":
            continue
        part = segments(messages[: at + 1], tokenizer, end_ids, tools)
        last = max(place for place, (role, _) in enumerate(part) if role == "assistant")
        only_last = [
            ("earlier" if role == "assistant" and place < last else role, ids)
            for place, (role, ids) in enumerate(part)
        ]
        found.append(build(f"{name} turn {at}", only_last, end_ids))
    opening = min((example.input_ids for example in found), key=len)
    shared = _hash(opening[: _first_learned(found)])
    return [replace(example, prompt_hash=shared) for example in found]


def _first_learned(examples: Sequence[Example]) -> int:
    """Tokens before the first learned one, over the examples of one conversation."""
    return min(
        next(at for at, label in enumerate(example.labels) if label != IGNORE)
        for example in examples
    )


def _hash(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()


def load(path: Path, tokenizer: Any, end_ids: Sequence[int], max_length: int) -> Dataset:
    """Every row of a JSONL file as examples, or counted as too long, or refused by id."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    data = Dataset(rows=len(lines), end_ids=list(end_ids))
    for line in lines:
        row = json.loads(line)
        name = str(row["id"])
        data.truncated += bool(row.get("truncated"))
        try:
            examples = conversation(row, tokenizer, end_ids)
        except Refused as reason:
            data.refused.append((name, str(reason)))
            data.not_ended += isinstance(reason, NotEnded)
            continue
        length = max(len(example.input_ids) for example in examples)
        if length > max_length:
            data.too_long.append((name, length))
        else:
            data.examples += examples
            data.own_turns += len(examples) - 1
    return data
