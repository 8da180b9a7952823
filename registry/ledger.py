"""The ledger: which alias was moved when, by whom, on what evidence. Lines are only ever added.

The lines (registry/ledger_lines.py) are rows of one table in the tracking database, SQLite or
PostgreSQL. What is hashed is what is stored: the column `body`, canonical JSON. The other columns
repeat parts of it for people who query, and are compared with it. The database itself refuses to
change or remove a row (triggers); whoever may drop these can still do it, and `verify` finds out.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from registry.digests import digest_of
from registry.errors import InfrastructureError, UserError
from registry.ledger_lines import (
    EMPTY,
    NO_HASH,
    TAG_HEAD,
    TAG_LENGTH,
    Action,
    Broken,
    Draft,
    Entry,
    Head,
    LedgerDamaged,
    LedgerMoved,
    Move,
    aliases_of,
    anchor_of,
    chained,
    left_behind,
    misplaced,
    parsed,
    verify,
)

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

__all__ = [
    "EMPTY",
    "NO_HASH",
    "TAG_HEAD",
    "TAG_LENGTH",
    "Action",
    "Broken",
    "Draft",
    "Entry",
    "Head",
    "Ledger",
    "LedgerDamaged",
    "LedgerMoved",
    "Move",
    "aliases_of",
    "anchor_of",
    "left_behind",
    "verify",
]

TABLE = "pilotage_ledger"

_SETTING = "PILOTAGE_LEDGER_URI"
_BUSY_WAIT = 60.0
"""Seconds to wait for SQLite's one writer; MLflow writes into the same file."""
_POLL = 0.1

_COLUMNS = ("model", "sequence", "hash", "at", "action", "body")

