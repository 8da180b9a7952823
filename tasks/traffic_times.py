"""Units and zones of a log's times, told from its first rows or said by a person."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from registry.errors import UserError
from tasks import traffic_columns
from tasks.traffic_columns import UNITS
from tasks.traffic_files import LogFile

SMALLEST = 1e8
"""Seconds since 1970 of a time that needs no unit (1973); ms, us and ns are 1000 times each."""

_OFFSET = re.compile(r"(?:Z|UTC|([+-]\d\d):?(\d\d)?)$")


@dataclass(frozen=True)
class LogTimes:
    numeric: dict[Path, set[str]]
    """Fields whose times are numbers."""

    unit_us: dict[Path, dict[str, float]]
    """Microseconds of what the reader gives for each of these fields."""

    zone: str
    """Whose hours are counted: a name, or an offset as +08:00."""

    zone_from: str
    zone_of_plain: str
    """Of texts without one."""

    has_id: bool
    notes: list[str]


def times_of(
    files: Sequence[LogFile],
    columns: Sequence[dict[str, str]],
    asked_zone: str | None,
    asked_unit: str | None,
) -> LogTimes:
    """Raises `UserError` for a zone that is none and for numbers that need a unit."""
    if asked_unit is not None and asked_unit not in UNITS:
        raise UserError.at(f"--time-unit {asked_unit}", "is no unit", f"one of {', '.join(UNITS)}")
    if asked_zone is not None:
        zone_of(asked_zone)
    numeric: dict[Path, set[str]] = {}
    unit_us: dict[Path, dict[str, float]] = {}
    offsets: set[str] = set()
    plain = False
    for file, taken in zip(files, columns, strict=True):
        fields = [field for field in ("arrived", "ended") if field in taken]
        numeric[file.path] = {one for one in fields if _is_numeric(file, taken[one])}
        unit_us[file.path] = dict.fromkeys(fields, 1.0)
        for field in ("arrived", "ended"):
            # A log may say the one as a text and the other in ms.
            if field in numeric[file.path]:
                unit_us[file.path][field] = _unit(file, taken[field], asked_unit, taken["arrived"])
        if "arrived" not in numeric[file.path]:
            for text in _values(file, taken["arrived"]):
                found = _OFFSET.search(str(text).strip())
                if found is None or len(str(text)) <= 10:
                    plain = True
                else:
                    offsets.add(f"{found[1]}:{found[2] or '00'}" if found[1] else "+00:00")
    notes = []
    if asked_zone is not None:
        zone, why = asked_zone, "--timezone"
    elif len(offsets) == 1 and not plain:
        zone, why = offsets.pop(), "as the log's times"
    else:
        zone, why = "UTC", "no other zone was said"
    if any(file.kind == "vllm" for file in files):
        notes.append(
            "vLLM's log has whole seconds and no year: the year is that of the file's date; a "
            "server that ran with --max-log-len logged no more tokens than that"
        )
    if plain:
        zone_word = asked_zone or "UTC"
        notes.append(f"times without a zone are read as {zone_word} (--timezone says another)")
    return LogTimes(numeric, unit_us, zone, why, asked_zone or "UTC",
                    all("id" in taken for taken in columns), notes)  # fmt: skip


def zone_of(name: str) -> Any:
    """A `tzinfo` of a name or an offset. Raises `UserError`."""
    from datetime import timedelta, timezone

    if re.fullmatch(r"[+-]\d\d:\d\d", name):
        hours, minutes = int(name[1:3]), int(name[4:])
        if hours < 24 and minutes < 60:
            minutes += 60 * hours
            return timezone(timedelta(minutes=-minutes if name[0] == "-" else minutes))
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise UserError.at(f"--timezone {name}", "is no time zone", "e.g. Asia/Shanghai or UTC"
                           ) from None  # fmt: skip


def unit_of_name(column: str, asked: str | None) -> float:
    """Microseconds of the unit of a duration's column."""
    return UNITS[asked or traffic_columns.unit_of_name(column)]


def _values(file: LogFile, column: str) -> list[Any]:
    return [row[column] for row in file.head if row.get(column) not in (None, "")]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_numeric(file: LogFile, column: str) -> bool:
    if file.kind == "parquet" and (column in file.numeric or column in file.times):
        return column in file.numeric
    values = _values(file, column)
    return 2 * sum(_number(value) is not None for value in values) > len(values)


def _unit(file: LogFile, column: str, asked: str | None, arrived: str) -> float:
    if asked is not None:
        return UNITS[asked]
    numbers = [one for one in map(_number, _values(file, column)) if one and np.isfinite(one)]
    if not numbers and column != arrived:
        # None of the first requests has an end.
        return _unit(file, arrived, asked, arrived)
    middle = float(np.median(np.abs(numbers))) if numbers else 0.0
    for name, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        if SMALLEST * factor <= middle < 1000 * SMALLEST * factor:
            return UNITS[name]
    raise UserError.at(
        f"{file.path}: {column}",
        f"numbers about {middle:g} are no seconds, ms, us or ns since 1970",
        "where they count from the log's begin, say the unit: --time-unit s",
    )
