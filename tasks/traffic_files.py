"""Files of a request log: which there are, what their columns are called, where a row stands.

CSV, JSONL and Parquet, the first two also as .gz and in UTF-16. DuckDB reads them
(`tasks.traffic_logs`); here is what a person needs beside it: names, samples and places.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from registry.errors import UserError
from tasks import vllm_logs

KINDS = {
    ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet", ".pq": "parquet", ".log": "vllm",
}  # fmt: skip
HEAD_ROWS = 200
"""Rows from which columns and units of time are told."""

LONGEST_LINE = 16 << 20
"""Bytes; DuckDB's own limit of a JSON object. A longer line of CSV than its buffer of 32 MB it
leaves out without a word (2.0.1)."""

STREAM = 1 << 16
"""Bytes that are read of a Parquet file at once; without it a column of a row group is."""

_CHUNK = 4 << 20


@dataclass(frozen=True)
class LogFile:
    path: Path
    kind: str
    columns: list[str]
    """Of JSON and Parquet dotted, down to what is no object."""

    head: list[dict[str, Any]]
    delimiter: str = ","
    encoding: str = "utf-8-sig"
    numeric: frozenset[str] = frozenset()
    """Columns that Parquet holds as numbers."""

    durations: Mapping[str, str] = field(default_factory=dict)
    """Columns that Parquet holds as durations, which it writes as whole numbers, and their unit."""

    times: frozenset[str] = frozenset()
    """Columns that Parquet holds as times."""


def found(paths: Sequence[Path]) -> list[Path]:
    """The files, those of folders in the order of their names. Raises `UserError`."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if one.is_file() and _kind(one))
            if not inside:
                raise UserError.at(
                    path, "holds no .csv, .jsonl, .parquet or .log file", "name the log"
                )
            files += inside
        elif not path.exists():
            raise UserError.at(path, "does not exist", "name a request log")
        elif not path.is_file():
            raise UserError.at(path, "is no regular file", "name a request log")
        elif not _kind(path):
            raise UserError.at(
                path,
                "is no .csv, .tsv, .jsonl or .parquet file, and no .log of vLLM",
                "convert the log; all but Parquet may also be .gz",
            )
        else:
            files.append(path)
    seen: dict[Path, Path] = {}
    for path in files:
        if path.resolve() in seen:
            raise UserError.at(path, "is named twice", "name every file once")
        seen[path.resolve()] = path
    return files


def _kind(path: Path) -> str | None:
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    kind = KINDS.get(name.suffix.lower())
    return None if kind == "parquet" and name != path else kind


def opened(path: Path) -> LogFile:
    """With its columns and first rows; an empty file has no columns. Raises `UserError`."""
    kind = _kind(path) or ""
    try:
        if kind == "parquet":
            return _parquet(path)
        encoding = _encoding(path)
        if kind == "vllm":
            return _vllm(path, encoding)
        _check_lines(path)
        return _csv(path, encoding) if kind == "csv" else _jsonl(path, encoding)
    except UnicodeDecodeError as error:
        raise UserError.at(path, f"byte {error.start} is not {error.encoding}", "save it as UTF-8"
                           ) from None  # fmt: skip
    except (OSError, EOFError, csv.Error) as error:
        raise UserError.at(path, f"cannot be read: {error}", "check the file") from None


def readable(file: LogFile, folder: Path, number: int) -> Path:
    """A name for DuckDB: no pattern of `*` and `[`, and UTF-8 inside."""
    ending = "".join(file.path.suffixes[-2:] if file.path.suffix == ".gz" else [file.path.suffix])
    if file.kind == "vllm":
        place = folder / f"{number}.csv"
        with place.open("w", encoding="utf-8", newline="") as out:
            csv.writer(out).writerows([file.columns, *(row for _, row in _vllm_rows(file))])
        return place
    if file.encoding.startswith("utf-16"):
        place = folder / f"{number}{ending.removesuffix('.gz')}"
        with text_of(file) as source, place.open("w", encoding="utf-8", newline="") as out:
            shutil.copyfileobj(source, out)
        return place
    place = folder / f"{number}{ending.lower()}"
    place.symlink_to(file.path.resolve())
    return place


