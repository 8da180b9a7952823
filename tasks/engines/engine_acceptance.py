"""How many of a draft's proposals a vLLM server accepts on given prompts, by segment.

The server's own counters are read before and after each segment's prompts, which are asked one at
a time. Nobody else may ask it meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from eval_suites.draft_checkpoints import Acceptance
from registry.errors import InfrastructureError, StageFailed
from tasks.engines.greedy_agreement import Answer, greedy_answers

DRAFTS = "vllm:spec_decode_num_drafts_total"
PROPOSED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATED = "vllm:generation_tokens_total"

MAX_UNDRAFTED = 0.1
"""Share of tokens, after each answer's first, that came without a draft: an answer's last tokens
may, near the end of the model's context. The acceptance length says nothing of them."""

SETTLE = 10.0
"""Seconds within which the counters hold what was answered; they follow by a step."""


class Counting(Protocol):
    """Of a server only what is asked here."""

    served_name: str
    api_key: str

    @property
    def url(self) -> str: ...

    def metrics(self, by: str | None = None) -> dict[str, float]: ...


def accepted_by_segment(
    server: Counting,
    rows: Sequence[Mapping[str, Any]],
    max_tokens: int,
    steps: int,
    *,
    ask: Callable[..., list[Answer]] = greedy_answers,
) -> tuple[list[Answer], dict[str, Acceptance]]:
    """Greedy answers to `rows` in order of their segments, and the counts of each segment.

    Raises `InfrastructureError` when the server's counters do not add up to its answers, and
    `StageFailed` when it answered without the draft.
    """
    ordered = by_segment(rows)
    answers: list[Answer] = []
    counts: dict[str, Acceptance] = {}
    seen, places = _read(server, steps)
    for segment, group in groupby(ordered, key=lambda row: str(row.get("segment", ""))):
        said = ask(server.url, server.api_key, server.served_name, list(group), max_tokens)
        answers += said
        wanted = seen[GENERATED] + sum(len(answer.tokens) for answer in said)
        now, now_places = _settled(server, wanted, steps)
        counts[segment] = Acceptance(
            drafts=round(now[DRAFTS] - seen[DRAFTS]),
            proposed=round(now[PROPOSED] - seen[PROPOSED]),
            accepted=round(now[ACCEPTED] - seen[ACCEPTED]),
            per_position=[round(now_places[i] - places[i]) for i in range(steps)],
        )
        seen, places = now, now_places
    _check_drafted(server, answers, Acceptance.total(list(counts.values())))
    return answers, counts


def _check_drafted(server: Counting, answers: Sequence[Answer], total: Acceptance) -> None:
    """Of a step with a draft come one token and the accepted ones, some behind an answer's end."""
    tokens = sum(max(0, len(answer.tokens) - 1) for answer in answers)
    without = tokens - total.drafts - total.accepted
    if total.drafts == 0 or without > MAX_UNDRAFTED * tokens:
        raise StageFailed.at(
            f"{server!r}",
            f"its engine drafted {total.drafts} times and accepted {total.accepted} tokens, but "
            f"its answers have {tokens} after their first ones: it does not use the draft",
            "see its log; a draft's own context may be shorter than its target's",
        )


def by_segment(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """In the order in which they are asked, with a draft and without."""
    return sorted(rows, key=lambda row: str(row.get("segment", "")))


def _read(server: Counting, steps: int) -> tuple[dict[str, float], dict[int, float]]:
    total = server.metrics()
    by_position = server.metrics("position")
    names = (DRAFTS, PROPOSED, ACCEPTED, GENERATED)
    places = {
        int(name.partition('"')[2].rstrip('"}')): value
        for name, value in by_position.items()
        if name.startswith(f"{PER_POSITION}{{")
    }
    missing = [name for name in names if name not in total]
    missing += [f"{PER_POSITION} {place}" for place in range(steps) if place not in places]
    if missing:
        raise InfrastructureError(f"{server!r} does not count {', '.join(missing)}")
    return {name: total[name] for name in names}, places


def _settled(
    server: Counting, wanted: float, steps: int
) -> tuple[dict[str, float], dict[int, float]]:
    deadline = time.monotonic() + SETTLE
    while True:
        total, places = _read(server, steps)
        if total[GENERATED] == wanted:
            return total, places
        if total[GENERATED] > wanted or time.monotonic() > deadline:
            raise InfrastructureError(
                f"{server!r} counts {total[GENERATED]:.0f} generated tokens, its answers make "
                f"{wanted:.0f}: somebody else asks it, or its counters are wrong"
            )
        time.sleep(0.05)
