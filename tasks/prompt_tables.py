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
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.errors import Problem, UserError
from registry.parquet_size import too_large
from tasks.chat_rows import kind_of
from tasks.rejects import LONGEST_ROW, Reject, bad_byte, begin_of, is_unicode, refuse, too_long
from tasks.strict_json import strict_loads

TABLES = (".csv", ".jsonl", ".ndjson", ".parquet")

_NO_TEXT = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "a zip archive or an Excel file",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"SQLite format 3": "SQLite",
}
"""How files begin that are saved under a text's name by mistake."""

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
    if _is_folder(path):
        return _dataset_rows(path, split)
    if split is not None:
        raise UserError.at(path, f"is a file, it has no split {split!r}", "leave out prompts.split")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet_rows(path)
    if suffix not in TABLES:
        raise UserError.at(
            path,
            f"unknown kind of file {suffix!r}",
            "use .csv, .jsonl or .parquet, or a folder that `datasets` has saved",
        )
    text = _text(path)
    return _csv_rows(path, text) if suffix == ".csv" else _jsonl_rows(path, text)


def _is_folder(path: Path) -> bool:
    """Whether it is a folder, not a file. Raises `UserError` for what is neither."""
    remedy = "check prompts.path, or what --prompts names"
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError.at(path, "no such file", remedy) from None
    except (OSError, ValueError) as error:  # no permission, a name that is too long, a NUL in it
        why = getattr(error, "strerror", None) or str(error)
        raise UserError.at(path, f"cannot be read: {why}", remedy) from None
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise UserError.at(path, "is no file (a pipe or a device)", "save the rows to a file")
    return stat.S_ISDIR(mode)


def digest_of_rows(rows: Sequence[Row]) -> str:
    """Digest of what the rows say, not of the bytes they were saved in."""
    # Any column may hold anything (NaN, dates, half a surrogate pair), used or not.
    text = json.dumps([row.columns for row in rows], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# -- text ------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    """The text of a file; a byte that is no UTF-8 becomes a lone surrogate, found by its row."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError.at(path, f"cannot be read: {error.strerror}", "check the file") from None
    if other := next((name for begin, name in _NO_TEXT.items() if content.startswith(begin)), ""):
        remedy = "unpack it, or save it as UTF-8 text"
        raise UserError.at(path, f"is not text (it looks like {other})", remedy)
    # In UTF-16 the zero bytes of plain letters are every other one; a stray NUL is of its row.
    fewer, more = sorted(content[parity:512:2].count(0) for parity in (0, 1))
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or more > max(4, 8 * fewer):
        raise UserError.at(path, "is not UTF-8 (it looks like UTF-16)", "save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("utf-8-sig", "surrogateescape")


def _jsonl_rows(path: Path, text: str) -> Table:
    rows: list[Row] = []
    rejects: list[Reject] = []
    # Not splitlines(): that would also break at U+2028 and other characters inside a text.
    for number, raw in enumerate(text.split("\n" if "\n" in text else "\r"), start=1):
        # A mark within a file is where another one was put behind it.
        line = raw.removesuffix("\r").removeprefix("\ufeff")
        if not line.strip():
            continue
        if len(line) > LONGEST_ROW:
            rejects.append(too_long(number, line))
            continue
        if not is_unicode(line):
            rejects.append(bad_byte(number, line))
            continue
        try:
            value = strict_loads(line)
        except (ValueError, RecursionError) as error:
            rejects.append(Reject(number, "not JSON", f"not JSON: {error}", begin_of(line)))
            continue
        if isinstance(value, dict):
            rows.append(Row(number, value))
        else:
            reason = f"is {'null' if value is None else kind_of(value)}, not an object"
            rejects.append(Reject(number, "not an object", reason, begin_of(line)))
    if rejects and not rows and _is_one_document(text, len(rejects)):
        raise UserError.at(
            path,
            "is one JSON document, not one JSON object a line",
            "write each object on a line of its own, e.g. `jq -c '.[]' list.json > rows.jsonl`",
        )
    return Table(rows, rejects)


def _is_one_document(text: str, lines: int) -> bool:
    """Whether the lines are one list or object together, as `json.dump(rows)` writes it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) or (isinstance(value, dict) and lines > 1)


def _csv_rows(path: Path, text: str) -> Table:
    # Not read_text(): universal newlines would change a line break inside quotes.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    rejects: list[Reject] = []
    header: list[str] | None = None
    begin = 1
    try:
        for fields in reader:
            # The line that the row begins on: a quoted field may hold line breaks.
            line, begin = begin, reader.line_num + 1
            if not any(field.strip() for field in fields):
                continue
            whole = ",".join(fields)
            if header is None:
                header = fields
                if len(set(header)) != len(header):
                    twice = sorted({name for name in header if header.count(name) > 1})
                    what = f"two columns have one name: {repr(twice)[:80]}"
                    raise UserError.at(f"{path}:{line}", what, "rename one")
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
        # It was opened where the row begins, and missed where the reader stands.
        said = f"not CSV: {error} (found in line {reader.line_num}, in the row that begins here)"
        remedy = "close the quote, and write one within a text twice"
        problems.append(Problem(f"{path}:{begin}", said, remedy))
        raise refuse(problems, path) from None
    return Table(rows, rejects)


# -- Arrow -----------------------------------------------------------------------------------


def _parquet_rows(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        # Not read_table(): that takes columns from the names of the folders above as well.
        file = pyarrow.parquet.ParquetFile(path)
        if what := too_large(file.metadata):
            raise UserError.at(path, what, "name a file with fewer rows")
        return _arrow_rows(path, file.read())
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        raise UserError.at(path, f"cannot be read as Parquet: {error}", "check the file") from None


def _arrow_rows(path: Path, table: Any) -> Table:
    """Rows of an Arrow table; one with bytes that are no text is a bad row."""
    names = table.column_names
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        what = f"several columns have the name {', '.join(map(repr, doubled))}"
        raise UserError.at(path, what, "rename them")
    rows: list[Row] = []
    rejects: list[Reject] = []

    def read(begin: int, count: int) -> None:
        """Rows from `begin` on; halved where one of them cannot be read."""
        try:
            found = table.slice(begin, count).to_pylist()
        except UnicodeDecodeError as error:
            if count > 1:
                read(begin, count // 2)
                read(begin + count // 2, count - count // 2)
                return
            bad = error.object[error.start]
            reason = f"byte {error.start + 1} of a text (0x{bad:02x}) is not UTF-8"
            shown = begin_of(error.object.decode("utf-8", "surrogateescape"))
            rejects.append(Reject(begin + 1, "not UTF-8", reason, shown, "save it as UTF-8"))
        else:
            rows.extend(Row(number, row) for number, row in enumerate(found, start=begin + 1))

    read(0, table.num_rows)
    return Table(rows, rejects, filled=True)


def _dataset_rows(path: Path, split: str | None) -> Table:
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
        return _arrow_rows(path, table)
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        remedy = "write it again with save_to_disk"
        raise UserError.at(path, f"cannot be read: {error}", remedy) from None


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