def text_of(file: LogFile, errors: str = "strict") -> IO[str]:
    return _text(file.path, file.encoding, errors)


def _text(path: Path, encoding: str, errors: str = "strict") -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding=encoding, errors=errors, newline="")
    return path.open("r", encoding=encoding, errors=errors, newline="")


def _bytes(path: Path) -> IO[bytes]:
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else Path.open
    opened: IO[bytes] = opener(path, "rb")
    return opened


def _check_lines(path: Path) -> None:
    """Raise `UserError` for a line that no reader takes, before one is silent about it."""
    with _bytes(path) as file:
        line, since = 1, 0
        while chunk := file.read(_CHUNK):
            end = b"\n" if b"\n" in chunk else b"\r"
            first = chunk.find(end)
            since += len(chunk) if first < 0 else first
            if since > LONGEST_LINE:
                raise UserError.at(
                    f"{path}: line {line}",
                    f"is longer than {LONGEST_LINE >> 20} MiB",
                    "take it out, or write the log without its prompts",
                )
            if first >= 0:
                line += chunk.count(end)
                since = len(chunk) - chunk.rfind(end) - 1


def _encoding(path: Path) -> str:
    with _bytes(path) as file:
        begin = file.read(4)
    for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        if begin.startswith(mark):
            return "utf-16"
    return "utf-8-sig"


def _vllm(path: Path, encoding: str) -> LogFile:
    file = LogFile(path, "vllm", vllm_logs.COLUMNS, [], encoding=encoding)
    rows = [dict(zip(file.columns, row, strict=True)) for _, row in _vllm_rows(file)]
    if not rows:
        raise UserError.at(
            path,
            "holds no token counts as vLLM logs them",
            "start vLLM with --enable-log-requests --enable-log-outputs and "
            "VLLM_LOGGING_LEVEL=DEBUG, or name the log of a proxy that keeps `usage`",
        )
    return replace(file, head=rows[:HEAD_ROWS])


def _vllm_rows(file: LogFile) -> list[tuple[int, list[str]]]:
    last = datetime.fromtimestamp(file.path.stat().st_mtime, UTC)
    with text_of(file, "replace") as lines:
        return vllm_logs.rows_of(lines, last.year)


def _csv(path: Path, encoding: str) -> LogFile:
    csv.field_size_limit(LONGEST_LINE)
    with _text(path, encoding, "replace") as file:
        first = file.readline(LONGEST_LINE)
        delimiter = max(",;\t|", key=first.count)
        file.seek(0)
        rows = [row for row in itertools.islice(csv.reader(file, delimiter=delimiter),
                                                HEAD_ROWS + 1) if row]  # fmt: skip
    if not rows:
        return LogFile(path, "csv", [], [], delimiter, encoding)
    names = [name.strip() for name in rows[0]]
    if len(set(names)) < len(names) or "" in names:
        twice = sorted({repr(name) for name in names if names.count(name) > 1 or not name})
        raise UserError.at(
            path, f"its first line has no or equal names of columns: {', '.join(twice)}",
            "give every column a name of its own in the first line",
        )  # fmt: skip
    head = [dict(zip(names, row, strict=False)) for row in rows[1:]]
    return LogFile(path, "csv", names, head, delimiter, encoding)


