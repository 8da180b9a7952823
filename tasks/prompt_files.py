"""Read prompt files as people really save them, and split them into parts that share no prompt.

CSV, JSONL and Parquet with a column mapping. One reader serves prompts, calibration and
evaluation sets. Text is kept to the code point: no normalisation, no stripping. A byte-order
mark, CRLF and blank lines are no part of the text and change nothing, the digest included. Every
mistake of a file is reported at once, by the line an editor shows; nothing is dropped silently.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.schema import ColumnMapping
from registry.errors import Problem, UserError

PARTS = ("train", "calibration", "draft", "eval", "load")
MAX_PROBLEMS_SHOWN = 20

# The csv module refuses fields over 128 KiB unless told; a long message is a message.
csv.field_size_limit(1 << 30)


@dataclass(frozen=True)
class Row:
    """One row of a file as it stands there: where (line or row number) and its columns."""

    line: int
    columns: dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Every row of a CSV, JSONL or Parquet file. Raises `UserError` naming file and lines."""
    suffix = path.suffix.lower()
    if not path.is_file():
        raise UserError.at(path, "no such file", "check the path given with --prompts")
    if suffix == ".parquet":
        return _parquet_rows(path)
    text = _text(path)
    if suffix == ".csv":
        return _csv_rows(path, text)
    if suffix in (".jsonl", ".ndjson"):
        return _jsonl_rows(path, text)
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
    rows = read_rows(path)
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
    problems: list[Problem] = []
    records = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}:{row.line}"
        prompt = row.columns.get(mapping.prompt)
        if not isinstance(prompt, str):
            problems.append(Problem(where, f"{mapping.prompt} is {_kind(prompt)}, not a text"))
            continue
        if not prompt.strip():
            problems.append(Problem(where, f"{mapping.prompt} is empty"))
            continue
        if any(unicodedata.category(char) == "Cs" or char == "\0" for char in prompt):
            problems.append(Problem(where, f"{mapping.prompt} holds a lone surrogate or NUL"))
            continue
        identity = row.columns.get(mapping.id) if mapping.id else f"row-{number}"
        if not isinstance(identity, str | int) or isinstance(identity, bool) or identity == "":
            problems.append(Problem(where, f"{mapping.id} is {_kind(identity)}, not a text"))
            continue
        segment = row.columns.get(mapping.segment) if mapping.segment else "all"
        reference = row.columns.get(mapping.reference) if mapping.reference else None
        if mapping.reference and reference in (None, "", {}, []):
            problems.append(Problem(where, f"{mapping.reference} is empty: no right answer"))
            continue
        conversation = row.columns.get(mapping.conversation) if mapping.conversation else None
        if mapping.conversation and conversation in (None, ""):
            problems.append(Problem(where, f"{mapping.conversation} is empty"))
            continue
        if not all(map(_is_json_text, (identity, segment, reference, conversation))):
            what = "id, segment, reference or conversation"
            problems.append(Problem(where, f"{what} is no plain JSON value"))
            continue
        records.append(
            {
                "id": str(identity),
                "segment": str(segment) if segment not in (None, "") else "none",
                "prompt": prompt,
                "reference": reference if isinstance(reference, dict) else _label(reference),
                **({"conversation": str(conversation)} if mapping.conversation else {}),
                "line": row.line,
            }
        )
    problems += _doubled(path, records)
    if problems:
        raise UserError(_shown(problems, path))
    return [{key: value for key, value in record.items() if key != "line"} for record in records]


