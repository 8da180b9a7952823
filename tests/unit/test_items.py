"""Items: what a file says is what a gate reads, or a reason that names the place."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry.evidence import ITEM_COLUMNS, Unusable
from registry.items import Items, read_items
from registry.settings import CHECKOUT


def from_csv(folder: Path, text: str | bytes) -> Items:
    path = folder / "items.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return read_items(path)


def from_jsonl(folder: Path, *lines: Any) -> Items:
    path = folder / "items.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return read_items(path)


def from_parquet(folder: Path, **columns: Any) -> Items:
    path = folder / "items.parquet"
    pd.DataFrame(columns).to_parquet(path)
    return read_items(path)


def reason(read: Any, *arguments: Any) -> str:
    with pytest.raises(Unusable) as caught:
        read(*arguments)
    return str(caught.value)


def test_importing_it_imports_no_pandas() -> None:
    code = (
        "import sys, registry.items, registry.evidence_folders; "
        "print([n for n in ('pandas', 'numpy', 'pyarrow', 'prefect') if n in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


# -- what is read ----------------------------------------------------------------------------


def test_a_csv_is_read_in_order_of_item_id_with_texts_as_they_are(tmp_path: Path) -> None:
    text = (
        "item_id, segment ,hit_rate,f1\n"
        'NA,null, 1 ,0.25\nnull,B,0,1e-1\n\n007,A,1.0,.5\n"a\nb",B,+1,5.\nnan,A,0,-0.5\n'
    )
    items = from_csv(tmp_path, text)
    assert items.ids.tolist() == ["007", "NA", "a\nb", "nan", "null"]
    assert items.labels("segment").tolist() == ["A", "null", "B", "A", "B"]
    assert items.metric("hit_rate").tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert items.metric("f1").tolist() == [0.5, 0.25, 5.0, -0.5, 0.1]
    assert items.metric("f1").dtype == "float64"
    assert len(items) == 5
    assert items.metrics() == ["hit_rate", "f1"]
    assert items.has("segment") and not items.has("conversation")
    # The line on which the row begins, as an editor counts.
    assert dict(zip(items.ids, items.frame.index, strict=True)) == {
        "NA": 2, "null": 3, "007": 5, "a\nb": 6, "nan": 8,
    }  # fmt: skip


def test_bom_crlf_and_blank_lines_change_nothing(tmp_path: Path) -> None:
    plain = "item_id,segment,m\n1,A,0.5\n2,B,1\n"
    windows = b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").replace("1,A", "\r\n1,A").encode()
    one, other = from_csv(tmp_path, plain), from_csv(tmp_path, windows)
    assert one.ids.tolist() == other.ids.tolist() == ["1", "2"]
    assert one.metric("m").tolist() == other.metric("m").tolist() == [0.5, 1.0]
    rows = b'\xef\xbb\xbf{"item_id": "q", "m": 1}\r\n\r\n{"item_id": "p", "m": 0}\r\n'
    (tmp_path / "items.jsonl").write_bytes(rows)
    lines = read_items(tmp_path / "items.jsonl")
    assert (lines.ids.tolist(), lines.metric("m").tolist()) == (["p", "q"], [0.0, 1.0])


def test_jsonl_numbers_and_labels(tmp_path: Path) -> None:
    items = from_jsonl(
        tmp_path,
        {"item_id": 7, "m": 1, "turn": 3, "flag": True, "output_tokens": 12},
        {"item_id": "a", "m": 0.25, "turn": 10, "flag": False, "output_tokens": 0},
    )
    assert items.ids.tolist() == ["7", "a"]
    assert items.metric("m").tolist() == [1.0, 0.25]
    assert items.labels("turn").tolist() == ["3", "10"]
    assert items.labels("flag").tolist() == ["true", "false"]
    assert items.metric("output_tokens").tolist() == [12.0, 0.0]
    assert items.metrics() == ["m", "turn", "output_tokens"]


def test_parquet_of_our_own(tmp_path: Path) -> None:
    rows = {name: ["x", "y"] for name in ITEM_COLUMNS} | {"output_tokens": [3, 4]}
    items = from_parquet(tmp_path, **(rows | {"item_id": ["b", "a"], "hit_rate": [1.0, 0.5]}))
    assert items.ids.tolist() == ["a", "b"]
    assert items.metric("hit_rate").tolist() == [0.5, 1.0]
    assert items.metric("output_tokens").tolist() == [4.0, 3.0]
    assert items.labels("segment").tolist() == ["y", "x"]
    # Most of the bytes, and no gate reads them.
    assert not items.has("response")
    assert items.frame.index.tolist() == [2, 1]


def test_integer_ids_of_parquet_are_texts(tmp_path: Path) -> None:
    assert from_parquet(tmp_path, item_id=[10, 9], m=[0.0, 1.0]).ids.tolist() == ["10", "9"]


def test_a_name_without_a_filter_finds_the_one_filter(tmp_path: Path) -> None:
    items = from_jsonl(tmp_path, {"item_id": 1, "em,strict": 1, "em,loose": 0, "acc,none": 0.5})
    assert items.metric("acc").tolist() == [0.5]
    assert items.metric("em,strict").tolist() == [1.0]
    text = reason(items.metric, "em")
    assert "'em,strict'" in text and "'em,loose'" in text


# -- cells that are no numbers ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("true", "write 1 or 0"),
        ("True", "write 1 or 0"),
        ('"0,71"', "write 0.71"),
        ("nan", "'nan'"),
        ("inf", "'inf'"),
        ("1e999", "'1e999'"),
        ("1_000", "'1_000'"),
        ("٣", "'٣'"),
        ("0x1", "'0x1'"),
        ("71%", "'71%'"),
        ("1 2", "'1 2'"),
        ("None", "'None'"),
    ],
)
def test_csv_cells_that_are_no_finite_number(tmp_path: Path, cell: str, said: str) -> None:
    items = from_csv(tmp_path, f"item_id,m\nq1,1\nq2,{cell}\n")
    text = reason(items.metric, "m")
    assert str(tmp_path / "items.csv") in text
    assert "1 of 2 items" in text and "'q2' (line 3)" in text and said in text


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("NaN", "nan"),
        ("Infinity", "inf"),
        ("1e999", "inf"),
        ("1" + "0" * 400, "100"),
        ("true", "write 1 or 0"),
        ("null", "is empty"),
        ('"0.71"', "the text '0.71'"),
        ('""', "is empty"),
        ("[1]", "[1]"),
        ("{}", "{}"),
    ],
)
def test_json_values_that_are_no_finite_number(tmp_path: Path, cell: str, said: str) -> None:
    items = from_jsonl(tmp_path, '{"item_id": "q1", "m": 1}', f'{{"item_id": "q2", "m": {cell}}}')
    text = reason(items.metric, "m")
    assert "1 of 2 items" in text and "'q2' (line 2)" in text and said in text


def test_a_key_that_a_line_lacks_is_an_empty_cell(tmp_path: Path) -> None:
    rows = [{"item_id": 1, "m": 1}, {"item_id": 2}, {"item_id": 3, "late": 1, "m": 1}]
    items = from_jsonl(tmp_path, *rows)
    assert "'2' (line 2) is empty" in reason(items.metric, "m")
    assert "2 of 3 items: item '1' (line 1) is empty" in reason(items.metric, "late")


@pytest.mark.parametrize("column", [[1.0, math.nan], [True, False], ["1", "0"], [1.0, math.inf]])
def test_parquet_cells_that_are_no_finite_number(tmp_path: Path, column: list[Any]) -> None:
    items = from_parquet(tmp_path, item_id=["p", "q"], m=column)
    assert "(row 2)" in reason(items.metric, "m")


def test_bad_cells_are_counted_and_the_first_of_the_file_named(tmp_path: Path) -> None:
    rows = "".join(f"q{9 - row},bad{row}\n" for row in range(5))
    text = reason(from_csv(tmp_path, f"item_id,m\nz,1\n{rows}").metric, "m")
    assert "5 of 6 items" in text and text.endswith("and 2 more")
    assert text.index("'q9' (line 3)") < text.index("'q8' (line 4)") < text.index("'q7' (line 5)")
    assert "q6" not in text


def test_a_metric_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    items = from_csv(tmp_path, "item_id,segment,language,hit,f1\n1,A,en,1,0.5\n")
    text = reason(items.metric, "hitrate")
    assert "no metric 'hitrate'" in text and text.endswith("it has: 'hit', 'f1'")
    assert "no metric" in reason(items.metric, "segment")
    assert "no metric" in reason(items.metric, "item_id")


def test_a_label_is_there_for_every_item(tmp_path: Path) -> None:
    items = from_csv(tmp_path, "item_id,segment,m\n1,A,1\n2,,1\n3, ,1\n")
    text = reason(items.labels, "segment")
    assert "2 of 3 items" in text and "'2' (line 3)" in text and "'3' (line 4)" in text
    assert "it has: 'item_id', 'segment', 'm'" in reason(items.labels, "conversation")
    null = from_jsonl(tmp_path, {"item_id": 1, "segment": None}, {"item_id": 2, "segment": []})
    assert "2 of 2 items" in reason(null.labels, "segment")
    gaps = from_parquet(tmp_path, item_id=["a", "b"], segment=["A", None], turn=[1.0, math.nan])
    assert "'b' (row 2)" in reason(gaps.labels, "segment")
    assert "'b' (row 2)" in reason(gaps.labels, "turn")


# -- ids -------------------------------------------------------------------------------------


def test_doubled_ids_are_named_with_their_lines(tmp_path: Path) -> None:
    """Case 04: other content, same content, number and text of one id."""
    rows = [
        {"item_id": "q-001", "m": 1},
        {"item_id": "q-002", "m": 1},
        {"item_id": "q-003", "m": 1},
        {"item_id": 7, "m": 1},
        {"item_id": "q-003", "m": 0},
        {"item_id": "q-001", "m": 1},
        {"item_id": "7", "m": 0},
    ]
    text = reason(lambda: from_jsonl(tmp_path, *rows))
    assert str(tmp_path / "items.jsonl") in text
    for named in ("'q-001' on lines 1, 6", "'q-003' on lines 3, 5", "'7' on lines 4, 7", ": 3:"):
        assert named in text


def test_many_doubled_ids_are_counted(tmp_path: Path) -> None:
    text = reason(
        from_csv, tmp_path, "item_id,m\n" + "".join(f"{row // 2},1\n" for row in range(40))
    )
    assert "more than once: 20:" in text and "and 15 more" in text


@pytest.mark.parametrize("cell", ["null", '""', '" "', "true", "1.5", "NaN", "[1]"])
def test_ids_that_are_none(tmp_path: Path, cell: str) -> None:
    text = reason(lambda: from_jsonl(tmp_path, {"item_id": "a"}, f'{{"item_id": {cell}}}'))
    assert "line 2: item_id is" in text


def test_a_line_of_empty_cells_is_an_item_without_id(tmp_path: Path) -> None:
    assert "line 3: item_id is empty" in reason(from_csv, tmp_path, "item_id,m\na,1\n,\n")


# -- files that cannot be read ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"item_id,m\n", "a header but no items"),
        (b"item_id,m,m \n1,1,0\n", "several columns are named 'm'"),
        (b"item_id,,m\n1,2,3\n", "column 2 has no name"),
        (b"id,m\n1,1\n", "no column 'item_id'; columns: 'id', 'm'"),
        (b"item_id;m\n1;1\n", "separate columns by commas, not ';'"),
        (b"item_id,m\na,1\nb,1,0\n\nc\n", "line 3: 3 cells, the header has 2; line 5: 1 cells"),
        (b'item_id,m\na,"1\n', "not CSV"),
        (b'item_id,m\na,"1"2\n', "line 2: not CSV"),
        ("item_id,m\na,1\n".encode("utf-16"), "UTF-16: save it as UTF-8"),
        ("item_id,m\na,1\n".encode("utf-16-le"), "line 1: a NUL byte: save it as UTF-8"),
        (b"item_id,m\na\0,1\n", "line 2: a NUL byte"),
        ("item_id,m\né,1\n".encode("latin-1"), "line 2: byte 0xe9 is not UTF-8: save it as UTF-8"),
    ],
)
def test_csv_files_that_cannot_be_used(tmp_path: Path, content: bytes, said: str) -> None:
    text = reason(from_csv, tmp_path, content)
    assert text.startswith(str(tmp_path / "items.csv")) and said in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no items"),
        (b'{"item_id": 1}\n{"item_id": 2\n[1]\n', "line 2: not JSON"),
        (b'{"item_id": 1}\n[1]\n', "line 2: is [1], not an object"),
        (b'{"id": 1}\n', "no key 'item_id' in any line; keys: 'id'"),
        (b'{"item_id": 1, "m": 1, "m": 0}\n', "a key stands twice"),
        (b'{"item_id": "\\ud800"}\n', "line 1: holds half a surrogate pair"),
        (b'{"item_id": 1, "\\uD800": 1}\n', "line 1: holds half a surrogate pair"),
        ('{"item_id": 1}\n'.encode("utf-16"), "UTF-16"),
        (b'{"item_id": "\xe9"}\n', "line 1: byte 0xe9 is not UTF-8"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'{"item_id": ' + b"1" * 5000 + b"}\n", "line 1: not JSON"),
        (b"".join(b'{"item_id": %d, "k%d": 1}\n' % (i, i) for i in range(3000)), "different keys"),
    ],
)
def test_jsonl_files_that_cannot_be_used(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(content)
    text = reason(read_items, path)
    assert text.startswith(str(path)) and said in text


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    text = reason(from_csv, tmp_path, "item_id,m\na,1\na,1\nb\n,1\n")
    assert "'a' on lines 2, 3" in text and "line 4: 1 cells" in text and "line 5: item_id" in text
    many = reason(from_csv, tmp_path, "item_id,m\n" + "x\n" * 50)
    assert many.endswith("and 45 more problems")


def test_parquet_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "items.parquet"
    assert "No such file" in reason(read_items, path)
    path.write_bytes(b"PAR1 this is none PAR1")
    assert str(path) in reason(read_items, path)
    assert "no column 'item_id'" in reason(lambda: from_parquet(tmp_path, m=[1.0]))
    assert "holds no items" in reason(lambda: from_parquet(tmp_path, item_id=[]))
    assert "row 2: item_id" in reason(lambda: from_parquet(tmp_path, item_id=["a", None]))
    assert "row 1: item_id" in reason(lambda: from_parquet(tmp_path, item_id=[0.5]))
    assert "'a' on rows 1, 3" in reason(lambda: from_parquet(tmp_path, item_id=["a", "b", "a"]))


def test_a_folder_has_one_file_of_items(tmp_path: Path) -> None:
    assert "holds no file of items" in reason(read_items, tmp_path)
    from_csv(tmp_path, "item_id,m\n1,1\n")
    assert read_items(tmp_path).ids.tolist() == ["1"]
    from_jsonl(tmp_path, {"item_id": 1})
    assert "items.csv and items.jsonl" in reason(read_items, tmp_path)
    assert "unknown kind of file" in reason(read_items, tmp_path / "items.txt")


def test_rows_of_another_measurement_are_found_out(tmp_path: Path) -> None:
    path = tmp_path / "items.parquet"
    frame = pd.DataFrame({"item_id": ["a", "b"], "bundle": ["x", "y"], "engine": [None, None]})
    frame.to_parquet(path)
    # A column without a single value, and one that is not there, say nothing.
    read_items(path, {"engine": "vllm", "harness": "lm-eval"})
    text = reason(read_items, path, {"bundle": "x"})
    assert "bundle of 1 of 2 rows" in text and "'y'" in text
    frame.assign(bundle=["x", None]).to_parquet(path)
    assert "bundle of 1 of 2 rows" in reason(read_items, path, {"bundle": "x"})


# -- whatever the text -----------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=6))
def test_any_csv_cells_come_back_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]
) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([("item_id", "segment", "m"), *rows])
    folder = tmp_path_factory.mktemp("items")
    ids = [row[0] for row in rows]
    blank = any(not identity.strip() for identity in ids)
    nul = any("\0" in cell for row in rows for cell in row)
    if blank or nul or len(set(ids)) < len(ids):
        assert reason(from_csv, folder, out.getvalue())
        return
    items = from_csv(folder, out.getvalue())
    assert items.ids.tolist() == sorted(ids)
    cells = {row[0]: row for row in rows}
    if all(row[1].strip() for row in rows):
        assert items.labels("segment").tolist() == [cells[i][1] for i in items.ids]
    else:
        assert reason(items.labels, "segment")
    try:
        values = items.metric("m")
    except Unusable:
        return
    assert values.tolist() == [float(cells[i][2]) for i in items.ids]


@settings(max_examples=150)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"item_id": TEXT | st.integers()},
            optional={"m": st.none() | st.booleans() | st.floats() | st.integers() | TEXT},
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_json_values_come_back_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("items")
    ids = [str(row["item_id"]) for row in rows]
    if len(set(ids)) < len(ids) or any(not identity.strip() for identity in ids):
        assert reason(lambda: from_jsonl(folder, *rows))
        return
    items = from_jsonl(folder, *rows)
    assert items.ids.tolist() == sorted(ids)
    cells = [row.get("m") for row in rows]
    numbers = all(type(cell) in (int, float) and math.isfinite(cell) for cell in cells)
    if numbers:
        expected = dict(zip(ids, map(float, cells), strict=True))
        assert items.metric("m").tolist() == [expected[i] for i in items.ids]
    else:
        assert reason(items.metric, "m")


@settings(max_examples=200)
@given(st.binary(max_size=60), st.sampled_from(["csv", "jsonl", "parquet"]))
def test_any_bytes_are_items_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("items") / f"items.{suffix}"
    path.write_bytes(b"item_id,m\n" + content if suffix == "csv" else content)
    try:
        items = read_items(path)
        items.metric("m")
        items.labels("m")
    except Unusable as unusable:
        assert str(path) in str(unusable)


def test_rows_that_this_machine_cannot_hold_are_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "items.parquet"
    pd.DataFrame({"item_id": [f"i{n}" for n in range(999)], "hit_rate": 1.0}).to_parquet(path)
    assert read_items(path).ids[0] == "i0"
    free = type("Free", (), {"available": 1000})
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(Unusable, match=r"items\.parquet: 999 rows, .* GiB of memory"):
        read_items(path)
