"""The artifact store: immutable folders, found by the key of the stage that makes them.

    store/<stage>/<key>/files/...        what the stage wrote
    store/<stage>/<key>/manifest.json    written last, with every file's size and SHA-256
    store/.incoming/...                  half written or half removed; deleted when stale
    store/.set-aside/...                 entries that no longer matched, kept for a person

An entry exists only if its manifest is complete, every file matches it, and the parents it was
made from still have the digests it was made from (a pruned parent is no objection: its content
is named in the manifest). Anything else is reported with the reason and made again.
"""

from __future__ import annotations

import glob
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from registry.artifacts import ArtifactRef, FileEntry, Manifest, Stage
from registry.digests import digest_of_listing, digests_of_files, files_below
from registry.errors import InfrastructureError, UserError
from registry.retention import Entry

MANIFEST = "manifest.json"
OUT = "out-"
"""How the name of what was withdrawn begins, in `.incoming`."""

FSYNCS = 8
"""Files that are brought to the disk at once."""


class Absent(Exception):
    """Why a stage cannot be reused; the text is shown to people (`missing`, `empty`, ...)."""


class Busy(InfrastructureError):
    """Another process of this machine holds the lock of an entry."""


class Store:
    """A store below one local folder. `SharedStore` puts one behind it that machines share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # -- reading ---------------------------------------------------------------------------

    def folder(self, stage: Stage) -> Path:
        return self.root / stage.name / stage.key

    def find(self, stage: Stage) -> ArtifactRef:
        """The finished artifact of `stage`. Raises `Absent` with the reason when there is none."""
        return self._checked(stage, self._sound(stage))

    def peek(self, stage: Stage) -> str | None:
        """Why a run would make the stage; None: it would find it."""
        try:
            self.find(stage)
        except Absent as absent:
            return str(absent)
        return None

    def _checked(self, stage: Stage, manifest: Manifest) -> ArtifactRef:
        """A sound entry, as long as it was made from what its parents are now."""
        for role, parent in stage.parents.items():
            recorded = manifest.parents.get(role, {}).get("digest")
            try:
                present = self.recorded_digest(parent)
            except Absent:
                continue
            if present != recorded:
                raise Absent(f"{self._name(stage)}: parent {role} has changed its content")
        return self._reference(stage, self.folder(stage), manifest, reused=True)

    def is_there(self, stage: Stage) -> bool:
        """Whether a manifest is there: for estimates. Only `find` says what may be used."""
        return (self.folder(stage) / MANIFEST).is_file()

    def recorded_digest(self, stage: Stage) -> str:
        """The digest in the manifest of `stage`, without reading its files."""
        return self._manifest(self.folder(stage), self._name(stage)).digest

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The full record of a finished artifact."""
        return self._manifest(ref.path.parent, f"{ref.stage}/{ref.key[:12]}")

    def mark_used(self, name: str, key: str) -> None:
        """Note that an entry is in use now: the time of its manifest. A missing one is none."""
        with suppress(OSError):
            os.utime(self.root / name / key / MANIFEST)

    def entries(self) -> tuple[list[Entry], list[Path]]:
        """Every entry by its manifest alone, and the folders that have none which can be read."""
        found, odd = [], []
        for folder in sorted(self.root.glob("[!.]*/*")):
            try:
                file = folder / MANIFEST
                manifest = Manifest.model_validate_json(file.read_bytes())
                used_at = datetime.fromtimestamp(file.stat().st_mtime, UTC)
                size = size_on_disk(folder)
            except (OSError, ValidationError):
                odd.append(folder)
                continue
            if (manifest.stage, manifest.key) != (folder.parent.name, folder.name):
                odd.append(folder)  # a copy that somebody made
                continue
            found.append(
                Entry(
                    stage=folder.parent.name,
                    key=folder.name,
                    digest=manifest.digest,
                    label=manifest.label,
                    size=size,
                    made_at=manifest.made_at,
                    used_at=max(used_at, manifest.made_at),
                    parents=tuple((one["stage"], one["key"]) for one in manifest.parents.values()),
                )
            )
        return found, odd

    def last_seconds(self, name: str, label: str) -> float | None:
        """How long the newest artifact of this stage and label took; None when there is none."""
        newest: Manifest | None = None
        for path in (self.root / name).glob(f"*/{MANIFEST}"):
            try:
                manifest = Manifest.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                continue
            same = manifest.label == label
            if same and (newest is None or manifest.made_at > newest.made_at):
                newest = manifest
        return newest.seconds if newest else None

    # -- writing ---------------------------------------------------------------------------

    def make(
        self,
        stage: Stage,
        produce: Callable[[Path], dict[str, Any]],
        provenance: dict[str, Any],
        *,
        fresh: Callable[[ArtifactRef], bool] = lambda ref: True,
        on_absent: Callable[[str], None] = lambda reason: None,
        lock_timeout: float = 24 * 3600.0,
    ) -> ArtifactRef:
        """Return the artifact of `stage`, calling `produce(folder)` only when there is none.

        `produce` writes its files into the folder it is given and returns a summary. When it
        raises, nothing of it stays. Two processes that ask for one key at once: the second
        waits for the first and reuses what it made. `fresh` may refuse an entry for its age.
        """
        with self._locked(stage.name, stage.key, lock_timeout):
            try:
                found = self._checked(stage, self._sound(stage))
                if fresh(found):
                    return found
                reason = f"{self._name(stage)}: too old ({found.made_at:%Y-%m-%d})"
            except Absent as absent:
                reason = str(absent)
            on_absent(reason)
            return self._produce(stage, produce, provenance)

    def _produce(
        self,
        stage: Stage,
        produce: Callable[[Path], dict[str, Any]],
        provenance: dict[str, Any],
    ) -> ArtifactRef:
        started = time.monotonic()
        parents = {
            role: {
                "stage": parent.name,
                "key": parent.key,
                "digest": self.recorded_digest(parent),
            }
            for role, parent in stage.parents.items()
        }
        incoming = self._incoming(stage.name, stage.key)
        files = incoming / "files"
        try:
            summary = produce(files)
            written = files_below(files)
            listing = {
                path.relative_to(files).as_posix(): FileEntry(
                    size=path.stat().st_size, sha256=digest
                )
                for path, digest in zip(written, digests_of_files(written), strict=True)
            }
            if not listing:
                raise InfrastructureError(f"stage {stage.title} wrote no file")
            manifest = Manifest(
                stage=stage.name,
                stage_version=stage.version,
                label=stage.label,
                key=stage.key,
                digest=digest_of_listing({name: file.sha256 for name, file in listing.items()}),
                files=listing,
                config=stage.config,
                parents=parents,
                inputs=stage.inputs,
                tools=stage.tools,
                provenance=provenance,
                summary=summary,
                made_at=datetime.now(UTC),
                seconds=round(time.monotonic() - started, 3),
            )
            self._publish(incoming, manifest, self.folder(stage))
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        return self._reference(stage, self.folder(stage), manifest, reused=False)

    def _publish(self, incoming: Path, manifest: Manifest, target: Path) -> None:
        """Make a folder with `files` the entry: on the disk, then in place at once."""
        (incoming / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        # Together: a disk that is asked for several at once writes its journal once for them.
        with ThreadPoolExecutor(FSYNCS) as threads:
            list(threads.map(_fsync, [*files_below(incoming / "files"), incoming / MANIFEST]))
        _fsync(incoming)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            aside = self.root / ".set-aside" / f"{target.parent.name}-{target.name[:12]}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            target.rename(aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}"))
        incoming.rename(target)
        _fsync(target.parent)

    @contextmanager
    def _locked(self, name: str, key: str, timeout: float) -> Iterator[None]:
        locks = self.root / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{name}-{key[:32]}.lock", timeout=timeout)
        try:
            lock.acquire()
        except Timeout:
            raise Busy(
                f"another process has been making store/{name}/{key[:12]} for {timeout:.0f} s"
            ) from None
        try:
            yield
        finally:
            lock.release()

    # -- removing --------------------------------------------------------------------------

    def withdraw(self, entry: Entry) -> Path:
        """Take an entry out as a whole; returns where it lies until somebody deletes it.

        Raises `Absent` with the reason when it stays: being made, made anew or used meanwhile,
        or gone already. Killed in between, it is there or it is out, and what is out is deleted
        by `remove_stale`.
        """
        name = f"store/{entry.stage}/{entry.key[:12]}"
        folder = self.root / entry.stage / entry.key
        out = (
            self.root / ".incoming" / f"{OUT}{entry.stage}-{entry.key[:12]}-{uuid.uuid4().hex[:8]}"
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._locked(entry.stage, entry.key, 0.0):
                manifest = self._manifest(folder, name)
                used_at = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime, UTC)
                if manifest.digest != entry.digest or used_at > entry.used_at:
                    raise Absent(f"{name}: made anew or used meanwhile")
                folder.rename(out)
        except Busy:
            raise Absent(f"{name}: another process is making it") from None
        except OSError as error:
            raise Absent(f"{name}: {error.strerror}") from None
        return out

    def leftovers(self, aside_before: datetime) -> list[Path]:
        """What was withdrawn and not deleted, and what was set aside before a moment."""
        aside = [
            path
            for path in (self.root / ".set-aside").glob("*")
            if datetime.fromtimestamp(path.stat().st_ctime, UTC) < aside_before
        ]
        return sorted((self.root / ".incoming").glob(f"{OUT}*")) + sorted(aside)

    def remove_stale(self, older_than: float = 24 * 3600.0) -> list[Path]:
        """Remove what crashed writers left behind.

        A writer holds its key's lock for as long as its folder is there: where nobody holds it, the
        writer is dead. A folder without such a lock goes when it is more than `older_than` seconds
        old, and what was withdrawn at any age: nobody finds it again.
        """
        removed = []
        now = time.time()
        for path in (self.root / ".incoming").glob("*"):
            try:
                old = now - path.stat().st_mtime > older_than
            except OSError:  # its writer has just ended
                continue
            alive = self._writer_lives(path)
            if path.name.startswith(OUT) or (old if alive is None else not alive):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        return removed

    def _writer_lives(self, incoming: Path) -> bool | None:
        """Whether somebody holds the key that a folder of `.incoming` was made for; None: no lock.

        A stage may take days, and a clock may jump: its folder's age says nothing then.
        """
        name = glob.escape(incoming.name.rpartition("-")[0])
        for lock in (self.root / ".locks").glob(f"{name}*.lock"):
            try:
                with FileLock(lock, timeout=0):
                    # Found by name before it was asked for: its writer may have ended in between.
                    return not incoming.exists()
            except Timeout:
                return True
        return None

    # -- parts -----------------------------------------------------------------------------

    def _incoming(self, name: str, key: str) -> Path:
        """A new folder with an empty folder `files`, for its writer alone."""
        folder = self.root / ".incoming" / f"{name}-{key[:12]}-{uuid.uuid4().hex[:8]}"
        (folder / "files").mkdir(parents=True)
        return folder

    def _name(self, stage: Stage) -> str:
        return f"store/{stage.name}/{stage.key[:12]}"

    def _manifest(self, folder: Path, name: str) -> Manifest:
        if not folder.is_dir():
            raise Absent(f"{name}: missing")
        try:
            text = (folder / MANIFEST).read_bytes()
        except OSError:
            empty = not any(folder.rglob("*"))
            raise Absent(f"{name}: {'empty' if empty else 'no manifest'}") from None
        try:
            return Manifest.model_validate_json(text)
        except ValidationError:
            raise Absent(f"{name}: manifest cannot be read") from None

    def _sound(self, stage: Stage) -> Manifest:
        """The manifest of an entry whose files all match it. Raises `Absent`."""
        name, folder = self._name(stage), self.folder(stage)
        # Before the files are read: who removes what nobody uses looks at it.
        self.mark_used(stage.name, stage.key)
        manifest = self._manifest(folder, name)
        if manifest.key != stage.key:
            raise Absent(f"{name}: manifest is of another key")
        if not manifest.is_of_its_files:
            raise Absent(f"{name}: the manifest's digest is not that of its files")
        files = folder / "files"
        try:
            present = {path.relative_to(files).as_posix(): path for path in files_below(files)}
        except UserError as error:
            raise Absent(f"{name}: {error.problems[0].where} {error.problems[0].what}") from None
        if set(present) != set(manifest.files):
            odd = sorted(set(present) ^ set(manifest.files))
            raise Absent(f"{name}: files differ from the manifest ({', '.join(odd[:3])})")
        try:
            sizes = {one: path.stat().st_size for one, path in present.items()}
            changed = [one for one, entry in manifest.files.items() if sizes[one] != entry.size]
            if not changed:
                digests = digests_of_files([present[one] for one in manifest.files])
                pairs = zip(manifest.files.items(), digests, strict=True)
                changed = [one for (one, entry), digest in pairs if digest != entry.sha256]
        except FileNotFoundError:
            raise Absent(f"{name}: removed while it was read") from None
        if changed:
            raise Absent(f"{name}: digest differs ({changed[0]} was changed)")
        return manifest

    @staticmethod
    def _reference(stage: Stage, folder: Path, manifest: Manifest, reused: bool) -> ArtifactRef:
        return ArtifactRef(
            stage=stage.name,
            key=manifest.key,
            digest=manifest.digest,
            path=folder / "files",
            summary=manifest.summary,
            made_at=manifest.made_at,
            seconds=manifest.seconds,
            reused=reused,
        )


def size_on_disk(folder: Path) -> int:
    """Bytes of everything below; a link counts as itself, its target stays where it is."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # somebody is deleting it
                total += Path(root, name).lstat().st_size
    return total


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