def split(
    records: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], seed: int, source: str
) -> dict[str, list[dict[str, Any]]]:
    """Parts of the asked sizes, stratified by segment, that share no prompt.

    Prompts that are equal after folding case and white space count as one and only the first is
    used. Raises `UserError` when there are too few prompts.
    """
    folded: dict[str, Mapping[str, Any]] = {}
    for record in records:
        folded.setdefault(" ".join(record["prompt"].casefold().split()), record)
    wanted = sum(sizes.values())
    if wanted > len(folded):
        raise UserError.at(
            source,
            f"{wanted} different prompts are asked for, the file has {len(folded)}",
            "lower prompts.sizes, e.g. --set prompts.sizes.train=200",
        )
    by_segment: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in folded.values():
        by_segment[record["segment"]].append(record)
    order = random.Random(seed)
    for members in by_segment.values():
        order.shuffle(members)
    # Dealing in the order of each row's share within its segment keeps every prefix stratified.
    dealt = sorted(
        ((place + 0.5) / len(members), segment, place)
        for segment, members in by_segment.items()
        for place in range(len(members))
    )
    queue = iter([by_segment[segment][place] for _, segment, place in dealt])
    names = [name for name in PARTS if sizes.get(name)]
    deck = [name for name in names for _ in range(sizes[name])]
    order.shuffle(deck)
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in PARTS}
    for name in deck:
        parts[name].append(dict(next(queue)))
    return parts


def apply_template(
    records: Iterable[Mapping[str, Any]], template: str, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Records with the recipe's template round each prompt, and the known labels at hand."""
    listed = ", ".join(labels)
    return [
        {
            **record,
            "prompt": template.replace("{labels}", listed).replace("{prompt}", record["prompt"]),
            "reference": {**record["reference"], "labels": list(labels)}
            if record["reference"]
            else None,
        }
        for record in records
    ]


def labels_of(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every intent that a reference names, in alphabetical order."""
    named = ((record["reference"] or {}).get("intent") for record in records)
    return sorted({str(intent) for intent in named if intent is not None})


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
    content = path.read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content[:512]:
        raise UserError.at(path, "is not UTF-8 (it looks like UTF-16)", "save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError.at(
            f"{path}:{line}", f"byte {error.start} is not UTF-8", "save it as UTF-8"
        ) from None


def _jsonl_rows(path: Path, text: str) -> list[Row]:
    rows, problems = [], []
    # Not splitlines(): that would also break at U+2028 and other characters inside a text.
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.removesuffix("\r")
        if not line.strip():
            continue
        try:
            value = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            problems.append(Problem(f"{path}:{number}", f"not JSON: {error}"))
            continue
        if isinstance(value, dict):
            rows.append(Row(number, value))
        else:
            problems.append(Problem(f"{path}:{number}", f"is {_kind(value)}, not an object"))
    if problems:
        raise UserError(_shown(problems, path))
    return rows


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _csv_rows(path: Path, text: str) -> list[Row]:
    # Not read_text(): universal newlines would change a line break inside quotes.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    problems: list[Problem] = []
    header: list[str] | None = None
    try:
        for line, fields in _numbered(reader):
            if not any(field.strip() for field in fields):
                continue
            if header is None:
                header = fields
                if len(set(header)) != len(header):
                    raise UserError.at(f"{path}:{line}", "two columns have one name", "rename one")
            elif len(fields) != len(header):
                what = f"has {len(fields)} fields, the header {len(header)}"
                problems.append(Problem(f"{path}:{line}", what))
            else:
                rows.append(Row(line, dict(zip(header, fields, strict=True))))
    except csv.Error as error:
        problems.append(Problem(f"{path}:{reader.line_num}", f"not CSV: {error}"))
    if problems:
        raise UserError(_shown(problems, path))
    return rows


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


def _doubled(path: Path, records: Sequence[Mapping[str, Any]]) -> list[Problem]:
    lines: dict[str, list[int]] = defaultdict(list)
    for record in records:
        lines[record["id"]].append(record["line"])
    return [
        Problem(str(path), f"id {identity!r} stands on lines {', '.join(map(str, found))}")
        for identity, found in lines.items()
        if len(found) > 1
    ]


def _shown(problems: list[Problem], path: Path) -> list[Problem]:
    rest = len(problems) - MAX_PROBLEMS_SHOWN
    shown = [
        replace(problem, remedy=problem.remedy or "correct or remove that row")
        for problem in problems[:MAX_PROBLEMS_SHOWN]
    ]
    return [*shown, Problem(str(path), f"and {rest} more bad rows")] if rest > 0 else shown


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return "missing" if value is None else names.get(type(value), "a number")