def _jsonl(path: Path, encoding: str) -> LogFile:
    head: list[dict[str, Any]] = []
    with _text(path, encoding, "replace") as file:
        for line in itertools.islice(file, HEAD_ROWS):
            if not head and line.lstrip().startswith("["):
                raise UserError.at(path, "is one JSON list", "write one object in each line")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                head.append(dict(_flat(row)))
    columns = list(dict.fromkeys(name for row in head for name in row))
    return LogFile(path, "jsonl", columns, head, encoding=encoding)


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict) and value and before.count(".") < 6:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _parquet(path: Path) -> LogFile:
    from pyarrow import ArrowInvalid, types
    from pyarrow import parquet as pq

    try:
        # A stream: what it would read ahead is a whole column of a row group.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=STREAM) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            batch = next(file.iter_batches(HEAD_ROWS), None) if rows else None
    except ArrowInvalid as error:
        raise UserError.at(path, f"is no Parquet file: {error}", "check the file") from None
    flat: dict[str, Any] = {}

    def add(name: str, kind: Any) -> None:
        if types.is_struct(kind):
            for inner in kind:
                add(f"{name}.{inner.name}", inner.type)
        else:
            flat[name] = kind

    for column in schema:
        add(column.name, column.type)
    head = [dict(_flat(row)) for row in batch.to_pylist()] if batch is not None else []
    numbers = (types.is_integer, types.is_floating, types.is_decimal)
    return LogFile(
        path,
        "parquet",
        list(flat) if rows else [],
        head,
        numeric=frozenset(n for n, kind in flat.items() if any(is_(kind) for is_ in numbers)),
        durations={n: kind.unit for n, kind in flat.items() if types.is_duration(kind)},
        times=frozenset(n for n, kind in flat.items() if types.is_timestamp(kind)),
    )


# -- where a row stands ----------------------------------------------------------------------


def places(
    file: LogFile,
    wanted: Mapping[int, str],
    named: Mapping[int, str],
    refused: Collection[int],
) -> Iterator[tuple[str, str]]:
    """`(place, value)` of rows by their number from 0 among those that DuckDB returned.

    `wanted` says which column is at fault (empty: the row). `refused` are all records that DuckDB
    refused, by their number from 1 in the file, `named` the reasons of those to name. A place is
    a line of the file, in Parquet a row from 1.
    """
    if file.kind == "parquet":
        yield from _parquet_places(file, wanted)
    elif file.kind == "jsonl":
        yield from _jsonl_places(file, wanted)
    elif file.kind == "vllm":
        for index, (line, row) in enumerate(_vllm_rows(file)):
            if index in wanted:
                value = row[file.columns.index(wanted[index])]
                yield f"line {line}", _shown(wanted[index], value)
    else:
        yield from _csv_places(file, wanted, named, refused)


def _csv_places(
    file: LogFile,
    wanted: Mapping[int, str],
    named: Mapping[int, str],
    refused: Collection[int],
) -> Iterator[tuple[str, str]]:
    left = len(wanted) + len(named)
    with text_of(file, "replace") as text:
        reader = csv.reader(text, delimiter=file.delimiter)
        index, begin = -1, 1
        # DuckDB numbers records, the header as 1, empty ones too.
        for record, row in enumerate(reader, start=1):
            line, begin = begin, reader.line_num + 1
            if not left:
                return
            if record in refused:
                if record in named:
                    left -= 1
                    yield f"line {line}", f"{named[record]}: {_cut(','.join(row))}"
                continue
            if record == 1 or not row:
                continue
            index += 1
            if index in wanted:
                left -= 1
                column = wanted[index]
                yield f"line {line}", _shown(column, row[file.columns.index(column)])


def _jsonl_places(file: LogFile, wanted: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    index, left = -1, len(wanted)
    with text_of(file, "replace") as text:
        for number, line in enumerate(text, start=1):
            if not left:
                return
            if not line.strip():
                continue
            index += 1
            if index not in wanted:
                continue
            left -= 1
            column = wanted[index]
            try:
                row = dict(_flat(json.loads(line)))
            except (ValueError, AttributeError, RecursionError):
                yield f"line {number}", _cut(line.strip())
                continue
            shown = _shown(column, row[column]) if column in row else f"no {column}"
            yield f"line {number}", shown


def _parquet_places(file: LogFile, wanted: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    from pyarrow import parquet as pq

    begin = 0
    with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=STREAM) as table:
        for batch in table.iter_batches(columns=sorted(set(wanted.values()) - {""})):
            inside = [row for row in wanted if begin <= row < begin + len(batch)]
            for row in inside:
                values = dict(_flat(batch.slice(row - begin, 1).to_pylist()[0]))
                yield f"row {row + 1}", _shown(wanted[row], values.get(wanted[row]))
            begin += len(batch)


def _shown(column: str, value: Any) -> str:
    return f"{column} = {_cut(repr(value))}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
