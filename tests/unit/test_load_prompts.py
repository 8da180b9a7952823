"""No prompt of a load test is sent twice, and none shares more than the prefix with another."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eval_suites.load import Scenario
from registry.errors import UserError
from tasks.engines.load_prompts import BLOCK, SeenBlocks, from_file, synthetic, tokenizer_of


def words(prefix: int, own: int) -> dict[str, Scenario]:
    return {"any": Scenario(unit="words", prefix=prefix, input=own)}


def repeated(rows: list[dict[str, Any]]) -> int:
    """Blocks that stood in an earlier prompt, with all that is before them."""
    seen = SeenBlocks(str.split)
    blocks = sum(len(text.split()) // BLOCK for text in texts(rows))
    return round(seen.share(rows) * blocks)


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


@pytest.mark.parametrize(("prefix", "own"), [(0, 1), (0, 32), (40, 17), (200, 100), (7, 1)])
def test_lengths_are_exact_and_no_block_is_shared_after_the_prefix(prefix: int, own: int) -> None:
    rows = synthetic(words(prefix, own), seed=3).take(2000)
    split = [text.split() for text in texts(rows)]
    assert {len(one) for one in split} == {prefix + own}
    assert len({" ".join(one) for one in split}) == 2000
    assert len({row["id"] for row in rows}) == 2000
    assert {" ".join(one[:prefix]) for one in split} == {" ".join(split[0][:prefix])}
    assert len({one[prefix] for one in split}) == 2000, "they differ from the first word on"
    assert repeated(rows) == (prefix // BLOCK) * 1999, "the shared prefix alone"
    # Not only at the start: no block of words stands in two prompts, wherever.
    blocks = [
        " ".join(one[start : start + BLOCK])
        for one in split
        for start in range(prefix, prefix + own, BLOCK)
    ]
    assert len(set(blocks)) == len(blocks)


def test_shared_blocks_are_seen() -> None:
    rows = synthetic(words(32, 48), seed=1).take(5)
    assert repeated(rows) == 2 * 4, "the prefix of all but the first"
    assert repeated([*rows, rows[2]]) == 2 * 4 + 5, "all of a prompt that is sent twice"
    changed = {"messages": [{"content": texts(rows)[0].rpartition(" ")[0] + " other"}]}
    assert repeated([rows[0], changed]) == 4, "the same but for the last word"
    assert SeenBlocks(str.split).share([]) == 0


def test_the_supply_knows_what_an_engine_could_reuse() -> None:
    supply = synthetic(words(16, 16), seed=1)
    supply.take(100)
    assert supply.expected_hits == pytest.approx(99 / 200)
    supply.take(10)
    assert supply.expected_hits == pytest.approx(0.5), "earlier batches count too"


def test_skipping_is_taking() -> None:
    shape = words(4, 20)
    taken, skipped = synthetic(shape, 9), synthetic(shape, 9)
    taken.take(300)
    skipped.skip(300)
    assert taken.taken == skipped.taken == 300
    assert taken.take(50) == skipped.take(50)
    assert taken.taken == 350


def test_a_seed_gives_the_same_prompts_and_another_others() -> None:
    shape = words(4, 20)
    first = synthetic(shape, 9).take(100)
    assert first == synthetic(shape, 9).take(100)
    assert not set(texts(first)) & set(texts(synthetic(shape, 10).take(100)))


def test_supplies_of_other_numbers_have_nothing_in_common() -> None:
    for prefix, own in ((0, 1), (20, 40)):
        shape = words(prefix, own)
        here, there = synthetic(shape, 9).take(500), synthetic(shape, 9, first=1 << 24).take(500)
        assert not set(texts(here)) & set(texts(there))
        assert not {row["id"] for row in here} & {row["id"] for row in there}
        assert repeated([*here, *there]) == (prefix // BLOCK) * 999
        assert len(texts(there)[0].split()) == prefix + own


def test_parts_taken_one_after_the_other_are_disjoint() -> None:
    supply = synthetic(words(0, 16), 1)
    parts = [supply.take(count) for count in (16, 221, 331, 221)]
    for first, second in pairwise(parts):
        assert not set(texts(first)) & set(texts(second))
    assert repeated([row for part in parts for row in part]) == 0


def written(folder: Path, prompts: list[str]) -> Path:
    path = folder / "prompts.jsonl"
    rows = [{"id": f"p{index}", "prompt": prompt} for index, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_files_prompts_are_given_once_each(tmp_path: Path) -> None:
    supply = from_file(written(tmp_path, ["a", "b", "a", "c", "b", "d"]))
    assert [row["id"] for row in supply.take(2)] == ["p0", "p1"]
    assert texts(supply.take(2)) == ["c", "d"]


def test_conversations_and_tools_are_sent_whole(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "track", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Here.", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "track"}}]
    rows = [
        {"id": "a", "messages": messages, "prompt": "Where?", "reference": None},
        {"id": "b", "messages": messages, "tools": tools},
        {"id": "again", "tools": tools, "messages": messages},
        {"id": "c", "prompt": "Where?", "tools": tools},
    ]
    path = tmp_path / "load.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    supply = from_file(path)
    assert supply.take(3) == [
        {"id": "a", "messages": messages},
        {"id": "b", "messages": messages, "tools": tools},
        {"id": "c", "messages": [{"role": "user", "content": "Where?"}], "tools": tools},
    ]
    other = from_file(path)
    other.take(1)
    assert other.digest != supply.digest
    path.write_text(json.dumps({"id": "a", "messages": messages[:1]}), encoding="utf-8")
    with pytest.raises(UserError, match=r"load\.jsonl:1: .*messages has no user message"):
        from_file(path)


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
    with pytest.raises(UserError, match="no such file"):
        from_file(tmp_path / "nowhere.jsonl")
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no prompts"):
        from_file(path)
    path.write_text(json.dumps([{"id": 1, "prompt": "a"}]), encoding="utf-8")
    with pytest.raises(UserError, match="one JSON document"):
        from_file(path)
    table = tmp_path / "prompts.csv"
    table.write_text("id,prompt\n1,a\n2,b\n", encoding="utf-8")
    assert texts(from_file(table).take(2)) == ["a", "b"]


def test_an_id_is_of_one_prompt_and_a_text_can_be_sent(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [("a", "one"), ("b", "one"), ("a", "one"), ("7", "two"), (7, "three"), ("c", "\ud83d")]
    path.write_text("".join(json.dumps({"id": n, "prompt": p}) + "\n" for n, p in rows))
    with pytest.raises(UserError) as error:
        from_file(path)
    assert [(one.where, one.what) for one in error.value.problems] == [
        (f"{path}:5", "id '7' is that of line 4 too"),
        (f"{path}:6", "a text holds a lone surrogate"),
    ]
    path.write_text("{}\n" * 50)
    with pytest.raises(UserError) as error:
        from_file(path)
    assert len(error.value.problems) == 21
    assert error.value.problems[0].what == "id is missing"
    assert error.value.problems[-1].what == "and 30 more bad rows"


# -- scenarios -------------------------------------------------------------------------------


def test_scenarios_are_mixed_by_their_weights_with_lengths_of_their_own() -> None:
    scenarios = {
        "service": Scenario(unit="words", weight=3, prefix=4, input=8, output=5),
        "report": Scenario(unit="words", weight=1, input=40, output=[100, 200]),
    }
    rows = synthetic(scenarios, seed=5).take(4000)
    service = [row for row in rows if row["scenario"] == "service"]
    report = [row for row in rows if row["scenario"] == "report"]
    assert len(service) == pytest.approx(3000, abs=150)
    assert len(service) + len(report) == 4000
    assert {len(text.split()) for text in texts(service)} == {12}
    assert {len(text.split()) for text in texts(report)} == {40}
    assert {row["output_tokens"] for row in service} == {5}
    longer = sum(row["output_tokens"] == 200 for row in report)
    assert longer == pytest.approx(len(report) / 2, abs=100)
    assert repeated(rows) == 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE, as GPT-2 and Qwen have it, trained on a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["order truck port load driver city gate time ship box"] * 9, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("prefix", "own"), [(0, 24), (0, 300), (64, 40), (33, 129)])
def test_tokens_are_exact(tokenizer: Path, prefix: int, own: int) -> None:
    scenarios = {"any": Scenario(prefix=prefix, input=own)}
    supply = synthetic(scenarios, 3, first=1 << 40, tokenizer=tokenizer)
    rows = supply.take(200)
    count = tokenizer_of(tokenizer).encode_batch(texts(rows), add_special_tokens=False)
    assert {len(one.ids) for one in count} == {prefix + own}
    assert {tuple(one.ids[:prefix]) for one in count} == {tuple(count[0].ids[:prefix])}
    shared = prefix // BLOCK
    assert supply.expected_hits == pytest.approx(shared * 199 / 200 / ((prefix + own) // BLOCK))


def test_lengths_that_cannot_be_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    short = {"chat": Scenario(input=2)}
    with pytest.raises(UserError, match="no text of exactly 2 tokens") as error:
        synthetic(short, 3, first=1 << 40, tokenizer=tokenizer).take(1)
    assert "scenario chat: input" in str(error.value)
    with pytest.raises(UserError, match="no tokenizer is known"):
        synthetic(short, 3)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        synthetic(short, 3, tokenizer=tmp_path)
