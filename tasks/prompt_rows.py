"""Which rows of the store's files hold which prompts: by id, a million rows in half a second.

A few ids are looked for among the bytes of a file, where its rows begin with their id, as ours do.
Otherwise the column of ids is read and nothing else; and where a file is odd (a number as an id,
a row of many megabytes), line by line. Each way finds the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from registry.errors import UserError
from tasks.conversations import texts_of_people
from tasks.prompt_formats import read_formatted
from tasks.prompt_tables import TABLES
from tasks.rejects import refuse

BLOCK = 8 << 20
"""Bytes that are read at once; a row must fit in."""

FEW = 8
"""More ids than this are found faster in the column."""

_ROW = b'{"id": '


def ids_of(path: Path, column: str = "id") -> Any:
    """A column of a JSONL file of ours as an Arrow array of texts, in file order."""
    import pyarrow
    from pyarrow import json as arrow_json

    if path.stat().st_size == 0:
        return pyarrow.array([], pyarrow.string())
    try:
        table = arrow_json.read_json(
            path,
            read_options=arrow_json.ReadOptions(block_size=BLOCK),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=pyarrow.schema([(column, pyarrow.string())]),
                unexpected_field_behavior="ignore",
            ),
        )
        return table[column]
    except pyarrow.ArrowInvalid:
        with path.open(encoding="utf-8") as lines:
            found = [json.loads(line).get(column) for line in lines]
        texts = [None if one is None else str(one) for one in found]
        return pyarrow.array(texts, pyarrow.string())


def find_ids(ids: Any, wanted: Collection[str]) -> dict[str, int]:
    """`{id: place of its first row}` of the wanted ids that stand in an Arrow array."""
    import pyarrow
    from pyarrow import compute

    values = pyarrow.array(sorted(wanted), pyarrow.string())
    places = compute.indices_nonzero(compute.is_in(ids, value_set=values))
    found: dict[str, int] = {}
    for place, name in zip(places.to_pylist(), ids.take(places).to_pylist(), strict=True):
        found.setdefault(name, place)
    return found


def find_rows(path: Path, wanted: Collection[str]) -> dict[str, int]:
    """`{id: row number, from 0}` in a JSONL file with a field `id`.

    Raises `OSError` or `ValueError` where the file cannot be read.
    """
    if path.stat().st_size == 0 or not wanted:
        return {}
    if len(wanted) <= FEW:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            if content[: len(_ROW) + 1] == _ROW + b'"':
                return _find_bytes(content, wanted)
    return find_ids(ids_of(path), wanted)


def _find_bytes(content: mmap, wanted: Collection[str]) -> dict[str, int]:
    """Rows that begin with one of the ids, spelled as `write_jsonl` does."""
    found = {}
    for name in wanted:
        spelled = _ROW + json.dumps(name, ensure_ascii=False).encode("utf-8", "replace")
        place = 0
        if content[: len(spelled)] != spelled:
            place = content.find(b"\n" + spelled) + 1
            if not place:
                continue
        found[name] = sum(
            content[at : min(at + BLOCK, place)].count(b"\n") for at in range(0, place, BLOCK)
        )
    return found


def column_of(path: Path, column: str) -> Any:
    """One column of a Parquet file as an Arrow array."""
    from pyarrow import parquet

    return parquet.read_table(path, columns=[column])[column].combine_chunks()


def prompts_at(path: Path, places: Collection[int]) -> list[str]:
    """What people wrote in some rows of a part's file, earlier turns included."""
    last = max(places, default=-1)
    found: list[str] = []
    with path.open("rb") as lines:
        for place, line in enumerate(lines):
            if place > last:
                break
            if place in places:
                found += texts_of_people(json.loads(line))
    return found


# -- what a person asks for ------------------------------------------------------------------


def asked_ids(words: Iterable[str]) -> list[str]:
    """Ids as they were given: each once, in order. A word that is a file stands for its ids.

    A table (CSV, JSONL, Parquet) gives its column `id`, an OpenAI batch its `custom_id`; any other
    file one id a line. Raises `UserError` for a file that cannot be read, and for a word that looks
    like a file and is none: taken for an id, it would have reached nothing.
    """
    found: dict[str, None] = {}
    for word in words:
        path = Path(word)
        if _is_file(path):
            found |= dict.fromkeys(_file_ids(path))
        elif not word or "/" in word or path.suffix.lower() in (".txt", *TABLES):
            remedy = "name a file of ids; an id that looks like one goes into it, one id a line"
            raise UserError.at(f"{word[:200]!a}", "is no file", remedy)
        else:
            found[word] = None
    return list(found)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a name, or with a NUL in it
        return False


def _file_ids(path: Path) -> list[str]:
    if path.suffix.lower() in TABLES:
        table = read_formatted(path)
        if table.rejects:
            raise refuse([reject.problem(path) for reject in table.rejects], path)
        rows, column = table.rows, table.known.get("id", "id")
        if not any(column in row.columns for row in rows):
            columns = sorted(set().union(*(row.columns for row in rows)))
            raise UserError.at(
                path,
                f"no column 'id'; it has {', '.join(columns) or 'no rows'}",
                "name a file with a column `id`, or a text file with one id a line; prompts "
                "without an id of their own are row-1, row-2, ...",
            )
        values = [row.columns.get(column) for row in rows]
        ids = [str(one) for one in values if one not in (None, "")]
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "is no UTF-8 text"
            raise UserError.at(path, f"cannot be read: {why}", "one id a line, UTF-8") from None
        ids = [line.strip() for line in text.split("\n") if line.strip()]
    if not ids:
        raise UserError.at(path, "holds no ids", "one id a line, or a table with a column `id`")
    return ids
