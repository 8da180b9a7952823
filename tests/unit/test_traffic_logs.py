"""Reading request logs: formats, columns, times, and what becomes of every odd row."""

from __future__ import annotations

import gzip
import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from registry.errors import InfrastructureError, UserError
from registry.traffic_requests import MICRO, NO_TIME
from tasks import traffic_logs, traffic_scan
from tasks.traffic_files import opened
from tasks.traffic_logs import Options, ReadLog, read_log
from tests.unit.traffic_builders import HEADER, write_csv

T0 = 1_760_000_000


def read(*paths: Path, **options: Any) -> ReadLog:
    return read_log(list(paths), Options(**options))


def values(log: ReadLog) -> list[tuple[int, int, int]]:
    """(seconds since T0, prompt, output), in order."""
    found = log.requests
    seconds = ((found.arrived - T0 * MICRO) / MICRO).tolist()
    return sorted(zip(seconds, found.prompt.tolist(), found.output.tolist(), strict=True))


TWO = [(0.5, 100, 20), (3.0, 300, 5)]


# -- formats ---------------------------------------------------------------------------------


def test_csv(tmp_path: Path) -> None:
    log = read(write_csv(tmp_path / "log.csv", [f"{T0 + 3},300,5,2", f"{T0}.5,100,20,1.25"]))
    assert values(log) == TWO
    assert log.requests.latency is not None
    assert sorted(log.requests.latency.tolist()) == [1_250_000, 2_000_000]
    assert (log.read, log.left_out, log.zone) == (2, {}, "UTC")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_bom_crlf_and_utf16(tmp_path: Path, encoding: str) -> None:
    text = f"arrived;prompt_tokens;output_tokens;segment\r\n{T0}.5;100;20;客服\r\n"
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    (tmp_path / "log.csv").write_bytes(mark + text.encode(encoding))
    log = read(tmp_path / "log.csv")
    assert values(log) == TWO[:1]
    assert log.requests.segments == ("客服",)


