"""Split prompt records into the five parts, stratified by segment, no prompt in two of them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from registry.errors import UserError
from tasks.conversations import with_prompt
from tasks.prompt_files import PARTS


def split(
    records: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], seed: int, source: str
) -> dict[str, list[dict[str, Any]]]:
    """Parts of the asked sizes, stratified by segment, that share no prompt.

    Prompts that are equal after folding case and white space count as one and only the first is
    used. Raises `UserError` when there are too few prompts.
    """
    folded: dict[str, Mapping[str, Any]] = {}
    for record in records:
        folded.setdefault(" ".join(record["prompt"].casefold().split()), record)
    wanted = sum(sizes.values())
    if wanted > len(folded):
        raise UserError.at(
            source,
            f"{wanted} different prompts are asked for, the file has {len(folded)}",
            "lower prompts.sizes, e.g. --set prompts.sizes.train=200",
        )
    by_segment: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in folded.values():
        by_segment[record["segment"]].append(record)
    order = random.Random(seed)
    for members in by_segment.values():
        order.shuffle(members)
    # Dealing in the order of each row's share within its segment keeps every prefix stratified.
    dealt = sorted(
        ((place + 0.5) / len(members), segment, place)
        for segment, members in by_segment.items()
        for place in range(len(members))
    )
    queue = iter([by_segment[segment][place] for _, segment, place in dealt])
    names = [name for name in PARTS if sizes.get(name)]
    deck = [name for name in names for _ in range(sizes[name])]
    order.shuffle(deck)
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in PARTS}
    for name in deck:
        parts[name].append(dict(next(queue)))
    return parts


def apply_template(
    records: Iterable[Mapping[str, Any]], template: str, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Records with the recipe's template round the last user message, and the labels at hand."""
    listed = ", ".join(labels)
    return [
        {
            **with_prompt(
                record,
                template.replace("{labels}", listed).replace("{prompt}", record["prompt"]),
            ),
            "reference": {**record["reference"], "labels": list(labels)}
            if record["reference"]
            else None,
        }
        for record in records
    ]


def labels_of(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every intent that a reference names, in alphabetical order."""
    named = ((record["reference"] or {}).get("intent") for record in records)
    return sorted({str(intent) for intent in named if intent is not None})
