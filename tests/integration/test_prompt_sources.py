"""Prompts as the libraries that people use save them: the same records from each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import ColumnMapping, FilePrompts
from registry.errors import UserError
from tasks import prompts
from tasks.prompt_formats import read_formatted
from tasks.prompt_records import all_records
from tasks.prompt_tables import read_table

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}]


def turns(number: int) -> list[dict[str, Any]]:
    return [
        SYSTEM,
        {"role": "user", "content": f"Where is FT{number}?"},
        {"role": "assistant", "content": "In Wuhan."},
        {"role": "user", "content": f"And when does it arrive? {number}"},
    ]


def records(path: Path, mapping: ColumnMapping, **options: Any) -> list[dict[str, Any]]:
    return all_records(path, read_formatted(path, **options), mapping)


def test_the_same_conversation_from_every_kind_of_file(tmp_path: Path) -> None:
    import datasets
    import pandas

    rows = [
        {"name": "a", "turns": turns(1), "sys": "House rules.", "functions": TOOLS},
        {"name": "b", "turns": [turns(2)[1]], "sys": None, "functions": None},
    ]
    texts = [
        {**row, "turns": json.dumps(row["turns"]), "functions": json.dumps(row["functions"])}
        for row in rows
    ]
    pandas.DataFrame(texts).to_csv(tmp_path / "p.csv", index=False)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "p.jsonl").write_text(lines, encoding="utf-8")
    pandas.DataFrame(rows).to_parquet(tmp_path / "p.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    mapping = ColumnMapping(messages="turns", system="sys", tools="functions", id="name")
    wanted = [
        {
            "id": "a",
            "segment": "all",
            "prompt": "And when does it arrive? 1",
            "reference": None,
            "messages": [
                {"role": "system", "content": "House rules.\n\nBe brief."},
                *turns(1)[1:],
            ],
            "tools": TOOLS,
        },
        {"id": "b", "segment": "all", "prompt": "Where is FT2?", "reference": None},
    ]
    for name in ("p.csv", "p.jsonl", "p.parquet", "folder"):
        assert records(tmp_path / name, mapping) == wanted, name


def test_a_folder_with_splits_needs_one(tmp_path: Path) -> None:
    import datasets

    def dataset(name: str) -> Any:
        # Formats and choices of columns of the one who saved it are not ours.
        made = datasets.Dataset.from_list([{"prompt": f"{name} 好", "id": 1, "x": 0.5}])
        return made.with_format("numpy", columns=["id"])

    splits = datasets.DatasetDict({name: dataset(name) for name in ("train", "test")})
    splits.save_to_disk(str(tmp_path / "both"))
    dataset("one").save_to_disk(str(tmp_path / "one"))
    found = records(tmp_path / "both", ColumnMapping(id="id"), split="test")
    assert found == [{"id": "1", "segment": "all", "prompt": "test 好", "reference": None}]
    assert records(tmp_path / "one", ColumnMapping())[0]["prompt"] == "one 好"
    (tmp_path / "empty").mkdir()
    for name, split, message in (
        ("both", None, "no split is named; it has train, test"),
        ("both", "dev", "no split 'dev'; it has train, test"),
        ("both", "../one", r"no split '\.\./one'"),
        ("one", "test", "is one dataset, it has no split 'test'"),
        ("empty", None, "is no folder that `datasets` has saved"),
    ):
        with pytest.raises(UserError, match=message):
            read_table(tmp_path / name, split)
    (file,) = (tmp_path / "one").glob("*.arrow")
    file.write_bytes(b"cut")
    with pytest.raises(UserError, match="cannot be read"):
        read_table(tmp_path / "one")
    (tmp_path / "p.csv").write_text("prompt\nx\n")
    with pytest.raises(UserError, match="is a file, it has no split 'train'"):
        read_table(tmp_path / "p.csv", "train")


def words(count: int, start: int = 0) -> list[str]:
    return [f"question {n * 7919} {chr(97 + n % 26) * 4}" for n in range(start, start + count)]


def test_splits_of_a_datasets_folder_as_files_of_parts(tmp_path: Path) -> None:
    import datasets

    made = {
        "train": datasets.Dataset.from_dict({"prompt": words(40)}),
        "test": datasets.Dataset.from_dict({"prompt": words(10, 50)}),
    }
    datasets.DatasetDict(made).save_to_disk(tmp_path / "folder")
    of = FilePrompts(
        source="file",
        path=str(tmp_path / "folder"),
        split="train",
        files={"eval": str(tmp_path / "folder/test")},
        sizes={"train": 4, "calibration": 1, "draft": 1, "eval": 4, "load": 1},
    )
    found = prompts.records_by_file(prompts.read_files(of), of)
    assert [one["prompt"] for one in found[""]] == words(40)
    assert [one["prompt"] for one in found["eval"]] == words(10, 50)
