"""Where the shared store lies: a URL without secrets, and what a plain folder asks for.

Imports fsspec only when a URL is opened.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from registry.errors import UserError

VARIABLE = "PILOTAGE_STORE_URL"
AT_ONCE = 4
"""Files, and parts of each, on the way at a time: 4 x 4 x 50 MiB of memory at most."""

_CLIENT = {
    "connect_timeout": 10,
    "read_timeout": 60,
    # A lost part is asked for twice; who goes on asking is `RemoteStore`.
    "retries": {"mode": "standard", "max_attempts": 2},
}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"max_concurrency": AT_ONCE, "config_kwargs": _CLIENT}}


def check_url(url: str) -> None:
    """Raises `UserError` for what is no URL of a store, or holds a secret; it is not repeated."""
    try:
        parts = urlsplit(url)
    except ValueError as error:  # `[` without its `]`
        raise UserError.at(
            VARIABLE, f"is no URL: {error}", "e.g. s3://bucket/prefix or file:///folder"
        ) from None
    if parts.password or (parts.scheme != "file" and (parts.query or parts.fragment)):
        raise UserError.at(
            VARIABLE,
            "holds a password or a query",
            "only scheme, bucket and prefix; credentials belong into the environment or the files "
            "of the object store's client (AWS_ACCESS_KEY_ID, ~/.aws/credentials, ...)",
        )
    if not parts.scheme or "::" in url or not (parts.netloc or parts.path.strip("/")):
        raise UserError.at(
            f"{VARIABLE}={url}", "is no URL of a store", "e.g. s3://bucket/prefix or file:///folder"
        )
    if parts.scheme == "memory":
        raise UserError.at(
            f"{VARIABLE}={url}",
            "is gone with the process that wrote it",
            "e.g. s3://bucket/prefix or file:///folder",
        )
    if parts.scheme in ("file", "local") and (parts.netloc or not parts.path.startswith("/")):
        raise UserError.at(
            f"{VARIABLE}={url}", "names no absolute folder", "three slashes: file:///shared/folder"
        )


def opened(url: str) -> tuple[Any, str]:
    check_url(url)
    from fsspec.core import url_to_fs

    scheme = urlsplit(url).scheme
    options = _OPTIONS.get(scheme, {})
    try:
        # Another machine may have written since the last listing.
        filesystem, root = url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        raise UserError.at(
            f"{VARIABLE}={url}", str(error), f"install the fsspec package for {scheme}://"
        ) from None
    except ValueError as error:
        raise UserError.at(
            f"{VARIABLE}={url}", str(error), "e.g. s3://bucket/prefix or file:///folder"
        ) from None
    return filesystem, root.rstrip("/")


# -- a shared folder -------------------------------------------------------------------------


def check_folder(root: str) -> None:
    # Made here, it would be a folder below a mount point on which nothing is mounted.
    if not Path(root).is_dir():
        raise OSError(f"the folder {root} is not there (is it mounted?)")


def copy_whole(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name[:100]}-{uuid.uuid4().hex[:8]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def write_synced(path: Path, text: bytes) -> None:
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove_empty(folder: Path) -> None:
    for root, _, _ in os.walk(folder, topdown=False):
        try:
            Path(root).rmdir()
        except OSError:
            continue