def test_gz_folder_and_names_that_are_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "logs [2025] it's *"
    (folder / "day 1").mkdir(parents=True)
    line = json.dumps({"arrived": T0 + 0.5, "prompt_tokens": 100, "output_tokens": 20})
    (folder / "day 1" / "a?.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    text = f"arrived,prompt_tokens,output_tokens\n{T0 + 3},300,5\n"
    (folder / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "notes.md").write_text("no log")
    log = read(folder)
    assert values(log) == TWO
    assert [file.rows for file in log.files] == [1, 1]


def test_openai_lines(tmp_path: Path) -> None:
    """Batch results nest the answer; usage is where OpenAI puts it."""
    rows = [
        {"id": "a", "response": {"status_code": 200, "body": {
            "created": T0 + 3, "usage": {"prompt_tokens": 300, "completion_tokens": 5,
                                         "prompt_tokens_details": {"cached_tokens": 256}}}}},
        {"id": "b", "response": {"status_code": 429, "body": {"error": "slow down"}}},
    ]  # fmt: skip
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    log = read(path)
    assert values(log) == TWO[1:]
    assert log.left_out == {"failed request": 1}
    assert log.requests.prefix_tokens is not None
    assert log.requests.prefix_tokens.tolist() == [256]
    assert log.files[0].columns["arrived"] == "response.body.created"


def test_parquet_with_times_and_structs(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({
        "timestamp": pa.array([T0 * 1000 + 3000, T0 * 1000 + 500, None], pa.timestamp("ms", "UTC")),
        "usage": [{"prompt_tokens": 300, "completion_tokens": 5},
                  {"prompt_tokens": 100, "completion_tokens": 20},
                  {"prompt_tokens": 1, "completion_tokens": 1}],
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "log.parquet")
    log = read(tmp_path / "log.parquet", bad_rows=0.5)
    assert values(log) == TWO
    assert log.left_out == {"arrived: missing": 1}
    assert log.examples == [f"{tmp_path / 'log.parquet'}: row 3: timestamp = None"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_parquet_times_without_a_zone_are_of_the_one_that_is_said(
    tmp_path: Path, unit: str
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    local = pa.array([datetime(2025, 10, 9, 16, 53, 23)], pa.timestamp(unit))
    table = pa.table({"ts": local, "prompt_tokens": [300], "output_tokens": [5]})
    parquet.write_table(table, tmp_path / "log.parquet")
    for zone in ("Asia/Shanghai", "+08:00"):
        log = read(tmp_path / "log.parquet", timezone=zone)
        assert values(log) == TWO[1:] and log.zone == zone
    assert any("without a zone" in note for note in log.notes)


def test_files_of_several_kinds_keep_what_all_of_them_have(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [f"{T0 + 3},300,5,2"])
    row = {"timestamp": "2025-10-09T08:53:20.5Z", "input_tokens": 100, "output_tokens": 20}
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    log = read(tmp_path)
    assert values(log) == TWO
    assert log.requests.latency is None
    assert any(note.startswith("latency: only some") for note in log.notes)


# -- times -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [
        f"{T0}.5", f"{T0}500", f"{T0}500000", f"{T0}500000000", "1.7600000005e9",
        "2025-10-09T08:53:20.5Z", "2025-10-09 08:53:20.5", "2025-10-09T16:53:20.500+08:00",
        "2025-10-09 16:53:20.5 +08:00", "2025-10-09 08:53:20.500000 UTC",
        '"2025-10-09 08:53:20,500"',
    ],
)  # fmt: skip
def test_units_and_forms_of_one_moment(tmp_path: Path, word: str) -> None:
    log = read(write_csv(tmp_path / "log.csv", [f"{word},100,20,1"]))
    assert values(log) == TWO[:1]


def test_zones(tmp_path: Path) -> None:
    plain = write_csv(tmp_path / "plain.csv", ["2025-10-09 16:53:20.5,100,20,1"])
    log = read(plain, timezone="Asia/Shanghai")
    assert values(log) == TWO[:1] and log.zone == "Asia/Shanghai" and log.zone_from == "--timezone"
    assert any("without a zone" in note for note in read(plain).notes)
    india = write_csv(tmp_path / "india.csv", ["2025-10-09 14:23:20.5,100,20,1"])
    assert values(read(india, timezone="+05:30")) == TWO[:1]
    own = write_csv(tmp_path / "own.csv", ["2025-10-09T16:53:20.5+08:00,100,20,1"])
    assert (read(own).zone, read(own).zone_from) == ("+08:00", "as the log's times")
    with pytest.raises(UserError, match="Mars/Olympus: is no time zone"):
        read(own, timezone="Mars/Olympus")


def test_times_from_the_logs_begin_need_a_unit(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "trace.csv", ["0,100,20,1", "2.5,100,20,1"])
    with pytest.raises(UserError, match=r"numbers about 2.5 are no seconds.*\n.*--time-unit s"):
        read(path)
    assert read(path, time_unit="s").requests.arrived.tolist() == [0, 2_500_000]


def test_latency_by_its_unit_and_from_an_end(tmp_path: Path) -> None:
    ms = write_csv(tmp_path / "ms.csv", [f"{T0},1,1,1500"],
                   "arrived,prompt_tokens,output_tokens,latency_ms")  # fmt: skip
    assert read(ms).requests.latency.tolist() == [1_500_000]  # type: ignore[union-attr]
    plain = write_csv(tmp_path / "plain.csv", [f"{T0},1,1,1500"])
    unit = read(plain, latency_unit="ms").requests.latency
    assert unit is not None and unit.tolist() == [1_500_000]
    end = write_csv(
        tmp_path / "end.csv",
        ["2025-10-09T08:53:20Z,1,1,2025-10-09T08:53:22Z", "2025-10-09T08:53:20Z,1,1,",
         "2025-10-09T08:53:20Z,1,1,2025-10-09T08:53:19Z"],
        "start_time,prompt_tokens,output_tokens,end_time",
    )  # fmt: skip
    log = read(end, bad_rows=0.5)
    assert log.requests.latency is not None
    assert log.requests.latency.tolist() == [2_000_000, NO_TIME]
    assert log.left_out == {"ended: before it arrived": 1}


# -- odd rows ----------------------------------------------------------------------------------

GOOD = [f"{T0 + n},10,10,1" for n in range(8)]
ODD = {
    "x,10,10,1": "arrived: no time of 1990 to 2200, read as s",
    ",10,10,1": "arrived: missing",
    f"{T0}000,10,10,1": "arrived: no time of 1990 to 2200, read as s",
    "1e400,10,10,1": "arrived: no time of 1990 to 2200, read as s",
    f"{T0},nan,10,1": "prompt_tokens: no whole number from 1 to 10000000",
    f"{T0},0,10,1": "prompt_tokens: no whole number from 1 to 10000000",
    f"{T0},99999999999999999999,10,1": "prompt_tokens: no whole number from 1 to 10000000",
    f"{T0},10,-3,1": "output_tokens: no whole number from 0 to 10000000",
    f"{T0},10,2.5,1": "output_tokens: no whole number from 0 to 10000000",
    f"{T0},10,,1": "output_tokens: missing",
    f"{T0},10,10,-0.1": "latency: no duration from 0 to 30 days",
    f"{T0},10,10,soon": "latency: no duration from 0 to 30 days",
    f"{T0},10,10": "record: missing columns",
    f"{T0},10,10,1,1": "record: too many columns",
}


@pytest.mark.parametrize("row", ODD)
def test_an_odd_row_is_counted_and_placed(tmp_path: Path, row: str) -> None:
    path = write_csv(tmp_path / "log.csv", [*GOOD[:4], "", row, *GOOD[4:]])
    log = read(path, bad_rows=0.2)
    assert (log.read, len(log.requests), log.left_out) == (9, 8, {ODD[row]: 1})
    assert len(log.examples) == 1 and log.examples[0].startswith(f"{path}: line 7: ")


def test_too_many_odd_rows_are_an_error_that_names_the_first(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", [*GOOD, *ODD])
    with pytest.raises(UserError) as caught:
        read(path)
    text = str(caught.value)
    assert "14 of 22 rows cannot be used" in text and "line 10: arrived = 'x'" in text
    assert "--bad-rows 0.637 accepts so many" in text
    # The share that it names is enough.
    assert len(read(path, bad_rows=0.637).requests) == 8


def test_places_behind_line_breaks_in_quotes(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "log.csv",
        ['"a\nb\nc",1760000000,1,1', "x,1760000000,0,1", "short,1", '"d\ne",1760000000,1,-1'],
        "prompt,ts,prompt_tokens,output_tokens",
    )
    log = read(path, bad_rows=0.8)
    assert [one.removeprefix(f"{path}: ") for one in log.examples] == [
        "line 5: prompt_tokens = '0'",
        "line 6: record: missing columns: short,1",
        "line 7: output_tokens = '-1'",
    ]


def test_lines_that_are_no_json(tmp_path: Path) -> None:
    good = json.dumps({"ts": T0, "prompt_tokens": "12", "output_tokens": 1e1})
    lines = [good, "", "not json", "[1]", '"word"', good.replace('"12"', "null"), good[:-1],
             good.replace(str(T0), '{"a": 1}'), good]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines))
    log = read(path, bad_rows=0.9)
    assert values(log) == [(0, 12, 10), (0, 12, 10)]
    assert log.left_out == {
        "no JSON object": 2,
        "arrived: missing": 2,
        "prompt_tokens: missing": 1,
        "arrived: no time of 1990 to 2200, read as s": 1,
    }
    assert log.examples[0] == f"{path}: line 3: not json"
    assert log.examples[3] == f"{path}: line 6: prompt_tokens = None"
    assert log.read == 8


def test_places_are_right_far_into_a_large_file(tmp_path: Path) -> None:
    """More rows than a batch, read by several threads: rows keep their numbers."""
    rows = [f"{T0 + n / 100},10,10,1" for n in range(450_000)]
    rows[400_000] = f"{T0},10,broken,1"
    rows[420_000] = "1,2"
    rows[449_999] = f"{T0},last,10,1"
    path = write_csv(tmp_path / "log.csv", rows)
    log = read(path)
    assert [one.removeprefix(f"{path}: ") for one in log.examples] == [
        "line 400002: output_tokens = 'broken'",
        "line 420002: record: missing columns: 1,2",
        "line 450001: prompt_tokens = 'last'",
    ]


def test_want_of_memory_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_scan, "MEMORY_MB", 20)
    row = {"arrived": T0, "prompt_tokens": 5000, "output_tokens": 5, "prompt": "word"}
    path = tmp_path / "log.jsonl"
    path.write_text(
        "\n".join([json.dumps(row), json.dumps({**row, "prompt": "word" * 10_000})] * 999)
    )
    monkeypatch.setattr(traffic_scan, "row_bytes", lambda file: 20.0)
    with pytest.raises(InfrastructureError, match=r"log\.jsonl: Out of Memory"):
        read(path)
    monkeypatch.undo()
    assert len(read(path).requests) == 1998


def test_failed_requests_are_left_out_and_are_no_mistake(tmp_path: Path) -> None:
    header = "request_id,status,arrived,prompt_tokens,output_tokens"
    rows = [f"a,ok,{T0},1,1", f"b,failed,{T0},1,", f"c,503,{T0},1,", f"d,200,{T0},1,1"]
    log = read(write_csv(tmp_path / "log.csv", rows, header))
    assert (len(log.requests), log.left_out) == (2, {"failed request": 2})


def test_rows_that_stand_twice(tmp_path: Path) -> None:
    header = "id,arrived,prompt_tokens,output_tokens"
    rows = [f"a,{T0},1,1", f"b,{T0},1,1", f"a,{T0},1,1", f"a,{T0},2,1"]
    log = read(write_csv(tmp_path / "with_id.csv", rows, header))
    # The same id with another length is another request; nothing says which of them is wrong.
    assert (len(log.requests), log.equal) == (3, 0)
    assert log.left_out == {"stands twice (same id, same values)": 1}
    without = write_csv(tmp_path / "without.csv", [f"{T0},1,1,1"] * 3)
    log = read(without)
    assert (len(log.requests), log.equal, log.left_out) == (3, 2, {})


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
@pytest.mark.parametrize("text", ["", "\n\n", HEADER + "\n"])
def test_no_request(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"log\.(csv|jsonl).*"):
        read(tmp_path / name)


def test_an_empty_file_among_others_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    write_csv(tmp_path / "b.csv", GOOD)
    log = read(tmp_path)
    assert len(log.requests) == 8 and {file.rows for file in log.files} == {0, 8}


# -- columns -----------------------------------------------------------------------------------


def test_columns_by_name_and_by_word(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", [f"{T0}.5,100,20"], "when,in,out")
    with pytest.raises(UserError) as caught:
        read(path)
    assert f"{path}: no column for arrived, prompt_tokens, output_tokens" in str(caught.value)
    assert "(it has: when, in, out)" in str(caught.value)
    assert "--columns arrived=COLUMN" in str(caught.value)
    named = {"arrived": "when", "prompt_tokens": "in", "output_tokens": "out"}
    assert values(read(path, columns=named)) == TWO[:1]
    with pytest.raises(UserError, match=r"arrived=wen: no such column\n.*did you mean 'when'"):
        read(path, columns={**named, "arrived": "wen"})


def test_published_traces_are_known_by_their_names(tmp_path: Path) -> None:
    azure = write_csv(tmp_path / "azure.csv", ["2023-11-16 18:17:03.9799600,4808,10"],
                      "TIMESTAMP,ContextTokens,GeneratedTokens")  # fmt: skip
    assert read(azure).requests.prompt.tolist() == [4808]
    burst = write_csv(
        tmp_path / "burst.csv", ["5,ChatGPT,472,18,490,Conversation log"],
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    )  # fmt: skip
    assert read(burst, time_unit="s").requests.output.tolist() == [18]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("x")
    (tmp_path / "log.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "log.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "list.json").write_text('[\n{"a": 1}\n]')
    (tmp_path / "empty").mkdir()
    for name, said in {
        "nothing.csv": "does not exist",
        "log.txt": "is no .csv",
        "log.parquet": "is no Parquet file",
        "log.csv.gz": "cannot be read: Not a gzipped file",
        "twice.csv": "equal names of columns: 'a'",
        "list.json": "is one JSON list",
        "empty": "holds no .csv",
    }.items():
        with pytest.raises(UserError) as caught:
            read(tmp_path / name)
        assert said in str(caught.value), name
    with pytest.raises(UserError, match="is named twice"):
        read(tmp_path / "twice.csv", tmp_path / "twice.csv")


def test_a_gzip_that_ends_early(tmp_path: Path) -> None:
    text = "\n".join([HEADER, *(f"{T0 + random.random()},10,10,1" for _ in range(50_000))])
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(text.encode())[:-2000])
    with pytest.raises(UserError, match=r"log\.csv\.gz: cannot be read"):
        read(tmp_path / "log.csv.gz")


@pytest.mark.parametrize(
    "ending",
    [".csv", ".csv.gz", ".jsonl"],
)
def test_a_line_that_no_reader_takes_is_named_and_not_lost(tmp_path: Path, ending: str) -> None:
    """DuckDB 2.0.1 left such a line of CSV out without a word."""
    path = tmp_path / f"log{ending}"
    good = f'{{"ts": {T0}, "prompt_tokens": 1, "completion_tokens": 1}}'
    lines = [HEADER, *GOOD] if "csv" in ending else [good] * 9
    text = "\n".join([*lines, f"{T0},1,1," + "x" * (35 << 20), lines[-1]]).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    with pytest.raises(UserError, match=rf"line {len(lines) + 1}: is longer than 16 MiB"):
        read(path)


def test_a_field_of_many_lines_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    text = f'{HEADER},prompt\n{T0},1,1,1,"' + ("x" * 1000 + "\n") * 20_000 + '"\n'
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(UserError, match=r"log\.csv: cannot be read: field larger"):
        read(tmp_path / "log.csv")


@pytest.mark.parametrize(
    ("arrived", "ended"),
    [(f"{T0}", "2025-10-09T08:53:22Z"), ("2025-10-09T08:53:20Z", f"{T0 + 2}"),
     (f"{T0}", f"{T0 + 2}000"), (f"{T0}000", f"{T0 + 2}")],
)  # fmt: skip
def test_arrival_and_end_may_be_written_in_two_ways(
    tmp_path: Path, arrived: str, ended: str
) -> None:
    header = "arrived,ended,prompt_tokens,output_tokens"
    log = read(write_csv(tmp_path / "log.csv", [f"{arrived},{ended},10,10"] * 3, header))
    assert log.requests.arrived.tolist() == [T0 * MICRO] * 3
    assert log.requests.latency is not None
    assert log.requests.latency.tolist() == [2 * MICRO] * 3


def test_a_list_in_one_line_and_parquet_without_rows_say_what_they_are(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    (tmp_path / "list.json").write_text('[{"a": 1}, {"a": 2}]')
    with pytest.raises(UserError, match="is one JSON list"):
        read(tmp_path / "list.json")
    kinds = {name: pa.int64() for name in ("arrived", "prompt_tokens", "output_tokens")}
    pq.write_table(pa.schema(kinds).empty_table(), tmp_path / "log.parquet")
    with pytest.raises(UserError, match=r"log\.parquet: holds no request"):
        read(tmp_path / "log.parquet")
    assert len(read(tmp_path / "log.parquet", write_csv(tmp_path / "b.csv", GOOD)).requests) == 8


@pytest.mark.parametrize(("unit", "value"), [("s", 2), ("ms", 1500), ("us", 1_500_000)])
def test_a_duration_of_parquet_has_its_own_unit(tmp_path: Path, unit: str, value: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    columns = {"arrived": [T0], "prompt_tokens": [1], "output_tokens": [1]}
    table = pa.table({**columns, "latency": pa.array([value], pa.duration(unit))})
    pq.write_table(table, tmp_path / "log.parquet")
    found = read(tmp_path / "log.parquet").requests.latency
    assert found is not None
    assert found.tolist() == [2 * MICRO if unit == "s" else 1_500_000]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_long_rows_of_parquet_are_read_like_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    """They come through Arrow, a few at once, in place of DuckDB's own reader."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    count, per = 90, {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    words = [f"Auftrag {n % 3} 货物 " + f"{n} {'x' * (6000 + n)}" for n in range(count)]
    table = pa.table({
        "timestamp": pa.array([(T0 + n) * per for n in range(count)], pa.timestamp(unit)),
        "usage": [{"prompt_tokens": 2000 + n, "completion_tokens": n or None}
                  for n in range(count)],
        "latency": pa.array([n * per for n in range(count)], pa.duration(unit)),
        "segment": pa.array([f"kind {n % 2}" for n in range(count)]).dictionary_encode(),
        "prompt": words,
    })  # fmt: skip
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=50)
    options = {"timezone": "Asia/Shanghai", "bad_rows": 0.1}
    streamed = read(tmp_path / "log.parquet", **options)
    assert traffic_scan.row_bytes(opened(tmp_path / "log.parquet")) > traffic_scan.LONG_ROW
    monkeypatch.setattr(traffic_scan, "LONG_ROW", 1 << 30)
    own = read(tmp_path / "log.parquet", **options)
    for log in (streamed, own):
        found = log.requests
        assert found.arrived.tolist() == [(T0 + n - 8 * 3600) * MICRO for n in range(1, count)]
        assert found.latency is not None
        assert found.latency.tolist() == [n * MICRO for n in range(1, count)]
        assert found.segments == ("kind 0", "kind 1")
        assert log.left_out == {"output_tokens: missing": 1}
        assert log.examples == [
            f"{tmp_path / 'log.parquet'}: row 1: usage.completion_tokens = None"
        ]
        # Ranks differ where the two hand on a time in another unit.
        assert sorted(text.begin for text in found.texts) == sorted(words[1:])


def test_the_sample_of_prompts_is_bounded_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of the files is, the same prompts are in it."""
    row = {"prompt_tokens": 500, "output_tokens": 5}
    for name, first in (("a", 0), ("b", 100)):
        lines = [{"arrived": T0 + first + n, "prompt": f"{first + n:03d} {'x' * 996}", **row}
                 for n in range(100)]  # fmt: skip
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / f"{name}.jsonl").write_text(text)
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    whole = read(*paths).requests.texts
    assert len(whole) == 200
    monkeypatch.setattr(traffic_logs, "MOST_CHARACTERS", 20_000)
    for order in (paths, paths[::-1]):
        assert read(*order).requests.texts == whole[:20]


def test_a_command_that_is_told_to_end_while_it_reads_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a file that cannot be read."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    columns = {"arrived": [T0] * 40, "prompt_tokens": [9] * 40, "output_tokens": [9] * 40}
    table = pa.table({**columns, "prompt": ["x" * 6000] * 40})
    pq.write_table(table, tmp_path / "log.parquet")

    def told(*_: Any, **__: Any) -> Any:
        raise SystemExit(143)

    monkeypatch.setattr(pa, "record_batch", told)
    with pytest.raises(SystemExit) as raised:
        read(tmp_path / "log.parquet")
    assert raised.value.code == 143
