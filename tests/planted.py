"""Secrets that can be told from any other text, and a search for them in everything there is."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import psutil

WORDS = {
    "PILOTAGE_TEACHER_API_KEY": "plantedTeacher+5c1d/77ab",
    "PILOTAGE_JUDGE_API_KEY": "plantedJudge.90ee41c2",
    "HF_TOKEN": "hf_plantedHub1a2b3c4d5e6f7g8h",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED5CAFE0001",
    "AWS_SECRET_ACCESS_KEY": "plantedAws/Secret=31337beef",
    "PREFECT_API_KEY_OF_ANOTHER_SERVER": "plantedPrefect-60d0cafe",
    "PGPASSWORD": "plantedPostgres_8badf00d",
    "MLFLOW_TRACKING_PASSWORD": "plantedTracking-d15ea5e",
}
"""By the variable that holds each; more stand in addresses."""

IN_MLFLOW_URI = "plantedMlflow-c0ffee11"
IN_LEDGER_URI = "plantedLedger-feedface"
IN_NOTIFY_URL = "plantedNotify-5eed5eed"
IN_STORE_URL = "plantedStore-0ddba11"
ALL = [*WORDS.values(), IN_MLFLOW_URI, IN_LEDGER_URI, IN_NOTIFY_URL, IN_STORE_URL]

LARGEST = 256 << 20
"""Bytes. Weights of the tests' models are far below."""


def spellings(word: str) -> set[bytes]:
    """As it is, in a URL, in JSON, and in base64 wherever it stands in the encoded text."""
    raw = word.encode()
    found = {raw, quote(word, safe="").encode(), word.replace("/", "\\/").encode()}
    for before in range(3):
        # The characters at both ends depend on the neighbours.
        whole = base64.b64encode(b"\0" * before + raw)
        found.add(whole[-(-before * 4 // 3) : (before + len(raw)) * 4 // 3 - 1])
    return {one for one in found if len(one) >= 8}


def leaks(content: bytes, words: Sequence[str] = ALL) -> list[str]:
    return [word for word in words if any(one in content for one in spellings(word))]


def leaks_below(folder: Path, words: Sequence[str] = ALL) -> list[str]:
    """`FILE: SECRET` for each file below a folder that holds one, compressed or not."""
    found = []
    for path in sorted(folder.rglob("*")):
        found += [f"{path}: {word} in its name" for word in words if word in path.name]
        if not path.is_file() or path.is_symlink():
            continue
        if path.stat().st_size > LARGEST:
            raise AssertionError(f"{path} is too large to be searched")
        for content in contents(path):
            found += [f"{path}: {word}" for word in leaks(content, words)]
    return found


def contents(path: Path) -> Iterator[bytes]:
    raw = path.read_bytes()
    yield raw
    if raw.startswith(b"\x1f\x8b"):
        yield gzip.decompress(raw)
    if raw.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    if raw.startswith(b"PAR1"):
        import pyarrow.parquet

        yield repr(pyarrow.parquet.read_table(path).to_pylist()).encode()
    if raw.startswith(b"\x78"):
        with contextlib.suppress(zlib.error):
            yield zlib.decompress(raw)


def tables_text(address: str) -> bytes:
    """Every row of every table of a PostgreSQL database, as text."""
    import psycopg

    out = bytearray()
    with psycopg.connect(address) as asked:
        names = asked.execute(
            "SELECT table_schema, table_name FROM information_schema.tables "
            "WHERE table_schema NOT IN ('pg_catalog', 'information_schema')"
        ).fetchall()
        for schema, name in names:
            for row in asked.execute(f'SELECT * FROM "{schema}"."{name}"'.encode()):
                out += repr(row).encode() + b"\n"
    return bytes(out)


def processes_that_know(
    home: Path, words: Sequence[str] = ALL, trusted: Sequence[str] = ()
) -> dict[str, str]:
    """Processes of a home with a secret on their command line or, but for trusted ones, in their
    environment: what they hold by their command line. `trusted`: words of command lines."""
    found = {}
    mark = os.fsencode(home)
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if mark not in environment and mark not in line:
            continue
        shown = line.replace(b"\0", b" ").decode(errors="replace")[:200]
        if said := leaks(line, words):
            found[shown] = f"on its command line: {said}"
        elif not any(word in shown for word in trusted) and (said := leaks(environment, words)):
            found[shown] = f"in its environment: {said}"
    return found


def planted(extra: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **WORDS, **extra}
