"""DuckDB over one file of a log: raw columns become numbers in SQL, batch by batch, in order.

Why DuckDB: docs/traffic.md. Every value is parsed by itself (`TRY_CAST`), so one odd value spoils
one row, and a line that is no record is counted and placed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

from registry.errors import InfrastructureError, UserError
from tasks.traffic_files import STREAM, LogFile, readable

BATCH = 200_000
"""Rows of a batch, where their texts together stay below `BATCH_BYTES`."""

BATCH_BYTES = 16 << 20
LONG_ROW = 4096
"""Bytes from which rows count as long. They are read by one thread, and those of Parquet through
Arrow, so many at once as `BATCH_BYTES` holds: DuckDB 2.0.1 takes 2048 of them whatever their size,
several times over, and in each thread."""

MEMORY_MB = 2000
"""Limit of DuckDB's own buffers. Ten million short rows took the same with 200 and with 2000;
beyond it, DuckDB writes to the temporary folder."""

VECTOR = 2048
"""Rows that DuckDB works on at once; of long ones several copies of so many, so the limit grows."""

ARROW = "through_arrow"
FULL = os.strerror(ENOSPC)

MISSING = float("-inf")
LONGEST_RECORD = 1 << 20
"""Bytes of a CSV record; larger buffers take more memory than all else. No `buffer_size` is set:
with one of 16 MiB, DuckDB 2.0.1 refused 26 good records of ten million."""

SAMPLED_TEXTS = 15_000
LONGEST_PREFIX = 20_000
"""Characters of a prompt that are compared."""

MOST_CHARACTERS = 40_000_000
"""Of all sampled prompts together."""

NOTHING = "('', 'null', 'none', 'na', 'n/a', '-')"
FAILURES = "('failed', 'failure', 'error', 'cancelled', 'canceled', 'aborted', 'abort', 'timeout')"


class Scan:
    """One DuckDB for all files of a log. `zone` is that of times that name none."""

    def __init__(self, folder: Path, zone: str) -> None:
        import duckdb

        self.folder = folder
        self.threads = min(4, os.cpu_count() or 1)
        self.duckdb = duckdb
        self.connection = duckdb.connect(
            config={
                "threads": self.threads,
                "memory_limit": f"{MEMORY_MB}MB",
                "temp_directory": str(folder / "spilled"),
                # Nothing is fetched from anywhere.
                "autoinstall_known_extensions": "false",
            }
        )
        self.connection.execute(f"set TimeZone = {_text(_zone_word(zone))}")

    def open(self, file: LogFile, number: int, taken: dict[str, str], numeric: set[str]) -> Reading:
        try:
            path = readable(file, self.folder, number)
        except OSError as error:
            if error.errno == ENOSPC:
                raise full(self.folder) from None
            raise UserError.at(file.path, f"cannot be read: {error}", "check the file") from None
        size = row_bytes(file)
        megabytes = MEMORY_MB + round(4 * VECTOR * size / 1e6)
        self.connection.execute(f"set memory_limit = '{megabytes}MB'")
        self.connection.execute(f"set threads = {1 if size > LONG_ROW else self.threads}")
        return Reading(
            self, file, path, taken, numeric, max(16, min(BATCH, int(BATCH_BYTES / size)))
        )


@dataclass(frozen=True)
class Reading:
    scan: Scan
    file: LogFile
    path: Path
    taken: dict[str, str]
    numeric: Collection[str]
    rows: int
    """Of a batch."""

    def batches(self) -> Iterator[dict[str, Any]]:
        """Columns by name: numbers as float64, -inf missing and NaN no number; hashes as uint64."""
        duckdb = self.scan.duckdb
        ended: list[BaseException] = []
        try:
            if self._through_arrow():
                stream = _arrow(self.file, self.taken, self.rows, ended)
                self.scan.connection.register(ARROW, stream)
            reader = self.scan.connection.sql(self._query()).to_arrow_reader(self.rows)
            for batch in reader:
                yield {name: _array(name, batch.column(name)) for name in batch.schema.names}
        except (duckdb.Error, OSError) as error:
            if ended and not isinstance(ended[0], Exception):
                # Of a command that was told to end while it read.
                raise ended[0] from None
            # Arrow hands DuckDB's errors on as its own.
            said = str(error).partition("\n")[0]
            if FULL in said or "offload" in said:
                # The second where the disk was nearly full from the first.
                raise full(self.scan.folder) from None
            if "Out of Memory" in said:
                raise InfrastructureError(f"{self.file.path}: {said}") from None
            mixed = "invalid state" in said
            raise UserError.at(
                self.file.path,
                f"cannot be read: {said}",
                "give all lines the same end, \\n or \\r\\n" if mixed else "check the file",
            ) from None

    def _through_arrow(self) -> bool:
        return self.file.kind == "parquet" and self.rows < BATCH_BYTES // LONG_ROW

    def refused(self) -> dict[int, str]:
        """Records of a CSV file that fit no columns, by their number from 1, with the reason."""
        if self.file.kind != "csv":
            return {}
        rows = self.scan.connection.execute(
            "select line, min(error_type::varchar) from reject_errors group by line"
        ).fetchall()
        self.scan.connection.execute("delete from reject_errors")
        self.scan.connection.execute("delete from reject_scans")
        return {int(line): f"record: {reason.lower()}" for line, reason in rows}

    def _query(self) -> str:
        taken = self.taken
        parts = {
            "arrived": self._time("arrived"),
            "prompt_tokens": self._number("prompt_tokens"),
            "output_tokens": self._number("output_tokens"),
        }
        for name in ("latency", "ttft", "prefix_tokens"):
            if name in taken:
                parts[name] = self._number(name)
        if "ended" in taken and "latency" not in taken:
            parts["ended"] = self._time("ended")
        if self.file.kind == "jsonl":
            parts["broken"] = "broken"
        if "status" in taken:
            word = f"lower(trim({self._words('status')}))"
            parts["failed"] = (
                f"coalesce({word} in {FAILURES} or try_cast({word} as double) >= 400, false)"
            )
        if "segment" in taken:
            parts["segment"] = f"coalesce({self._words('segment')}, '')"
        if "prefix_id" in taken:
            word = self._words("prefix_id")
            parts["prefix_id"] = f"case when coalesce({word}, '') = '' then 0 else hash({word}) end"
        raws = [self._raw(name) for name in taken if name != "prompt"]
        parts["hash"] = f"hash({', '.join(raws)})"
        if "prompt" in taken:
            word = self._words("prompt")
            chosen = f"hash({self._raw('arrived')}, {word}) % {self._every()} = 0"
            parts["text"] = f"case when {chosen} then left({word}, {LONGEST_PREFIX}) end"
            parts["characters"] = f"coalesce(length({word}), 0)"
        listed = ", ".join(f"{sql} as {_name(name)}" for name, sql in parts.items())
        return f"select {listed} from {self._source()}"

    def _source(self) -> str:
        path = _text(str(self.path))
        if self.file.kind == "parquet":
            return ARROW if self._through_arrow() else f"read_parquet({path})"
        if self.file.kind == "jsonl":
            keys = ", ".join(_text(_json_path(column)) for column in self.taken.values())
            return (
                f"(select json_extract_string(json, [{keys}]) as x, json is null as broken "
                f"from read_ndjson_objects({path}, ignore_errors = true))"
            )
        columns = ", ".join(f"{_text(name)}: 'VARCHAR'" for name in self.file.columns)
        return (
            f"read_csv({path}, auto_detect = false, header = true, columns = {{{columns}}}, "
            f"delim = {_text(self.file.delimiter)}, quote = '\"', escape = '\"', "
            f"max_line_size = {LONGEST_RECORD}, store_rejects = true)"
        )

    def _raw(self, field: str) -> str:
        column = self.taken[field]
        if self.file.kind == "jsonl":
            return f"x[{list(self.taken).index(field) + 1}]"
        if self.file.kind == "parquet":
            first, *inner = column.split(".")
            return _name(first) + "".join(f"[{_text(name)}]" for name in inner)
        return _name(column)

    def _words(self, field: str) -> str:
        return f"cast({self._raw(field)} as varchar)"

    def _number(self, field: str) -> str:
        raw = self._raw(field)
        if self.taken[field] in self.file.numeric:
            return f"coalesce(cast({raw} as double), '-inf'::double)"
        return f"coalesce(try_cast({raw} as double), {self._none(field)})"

    def _time(self, field: str) -> str:
        """As the log's numbers, or microseconds since 1970."""
        if field in self.numeric:
            return self._number(field)
        raw = self._raw(field)
        if self.taken[field] in self.file.times:
            return f"coalesce(epoch_us(cast({raw} as timestamptz))::double, '-inf'::double)"
        # `12:00:00,123` is Python's logging, `12:00:00 +08:00` is common too.
        text = f"replace(replace({self._words(field)}, ',', '.'), ' +', '+')"
        known = f"epoch_us(try_cast({text} as timestamptz))::double"
        return f"coalesce({known}, {self._none(field)})"

    def _none(self, field: str) -> str:
        """What a value that is no number stands for."""
        word = f"lower(trim({self._words(field)}))"
        return f"case when coalesce({word}, '') in {NOTHING} then '-inf'::double else 'nan' end"

    def _every(self) -> int:
        """One of so many prompts is taken: about `SAMPLED_TEXTS` of all."""
        size = row_bytes(self.file)
        rows = self.file.path.stat().st_size / size
        sampled = min(SAMPLED_TEXTS, 1.5 * MOST_CHARACTERS / min(size, LONGEST_PREFIX))
        return max(1, round(rows / sampled))


