"""Prompts for a load test, none of them sent twice: equal prompts measure the prefix cache."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eval_suites.load import Synthetic
from registry.errors import UserError
from tasks.engines.vllm_bench import read_prompts

Row = dict[str, Any]

BLOCK = 16
"""Words of a block. Engines cache prompts by blocks; two of ours share at most the prefix."""

VOCABULARY = (
    "order truck port load driver city gate time ship box pallet route delay quote price docks "
    "crane check cargo seal label yard lane depot wheel axle tank valve hub rail"
)


class Prompts:
    """A supply of rows `{"id", "messages"}`; what was taken is never given again."""

    def __init__(self, rows: Iterator[Row], known: str, total: int | None) -> None:
        self._rows, self._known, self._total = rows, known, total
        self.taken = 0

    def take(self, count: int) -> list[Row]:
        """Raises `UserError` when the supply has fewer left."""
        found = list(islice(self._rows, count))
        if len(found) < count:
            raise UserError.at(
                self._known,
                f"holds {self._total} different prompts, {self.taken + count} are needed by now",
                "name more prompts, or a load profile with `synthetic` ones",
            )
        self.taken += count
        return found

    def skip(self, count: int) -> None:
        """Leave out what an interrupted search has sent."""
        self.take(count)


def from_file(path: Path) -> Prompts:
    rows = read_prompts(path)
    return Prompts(iter(rows), str(path), len(rows))


def synthetic(shape: Synthetic, seed: int, first: int = 0) -> Prompts:
    """Endless prompts of exact lengths in words, after one prefix that all share.

    Numbered from `first`: two supplies of numbers that do not overlap have no prompt in common.
    """
    prefix = _words(random.Random(seed), shape.prefix_words)

    def rows() -> Iterator[Row]:
        number = first
        while True:
            # A seed of its own for each, so that a search that was stopped can leave some out.
            drawn = random.Random(f"{seed} {number}")
            own = [f"{number:x}", *_words(drawn, shape.input_words - 1)]
            # The number stands in every block, so no two prompts share one after the prefix.
            own = [f"{word}{number:x}" if i % BLOCK == 0 else word for i, word in enumerate(own)]
            text = " ".join([*prefix, *own])
            yield {"id": f"s{number}", "messages": [{"role": "user", "content": text}]}
            number += 1

    return Prompts(rows(), "synthetic", None)


def shared_blocks(rows: Sequence[Row], prefix_words: int) -> int:
    """How many blocks of words after the prefix stand at the start of more than one prompt.

    What an engine could reuse: a block counts with all that stands before it.
    """
    seen: dict[str, int] = {}
    for row in rows:
        words = row["messages"][-1]["content"].split()[prefix_words:]
        for end in range(BLOCK, len(words) + 1, BLOCK):
            digest = hashlib.sha256(" ".join(words[:end]).encode()).hexdigest()
            seen[digest] = seen.get(digest, 0) + 1
    return sum(count > 1 for count in seen.values())


def _words(drawn: random.Random, count: int) -> list[str]:
    return drawn.choices(VOCABULARY.split(), k=count)
