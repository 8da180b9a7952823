"""The entries that machines share, at any fsspec URL: an object store, or a shared folder.

    URL/<stage>/<key>/000001.json      a manifest; the highest number is the entry of the key
    URL/<stage>/<key>/<digest>/...     its files, in a folder named by their content
    URL/<stage>/<key>/used             empty; its time: when a machine last asked for the entry

Files go first, the manifest last. A number is created once and never written over (`If-None-Match`
on an object store, a hard link in a folder), so of two writers one wins. Two writers whose content
differs, such as two measurements, never write into one folder, so what the winner's manifest names
is whole. Files without a manifest are no entry. An entry that is made anew gets the next number.

Credentials are the library's own business: environment and files of the object store's client.
"""

from __future__ import annotations

import os
import posixpath
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import ValidationError

from registry.artifacts import Manifest
from registry.digests import digest_of_file
from registry.errors import InfrastructureError, UserError
from registry.store_url import (
    AT_ONCE,
    VARIABLE,
    check_folder,
    copy_whole,
    opened,
    remove_empty,
    write_synced,
)

PATIENCE = 90.0
"""Seconds for which an operation is tried again before the shared store counts as unreachable."""
LONGEST_PAUSE = 20.0
MARK_EVERY = timedelta(hours=12)
"""How old `used` may be before it is written again."""

USED = "used"
_NUMBERED = re.compile(r"(\d{6})\.json")
_OURS = (AttributeError, LookupError, NameError, TypeError)
"""Mistakes of a program; trying again does not help. Every client has errors of its own."""

T = TypeVar("T")


class Damaged(Exception):
    """An entry whose files do not match its manifest; the text says which."""


@dataclass(frozen=True)
class Shared:
    """The newest manifest of a key. `manifest` None: it cannot be read, so there is no entry."""

    number: int
    manifest: Manifest | None


