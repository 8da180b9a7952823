"""From rows of a file to prompt records, by the recipe's mapping; every bad row is named.

A record is `{"id", "segment", "prompt", "reference"[, "conversation"][, "messages"][, "tools"]}`
(`conversations.py`). What is wrong with the file as a whole (a column that is not there) refuses
it; a bad row refuses it too unless the recipe allows a share of them (`rejects.py`).
"""

from __future__ import annotations

import json
import unicodedata
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.schema import ColumnMapping
from registry.errors import Problem, UserError
from tasks.chat_rows import Malformed, kind_of, messages_in, texts_in, tools_in
from tasks.conversations import with_messages, with_system
from tasks.prompt_tables import Row, Table, read_table
from tasks.rejects import LONGEST_ROW, Reject, begin_of, is_unicode, refuse, too_long

_MISSING = object()


def read_records(path: Path, mapping: ColumnMapping) -> list[dict[str, Any]]:
    """Prompt records of a file; ids are unique texts.

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


def used_mapping(table: Table, mapping: ColumnMapping) -> ColumnMapping:
    """The recipe's mapping, and what the file's format fixes where the recipe says nothing."""
    plain = ColumnMapping()
    said = [name for name in table.known if getattr(mapping, name) != getattr(plain, name)]
    # Named a prompt, a batch's conversation is not asked.
    said += ["messages"] if mapping.prompt != plain.prompt else []
    fixed = {name: column for name, column in table.known.items() if name not in said}
    return mapping.model_copy(update=fixed)


# -- one row ---------------------------------------------------------------------------------


def _records(
    path: Path, table: Table, mapping: ColumnMapping
) -> tuple[list[dict[str, Any]], list[Reject]]:
    """Records with their line, and every bad row by line. Ids may stand twice still."""
    rows = table.rows
    if not rows and table.rejects:
        return [], table.rejects
    if not rows:
        raise UserError.at(path, "holds no rows", "name a file with prompts")
    mapping = used_mapping(table, mapping)
    names = [
        mapping.messages or mapping.prompt,
        mapping.system,
        mapping.tools,
        mapping.id,
        mapping.segment,
        mapping.reference,
        mapping.conversation,
    ]
    absent = [
        name
        for name in names
        if name is not None and all(_column(row, name) is _MISSING for row in rows)
    ]
    if absent:
        known = sorted(set().union(*(row.columns for row in rows)))
        # Spaces round a name are to be seen; ordinary names are easier to read without quotes.
        spelled = [name if name == name.strip() and name else repr(name) for name in known]
        remedy = (
            "set prompts.mapping.prompt or .messages (and id, segment, reference) to the file's "
            "columns"
        )
        if len(known) == 1 and path.suffix.lower() == ".csv" and set(known[0]) & set(";\t|"):
            remedy = "save it with commas between the columns"
        missing = ", ".join(map(repr, dict.fromkeys(absent)))
        raise UserError.at(path, f"no column {missing}; it has {', '.join(spelled)}", remedy)
    bad_lines = [reject.line for reject in table.rejects]
    records, rejects = [], []
    for number, row in enumerate(rows, start=1):
        # Rows are counted with the bad ones: correcting one changes no other row's id.
        number += bisect(bad_lines, row.line)
        try:
            records.append(_record(row, number, mapping, table.filled))
        except Malformed as bad:
            rejects.append(Reject(row.line, bad.kind, str(bad), begin_of(row.columns)))
        except _TooLong as bad:
            rejects.append(too_long(row.line, bad.text))
    return records, sorted([*table.rejects, *rejects], key=lambda reject: reject.line)


class _TooLong(Exception):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def _column(row: Row, name: str) -> Any:
    """A column's value; a name with dots that is no column goes into objects and lists."""
    if name in row.columns:
        return row.columns[name]
    value: Any = row.columns
    for step in name.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return _MISSING
    return value


