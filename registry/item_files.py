"""Files of items as people save them: CSV, JSONL, Parquet, read to columns and line numbers.

Nothing is converted, filled in or dropped: what a cell means is for `registry.items` to say. All
mistakes of one file are collected and named at once, by the line that an editor shows.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from registry.evidence import Unusable
from registry.parquet_size import too_large

MAX_SHOWN = 5
MAX_COLUMNS = 2000

_BOOLEANS = ("true", "false")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)

# The csv module refuses cells over 128 KiB unless told; a long answer is an answer.
csv.field_size_limit(1 << 30)


@dataclass(frozen=True)
class Table:
    """Columns of one length, the line (or row) of each entry, and what is wrong with the file.

    `text_cells`: cells are CSV texts, of which numbers are still to be made.
    """

    where: str
    columns: Mapping[str, Any]
    lines: Sequence[int]
    place: Literal["line", "row"] = "line"
    text_cells: bool = False
    problems: Sequence[str] = field(default_factory=list)


def read_table(path: Path) -> Table:
    """The rows of a .parquet, .csv or .jsonl file with a column `item_id`. Raises `Unusable`."""
    readers = {".parquet": _read_parquet, ".csv": _read_csv, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise Unusable(f"{path}: unknown kind of file: use .parquet, .csv or .jsonl")
    try:
        if path.exists() and not path.is_file():
            # A pipe would be waited for without end.
            raise Unusable(f"{path}: is no regular file")
        return readers[path.suffix](path)
    except OSError as error:
        raise Unusable(f"{path}: cannot be read: {error.strerror or error}") from None


def refuse_file(where: str, problems: Sequence[str]) -> None:
    """Raise `Unusable` with the problems of one file: the first of them, and how many more."""
    rest = len(problems) - MAX_SHOWN
    more = [f"and {rest} more problems"] if rest > 0 else []
    raise Unusable(f"{where}: " + "; ".join([*problems[:MAX_SHOWN], *more]))


def json_lines(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line that holds one; what is wrong goes to `problems`.

    Reads line by line: samples with their prompts may be larger than memory. `NaN` is read (lm-eval
    writes it); it is refused where its column is asked for. Raises `Unusable` for UTF-16.
    """
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, start=1):
            if number == 1:
                _check_encoding(raw, path)
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            try:
                value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
                if b"\\ud" in raw.lower():
                    # Half a surrogate pair is valid JSON, but no text that could be written.
                    json.dumps(value, ensure_ascii=False).encode("utf-8")
            except UnicodeDecodeError as error:
                byte = raw[error.start]
                problems.append(f"line {number}: byte 0x{byte:02x} is not UTF-8: save it as UTF-8")
            except UnicodeEncodeError:
                problems.append(f"line {number}: holds half a surrogate pair, which is no text")
            except (ValueError, RecursionError) as error:
                problems.append(f"line {number}: not JSON: {error}")
            else:
                if isinstance(value, dict):
                    yield number, value
                else:
                    problems.append(f"line {number}: {defect(value)}, not an object")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Plain json would keep the last value, whichever that is.
        raise ValueError("a key stands twice in one object")
    return found


def _read_jsonl(path: Path) -> Table:
    problems: list[str] = []
    columns: dict[str, list[Any]] = {}
    lines: list[int] = []
    for line, row in json_lines(path, problems):
        for name, cell in row.items():
            cells = columns.setdefault(name, [])
            cells.extend([None] * (len(lines) - len(cells)))
            cells.append(cell)
        lines.append(line)
        if len(columns) > MAX_COLUMNS:
            raise Unusable(f"{path}: more than {MAX_COLUMNS} different keys: use one per metric")
    for cells in columns.values():
        cells.extend([None] * (len(lines) - len(cells)))
    if not lines:
        refuse_file(str(path), [*problems, "holds no items"])
    if "item_id" not in columns:
        refuse_file(str(path), [*problems, f"no key 'item_id' in any line; keys: {few(columns)}"])
    return Table(str(path), columns, lines, problems=problems)


