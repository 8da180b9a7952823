"""Bad rows of a prompt file: each named with line and reason, refused or left out as asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import ColumnMapping, FilePrompts
from registry.artifacts import ArtifactRef
from registry.errors import UserError
from tasks import prompts, stages
from tasks.prompt_records import read_records, sift
from tasks.prompt_tables import digest_of_rows, read_rows, read_table
from tasks.rejects import LONGEST_ROW, TEXT_KEPT, begin_of

MAPPING = ColumnMapping(id="id")
SIZES = {"train": 4, "calibration": 1, "draft": 1, "eval": 1, "load": 1}

GOOD = [
    json.dumps({"id": f"g{n}", "prompt": f"good {n} 好"}, ensure_ascii=False) for n in range(20)
]

BAD: list[tuple[bytes, str]] = [
    (b'{"id": "b1", "prompt": "cut', "not JSON: Unterminated string"),
    (b'{"id": "b2", "prompt": "caf\xe9"}', "character 28 is a byte (0xe9) that is not UTF-8"),
    (b'{"id": "b3", "prompt": "half \\ud83d"}', "prompt holds a lone surrogate or NUL"),
    (b'{"id": "b4", "prompt": "nul \\u0000"}', "prompt holds a lone surrogate or NUL"),
    (b'{"id": "b5", "prompt": "raw nul \0"}', "not JSON: Invalid control character"),
    (b'{"id": "b6"}', "prompt is missing, not a text"),
    (b'{"id": "b7", "prompt": "  "}', "prompt is empty"),
    (b'{"id": "b8", "prompt": 8}', "prompt is a number, not a text"),
    (b'{"id": true, "prompt": "x"}', "id is a boolean, not a text"),
    (b'{"prompt": "no id"}', "id is missing, not a text"),
    (b'["a list"]', "is a list, not an object"),
    (b'{"id": "b10", "prompt": NaN}', "not JSON: NaN is no JSON number"),
    (b'{"id": 7, "prompt": "seven"}', "id '7' stands on lines 41, 43"),
    (b'{"id": "7", "prompt": "a text"}', "id '7' stands on lines 41, 43"),
    (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', "characters long, at most"),
]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Good and bad rows in turn, as Windows saves them: mark, CRLF, a blank line before each."""
    lines: list[bytes] = []
    for number, good in enumerate(GOOD):
        bad = [BAD[number][0]] if number < len(BAD) else []
        lines += [b"" if number % 2 else b" \t", good.encode(), *bad]
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    return path


def line_of(bad: int) -> int:
    return 3 * bad + 3


def recipe(path: Path, **changes: Any) -> FilePrompts:
    mapping = {"id": "id"} | changes.pop("mapping", {})
    written = {"source": "file", "path": str(path), "sizes": SIZES, "mapping": mapping}
    return FilePrompts.model_validate({**written, **changes})


def prepared(of: FilePrompts) -> ArtifactRef:
    stages.begin_run(1)
    return prompts.prepare_prompts.fn(prompts.stage(of, seed=0), of)


@pytest.fixture(autouse=True)
def no_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "provenance", dict)


def test_every_bad_row_is_found_with_its_line_and_reason(mixed: Path) -> None:
    good, rejects = sift(mixed, read_table(mixed), MAPPING)
    assert [record["id"] for record in good] == [f"g{number}" for number in range(20)]
    assert good[3] == {"id": "g3", "segment": "all", "prompt": "good 3 好", "reference": None}
    assert [reject.line for reject in rejects] == [line_of(number) for number in range(len(BAD))]
    for reject, (_, reason) in zip(rejects, BAD, strict=True):
        reason = reason.replace("41", str(line_of(12))).replace("43", str(line_of(13)))
        assert reason in reject.reason
        assert len(reject.text) <= TEXT_KEPT
    assert rejects[1].text == '{"id": "b2", "prompt": "caf\\xe9"}'