def _arrow(file: LogFile, taken: Mapping[str, str], rows: int, ended: list[BaseException]) -> Any:
    """The columns of a Parquet file that are taken, `rows` at once; durations as their numbers.

    What ends the stream goes into `ended`: DuckDB makes a text of it.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    table = pq.ParquetFile(file.path, pre_buffer=False, buffer_size=STREAM)
    columns = sorted({column.partition(".")[0] for column in taken.values()})
    schema = pa.schema([table.schema_arrow.field(name) for name in columns])
    plain = pa.schema(
        [one.with_type(pa.int64()) if pa.types.is_duration(one.type) else one for one in schema]
    )

    def batches() -> Iterator[Any]:
        try:
            for part in table.iter_batches(rows, columns=columns, use_threads=False):
                cast = [part.column(one.name).cast(one.type) for one in plain]
                yield pa.record_batch(cast, schema=plain)
        except BaseException as error:
            ended.append(error)
            raise

    return pa.RecordBatchReader.from_batches(plain, batches())


def full(folder: Path) -> InfrastructureError:
    return InfrastructureError(
        f"{folder}: the disk is full; make room there, or name another place with TMPDIR"
    )


def row_bytes(file: LogFile) -> float:
    """About, of the first rows."""
    sizes = [sum(len(str(value)) for value in row.values()) for row in file.head]
    return max(20.0, sum(sizes) / max(1, len(sizes)))


def _array(name: str, column: Any) -> Any:
    return column if name in ("segment", "text") else column.to_numpy(zero_copy_only=False)


def _name(word: str) -> str:
    return '"' + word.replace('"', '""') + '"'


def _text(word: str) -> str:
    return "'" + word.replace("'", "''") + "'"


def _json_path(column: str) -> str:
    keys = (key.replace("\\", "\\\\").replace('"', '\\"') for key in column.split("."))
    return "$" + "".join(f'."{key}"' for key in keys)


def _zone_word(zone: str) -> str:
    """ICU knows no `+08:00`, but `Etc/GMT-8`; minutes it takes as GMT+5:30."""
    return f"GMT{zone}" if zone[:1] in "+-" else zone