class RemoteStore:
    """Raises `UserError` for a URL that cannot be used, also for one that holds a password."""

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        self.url = url
        self._patience = patience
        self._fs, self._root = opened(url)
        self._folder = "file" in _protocols(self._fs)

    # -- reading ---------------------------------------------------------------------------

    def newest(self, stage: str, key: str) -> Shared | None:
        """The entry of a key, and a mark that somebody asked for it; None where there is none."""
        listing = self._ask("list", lambda: self._listing(stage, key))
        number = newest_number(listing)
        if not number:
            return None
        used = listing.get(USED)
        if used is None or datetime.now(UTC) - _time(used) > MARK_EVERY:
            self.mark_used(stage, key)
        try:
            text = self._ask("read", lambda: self._fs.cat_file(self._numbered(stage, key, number)))
        except FileNotFoundError:  # removed in between
            return None
        return Shared(number, _manifest(text, stage, key))

    def fetch(self, manifest: Manifest, folder: Path) -> None:
        """Bring the files of an entry into an empty folder. Raises `Damaged` when one differs.

        A connection that breaks is tried again; what came so far is fetched once more.
        """
        source = self._files(manifest)
        targets = {name: folder / name for name in manifest.files}
        for path in targets.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._ask(
                "read",
                lambda: self._fs.get(
                    [f"{source}/{name}" for name in targets],
                    [str(path) for path in targets.values()],
                    **self._batch,
                ),
            )
        except FileNotFoundError:
            self._ask("list", self._check_there)
            there = self._ask("list", lambda: self._fs.find(source))
            missing = sorted(set(targets) - {at.removeprefix(f"{source}/") for at in there})
            raise Damaged(f"{', '.join(missing[:3]) or 'a file'} is missing") from None
        for name, entry in manifest.files.items():
            path = targets[name]
            if path.stat().st_size != entry.size or digest_of_file(path) != entry.sha256:
                raise Damaged(f"{name} differs from its manifest")

    # -- writing ---------------------------------------------------------------------------

    def publish(self, files: Path, manifest: Manifest, after: int) -> Shared | None:
        """Upload an entry as the number after `after` (0: the first). None: it is there.

        Otherwise another machine was first, and its entry is returned: the one that counts.
        """
        stage, key = manifest.stage, manifest.key
        target = self._files(manifest)
        self._ask("write", lambda: self._upload(files, target, manifest))
        text = manifest.model_dump_json(indent=1).encode("utf-8")
        try:
            self._ask("write", lambda: self._create(self._numbered(stage, key, after + 1), text))
        except FileExistsError:
            there = self.newest(stage, key)
            # The answer to our own write may have been lost, and the write repeated.
            if there is not None and there.manifest == manifest:
                return None
            if there is None:
                raise InfrastructureError(
                    f"{self.url}: store/{stage}/{key[:12]} was removed while it was written"
                ) from None
            return there
        self.mark_used(stage, key)
        return None

    def mark_used(self, stage: str, key: str) -> None:
        at = f"{self._entry(stage, key)}/{USED}"
        self._ask("write", lambda: self._write(at, b""))

    def _upload(self, files: Path, target: str, manifest: Manifest) -> None:
        self._check_there()
        if self._folder:
            for name in manifest.files:
                copy_whole(files / name, Path(target, name))
        else:
            self._fs.put(
                [str(files / name) for name in manifest.files],
                [f"{target}/{name}" for name in manifest.files],
                **self._batch,
            )
        there = self._fs.find(target, detail=True)
        sizes = {name.removeprefix(f"{target}/"): info["size"] for name, info in there.items()}
        for name, entry in manifest.files.items():
            if sizes.get(name) != entry.size:
                raise OSError(f"{name} was written and is not there in full")

    def _create(self, at: str, text: bytes) -> None:
        """Write what must not be there yet, as a whole. Raises `FileExistsError`."""
        if self._folder:
            check_folder(self._root)
            path = Path(at)
            draft = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write_synced(draft, text)
                os.link(draft, path)
            finally:
                draft.unlink(missing_ok=True)
            return
        try:
            self._fs.pipe_file(at, text, mode="create")
        except OSError as error:
            if _says_exists(error):
                raise FileExistsError(at) from error
            raise

    def _write(self, at: str, text: bytes) -> None:
        self._check_there()
        if self._folder:
            Path(at).parent.mkdir(parents=True, exist_ok=True)
            Path(at).write_bytes(text)
        else:
            self._fs.pipe_file(at, text)

    # -- removing and asking ---------------------------------------------------------------

    def objects(self) -> dict[tuple[str, str], dict[str, tuple[int, datetime]]]:
        """By stage and key: every object below, with its bytes and the time it was written."""
        found: dict[tuple[str, str], dict[str, tuple[int, datetime]]] = {}
        for at, info in self._ask("list", lambda: self._find_all()).items():
            parts = PurePosixPath(at.removeprefix(f"{self._root}/")).parts
            if len(parts) > 2 and not parts[0].startswith("."):
                stage, key, *rest = parts
                here = found.setdefault((stage, key), {})
                here["/".join(rest)] = (info["size"], _time(info))
        return found

    def read(self, stage: str, key: str, number: int) -> Manifest | None:
        """One manifest; None where it is gone, or cannot be read."""
        try:
            text = self._ask("read", lambda: self._fs.cat_file(self._numbered(stage, key, number)))
        except FileNotFoundError:
            return None
        return _manifest(text, stage, key)

    def used_at(self, stage: str, key: str) -> datetime:
        """When a machine last asked for an entry; long ago where none did."""
        used = self._ask("list", lambda: self._listing(stage, key)).get(USED)
        return _time(used) if used is not None else datetime.min.replace(tzinfo=UTC)

    def remove(self, stage: str, key: str, names: list[str]) -> None:
        """Delete objects of a key, manifests first: without them there is no entry."""
        for name in sorted(names, key=lambda name: (not _NUMBERED.fullmatch(name), name)):
            with suppress(FileNotFoundError):
                self._ask("delete", partial(self._fs.rm_file, f"{self._entry(stage, key)}/{name}"))
        if self._folder:
            remove_empty(Path(self._entry(stage, key)))

    def probe(self) -> str:
        """Write, read and delete a small object; empty, or what a person must know.

        Raises what every operation raises.
        """
        at = f"{self._root}/.probe/{uuid.uuid4().hex}"
        self._ask("write", lambda: self._create(at, b"probe"))
        try:
            try:
                found = self._ask("read", lambda: self._fs.cat_file(at))
            except FileNotFoundError:
                found = None
            if found != b"probe":
                return "what was written is not what is read"
            try:
                self._ask("write", lambda: self._create(at, b"again"))
            except FileExistsError:
                return ""
            return "writes over what is there although it was told not to (If-None-Match)"
        finally:
            with suppress(FileNotFoundError):
                self._ask("delete", lambda: self._fs.rm_file(at))

    # -- parts -----------------------------------------------------------------------------

    @property
    def _batch(self) -> dict[str, int]:
        return {} if self._folder else {"batch_size": AT_ONCE}

    def _entry(self, stage: str, key: str) -> str:
        return f"{self._root}/{stage}/{key}"

    def _numbered(self, stage: str, key: str, number: int) -> str:
        return f"{self._entry(stage, key)}/{number:06d}.json"

    def _files(self, manifest: Manifest) -> str:
        return f"{self._entry(manifest.stage, manifest.key)}/{manifest.digest}"

    def _listing(self, stage: str, key: str) -> dict[str, Mapping[str, Any]]:
        self._check_there()
        try:
            found = self._fs.ls(self._entry(stage, key), detail=True)
        except FileNotFoundError:
            return {}
        return {posixpath.basename(info["name"]): info for info in found}

    def _find_all(self) -> dict[str, Mapping[str, Any]]:
        self._check_there()
        return dict(self._fs.find(self._root, detail=True))

    def _check_there(self) -> None:
        if self._folder:
            check_folder(self._root)

    def _ask(self, verb: str, call: Callable[[], T]) -> T:
        """Try for `patience` seconds, with growing pauses that differ between machines.

        `FileExistsError`, and `FileNotFoundError` where nothing is written, are answers. Raises
        `UserError` for what waiting does not mend (no credentials, not allowed, no bucket),
        `InfrastructureError` for the rest.
        """
        began = time.monotonic()
        pause = 1.0
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                if verb != "write":
                    raise
                raise UserError.at(
                    f"{VARIABLE}={self.url}",
                    f"cannot write: {_first_line(error)}",
                    "create the bucket; only what is below it is made here",
                ) from None
            except (FileExistsError, UserError, *_OURS):
                raise
            except Exception as error:
                if _refused(error):
                    raise UserError.at(
                        f"{VARIABLE}={self.url}",
                        f"cannot {verb}: {_first_line(error)}",
                        "give the object store's client credentials that may list, read, write "
                        "and delete there (docs/scaling.md)",
                    ) from None
                wait = pause * random.uniform(0.5, 1.5)
                if time.monotonic() - began + wait > self._patience:
                    raise InfrastructureError(
                        f"{VARIABLE}={self.url}: cannot {verb}, tried for {self._patience:.0f} s: "
                        f"{_first_line(error)}"
                    ) from error
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    named = filesystem.protocol
    return (named,) if isinstance(named, str) else tuple(named)


