"""Prompt files that are not what their name says, or say one thing twice: refused with a reason."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from recipes.schema import ColumnMapping
from registry.errors import Problem, UserError
from tasks.prompt_records import read_records, sift
from tasks.prompt_tables import digest_of_rows, read_rows, read_table

ROWS = [{"id": f"q{n}", "prompt": f"question {n} \u2028 好"} for n in range(4)]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
MARK = "\ufeff"


def refused(path: Path, mapping: ColumnMapping | None = None) -> Problem:
    """The one problem of a file."""
    with pytest.raises(UserError) as caught:
        read_records(path, mapping or ColumnMapping())
    (problem,) = caught.value.problems
    return problem


def reasons(path: Path, rows: list[dict[str, Any]], **mapping: str) -> list[tuple[int, str]]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    _, rejects = sift(path, read_table(path), ColumnMapping(**mapping))
    return [(reject.line, reject.reason) for reject in rejects]


# -- the same rows in other bytes ------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        MARK + "\r\n".join(LINES[:2]) + "\r\n" + MARK + "\r\n".join(LINES[2:]),
        MARK + "\n" + MARK + LINES[0] + "\n" + "\n".join(LINES[1:]) + "\n" + MARK,
        "\r".join(LINES) + "\r",
    ],
    ids=["two files with a mark each", "marks alone", "old Mac line ends"],
)
def test_marks_within_a_file_and_old_line_ends_change_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(text.encode())
    found = read_rows(path)
    assert [row.columns for row in found] == ROWS
    path.write_text("\n".join(LINES), encoding="utf-8", newline="")
    assert digest_of_rows(found) == digest_of_rows(read_rows(path))


# -- not what its name says ------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 1])
def test_one_json_document_is_no_jsonl(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "p.jsonl"
    for value in (ROWS, {"data": ROWS} if indent else ROWS):
        path.write_text(json.dumps(value, indent=indent), encoding="utf-8")
        problem = refused(path)
        assert problem.where == str(path)
        assert problem.what == "is one JSON document, not one JSON object a line"
        assert "jq -c '.[]'" in problem.remedy


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv"])
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(b"prompt", mtime=0), "gzip"),
        (b"PK\x03\x04rest", "a zip archive or an Excel file"),
        (b"PAR1rest", "Parquet"),
    ],
)
def test_a_packed_file_is_called_what_it_is(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert refused(tmp_path / name).what == f"is not text (it looks like {kind})"


def test_a_path_that_names_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert refused(tmp_path / "pipe.jsonl").what == "is no file (a pipe or a device)"
    assert refused(tmp_path / ("a" * 300 + ".csv")).what == "cannot be read: File name too long"
    assert refused(Path("a\0b.csv")).what == "cannot be read: embedded null byte"
    (tmp_path / "p.csv").write_text("prompt\nx\n")
    for gone in (tmp_path / "gone.csv", tmp_path / "p.csv" / "below.csv"):
        problem = refused(gone)
        assert problem.what == "no such file"
        assert "prompts.path" in problem.remedy, "a recipe may have named it"


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_that_no_comma_separates(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "p.csv"
    path.write_text(f"id{separator}prompt\n1{separator}hello\n")
    assert refused(path).remedy == "save it with commas between the columns"


def test_spaces_round_a_column_are_seen_and_an_absent_one_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("id, text\n1,hello\n")
    mapping = ColumnMapping(prompt="text", segment="topic", reference="topic")
    assert refused(path, mapping).what == "no column 'text', 'topic'; it has ' text', id"


@pytest.mark.parametrize("later", ["", '"fine, this",9\n'])
def test_an_open_quote_is_named_where_it_stands(tmp_path: Path, later: str) -> None:
    path = tmp_path / "p.csv"
    rows = "".join(f"question {n},{n}\n" for n in range(5))
    path.write_text(f'prompt,id\n{rows}"open,6\n{rows}{later}')
    problem = refused(path)
    assert problem.where == f"{path}:7"
    assert problem.what.startswith("not CSV: ")


# -- values ----------------------------------------------------------------------------------


def test_a_field_that_stands_twice_is_not_chosen_from(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x", "id": 1, "prompt": "y"}\n{"prompt": "z", "a": {"b": 1}}\n')
    problem = refused(path)
    assert (problem.where, problem.what) == (
        f"{path}:1",
        "not JSON: the field 'prompt' stands twice",
    )


def test_what_nobody_sees_is_empty(tmp_path: Path) -> None:
    rows = [
        {"p": "\u200b \u2060", "i": "a", "r": "x"},
        {"p": "x", "i": " ", "r": "x"},
        {"p": "x", "i": "c", "r": " \t"},
        {"p": "x\u200b", "i": "d", "r": 0, "s": "\u200b"},
    ]
    path = tmp_path / "p.jsonl"
    assert reasons(path, rows, prompt="p", id="i", reference="r", segment="s") == [
        (1, "p is empty"),
        (2, "i is empty"),
        (3, "r is empty: no right answer"),
    ]
    mapping = ColumnMapping(prompt="p", id="i", reference="r", segment="s")
    (good,), _ = sift(path, read_table(path), mapping)
    assert good == {"id": "d", "segment": "none", "prompt": "x\u200b", "reference": {"intent": "0"}}


def test_values_that_cannot_be_written_are_named_by_their_column(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "x", "i": "a", "s": "nul \0", "r": "x"},
        {"prompt": "x", "i": "b", "s": "s", "r": {"label": "half \ud83d"}},
        {"prompt": "x", "i": 1.5, "s": "s", "r": "x"},
        {"prompt": "x", "i": "\ud83d", "s": "s", "r": "x"},
    ]
    found = reasons(tmp_path / "p.jsonl", rows, id="i", segment="s", reference="r")
    assert found == [
        (1, "s holds a lone surrogate or NUL"),
        (2, "r holds a lone surrogate or NUL"),
        (3, "i is a number with a fraction, not a text or a whole number"),
        (4, "i holds a lone surrogate or NUL"),
    ]


# -- Parquet ---------------------------------------------------------------------------------


def test_bytes_that_are_no_text_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    texts = [b"bad \xff" if n in (2, 4, 6) else b"good %d" % n for n in range(7)]
    write_table(pyarrow.table({"prompt": pyarrow.array(texts).view(pyarrow.string())}), path)
    good, rejects = sift(path, read_table(path), ColumnMapping())
    assert [row["id"] for row in good] == ["row-1", "row-2", "row-4", "row-6"]
    assert [row["prompt"] for row in good] == ["good 0", "good 1", "good 3", "good 5"]
    assert [(one.line, one.reason) for one in rejects] == [
        (line, "byte 5 of a text (0xff) is not UTF-8") for line in (3, 5, 7)
    ]
    assert rejects[0].text == "bad \\xff"
    write_table(pyarrow.table({"prompt": pyarrow.array(texts)}), path)
    _, rejects = sift(path, read_table(path), ColumnMapping())
    assert {one.reason for one in rejects} == {"prompt is bytes, not a text"}


def test_columns_come_from_the_file_and_have_one_name_each(tmp_path: Path) -> None:
    folder = tmp_path / "segment=spam"
    folder.mkdir()
    write_table(pyarrow.table({"prompt": ["x"]}), folder / "p.parquet")
    assert read_rows(folder / "p.parquet")[0].columns == {"prompt": "x"}
    columns = [pyarrow.array(["x"]), pyarrow.array(["y"])]
    twice = pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"])
    write_table(twice, folder / "t.parquet")
    assert refused(folder / "t.parquet").what == "several columns have the name 'prompt'"


def test_a_small_file_of_endless_rows_or_text_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred million equal rows take a few hundred kB of Parquet."""
    free = SimpleNamespace(available=2 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    many = {"prompt": ["hi"] * 100_000, "reference": ["x"] * 100_000}
    long = {"prompt": ["x" * 30_000_000], "reference": ["x"]}
    for name, rows in (("many.parquet", many), ("long.parquet", long)):
        path = tmp_path / name
        write_table(pyarrow.table(rows), path, use_dictionary=name[0] == "m")
        assert path.stat().st_size < 2 << 20
        free.available = 2 << 30
        assert len(read_rows(path)) == len(rows["prompt"])
        free.available = 30 << 20
        with pytest.raises(UserError, match=rf"{name}: .* rows, .* GiB of memory; 0 GiB are free"):
            read_rows(path)