_CREATE = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
    model TEXT NOT NULL, sequence INTEGER NOT NULL, hash TEXT NOT NULL, at TEXT NOT NULL,
    action TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (model, sequence))"""

_REFUSED = f"{TABLE} is append-only"

_GUARDS = {
    "sqlite": [
        f"""CREATE TRIGGER IF NOT EXISTS {TABLE}_no_{event.lower()} BEFORE {event} ON {TABLE}
        BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"""
        for event in ("UPDATE", "DELETE")
    ]
    + [
        # INSERT OR REPLACE removes a row without a word to the trigger above.
        f"""CREATE TRIGGER IF NOT EXISTS {TABLE}_at_the_end BEFORE INSERT ON {TABLE}
        WHEN NEW.sequence <>
            (SELECT COALESCE(MAX(sequence), 0) + 1 FROM {TABLE} WHERE model = NEW.model)
        BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"""
    ],
    "postgresql": [
        f"""CREATE OR REPLACE FUNCTION {TABLE}_refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION '{_REFUSED}'; END $$""",
        f"""CREATE TRIGGER {TABLE}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {TABLE}
        FOR EACH STATEMENT EXECUTE FUNCTION {TABLE}_refuse()""",
    ],
}


class Ledger:
    """The lines of every registered model in one database.

    uri: `sqlite:////absolute/file` or `postgresql://user:password@host/database`. Nothing is
    opened before the first question; a question makes no table and no file. Where the database
    cannot be asked, every method raises `InfrastructureError`.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._kind = uri.partition(":")[0].partition("+")[0]
        if self._kind not in _GUARDS:
            raise UserError.at(
                _SETTING,
                f"the ledger is kept in SQLite or PostgreSQL, not behind {self._kind!r}",
                f"set {_SETTING} to a database URL, e.g. postgresql://USER@HOST/DATABASE "
                "(best the tracking server's own database)",
            )
        self._made = False

    # -- reading ---------------------------------------------------------------------------

    def head(self, model: str) -> Head:
        """The end of a model's chain; `EMPTY` when it has no line."""
        if not self._exists():
            return EMPTY
        with self._asking(f"read the end of {model}'s ledger"), self._engine.connect() as asked:
            return _head(asked, model)

    def entries(self, model: str) -> list[Entry]:
        """Its lines in order. Raises `LedgerDamaged` where a row is not a line any more."""
        return list(self._lines(model))

    def hash_of(self, model: str, sequence: int) -> str | None:
        """Hash of the line with this number, as stored; None where there is none."""
        if not self._exists():
            return None
        asked = f"SELECT hash FROM {TABLE} WHERE model = :model AND sequence = :sequence"
        found = self._rows(asked, model=model, sequence=sequence)
        return str(found[0][0]) if found else None

    def models(self) -> list[str]:
        """Every model that has a line."""
        if not self._exists():
            return []
        rows = self._rows(f"SELECT DISTINCT model FROM {TABLE} ORDER BY model")
        return [str(row[0]) for row in rows]

    def check(self, model: str, anchor: Head | None) -> Broken | None:
        """`verify` of the stored lines, the table's columns included."""
        return verify(self._lines(model), anchor)

    def _lines(self, model: str) -> Iterator[Entry]:
        if not self._exists():
            return
        asked = f"SELECT {', '.join(_COLUMNS)} FROM {TABLE} WHERE model = :model ORDER BY sequence"
        for place, values in enumerate(self._rows(asked, model=model), start=1):
            row = dict(zip(_COLUMNS, values, strict=True))
            broken = _wrong_row(place, row)
            if broken:
                raise LedgerDamaged(f"ledger of {model}", broken)
            yield parsed(row["body"], row["hash"])

    def _rows(self, question: str, **values: str | int) -> list[tuple]:
        from sqlalchemy import text

        with self._asking("read the ledger"), self._engine.connect() as asked:
            return [tuple(row) for row in asked.execute(text(question), values)]

    # -- writing ---------------------------------------------------------------------------

    def append(self, model: str, draft: Draft, expected: Head) -> Entry:
        """Add a line after `expected`, or raise `LedgerMoved` when the chain ends elsewhere.

        Of several processes that expect the same end, one adds its line; the primary key decides.
        """
        from sqlalchemy import text
        from sqlalchemy.exc import IntegrityError

        entry = chained(model, draft, expected)
        row = {
            "model": model,
            "sequence": entry.sequence,
            "hash": entry.hash,
            "at": _written(entry),
            "action": entry.action,
            "body": entry.body,
        }
        names, marks = ", ".join(_COLUMNS), ", ".join(f":{name}" for name in _COLUMNS)
        insert = text(f"INSERT INTO {TABLE} ({names}) VALUES ({marks})")
        self._make()
        with self._asking(f"add a line to {model}'s ledger"):
            try:
                with self._engine.execution_options(writes=True).begin() as asked:
                    now = _head(asked, model)
                    if now != expected:
                        raise LedgerMoved(now)
                    asked.execute(insert, row)
            except IntegrityError:
                raise LedgerMoved(self.head(model)) from None
        return entry

    def lock(self, model: str, timeout: float) -> AbstractContextManager[None]:
        """One process at a time per model, for what takes more than one line or one system.

        A process that dies gives it back: the lock is the operating system's (a file beside
        SQLite's) or the connection's (an advisory lock of the PostgreSQL server). Raises
        `InfrastructureError` after `timeout` seconds. It keeps processes from disturbing each
        other; that no line is lost is up to `append`.
        """
        if self._kind == "sqlite":
            return self._file_lock(model, timeout)
        return self._server_lock(model, timeout)

    @contextmanager
    def _file_lock(self, model: str, timeout: float) -> Iterator[None]:
        with self._asking(f"lock the ledger of {model}"):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{self._file}.{digest_of(model)[:16]}.lock")
            try:
                lock.acquire(timeout=timeout)
            except Timeout:
                raise _still_locked(model, timeout) from None
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _server_lock(self, model: str, timeout: float) -> Iterator[None]:
        from sqlalchemy import text
        from sqlalchemy.exc import SQLAlchemyError

        key = {"key": _advisory_key(f"ledger of {model}")}
        deadline = time.monotonic() + timeout
        with self._asking(f"lock the ledger of {model}"):
            # No transaction: the server may end one that idles, and the lock with it.
            held = self._engine.execution_options(isolation_level="AUTOCOMMIT").connect()
        try:
            with self._asking(f"lock the ledger of {model}"):
                # Where the machine dies, and not only the process, the server finds out in 1 min.
                for name, seconds in (("idle", 30), ("interval", 10), ("count", 3)):
                    held.execute(text(f"SET tcp_keepalives_{name} = {seconds}"))
                while not held.execute(text("SELECT pg_try_advisory_lock(:key)"), key).scalar():
                    if time.monotonic() > deadline:
                        raise _still_locked(model, timeout)
                    time.sleep(_POLL)
            yield
        finally:
            # Closing frees it as well, a moment later; so does a connection that is gone.
            with suppress(SQLAlchemyError):
                held.execute(text("SELECT pg_advisory_unlock(:key)"), key)
            with suppress(SQLAlchemyError):
                held.close()

    # -- the database ----------------------------------------------------------------------

    @cached_property
    def _file(self) -> Path:
        """SQLite's file."""
        name = self._url.database or ""
        if name in ("", ":memory:") or name.startswith("file:"):
            raise UserError.at(_SETTING, "names no file", "sqlite:////ABSOLUTE/PATH")
        return Path(name)

    @cached_property
    def _url(self) -> URL:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            url = make_url(self._uri)
        except (ArgumentError, ValueError):
            # Not shown: it may hold a password.
            raise UserError.at(_SETTING, "cannot be read", "see docs/settings.md") from None
        driver = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}[self._kind]
        return url.set(drivername=driver)

    @cached_property
    def _engine(self) -> Engine:
        from sqlalchemy import create_engine, event
        from sqlalchemy.pool import NullPool

        if self._kind == "postgresql":
            url = self._url
            if "connect_timeout" not in url.query:
                url = url.update_query_dict({"connect_timeout": "15"})
            return create_engine(url, poolclass=NullPool, isolation_level="READ COMMITTED")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(self._url, poolclass=NullPool, connect_args={"timeout": _BUSY_WAIT})

        @event.listens_for(engine, "connect")
        def _(connection, record):  # type: ignore[no-untyped-def]
            # The driver would begin too late, after the question that an answer depends on.
            connection.isolation_level = None

        @event.listens_for(engine, "begin")
        def _(connection: Connection) -> None:
            writes = connection.get_execution_options().get("writes")
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        return engine

    def _exists(self) -> bool:
        """Whether there is a table. Makes none, nor a file, which MLflow would take for its own."""
        if self._made:
            return True
        from sqlalchemy import inspect

        with self._asking("open the ledger"):
            if self._kind == "sqlite" and not self._file.exists():
                return False
            self._made = inspect(self._engine).has_table(TABLE)
        return self._made

    def _make(self) -> None:
        if self._exists():
            return
        with (
            self._asking("make the ledger's table"),
            self._engine.execution_options(writes=True).begin() as asked,
        ):
            if self._kind == "postgresql":
                # Two that make a table at once disturb each other there, IF NOT EXISTS or not.
                asked.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_advisory_key(TABLE)})")
            from sqlalchemy import inspect

            if not inspect(asked).has_table(TABLE):
                for statement in (_CREATE, *_GUARDS[self._kind]):
                    asked.exec_driver_sql(statement)
        self._made = True

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn whatever the database or its driver raises into our errors."""
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except ImportError as error:
            raise UserError.at(_SETTING, f"its driver does not load: {error}", "make env") from None
        except UnicodeError:
            raise UserError.at(what, "the name is no text", "a name is UTF-8") from None
        except (SQLAlchemyError, OSError) as error:
            # Host and database only: a URL may hold a password.
            where = f"{self._url.host or ''}:{self._url.database}".lstrip(":")
            line = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise InfrastructureError(f"{where}: could not {what}: {line}") from error


def _head(asked: Connection, model: str) -> Head:
    from sqlalchemy import text

    last = f"SELECT sequence, hash FROM {TABLE} WHERE model = :model ORDER BY sequence DESC LIMIT 1"
    row = asked.execute(text(last), {"model": model}).first()
    return Head(row[0], row[1]) if row else EMPTY


def _wrong_row(place: int, row: Mapping[str, object]) -> Broken | None:
    """What is wrong with a row of the table, taken alone; its hash is checked with the chain."""
    number, body, digest = row["sequence"], row["body"], row["hash"]
    if isinstance(number, int) and number != place:
        return misplaced(place, number)
    if not isinstance(body, str) or not isinstance(digest, str):
        return Broken(place, "was changed: its row holds no text")
    try:
        entry = parsed(body, digest)
    except ValueError as error:
        return Broken(place, f"was changed: its body cannot be read: {error}")
    told = {**entry.model_dump(include={"model", "sequence", "action"}), "at": _written(entry)}
    for column, value in told.items():
        if row[column] != value:
            return Broken(
                place,
                f"was changed: its column {column} is {row[column]!r}, its body says {value!r}",
            )
    return None


def _written(entry: Entry) -> str:
    """The line's time as its body spells it."""
    return str(entry.model_dump(mode="json", include={"at"})["at"])


def _advisory_key(name: str) -> int:
    """PostgreSQL's advisory locks are named by a signed number of 64 bits."""
    return int.from_bytes(hashlib.sha256(f"pilotage {name}".encode()).digest()[:8], signed=True)


def _still_locked(model: str, timeout: float) -> InfrastructureError:
    return InfrastructureError(
        f"another process holds the ledger of {model}; waited {timeout:g} s for it"
    )