def _manifest(text: bytes, stage: str, key: str) -> Manifest | None:
    """None for one that is cut, of another key or digest, or names a file outside its folder."""
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError:
        return None
    sound = (manifest.stage, manifest.key) == (stage, key) and _can_be_files(manifest.files)
    return manifest if sound and manifest.is_of_its_files else None


def _can_be_files(names: Iterable[str]) -> bool:
    """Whether all are plain relative paths, none of which is a folder of another."""
    paths = {PurePosixPath(name): name for name in names}
    return all(
        str(path) == name
        and path.parts
        and ".." not in path.parts
        and not path.is_absolute()
        and "\0" not in name
        and paths.keys().isdisjoint(path.parents)
        for path, name in paths.items()
    )


def newest_number(names: Iterable[str]) -> int:
    """The highest number among the names below a key; 0: no manifest."""
    return max((int(m[1]) for name in names if (m := _NUMBERED.fullmatch(name))), default=0)


def _time(info: Mapping[str, Any]) -> datetime:
    told = info.get("LastModified", info.get("last_modified", info.get("mtime")))
    if isinstance(told, datetime):
        return told
    # Unknown: as if it were of now, so that nothing is removed for its age.
    return datetime.now(UTC) if told is None else datetime.fromtimestamp(float(told), UTC)


def _refused(error: Exception) -> bool:
    """Whether waiting does not help. botocore's names are compared: it may not be installed."""
    return isinstance(error, PermissionError | NotImplementedError) or type(error).__name__ in (
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "ParamValidationError",
    )


def _says_exists(error: OSError) -> bool:
    """Not every S3 server says which condition failed, and s3fs 2026.7 asks for that word."""
    response = getattr(error.__cause__, "response", None) or {}
    code = response.get("Error", {}).get("Code")
    return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
