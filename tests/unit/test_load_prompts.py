"""No prompt of a load test is sent twice, and none shares more than the prefix with another."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eval_suites.load import Synthetic
from registry.errors import UserError
from tasks.engines.load_prompts import BLOCK, from_file, shared_blocks, synthetic


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


@pytest.mark.parametrize(("prefix", "own"), [(0, 1), (0, 32), (40, 17), (200, 100), (7, 1)])
def test_lengths_are_exact_and_no_block_is_shared_after_the_prefix(prefix: int, own: int) -> None:
    rows = synthetic(Synthetic(prefix_words=prefix, input_words=own), seed=3).take(2000)
    words = [text.split() for text in texts(rows)]
    assert {len(one) for one in words} == {prefix + own}
    assert len({" ".join(one) for one in words}) == 2000
    assert len({row["id"] for row in rows}) == 2000
    assert {" ".join(one[:prefix]) for one in words} == {" ".join(words[0][:prefix])}
    assert len({one[prefix] for one in words}) == 2000, "they differ from the first word on"
    assert shared_blocks(rows, prefix) == 0
    # Not only at the start: no block of words stands in two prompts, wherever.
    blocks = [
        " ".join(one[start : start + BLOCK])
        for one in words
        for start in range(prefix, prefix + own, BLOCK)
    ]
    assert len(set(blocks)) == len(blocks)


def test_shared_blocks_are_seen() -> None:
    shape = Synthetic(prefix_words=32, input_words=48)
    rows = synthetic(shape, seed=1).take(5)
    assert shared_blocks(rows, 0) == 2, "the prefix itself, where it is not declared"
    assert shared_blocks([*rows, rows[2]], 32) == 3, "all of a prompt that is sent twice"
    changed = {"messages": [{"content": texts(rows)[0].rpartition(" ")[0] + " other"}]}
    assert shared_blocks([rows[0], changed], 32) == 2, "the same but for the last word"
    assert shared_blocks([], 32) == 0


def test_skipping_is_taking() -> None:
    shape = Synthetic(prefix_words=4, input_words=20)
    taken, skipped = synthetic(shape, 9), synthetic(shape, 9)
    taken.take(300)
    skipped.skip(300)
    assert taken.taken == skipped.taken == 300
    assert taken.take(50) == skipped.take(50)
    assert taken.taken == 350


def test_a_seed_gives_the_same_prompts_and_another_others() -> None:
    shape = Synthetic(prefix_words=4, input_words=20)
    first = synthetic(shape, 9).take(100)
    assert first == synthetic(shape, 9).take(100)
    assert not set(texts(first)) & set(texts(synthetic(shape, 10).take(100)))


def test_supplies_of_other_numbers_have_nothing_in_common() -> None:
    for shape in (Synthetic(input_words=1), Synthetic(prefix_words=20, input_words=40)):
        here, there = synthetic(shape, 9).take(500), synthetic(shape, 9, first=1 << 24).take(500)
        assert not set(texts(here)) & set(texts(there))
        assert not {row["id"] for row in here} & {row["id"] for row in there}
        assert shared_blocks([*here, *there], shape.prefix_words) == 0
        assert len(texts(there)[0].split()) == shape.prefix_words + shape.input_words


def test_parts_taken_one_after_the_other_are_disjoint() -> None:
    supply = synthetic(Synthetic(input_words=16), 1)
    parts = [supply.take(count) for count in (16, 221, 331, 221)]
    for first, second in pairwise(parts):
        assert not set(texts(first)) & set(texts(second))
    assert shared_blocks([row for part in parts for row in part], 0) == 0


def written(folder: Path, prompts: list[str]) -> Path:
    path = folder / "prompts.jsonl"
    rows = [{"id": f"p{index}", "prompt": prompt} for index, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_files_prompts_are_given_once_each(tmp_path: Path) -> None:
    supply = from_file(written(tmp_path, ["a", "b", "a", "c", "b", "d"]))
    assert [row["id"] for row in supply.take(2)] == ["p0", "p1"]
    assert texts(supply.take(2)) == ["c", "d"]


def test_a_file_that_is_used_up_is_a_users_error(tmp_path: Path) -> None:
    path = written(tmp_path, ["a", "b", "a", "c"])
    supply = from_file(path)
    supply.take(2)
    with pytest.raises(UserError, match="holds 3 different prompts, 5 are needed by now") as error:
        supply.take(3)
    assert str(path) in str(error.value)
    assert "name more prompts" in str(error.value)
    with pytest.raises(UserError, match="holds 3 different prompts, 4 are needed"):
        from_file(path).skip(4)


def test_a_file_with_odd_lines_is_a_users_error(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 1, "prompt": "a"}\n{"id": 2}\nno json\n', encoding="utf-8")
    with pytest.raises(UserError) as error:
        from_file(path)
    assert f"{path}:2" in str(error.value)
    assert f"{path}:3" in str(error.value)
    with pytest.raises(UserError, match="cannot be read"):
        from_file(tmp_path / "nowhere.jsonl")
