"""The split: exact sizes, segments in their shares, and groups that stay together."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from registry.errors import UserError
from tasks.prompt_files import PARTS
from tasks.prompt_split import split

SIZES = {"train": 60, "calibration": 15, "draft": 15, "eval": 30, "load": 10}


def row(name: str, prompt: str, segment: str = "a", **more: Any) -> dict[str, Any]:
    return {"id": name, "segment": segment, "prompt": prompt, "reference": None, **more}


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts that are nothing like each other."""
    rng = random.Random(seed)
    return [
        " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(8))
        for _ in range(count)
    ]


def part_of(parts: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    return {one["id"]: part for part in PARTS for one in parts[part]}


def grouped_rows() -> list[dict[str, Any]]:
    """100 sentences; each third one stands three times, in other words."""
    rows = []
    for number, text in enumerate(sentences(100)):
        segment = f"s{number % 3}"
        rows.append(row(f"{number}-0", text, segment))
        if number % 3 == 0:
            rows.append(row(f"{number}-1", f"{text} now", segment))
            rows.append(row(f"{number}-2", f"hi {text.upper()}!", segment))
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_near_duplicates_come_into_one_part_and_sizes_are_exact(seed: int) -> None:
    made = split(grouped_rows(), SIZES, seed, "x")
    assert {part: len(rows) for part, rows in made.parts.items()} == SIZES
    held: dict[str, set[str]] = {}
    for name, part in part_of(made.parts).items():
        held.setdefault(name.split("-")[0], set()).add(part)
    assert all(len(parts) == 1 for parts in held.values())
    assert made.counts() == {
        "prompts": 168,
        "groups": 34,
        "in_groups": 102,
        "largest": 3,
        "stratified": True,
    }
    assert made.parts == split(grouped_rows(), SIZES, seed, "x").parts


def test_rows_of_one_conversation_come_into_one_part() -> None:
    rows = [
        row(f"{number}", text, conversation=f"c{number // 4}")
        for number, text in enumerate(sentences(160))
    ]
    found = part_of(split(rows, SIZES, 3, "x").parts)
    for number in range(40):
        inside = [found[str(n)] for n in range(4 * number, 4 * number + 4) if str(n) in found]
        assert len(set(inside)) <= 1


def test_conversations_with_the_same_last_message_are_different_prompts() -> None:
    rows = [
        row(str(n), "yes", messages=[{"role": "user", "content": text}, *YES])
        for n, text in enumerate(sentences(130))
    ]
    assert len(part_of(split(rows, SIZES, 0, "x").parts)) == 130


YES = [{"role": "assistant", "content": "Sure?"}, {"role": "user", "content": "yes"}]


def test_every_part_has_the_segments_in_their_shares() -> None:
    rows = [
        row(str(n), text, "rare" if n % 10 == 0 else "often")
        for n, text in enumerate(sentences(400))
    ]
    parts = split(rows, SIZES, 1, "x").parts
    rare = {part: Counter(one["segment"] for one in parts[part])["rare"] for part in PARTS}
    assert rare["train"] == 6 and rare["eval"] == 3 and rare["load"] == 1
    assert all(rare[part] in (1, 2) for part in ("calibration", "draft"))
    # The beginning of a part is like the part: calibration may use only the first rows.
    assert Counter(one["segment"] for one in parts["train"][:30])["rare"] == 3


def test_a_group_larger_than_any_part_is_cut_and_the_rest_used_nowhere() -> None:
    text = " ".join(sentences(3))
    rows = [row(f"same-{n}", f"{text} {n:03d}") for n in range(100)]
    rows += [row(str(n), one) for n, one in enumerate(sentences(80, seed=1))]
    parts = split(rows, SIZES, 0, "x").parts
    assert {part: len(some) for part, some in parts.items()} == SIZES
    held = {part for name, part in part_of(parts).items() if name.startswith("same")}
    assert held == {"train"}


def test_sizes_are_kept_where_large_conversations_leave_no_choice_of_segments() -> None:
    rows = [
        row(str(n), text, f"s{n // 20}", conversation=f"c{n // 20}")
        for n, text in enumerate(sentences(100))
    ]
    sizes = {"train": 20, "calibration": 20, "draft": 20, "eval": 15, "load": 5}
    made = split(rows, sizes, 0, "x")
    assert {part: len(some) for part, some in made.parts.items()} == sizes
    assert not made.stratified
    assert all(len({one["conversation"] for one in made.parts[part]}) == 1 for part in PARTS)


def test_groups_that_make_the_sizes_impossible_are_told_with_numbers() -> None:
    text = " ".join(sentences(3))
    rows = [row(f"same-{n}", f"{text} {n:03d}") for n in range(120)]
    rows += [row(str(n), one) for n, one in enumerate(sentences(20, seed=1))]
    with pytest.raises(UserError) as caught:
        split(rows, SIZES, 0, "all.csv")
    first = caught.value.problems[0]
    assert "140 different prompts are 21 such groups, the largest of 120 rows" in first.what
    assert first.where.startswith("all.csv: prompts.sizes.")
    assert "raise prompts.disjoint.threshold" in first.remedy
    left = [int(p.what.split("only ")[1].split()[0]) for p in caught.value.problems]
    assert sum(left) <= 20 + 60