def _record(row: Row, number: int, mapping: ColumnMapping, filled: bool) -> dict[str, Any]:
    """The record with its line. Raises `Malformed` and `_TooLong`."""

    def value(name: str | None) -> Any:
        found = _MISSING if name is None else _column(row, name)
        return None if found is _MISSING else found

    asked = _asked(value, mapping, filled)
    identity = value(mapping.id) if mapping.id else f"row-{number}"
    if isinstance(identity, float):
        raise _bad(mapping.id, "is a number with a fraction, not a text or a whole number")
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise _bad(mapping.id, f"is {kind_of(identity)}, not a text")
    if _is_blank(identity):
        raise _bad(mapping.id, "is empty")
    segment = value(mapping.segment) if mapping.segment else "all"
    reference = value(mapping.reference)
    conversation = value(mapping.conversation)
    for name, one in ((mapping.segment, segment), (mapping.conversation, conversation)):
        if isinstance(one, dict | list):
            raise _bad(name, f"is {kind_of(one)}, not a text")
    if mapping.reference and (reference in ({}, []) or _is_blank(reference)):
        raise _bad(mapping.reference, "is empty: no right answer")
    if isinstance(reference, list):
        raise _bad(mapping.reference, "is a list, not a text or an object")
    if mapping.conversation and _is_blank(conversation):
        raise _bad(mapping.conversation, "is empty")
    for name, one in (
        (mapping.id, identity),
        (mapping.segment, segment),
        (mapping.reference, reference),
        (mapping.conversation, conversation),
    ):
        _check_texts(one, str(name))
    record = {
        "id": str(identity),
        "segment": "none" if _is_blank(segment) else str(segment),
        "prompt": asked.pop("prompt"),
        "reference": reference if isinstance(reference, dict) else _label(reference),
        **({"conversation": str(conversation)} if mapping.conversation else {}),
        **asked,
    }
    return {**record, "line": row.line}


def _asked(value: Any, mapping: ColumnMapping, filled: bool) -> dict[str, Any]:
    """`{"prompt"[, "messages"][, "tools"]}` of a row."""

    def given(name: str) -> Any:
        return _without_nulls(value(name)) if filled else value(name)

    name = mapping.messages or mapping.prompt
    if mapping.messages is None:
        asked: dict[str, Any] = {"prompt": _prompt(value(name), name)}
    else:
        asked = with_messages({}, messages_in(given(name), name))
        _check_texts(asked.get("messages", asked["prompt"]), name)
    if mapping.system is not None:
        system = value(mapping.system)
        if system is not None and not isinstance(system, str):
            raise _bad(mapping.system, f"is {kind_of(system)}, not a text")
        if system and not _is_blank(system):
            _check_texts(system, mapping.system)
            asked = with_system(asked, system)
    if mapping.tools is not None:
        tools = tools_in(given(mapping.tools), mapping.tools)
        _check_texts(tools, mapping.tools)
        asked |= {"tools": tools} if tools else {}
    return asked


def _prompt(prompt: Any, name: str) -> str:
    if not isinstance(prompt, str):
        raise _bad(name, f"is {kind_of(prompt)}, not a text")
    if _is_blank(prompt):
        raise _bad(name, "is empty")
    _check_texts(prompt, name)
    return prompt


def _check_texts(value: Any, name: str) -> None:
    """Raises for texts that cannot be sent: half characters, NUL, a picture in a column."""
    if value is None or isinstance(value, int):
        return
    texts = [value] if isinstance(value, str) else list(texts_in(value))
    if sum(map(len, texts)) > LONGEST_ROW:
        raise _TooLong("".join(texts))
    if any("\0" in text or not is_unicode(text) for text in texts):
        raise _bad(name, "holds a lone surrogate or NUL")
    if not isinstance(value, str) and not _is_json_text(value):
        raise _bad(name, "is no plain JSON value")


def _is_blank(value: Any) -> bool:
    """None, and a text of white space and of characters that nobody sees (U+200B, marks)."""
    if not isinstance(value, str):
        return value is None
    return all(char.isspace() or unicodedata.category(char) in ("Cf", "Cc") for char in value)


def _bad(name: object, what: str) -> Malformed:
    return Malformed(f"{name} {what}", f"{name} {what}")


def _without_nulls(value: Any) -> Any:
    """Objects without their null fields, which Arrow adds where another row has a value."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_json_text(value: Any) -> bool:
    """Whether a value can be written to our JSONL files and read back as it is."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError):
        return False
    return True


def _label(reference: Any) -> dict[str, Any] | None:
    return None if reference in (None, "") else {"intent": str(reference)}


# -- ids -------------------------------------------------------------------------------------


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