def _read_csv(path: Path) -> Table:
    content = path.read_bytes()
    _check_encoding(content, path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        byte = content[error.start]
        raise Unusable(
            f"{path}: line {line}: byte 0x{byte:02x} is not UTF-8: save it as UTF-8"
        ) from None
    problems: list[str] = []
    header: list[str] = []
    rows: list[list[str]] = []
    lines: list[int] = []
    # Not universal newlines: they would change a line break inside quotes.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin = 1
    try:
        for cells in reader:
            line, begin = begin, reader.line_num + 1
            # A blank line; a line of empty cells is an item without id and is refused below.
            if len(cells) < 2 and not "".join(cells).strip():
                continue
            if not header:
                header = _header(cells, line, path)
            elif len(cells) != len(header):
                problems.append(f"line {line}: {len(cells)} cells, the header has {len(header)}")
            else:
                rows.append(cells)
                lines.append(line)
    except csv.Error as error:
        problems.append(f"line {reader.line_num}: not CSV: {error}")
    if not rows:
        what = "holds a header but no items" if header else "is empty"
        refuse_file(str(path), problems or [what])
    import pandas as pd

    # Arrow's texts take a fifth of Python's.
    columns = {
        name: pd.array(cells, dtype="str")
        for name, cells in zip(header, zip(*rows, strict=True), strict=True)
    }
    return Table(str(path), columns, lines, text_cells=True, problems=problems)


def _header(cells: Sequence[str], line: int, path: Path) -> list[str]:
    names = [cell.strip() for cell in cells]
    problems = []
    if "item_id" not in names:
        hint = next(
            (f": separate columns by commas, not {c!r}" for c in ";\t|" if c in cells[0]), ""
        )
        problems.append(f"line {line}: no column 'item_id'; columns: {few(names)}{hint}")
    doubled = sorted({name for name in names if name and names.count(name) > 1})
    if doubled:
        problems.append(f"line {line}: several columns are named {few(doubled)}: rename them")
    nameless = [str(place) for place, name in enumerate(names, start=1) if not name]
    if nameless:
        problems.append(f"line {line}: column {', '.join(nameless)} has no name: give it one")
    if problems:
        refuse_file(str(path), problems)
    return names


def _read_parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) != len(names):
                raise Unusable(f"{path}: several columns have one name: measure again")
            if "item_id" not in names:
                raise Unusable(f"{path}: no column 'item_id'; columns: {few(names)}")
            if what := too_large(file.metadata):
                raise Unusable(f"{path}: {what}: measure fewer items")
            # The answers are most of the file and no gate reads them.
            table = file.read([name for name in names if name != "response"])
            frame = table.to_pandas(ignore_metadata=True)
    except (pyarrow.ArrowException, ValueError, LookupError, OverflowError) as error:
        raise Unusable(f"{path}: cannot be read as Parquet ({error}): measure again") from None
    columns: dict[str, Any] = {name: frame[name].array for name in frame.columns}
    # A list has Python's own numbers and texts, whatever type the column had.
    columns["item_id"] = frame["item_id"].tolist()
    return Table(str(path), columns, range(1, len(frame) + 1), place="row")


def _check_encoding(content: bytes, path: Path) -> None:
    """Raise `Unusable` for what has NUL bytes, as UTF-16 and UTF-32 have."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Unusable(f"{path}: looks like UTF-16: save it as UTF-8")
    place = content.find(b"\0")
    if place >= 0:
        line = content[:place].count(b"\n") + 1
        raise Unusable(f"{path}: line {line}: a NUL byte: save it as UTF-8 text")


# -- words for messages ----------------------------------------------------------------------


def defect(cell: Any) -> str:
    """What is wrong with a cell, to be read after the item's name."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return "is empty"
    if isinstance(cell, bool) or (isinstance(cell, str) and cell.strip().lower() in _BOOLEANS):
        return f"is {shown(cell)}: write 1 or 0"
    if isinstance(cell, str) and _DECIMAL_COMMA.fullmatch(cell.strip()):
        return f"is {shown(cell)}: write {cell.strip().replace(',', '.')}"
    if isinstance(cell, str):
        return f"is the text {shown(cell)}"
    return f"is {shown(cell)}"


def doubled_text(doubled: Mapping[str, Sequence[int]], place: str) -> str:
    """Ids that stand more than once, with their places: a handful of them, and how many."""
    texts = []
    for identity, found in list(doubled.items())[:MAX_SHOWN]:
        listed = ", ".join(map(str, found[:MAX_SHOWN]))
        more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        texts.append(f"{shown(identity)} on {place}s {listed}{more}")
    rest = len(doubled) - len(texts)
    more = f"; and {rest} more" if rest else ""
    return f"item ids that stand more than once: {len(doubled)}: {'; '.join(texts)}{more}"


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    # repr: line breaks and half surrogates would spoil the message.
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def few(names: Iterable[str]) -> str:
    """Names for a message, the first 20."""
    listed = [shown(name) for name in names]
    more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
    return ", ".join(listed[:20]) + more
