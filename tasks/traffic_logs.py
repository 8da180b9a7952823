"""Read request logs of any size into columns, and say what of them was left out.

DuckDB streams the files and parses numbers and times in parallel; every batch is checked here and
kept as whole numbers, about 30 bytes a request. Nothing is dropped silently: a row is kept, or
counted under the reason why not, the first ones with file, place and value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from registry.errors import UserError
from registry.traffic_requests import NO_TIME, Requests, Text
from tasks.traffic_columns import chosen
from tasks.traffic_files import HEAD_ROWS, LogFile, found, opened, places
from tasks.traffic_scan import MISSING, MOST_CHARACTERS, Scan
from tasks.traffic_scratch import scratch
from tasks.traffic_times import LogTimes, times_of, unit_of_name

EXAMPLES = 10
"""Rows that were left out and are named."""

MOST_TOKENS = 10_000_000
LONGEST_S = 30 * 86_400
"""A request that took longer is a mistake in the log."""

YEARS_US = (631_152_000_000_000, 7_258_118_400_000_000)
"""1990 to 2200."""

MOST_SEGMENTS = 1000
TEXTS = 10_000
"""Prompts that are compared for shared prefixes."""

FAILED = "failed request"
REPEATED = "stands twice (same id, same values)"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    columns: Mapping[str, str] = field(default_factory=dict)
    timezone: str | None = None
    time_unit: str | None = None
    """Of numeric times; then they may also count from the log's begin."""

    latency_unit: str | None = None
    bad_rows: float = 0.01
    """Largest share of rows that may be bad."""


@dataclass(frozen=True)
class ReadFile:
    path: Path
    kind: str
    bytes: int
    rows: int
    columns: dict[str, str]


@dataclass(frozen=True, eq=False)
class ReadLog:
    requests: Requests
    files: list[ReadFile]
    read: int
    left_out: dict[str, int]
    examples: list[str]
    equal: int
    zone: str
    zone_from: str
    notes: list[str]


def read_log(paths: Sequence[Path], options: Options) -> ReadLog:
    """All requests of the files. Raises `UserError` naming file, place, value and remedy."""
    files = [opened(path) for path in found(paths)]
    if not any(file.columns for file in files):
        raise UserError.at(files[0].path, "holds no request", "name a log with requests")
    with_rows = [file for file in files if file.columns]
    columns = [chosen(file.columns, options.columns, _where(file)) for file in with_rows]
    times = times_of(with_rows, columns, options.timezone, options.time_unit)
    kept = _Kept()
    with scratch() as folder:
        scan = Scan(folder, times.zone_of_plain)
        for number, (file, taken) in enumerate(zip(with_rows, columns, strict=True)):
            _read_file(scan, number, file, taken, times, options, kept)
    kept.files += [
        ReadFile(file.path, file.kind, file.path.stat().st_size, 0, {})
        for file in files
        if not file.columns
    ]
    return _checked(kept, times, options)


def _where(file: LogFile) -> str:
    """Columns of JSON are those of its first lines."""
    return f"{file.path}, first {HEAD_ROWS} lines" if file.kind == "jsonl" else str(file.path)


class _Kept:
    """What grows while files are read."""

    def __init__(self) -> None:
        self.files: list[ReadFile] = []
        self.parts: dict[str, list[Any]] = {}
        self.left_out: Counter[str] = Counter()
        self.bad: int = 0
        self.examples: list[str] = []
        self.segments: dict[str, int] = {}
        self.texts: list[Text] = []
        self.characters: int = 0
        self.notes: list[str] = []

    @property
    def read(self) -> int:
        return sum(file.rows for file in self.files)


def _read_file(
    scan: Scan,
    number: int,
    file: LogFile,
    taken: dict[str, str],
    times: LogTimes,
    options: Options,
    kept: _Kept,
) -> None:
    rows = 0
    named: dict[int, tuple[str, str]] = {}
    room = EXAMPLES - len(kept.examples)
    reading = scan.open(file, number, taken, times.numeric[file.path])
    check = _checker(file, taken, times.unit_us[file.path], options)
    for batch in reading.batches():
        codes, reasons, values = check(batch)
        good = codes == 0
        for code, count in enumerate(np.bincount(codes, minlength=len(reasons))):
            if code and count:
                kept.left_out[reasons[code][0]] += int(count)
                kept.bad += 0 if reasons[code][0] == FAILED else int(count)
        for place in np.flatnonzero(~good)[: max(0, room - len(named))]:
            named[rows + int(place)] = reasons[codes[place]]
        rows += len(codes)
        _keep(kept, batch, values, None if good.all() else good)
    refused = reading.refused()
    for reason in refused.values():
        kept.left_out[reason] += 1
        kept.bad += 1
    first = dict(sorted(refused.items())[: max(0, room)])
    wanted = {row: column for row, (_, column) in named.items()}
    found_places = places(file, wanted, first, refused)
    for (place, value), _ in zip(found_places, range(room), strict=False):
        kept.examples.append(f"{file.path}: {place}: {value}")
    size = file.path.stat().st_size
    kept.files.append(ReadFile(file.path, file.kind, size, rows + len(refused), taken))


