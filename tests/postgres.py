"""A real PostgreSQL server for tests: made for them, on a free port of 127.0.0.1, then removed.

A test module asks for it with `pytest_plugins = ["tests.postgres"]` and the fixture `postgres_uri`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

SERVER_USER = "postgres"
"""Whom the server runs as where the tests run as root, which PostgreSQL refuses."""


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """`postgresql://postgres@127.0.0.1:PORT`: one server for all tests of a session."""
    with server() as address:
        yield address


@pytest.fixture
def postgres_uri(postgres_server: str) -> str:
    """URI of an empty database that no other test sees."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(f"{postgres_server}/postgres", autocommit=True) as asked:
        asked.execute(f"CREATE DATABASE {name}".encode())
    return f"{postgres_server}/{name}"


@contextmanager
def server(*settings: str) -> Iterator[str]:
    """Start a server, give its address, end and remove it. `settings`: `name=value` of its own.

    Skips the test, and says why, where PostgreSQL is not installed or cannot be run.
    """
    binaries = _binaries()
    folder = Path(tempfile.mkdtemp(prefix="pilotage-postgres-"))
    try:
        _hand_over(folder)
        data = folder / "data"
        initdb = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"]
        _run(folder, binaries / "initdb", "--no-sync", *initdb, "-D", data)
        port = _start(folder, binaries, data, settings)
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}"
        finally:
            _run(folder, binaries / "pg_ctl", "stop", "-D", data, "-m", "immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path:
    """The folder of `initdb` and `pg_ctl`, of the newest version where there are several."""
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    folders = sorted(installed, key=lambda path: float(path.parent.name), reverse=True)
    found = shutil.which("pg_ctl")
    if found:
        folders.insert(0, Path(found).resolve().parent)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            return folder
    pytest.skip("PostgreSQL is not installed (initdb, pg_ctl): apt install postgresql")


def _start(folder: Path, binaries: Path, data: Path, settings: tuple[str, ...]) -> int:
    # What is lost when the machine dies does not matter here.
    common = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
    for attempt in range(3):
        port = _free_port()
        words = " ".join(f"-c {one}" for one in (*common, *settings, f"port={port}"))
        try:
            log = folder / f"log-{attempt}"
            _run(folder, binaries / "pg_ctl", "start", "-w", "-D", data, "-l", log, "-o", words)
            return port
        except RuntimeError:
            # Somebody else may have taken the port in between.
            if attempt == 2:
                raise
    raise AssertionError


def _run(folder: Path, *words: object) -> None:
    root = os.geteuid() == 0
    # A file and no pipe, which the server would keep open.
    with (folder / "output").open("w") as output:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=folder,
            user=SERVER_USER if root else None,
            group=SERVER_USER if root else None,
            extra_groups=[] if root else None,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
    if done.returncode:
        texts = [path.read_text(errors="replace") for path in folder.iterdir() if path.is_file()]
        raise RuntimeError(f"{words[0]} ended with {done.returncode}:\n" + "\n".join(texts))


def _hand_over(folder: Path) -> None:
    if os.geteuid() != 0:
        return
    try:
        shutil.chown(folder, SERVER_USER, SERVER_USER)
    except LookupError:
        pytest.skip(f"PostgreSQL does not run as root, and there is no user {SERVER_USER!r}")


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])
