"""Prompt files as people save them: same text, same records; every mistake named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table
from pyarrow.parquet import write_table

from recipes.schema import ColumnMapping
from registry.errors import UserError
from tasks.prompt_records import read_records
from tasks.prompt_split import apply_template, labels_of, split
from tasks.prompt_tables import digest_of_rows, read_rows

ROWS: list[dict[str, Any]] = [
    {"id": "q1", "prompt": "请读出“单号：ＡＢ１２３”。"},
    {"id": "q2", "prompt": "Summarise the refund policy.", "meta": {"lang": "en"}},
    {"id": "q3", "prompt": "family: \U0001f468‍\U0001f469‍\U0001f467"},
    {"id": "q4", "prompt": "a\tb", "meta": {"topic": "format"}},
    {"id": "q5", "prompt": "   spaces stay   "},
    {"id": "q6", "prompt": "café \u2028 with line separator"},
]


def plain(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def test_bom_crlf_and_blank_lines_change_nothing(tmp_path: Path) -> None:
    one, other = tmp_path / "plain.jsonl", tmp_path / "windows.jsonl"
    one.write_text(plain(ROWS), encoding="utf-8", newline="")
    lines = plain(ROWS).split("\n")[:-1]
    lines.insert(1, "")
    lines.insert(3, "  \t")
    other.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    left, right = read_rows(one), read_rows(other)
    assert [row.columns for row in left] == ROWS
    assert [row.columns for row in right] == ROWS
    assert digest_of_rows(left) == digest_of_rows(right)


def test_a_broken_row_is_named_by_the_line_an_editor_shows(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "cut\r\n[1]\r\n')
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:3", f"{path}:4"]


def test_utf16_is_refused_with_the_encoding_expected(tmp_path: Path) -> None:
    path = tmp_path / "utf16.jsonl"
    path.write_text(plain(ROWS), encoding="utf-16")
    with pytest.raises(UserError, match="UTF-8"):
        read_rows(path)


def test_invalid_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"prompt\nfine\nb\xe9d\n")
    with pytest.raises(UserError, match=r"bad\.csv:3"):
        read_rows(path)


def test_ids_that_differ_only_in_type_or_stand_twice_are_named_together(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    ids = ["q-1", "q-2", "q-3", 7, "q-3", "q-1", "7"]
    path.write_text(plain([{"id": one, "prompt": f"p{n}"} for n, one in enumerate(ids)]))
    with pytest.raises(UserError) as caught:
        read_records(path, ColumnMapping(id="id"))
    assert [problem.what for problem in caught.value.problems] == [
        "id 'q-1' stands on lines 1, 6",
        "id 'q-3' stands on lines 3, 5",
        "id '7' stands on lines 4, 7",
    ]


def test_all_bad_values_at_once(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = ['{"prompt": "ok"}', '{"prompt": ""}', '{"prompt": 3}', '{"x": 1}']
    rows += ['{"prompt": "nul\\u0000"}', '{"prompt": "half \\ud83d"}']
    path.write_text("\n".join(rows))
    with pytest.raises(UserError) as caught:
        read_records(path, ColumnMapping())
    assert [problem.where[-1] for problem in caught.value.problems] == ["2", "3", "4", "5", "6"]


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("text,category\nhello,greet\n")
    with pytest.raises(UserError, match="no column 'prompt'; it has category, text"):
        read_records(path, ColumnMapping())


def test_csv_with_line_breaks_inside_quotes(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(b'text,category\r\n"two\r\nlines",a\r\n\r\nplain,b\r\nshort\r\n')
    with pytest.raises(UserError, match=r"p\.csv:6: has 1 fields, the header 2"):
        read_rows(path)
    path.write_bytes(b'text,category\r\n"two\r\nlines",a\r\nplain,b\r\n')
    records = read_records(path, ColumnMapping(prompt="text", segment="category"))
    assert [record["prompt"] for record in records] == ["two\r\nlines", "plain"]


def test_a_long_csv_field_is_a_field_and_a_bad_row_has_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("prompt\n" + "x" * 300_000 + "\n")
    assert len(read_rows(path)[0].columns["prompt"]) == 300_000
    path.write_text("prompt,b\nshort\n")
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert caught.value.problems[0].remedy == "correct or remove that row"


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_table(Table.from_pydict({"prompt": ["a", "b"], "id": [1, 2]}), path)
    assert [r["id"] for r in read_records(path, ColumnMapping(id="id"))] == ["1", "2"]
    path.write_text("not parquet")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read_rows(path)


def test_a_lone_surrogate_is_named_and_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = ['{"prompt": "\\ud800", "label": "a"}', '{"prompt": "b", "label": "\\ud800"}']
    path.write_text("\n".join([*rows, '{"prompt": "c", "label": ""}']))
    assert len(digest_of_rows(read_rows(path))) == 64
    with pytest.raises(UserError) as caught:
        read_records(path, ColumnMapping(reference="label"))
    assert [problem.where[-1] for problem in caught.value.problems] == ["1", "2", "3"]


def test_nan_is_no_json_and_odd_columns_have_a_digest(tmp_path: Path) -> None:
    import datetime
    import decimal

    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "score": NaN}')
    with pytest.raises(UserError, match=r"p\.jsonl:1: not JSON: NaN is no JSON number"):
        read_rows(path)
    table = tmp_path / "p.parquet"
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    odd = {"prompt": ["a"], "at": [moment], "price": [decimal.Decimal("1.5")], "raw": [b"x"]}
    write_table(Table.from_pydict(odd), table)
    assert len(digest_of_rows(read_rows(table))) == 64


def records(count: int, segments: int = 4) -> list[dict[str, Any]]:
    return [
        {"id": str(n), "segment": f"s{n % segments}", "prompt": f"prompt {n}", "reference": None}
        for n in range(count)
    ]


SIZES = {"train": 40, "calibration": 8, "draft": 8, "eval": 16, "load": 8}


def test_the_parts_share_no_prompt_and_keep_the_segments(tmp_path: Path) -> None:
    parts = split(records(100), SIZES, seed=3, source="x").parts
    assert {name: len(rows) for name, rows in parts.items()} == SIZES
    prompts = [row["prompt"] for rows in parts.values() for row in rows]
    assert len(set(prompts)) == len(prompts)
    assert all({row["segment"] for row in parts[p]} == {"s0", "s1", "s2", "s3"} for p in parts)
    assert parts == split(records(100), SIZES, seed=3, source="x").parts
    assert parts != split(records(100), SIZES, seed=4, source="x").parts


def test_prompts_equal_but_for_case_and_space_are_one() -> None:
    again = {"id": "again", "segment": "s0", "prompt": " PROMPT   1 ", "reference": None}
    doubled = [*records(80), again]
    parts = split(doubled, SIZES, seed=0, source="x").parts
    assert "again" not in [row["id"] for rows in parts.values() for row in rows]
    with pytest.raises(UserError, match="80 different prompts are asked for, the file has 79"):
        split(doubled[1:79] + doubled[80:] + doubled[79:80], SIZES, seed=0, source="x")


def test_the_template_lists_the_labels() -> None:
    rows = [
        {"prompt": "my card", "reference": {"intent": "card"}},
        {"prompt": "x", "reference": None},
    ]
    made = apply_template(rows, "One of {labels}: {prompt}", labels_of(rows))
    assert made[0]["prompt"] == "One of card: my card"
    assert made[0]["reference"] == {"intent": "card", "labels": ["card"]}
    assert made[1]["reference"] is None
