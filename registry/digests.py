"""SHA-256 over values, files and folders. One spelling of "the same" for the whole project."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from registry.errors import UserError

HASHERS = 16
"""Threads that hash at most; more only wait for the disk."""

WORTH_THREADS = 8 << 20
"""Bytes below which threads take longer to start than they save."""


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys and no spaces; NaN and infinity are refused."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
        default=_plain,
    )


def digest_of(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `value` (order of keys does not matter)."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


def digest_of_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def digests_of_files(paths: Sequence[Path]) -> list[str]:
    """`digest_of_file` of each, in their order; big files beside each other.

    hashlib and reading leave the interpreter to others, so a night that reuses everything reads
    its weights as fast as cores and disk allow. Nothing is left out: only reading finds a bit that
    a disk flipped. Raises `OSError` as reading does.
    """
    workers = min(HASHERS, len(os.sched_getaffinity(0)), len(paths))
    if workers < 2 or sum(path.stat().st_size for path in paths) < WORTH_THREADS:
        return [digest_of_file(path) for path in paths]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(digest_of_file, paths))


def files_below(folder: Path) -> list[Path]:
    """Every file below `folder`, hidden ones too, in a fixed order; empty where there is none.

    A link to a file counts as that file. Empty folders do not count. Raises `UserError` for what
    a program would read and no digest would see: a link to a folder, a broken link, a device, a
    folder that cannot be read, a name that is not UTF-8.
    """
    if not folder.is_dir():
        return []
    found = []
    for root, folders, names in os.walk(folder, onerror=_unreadable):
        # `os.walk` does not go into linked folders; they must not go by unseen either.
        linked = [name for name in folders if Path(root, name).is_symlink()]
        for path in (Path(root, name) for name in [*names, *linked]):
            if not path.is_file():
                raise UserError.at(
                    path,
                    "is a link to a folder, a broken link or a device",
                    "put a copy of the content in its place",
                )
            if not _is_utf8(str(path)):
                raise UserError.at(ascii(str(path)), "its name is not UTF-8", "rename it")
            found.append(path)
    return sorted(found)


def digest_of_listing(listing: Mapping[str, str]) -> str:
    """Digest of a folder from `{relative path: SHA-256}`; names and contents, never times."""
    return digest_of(sorted(listing.items()))


def digest_of_folder(folder: Path, names: Iterable[Path] | None = None) -> str:
    """Digest of a folder's names and contents. Where it lies and file times do not matter."""
    paths = files_below(folder) if names is None else sorted(names)
    return digest_of_listing(
        {path.relative_to(folder).as_posix(): digest_of_file(path) for path in paths}
    )


def _unreadable(error: OSError) -> None:
    raise UserError.at(error.filename, f"cannot be read: {error.strerror}", "make it readable")


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path | date | time | Decimal):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")
