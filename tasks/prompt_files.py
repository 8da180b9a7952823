"""Read prompt files as people really save them, and split them into parts that share no prompt.

CSV, JSONL and Parquet with a column mapping. One reader serves prompts, calibration and
evaluation sets. Text is kept to the code point: no normalisation, no stripping. A byte-order
mark, CRLF and blank lines are no part of the text and change nothing, the digest included. Every
mistake of a file is reported at once, by the line an editor shows; nothing is dropped silently.
What is wrong with the file as a whole (its encoding, its columns) refuses it; a bad row refuses
it too unless the recipe allows a share of them (`sift`, `tasks/rejects.py`).
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.schema import ColumnMapping
from registry.errors import Problem, UserError
from tasks.rejects import LONGEST_ROW, Reject, bad_byte, begin_of, is_unicode, refuse, too_long

PARTS = ("train", "calibration", "draft", "eval", "load")
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

    def __len__(self) -> int:
        return len(self.rows) + len(self.rejects)


def read_rows(path: Path) -> list[Row]:
    """Every row of a CSV, JSONL or Parquet file. Raises `UserError` naming file and lines."""
    table = read_table(path)
    if table.rejects:
        raise refuse([reject.problem(path) for reject in table.rejects], path)
    return table.rows


def read_table(path: Path) -> Table:
    """Rows of a file, good and bad. Raises `UserError` where the file as a whole is wrong."""
    suffix = path.suffix.lower()
    if not path.is_file():
        raise UserError.at(path, "no such file", "check the path given with --prompts")
    if suffix == ".parquet":
        return Table(_parquet_rows(path), [])
    text = _text(path)
    if suffix == ".csv":
        return _csv_rows(path, text)
    if suffix in (".jsonl", ".ndjson"):
        return _jsonl_rows(text)
    raise UserError.at(path, f"unknown kind of file {suffix!r}", "use .csv, .jsonl or .parquet")


def digest_of_rows(rows: Sequence[Row]) -> str:
    """Digest of what the rows say, not of the bytes they were saved in."""
    # Any column may hold anything (NaN, dates, half a surrogate pair), used or not.
    text = json.dumps([row.columns for row in rows], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read_records(path: Path, mapping: ColumnMapping) -> list[dict[str, Any]]:
    """Prompt records `{id, segment, prompt, reference}` of a file; ids are unique texts.

    Number and text forms of an id are one id. All missing, empty, doubled or mistyped values
    are reported at once.
    """
    return all_records(path, read_table(path), mapping)


def all_records(path: Path, table: Table, mapping: ColumnMapping) -> list[dict[str, Any]]:
    """The records of a file that has no bad row. Raises `UserError` with all of them."""
    records, rejects = _records(path, table, mapping)
    doubled = _doubled(records)
    if rejects or doubled:
        problems = [reject.problem(path) for reject in rejects]
        problems += [Problem(str(path), _on_lines(name, on)) for name, on in doubled.items()]
        raise refuse(problems, path)
    return [_without_line(record) for record in records]


def sift(
    path: Path, table: Table, mapping: ColumnMapping
) -> tuple[list[dict[str, Any]], list[Reject]]:
    """The good records of a file and its bad rows, in file order.

    Of rows that share an id none is good: nobody can say which of them was meant. Raises
    `UserError` where the file as a whole is wrong.
    """
    records, rejects = _records(path, table, mapping)
    doubled = _doubled(records)
    good = []
    for record in records:
        name, line = record["id"], record["line"]
        if name in doubled:
            reason = _on_lines(name, doubled[name])
            text = begin_of(_without_line(record))
            rejects.append(Reject(line, "an id that stands twice", reason, text))
        else:
            good.append(_without_line(record))
    return good, sorted(rejects, key=lambda reject: reject.line)


def _records(
    path: Path, table: Table, mapping: ColumnMapping
) -> tuple[list[dict[str, Any]], list[Reject]]:
    """Records with their line, and every bad row by line. Ids may stand twice still."""
    rows = table.rows
    if not rows and table.rejects:
        return [], table.rejects
    if not rows:
        raise UserError.at(path, "holds no rows", "name a file with prompts")
    names = [
        mapping.prompt,
        mapping.id,
        mapping.segment,
        mapping.reference,
        mapping.conversation,
    ]
    known = set().union(*(row.columns for row in rows))
    absent = [name for name in names if name is not None and name not in known]
    if absent:
        raise UserError.at(
            path,
            f"no column {', '.join(map(repr, absent))}; it has {', '.join(sorted(known))}",
            "set prompts.mapping.prompt (and id, segment, reference) to the file's columns",
        )
    bad_lines = [reject.line for reject in table.rejects]
    records, rejects = [], []
    for number, row in enumerate(rows, start=1):
        # Rows are counted with the bad ones: correcting one changes no other row's id.
        made = _record(row, number + bisect(bad_lines, row.line), mapping)
        if isinstance(made, Reject):
            rejects.append(made)
        else:
            records.append(made)
    return records, sorted([*table.rejects, *rejects], key=lambda reject: reject.line)


def _record(row: Row, number: int, mapping: ColumnMapping) -> dict[str, Any] | Reject:
    def bad(name: object, what: str) -> Reject:
        return Reject(row.line, f"{name} {what}", f"{name} {what}", begin_of(row.columns))

    prompt = row.columns.get(mapping.prompt)
    if not isinstance(prompt, str):
        return bad(mapping.prompt, f"is {_kind(prompt)}, not a text")
    if not prompt.strip():
        return bad(mapping.prompt, "is empty")
    if len(prompt) > LONGEST_ROW:
        return too_long(row.line, prompt)
    if "\0" in prompt or not is_unicode(prompt):
        return bad(mapping.prompt, "holds a lone surrogate or NUL")
    identity = row.columns.get(mapping.id) if mapping.id else f"row-{number}"
    if not isinstance(identity, str | int) or isinstance(identity, bool) or identity == "":
        return bad(mapping.id, f"is {_kind(identity)}, not a text")
    segment = row.columns.get(mapping.segment) if mapping.segment else "all"
    reference = row.columns.get(mapping.reference) if mapping.reference else None
    if mapping.reference and reference in (None, "", {}, []):
        return bad(mapping.reference, "is empty: no right answer")
    conversation = row.columns.get(mapping.conversation) if mapping.conversation else None
    if mapping.conversation and conversation in (None, ""):
        return bad(mapping.conversation, "is empty")
    if not all(map(_is_json_text, (identity, segment, reference, conversation))):
        return bad("id, segment, reference or conversation", "is no plain JSON value")
    return {
        "id": str(identity),
        "segment": str(segment) if segment not in (None, "") else "none",
        "prompt": prompt,
        "reference": reference if isinstance(reference, dict) else _label(reference),
        **({"conversation": str(conversation)} if mapping.conversation else {}),
        "line": row.line,
    }


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file that this project wrote."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


# -- parts -----------------------------------------------------------------------------------


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
            reason = f"is {_kind(value)}, not an object"
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


def _parquet_rows(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        raise UserError.at(path, f"cannot be read as Parquet: {error}", "check the file") from None
    return [Row(number, row) for number, row in enumerate(rows, start=1)]


def _is_json_text(value: Any) -> bool:
    """Whether a value can be written to our JSONL files and read back as it is."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError):
        return False
    return True


def _label(reference: Any) -> dict[str, Any] | None:
    return None if reference in (None, "") else {"intent": str(reference)}


def _doubled(records: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Ids that stand more than once, with their lines."""
    lines: dict[str, list[int]] = defaultdict(list)
    for record in records:
        lines[record["id"]].append(record["line"])
    return {identity: found for identity, found in lines.items() if len(found) > 1}


def _on_lines(identity: str, lines: Sequence[int]) -> str:
    return f"id {identity!r} stands on lines {', '.join(map(str, lines))}"


def _without_line(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "line"}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return "missing" if value is None else names.get(type(value), "a number")
