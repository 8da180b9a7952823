"""SHA-256 over values, files and folders. One spelling of "the same" for the whole project."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel


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


def files_below(folder: Path) -> list[Path]:
    """Every regular file below `folder`, in a fixed order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest_of_listing(listing: Mapping[str, str]) -> str:
    """Digest of a folder from `{relative path: SHA-256}`; names and contents, never times."""
    return digest_of(sorted(listing.items()))


def digest_of_folder(folder: Path, names: Iterable[Path] | None = None) -> str:
    """Digest of a folder's names and contents. Where it lies and file times do not matter."""
    paths = files_below(folder) if names is None else sorted(names)
    return digest_of_listing(
        {path.relative_to(folder).as_posix(): digest_of_file(path) for path in paths}
    )


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path | date | time | Decimal):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")
