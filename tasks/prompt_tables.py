"""Read the files that prompts come from, as people really save them, into rows and bad rows.

CSV, JSONL, Parquet, and folders of `datasets`. Text is kept to the code point: no normalisation,
no stripping. A byte-order mark, CRLF and blank lines are no part of the text and change nothing,
the digest included. What is wrong with a file as a whole (its encoding, its quotes) refuses it;
a row that cannot be split into columns is a `Reject` with the line an editor shows.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.errors import Problem, UserError
from tasks.chat_rows import kind_of
from tasks.rejects import LONGEST_ROW, Reject, bad_byte, begin_of, is_unicode, refuse, too_long

TABLES = (".csv", ".jsonl", ".ndjson", ".parquet")

# The csv module refuses fields over 128 KiB unless told; a long message is a message.
csv.field_size_limit(1 << 30)


@dataclass(frozen=True)
class Row:
    """One row of a file as it stands there: where (line or row number) and its columns."""

    line: int
    columns: dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A file: its rows, and those that cannot even be split into columns; blank lines are none."""

    rows: list[Row]
    rejects: list[Reject]
    known: Mapping[str, str] = field(default_factory=dict)
    """Mapping that the format fixes, used where the recipe says nothing else."""
    unused: Mapping[str, int] = field(default_factory=dict)
    """Fields of a format that change nothing here, and how many rows have them."""
    filled: bool = False
    """Whether objects were filled up with nulls, so that all rows have the same keys (Arrow)."""

    def __len__(self) -> int:
        return len(self.rows) + len(self.rejects)


def read_rows(path: Path) -> list[Row]:
    """Every row of a CSV, JSONL or Parquet file. Raises `UserError` naming file and lines."""
    table = read_table(path)
    if table.rejects:
        raise refuse([reject.problem(path) for reject in table.rejects], path)
    return table.rows


def read_table(path: Path, split: str | None = None) -> Table:
    """Rows of a file, good and bad. Raises `UserError` where the file as a whole is wrong.

    `split` is that of a `datasets` folder that holds several.
    """
    if path.is_dir():
        return Table(_dataset_rows(path, split), [], filled=True)
    if not path.is_file():
        raise UserError.at(path, "no such file", "check the path given with --prompts")
    if split is not None:
        raise UserError.at(path, f"is a file, it has no split {split!r}", "leave out prompts.split")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return Table(_parquet_rows(path), [], filled=True)
    if suffix not in TABLES:
        raise UserError.at(
            path,
            f"unknown kind of file {suffix!r}",
            "use .csv, .jsonl or .parquet, or a folder that `datasets` has saved",
        )
    text = _text(path)
    return _csv_rows(path, text) if suffix == ".csv" else _jsonl_rows(text)


def digest_of_rows(rows: Sequence[Row]) -> str:
    """Digest of what the rows say, not of the bytes they were saved in."""
    # Any column may hold anything (NaN, dates, half a surrogate pair), used or not.
    text = json.dumps([row.columns for row in rows], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# -- text ------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    """The text of a file; a byte that is no UTF-8 becomes a lone surrogate, found by its row."""
    content = path.read_bytes()
    # In UTF-16 the zero bytes of plain letters are every other one; a stray NUL is of its row.
    fewer, more = sorted(content[parity:512:2].count(0) for parity in (0, 1))
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or more > max(4, 8 * fewer):
        raise UserError.at(path, "is not UTF-8 (it looks like UTF-16)", "save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("utf-8-sig", "surrogateescape")


def _jsonl_rows(text: str) -> Table:
    rows, rejects = [], []
    # Not splitlines(): that would also break at U+2028 and other characters inside a text.
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.removesuffix("\r")
        if not line.strip():
            continue
        if len(line) > LONGEST_ROW:
            rejects.append(too_long(number, line))
            continue
        if not is_unicode(line):
            rejects.append(bad_byte(number, line))
            continue
        try:
            value = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            rejects.append(Reject(number, "not JSON", f"not JSON: {error}", begin_of(line)))
            continue
        if isinstance(value, dict):
            rows.append(Row(number, value))
        else:
            reason = f"is {kind_of(value)}, not an object"
            rejects.append(Reject(number, "not an object", reason, begin_of(line)))
    return Table(rows, rejects)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _csv_rows(path: Path, text: str) -> Table:
    # Not read_text(): universal newlines would change a line break inside quotes.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    rejects: list[Reject] = []
    header: list[str] | None = None
    try:
        for line, fields in _numbered(reader):
            if not any(field.strip() for field in fields):
                continue
            whole = ",".join(fields)
            if header is None:
                header = fields
                if len(set(header)) != len(header):
                    raise UserError.at(f"{path}:{line}", "two columns have one name", "rename one")
                if not is_unicode(whole):
                    raise refuse([bad_byte(line, whole).problem(path)], path)
            elif len(whole) > LONGEST_ROW:
                rejects.append(too_long(line, whole))
            elif not is_unicode(whole):
                rejects.append(bad_byte(line, whole))
            elif len(fields) != len(header):
                what = f"has {len(fields)} fields, the header {len(header)}"
                rejects.append(Reject(line, "another number of fields", what, begin_of(whole)))
            else:
                rows.append(Row(line, dict(zip(header, fields, strict=True))))
    except csv.Error as error:
        # After a wrong quote nobody knows where rows begin: this is of the file, not of a row.
        problems = [reject.problem(path) for reject in rejects]
        problems.append(Problem(f"{path}:{reader.line_num}", f"not CSV: {error}"))
        raise refuse(problems, path) from None
    return Table(rows, rejects)


def _numbered(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """CSV rows with the line they begin on (a quoted field may hold line breaks)."""
    begin = 1
    for fields in reader:
        yield begin, fields
        begin = reader.line_num + 1


# -- Arrow -----------------------------------------------------------------------------------


def _parquet_rows(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        raise UserError.at(path, f"cannot be read as Parquet: {error}", "check the file") from None
    return [Row(number, row) for number, row in enumerate(rows, start=1)]


def _dataset_rows(path: Path, split: str | None) -> list[Row]:
    """Rows of a folder written by `save_to_disk`."""
    if (path / "dataset_dict.json").is_file():
        path = _split_folder(path, split)
    elif split is not None:
        raise UserError.at(path, f"is one dataset, it has no split {split!r}", "leave it out")
    if not (path / "state.json").is_file():
        raise UserError.at(
            path,
            "is no folder that `datasets` has saved (no state.json)",
            "write one with Dataset.save_to_disk, or name a file",
        )
    import datasets
    import pyarrow

    try:
        # As Arrow: the columns' own values, whatever format (torch, a choice of columns) is set.
        table = datasets.load_from_disk(str(path)).with_format("arrow")[:]
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        remedy = "write it again with save_to_disk"
        raise UserError.at(path, f"cannot be read: {error}", remedy) from None
    return [Row(number, row) for number, row in enumerate(rows, start=1)]


def _split_folder(path: Path, split: str | None) -> Path:
    try:
        names = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        names = [str(name) for name in names if Path(str(name)).name == str(name)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError.at(path / "dataset_dict.json", f"cannot be read: {error!r}") from None
    if split is None or split not in names:
        what = "no split is named" if split is None else f"no split {split!r}"
        raise UserError.at(
            path, f"{what}; it has {', '.join(names)}", "set prompts.split to one of them"
        )
    return path / split