Check = Callable[[dict[str, Any]], tuple[NDArray[np.int8], list[tuple[str, str]], dict[str, Any]]]


def _checker(
    file: LogFile, taken: dict[str, str], unit_us: Mapping[str, float], options: Options
) -> Check:
    """`check(batch)` gives (code per row, [(reason, column at fault)] by code, whole numbers)."""
    first, last = YEARS_US if options.time_unit is None else (0, YEARS_US[1])
    years = "of 1990 to 2200" if options.time_unit is None else "from 0 on"

    def check(
        batch: dict[str, Any],
    ) -> tuple[NDArray[np.int8], list[tuple[str, str]], dict[str, Any]]:
        codes = np.zeros(len(batch["arrived"]), np.int8)
        reasons: list[tuple[str, str]] = [("", "")]
        values: dict[str, Any] = {}

        def refuse(mask: NDArray[np.bool_], reason: str, column: str) -> None:
            reasons.append((reason, column))
            codes[mask & (codes == 0)] = len(reasons) - 1

        def time_of(name: str) -> NDArray[np.int64]:
            raw: Floats = batch[name]
            with np.errstate(over="ignore", invalid="ignore"):
                us = np.round(raw * unit_us[name])
                out = ~((us >= first) & (us < last))
            refuse(raw == MISSING, f"{name}: missing", taken[name])
            refuse(out, f"{name}: no time {years}{_unit_word(unit_us[name])}", taken[name])
            return np.where(out, 0, us).astype(np.int64)

        def tokens_of(name: str, least: int) -> NDArray[np.int32]:
            raw: Floats = batch[name]
            odd = ~((raw >= least) & (raw <= MOST_TOKENS) & (raw == np.floor(raw)))
            refuse(raw == MISSING, f"{name}: missing", taken[name])
            what = f"no whole number from {least} to {MOST_TOKENS}"
            refuse(odd, f"{name}: {what}", taken[name])
            return np.where(odd, 0, raw).astype(np.int32)

        def duration_of(name: str) -> NDArray[np.int64]:
            raw: Floats = batch[name]
            known = file.durations.get(taken[name], options.latency_unit)
            with np.errstate(over="ignore", invalid="ignore"):
                us = np.round(raw * unit_of_name(taken[name], known))
                odd = ~((us >= 0) & (us <= LONGEST_S * 1e6))
            none = raw == MISSING
            refuse(odd & ~none, f"{name}: no duration from 0 to 30 days", taken[name])
            return np.where(odd, NO_TIME, us).astype(np.int64)

        if "broken" in batch:
            refuse(batch["broken"], "no JSON object", "")
        if "failed" in batch:
            refuse(batch["failed"], FAILED, taken["status"])
        values["arrived"] = time_of("arrived")
        values["prompt"] = tokens_of("prompt_tokens", 1)
        values["output"] = tokens_of("output_tokens", 0)
        if "latency" in batch:
            values["latency"] = duration_of("latency")
        elif "ended" in batch:
            none = batch["ended"] == MISSING
            before = codes.copy()
            ended = time_of("ended")
            # A request without an end is one that is only not counted in flight.
            codes[none] = before[none]
            took = ended - values["arrived"]
            refuse(~none & (took < 0), "ended: before it arrived", taken["ended"])
            long = took > LONGEST_S * 1_000_000
            refuse(~none & long, "ended: more than 30 days later", taken["ended"])
            values["latency"] = np.where(none, NO_TIME, took)
        if "ttft" in batch:
            values["ttft"] = duration_of("ttft")
        if "prefix_tokens" in batch:
            raw = batch["prefix_tokens"]
            odd = ~((raw >= 0) & (raw <= batch["prompt_tokens"]) & (raw == np.floor(raw)))
            refuse(odd & (raw != MISSING), "prefix_tokens: no whole number from 0 to the prompt's",
                   taken["prefix_tokens"])  # fmt: skip
            values["prefix_tokens"] = np.where(odd, 0, raw).astype(np.int32)
        return codes, reasons, values

    return check


def _unit_word(unit_us: float) -> str:
    word = {1e6: "s", 1e3: "ms", 1e-3: "ns"}.get(unit_us)
    return f", read as {word}" if word else ""