def test_without_a_share_all_of_them_refuse_the_file_at_once(mixed: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_records(mixed, MAPPING)
    places = [problem.where for problem in caught.value.problems]
    rows = [number for number in range(len(BAD)) if number not in (12, 13)]
    assert places == [f"{mixed}:{line_of(number)}" for number in rows] + [str(mixed)]
    assert f"id '7' stands on lines {line_of(12)}, {line_of(13)}" in str(caught.value)
    with pytest.raises(UserError, match=r"mixed\.jsonl:3"):
        prompts.stage(recipe(mixed), seed=0)


def test_a_share_leaves_them_out_and_writes_them_down(mixed: Path) -> None:
    ref = prepared(recipe(mixed, max_reject_share=0.5))
    lines = (ref.path / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    written = [json.loads(line) for line in lines]
    assert [row["line"] for row in written] == [line_of(number) for number in range(len(BAD))]
    assert all(set(row) == {"line", "reason", "text"} for row in written)
    counted = ref.summary["rejected"]
    assert (counted["rows"], counted["of"]) == (len(BAD), len(BAD) + 20)
    assert sum(counted["reasons"].values()) == len(BAD)
    assert counted["reasons"]["not JSON"] == 3
    assert counted["reasons"]["an id that stands twice"] == 2
    assert sum(ref.summary["prompts"].values()) == sum(SIZES.values())


def test_more_than_the_share_stops_with_a_table_of_reasons(mixed: Path) -> None:
    with pytest.raises(UserError) as caught:
        prompts.stage(recipe(mixed, max_reject_share=0.4), seed=0)
    first, second, *others = caught.value.problems
    assert first.what == ("15 of 35 rows (42.9%) are bad, more than prompts.max_reject_share 40.0%")
    assert second.where == f"{mixed}:3"
    assert second.what.startswith("3 x not JSON; here: not JSON: Unterminated string")
    assert len(others) == len({problem.what.partition(";")[0] for problem in others}) == 10


def test_only_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"nothing\n\xff\n")
    with pytest.raises(UserError, match=r"2 of 2 rows \(100.0%\) are bad"):
        prompts.stage(recipe(path, max_reject_share=0.99), seed=0)
    path.write_bytes(b"\r\n \n")
    with pytest.raises(UserError, match="holds no rows"):
        prompts.stage(recipe(path, max_reject_share=0.99), seed=0)


def test_csv_rows(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    good = "".join(f'g{n},"good\n{n}"\r\n' for n in range(4))
    path.write_bytes(b"id,prompt\r\nshort\r\nb,caf\xe9\r\nc,nul \0\r\n,\r\nd,\r\n" + good.encode())
    records, rejects = sift(path, read_table(path), MAPPING)
    assert [record["prompt"] for record in records] == [f"good\n{n}" for n in range(4)]
    assert [(reject.line, reject.kind) for reject in rejects] == [
        (2, "another number of fields"),
        (3, "not UTF-8"),
        (4, "prompt holds a lone surrogate or NUL"),
        (6, "prompt is empty"),
    ]
    path.write_bytes(b'id,prompt\nshort\na,"never closed\n' + good.encode())
    with pytest.raises(UserError, match="not CSV"):
        sift(path, read_table(path), MAPPING)
    path.write_bytes(b"id,pr\xffmpt\na,b\n")
    with pytest.raises(UserError, match=r"p\.csv:1: character 6 is a byte \(0xff\)"):
        read_table(path)


def test_parquet_rows(tmp_path: Path) -> None:
    import pandas

    path = tmp_path / "p.parquet"
    rows = {"id": ["a", "b", "b"], "prompt": ["x", "", "y"]}
    pandas.DataFrame(rows).to_parquet(path)
    records, rejects = sift(path, read_table(path), MAPPING)
    assert [record["id"] for record in records] == ["a", "b"], "the empty one is no double"
    assert [(reject.line, reject.reason) for reject in rejects] == [(2, "prompt is empty")]


def test_correcting_a_row_changes_no_other_rows_number(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\nbad\n{"prompt": ""}\n{"prompt": "b"}\n', encoding="utf-8")
    records, _ = sift(path, read_table(path), ColumnMapping())
    assert [record["id"] for record in records] == ["row-1", "row-4"]


def test_utf16_without_a_mark_is_refused_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "你好，订单在哪里"}\n'.encode("utf-16-le"))
    with pytest.raises(UserError, match="UTF-16"):
        read_rows(path)


def test_the_key_is_that_of_before_where_nothing_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(GOOD), encoding="utf-8")
    plain = prompts.stage(recipe(path), seed=0)
    assert "max_reject_share" not in plain.config["prompts"]
    assert plain.inputs == {"prompts": digest_of_rows(read_rows(path))}
    assert "rejected" not in prepared(recipe(path)).summary
    shared = prompts.stage(recipe(path, max_reject_share=0.5), seed=0)
    assert shared.key != plain.key
    path.write_text("\n".join([*GOOD, "bad"]), encoding="utf-8")
    one = prompts.stage(recipe(path, max_reject_share=0.5), seed=0)
    path.write_text("\n".join([*GOOD, "worse"]), encoding="utf-8")
    assert len({shared.key, one.key, prompts.stage(recipe(path, max_reject_share=0.5), 0).key}) == 3


def test_begin_of_a_row_can_always_be_written() -> None:
    for text in ("\ud83d", "\udce9 \ud83d", "a\0b", "好" * 300):
        spelled = begin_of(text)
        assert spelled.encode("utf-8") and len(spelled) <= TEXT_KEPT
    assert LONGEST_ROW > 1_000_000
    assert json.loads(begin_of({"a": "好"})) == {"a": "好"}