def _keep(
    kept: _Kept, batch: dict[str, Any], values: dict[str, Any], good: NDArray[np.bool_] | None
) -> None:
    """Append the good rows of a batch."""
    if "text" in batch:
        shown = range(len(batch["arrived"])) if good is None else np.flatnonzero(good)
        texts = batch["text"].to_pylist()
        for row in shown:
            if texts[row] is not None:
                kept.texts.append(
                    Text(
                        int(batch["hash"][row]),
                        texts[row],
                        int(batch["characters"][row]),
                        int(values["prompt"][row]),
                    )
                )
                kept.characters += len(texts[row])
        if len(kept.texts) > 2 * TEXTS or kept.characters > 2 * MOST_CHARACTERS:
            kept.texts = _sampled(kept.texts)
            kept.characters = sum(len(text.begin) for text in kept.texts)
    if "segment" in batch:
        values["segment"] = _codes(kept.segments, batch["segment"])
    values["hash"] = batch["hash"]
    if "prefix_id" in batch:
        values["prefix_id"] = batch["prefix_id"]
    for name, array in values.items():
        kept.parts.setdefault(name, []).append(array.copy() if good is None else array[good])


def _sampled(texts: Sequence[Text]) -> list[Text]:
    """The first ones by their hash, whatever the order of rows and files was."""
    ordered = sorted(texts)[:TEXTS]
    sizes = np.cumsum([len(text.begin) for text in ordered])
    return ordered[: int(np.searchsorted(sizes, MOST_CHARACTERS, side="right"))]


def _codes(segments: dict[str, int], column: Any) -> NDArray[np.int16]:
    """Of an Arrow column of names; a name seen for the first time gets the next number."""
    encoded = column.dictionary_encode()
    for name in encoded.dictionary.to_pylist():
        segments.setdefault(name, len(segments))
        if len(segments) > MOST_SEGMENTS:
            raise UserError.at(
                "segment",
                f"has more than {MOST_SEGMENTS} values, the last {name!r}",
                "name a column with the kind of request: --columns segment=COLUMN",
            )
    table = np.array([segments[name] for name in encoded.dictionary.to_pylist()], np.int16)
    codes: NDArray[np.int16] = table[encoded.indices.to_numpy(zero_copy_only=False)]
    return codes


def _checked(kept: _Kept, times: LogTimes, options: Options) -> ReadLog:
    names = [name for name, parts in kept.parts.items() if sum(map(len, parts))]
    share = kept.bad / max(1, kept.read)
    rows = "; ".join(f"{count} x {reason}" for reason, count in kept.left_out.most_common())
    place = kept.files[0].path if len(kept.files) == 1 else f"{len(kept.files)} files"
    if share > options.bad_rows or "arrived" not in names:
        if not kept.read:
            raise UserError.at(place, "holds no request", "name a log with requests")
        what = f"{kept.bad} of {kept.read} rows cannot be used ({rows})"
        shown = "".join(f"\n      {example}" for example in kept.examples)
        enough = math.ceil(1000 * share) / 1000
        remedy = (
            f"correct them, or name other columns; --bad-rows {enough:g} accepts so many"
            if "arrived" in names
            else "correct them, or name other columns with --columns"
        )
        raise UserError.at(place, f"{what}; the first:{shown}" if shown else what, remedy)
    arrays = _joined(kept)
    hashes = arrays.pop("hash")
    equal, repeated = _equal(hashes, drop=times.has_id)
    if repeated is not None:
        kept.left_out[REPEATED] += equal
        arrays = {name: array[~repeated] for name, array in arrays.items()}
        equal = 0
    requests = Requests(
        arrived=arrays["arrived"],
        prompt=arrays["prompt"],
        output=arrays["output"],
        latency=arrays.get("latency"),
        ttft=arrays.get("ttft"),
        segment=arrays.get("segment"),
        segments=tuple(kept.segments),
        prefix_id=arrays.get("prefix_id"),
        prefix_tokens=arrays.get("prefix_tokens"),
        texts=_sampled(kept.texts),
    )
    left_out = dict(sorted(kept.left_out.items()))
    return ReadLog(requests, kept.files, kept.read, left_out, kept.examples, equal, times.zone,
                   times.zone_from, [*times.notes, *kept.notes])  # fmt: skip


def _joined(kept: _Kept) -> dict[str, NDArray[Any]]:
    """One array each; a column that only some files have is left out of all, and said."""
    rows = sum(map(len, kept.parts["arrived"]))
    arrays = {}
    for name in list(kept.parts):
        parts = kept.parts.pop(name)
        if sum(map(len, parts)) == rows:
            arrays[name] = np.concatenate(parts)
        else:
            kept.notes.append(f"{name}: only some of the files have it, so it is not used")
    return arrays


def _equal(hashes: NDArray[np.uint64], drop: bool) -> tuple[int, NDArray[np.bool_] | None]:
    """How many rows equal an earlier one in all columns that are read, and with `drop` which."""
    ordered = np.sort(hashes)
    equal = int((ordered[1:] == ordered[:-1]).sum())
    if not equal or not drop:
        return equal, None
    del ordered
    order = np.argsort(hashes, kind="stable")
    repeated = np.zeros(len(hashes), bool)
    repeated[order[1:][hashes[order[1:]] == hashes[order[:-1]]]] = True
    return equal, repeated
