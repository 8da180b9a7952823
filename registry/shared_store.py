"""The local store with a store behind it that machines share (`registry/remote_store.py`).

Stages work in the local folder; what is shared decides which content a key has. Found locally and
not there: uploaded. Found there and not locally, or with other content: fetched, every file
verified, published as if it had been made here. Locks hold on one machine only: two machines that
make one key at once do double work, and both go on with the entry of the one that was first.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from registry.artifacts import ArtifactRef, Manifest, Stage
from registry.errors import InfrastructureError
from registry.lineage import digest_below
from registry.remote_store import Damaged, RemoteStore, Shared
from registry.settings import settings
from registry.store import MANIFEST, Absent, Busy, Store
from registry.whole_files import write_whole

LOCK_WAIT = 600.0
"""Seconds that a fetch waits for another process of this machine that has the entry."""
ROUNDS = 3
"""How often the entry of another machine may come in between while one is brought into line."""


class Step(Enum):
    NOTHING = "both have it, or neither"
    SHARE = "upload what is here"
    FETCH = "take what is there"


def next_step(local: Manifest | None, after: int | None, shared: Shared | None) -> Step:
    """What brings one key into line. `local` None: there is no sound entry here.

    after: the number that the local entry was made to follow, while it is not uploaded.
    """
    if shared is None or shared.manifest is None:
        return Step.SHARE if local is not None else Step.NOTHING
    if local is None:
        return Step.FETCH
    if local == shared.manifest:
        return Step.NOTHING
    return Step.SHARE if after == shared.number else Step.FETCH


class SharedStore(Store):
    """`on_transfer` is told what is fetched and uploaded, in words for people."""

    def __init__(
        self,
        root: Path,
        remote: RemoteStore,
        on_transfer: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(root)
        self.remote = remote
        self._tell = on_transfer

    def find(self, stage: Stage) -> ArtifactRef:
        try:
            with self._locked(stage.name, stage.key, 0.0):
                return self._checked(stage, self._sound(stage))
        except Busy:
            # Its maker brings it into line.
            return self._checked(stage, super()._sound(stage))

    def peek(self, stage: Stage) -> str | None:
        """Fetches nothing."""
        shared = self.remote.newest(stage.name, stage.key)
        if shared is not None and shared.manifest is not None:
            return None
        try:
            self._checked(stage, super()._sound(stage))
        except Absent as absent:
            return str(absent)
        return None

    def is_there(self, stage: Stage) -> bool:
        if super().is_there(stage):
            return True
        shared = self.remote.newest(stage.name, stage.key)
        return shared is not None and shared.manifest is not None

    def recorded_digest(self, stage: Stage) -> str:
        try:
            return super().recorded_digest(stage)
        except Absent:
            shared = self.remote.newest(stage.name, stage.key)
            if shared is None or shared.manifest is None:
                raise
            return shared.manifest.digest

    def fetch_part(self, name: str, key: str, below: str, digest: str) -> bool:
        """Bring the entry here whose folder `below` has this digest; False: nobody has it."""
        shared = self.remote.newest(name, key)
        if shared is None or shared.manifest is None:
            return False
        if digest_below(shared.manifest, below) != digest:
            return False
        with self._locked(name, key, LOCK_WAIT):
            try:
                self._fetch(self.root / name / key, shared.manifest)
            except Damaged as damage:
                self._tell(f"store/{name}/{key[:12]} of {self.remote.url} is damaged: {damage}")
                return False
        return True

    # -- in line -----------------------------------------------------------------------------

    def _sound(self, stage: Stage) -> Manifest:
        reason = None
        try:
            local = super()._sound(stage)
        except Absent as absent:
            local, reason = None, absent
        lined_up = self._line_up(stage, local)
        if lined_up is None:
            raise reason or Absent(f"{self._name(stage)}: missing")
        return lined_up

    def _produce(
        self,
        stage: Stage,
        produce: Callable[[Path], dict[str, Any]],
        provenance: dict[str, Any],
    ) -> ArtifactRef:
        shared = self.remote.newest(stage.name, stage.key)
        # A kill or an outage before it is uploaded: the next run knows what it was to follow.
        self._note(stage, shared.number if shared is not None else 0)
        made = super()._produce(stage, produce, provenance)
        counts = self._line_up(stage, self._manifest(self.folder(stage), self._name(stage)))
        if counts is None or counts.digest == made.digest:
            return made
        return self._reference(stage, self.folder(stage), counts, reused=False)

    def _line_up(self, stage: Stage, local: Manifest | None) -> Manifest | None:
        """The entry that counts for all machines, here and there; None where nobody has it."""
        folder = self.folder(stage)
        for _ in range(ROUNDS):
            shared = self.remote.newest(stage.name, stage.key)
            step = next_step(local, self._noted(stage), shared)
            if step is Step.SHARE and local is not None:
                self._tell(f"{stage.title}: uploading {_size(local)} to {self.remote.url}")
                number = shared.number if shared is not None else 0
                if self.remote.publish(folder / "files", local, after=number) is None:
                    self._forget(stage)
                    return local
                self._tell(f"{stage.title}: another machine was first, its entry counts")
            elif step is Step.FETCH and shared is not None and shared.manifest is not None:
                try:
                    local = self._take(stage, local, shared.manifest)
                except Damaged as damage:
                    self._tell(
                        f"{stage.title}: the entry of {self.remote.url} is damaged: {damage}"
                    )
                    if local is None:
                        return None
                    self._note(stage, shared.number)
            else:
                self._forget(stage)
                return local
        raise InfrastructureError(f"{self._name(stage)} at {self.remote.url} changes all the time")

    def _take(self, stage: Stage, local: Manifest | None, theirs: Manifest) -> Manifest:
        folder = self.folder(stage)
        if local is not None and local.digest == theirs.digest:
            # The same files, made twice; when and from what they were made must be one answer too.
            write_whole(folder / MANIFEST, theirs.model_dump_json(indent=1))
        else:
            self._tell(f"{stage.title}: fetching {_size(theirs)} from {self.remote.url}")
            self._fetch(folder, theirs)
        return theirs

    def _fetch(self, folder: Path, manifest: Manifest) -> None:
        incoming = self._incoming(manifest.stage, manifest.key)
        try:
            self.remote.fetch(manifest, incoming / "files")
            self._publish(incoming, manifest, folder)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    # -- what is not uploaded yet --------------------------------------------------------------

    def _noted_at(self, stage: Stage) -> Path:
        return self.root / ".unshared" / f"{stage.name}-{stage.key}"

    def _note(self, stage: Stage, after: int) -> None:
        path = self._noted_at(stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, str(after))

    def _noted(self, stage: Stage) -> int | None:
        try:
            return int(self._noted_at(stage).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _forget(self, stage: Stage) -> None:
        self._noted_at(stage).unlink(missing_ok=True)


def open_store(on_transfer: Callable[[str], None] = lambda text: None) -> Store:
    """The store of this machine's settings, with a shared one behind it where a URL is set."""
    one = settings()
    if not one.store_url:
        return Store(one.store_dir)
    return SharedStore(one.store_dir, RemoteStore(one.store_url), on_transfer)


def _size(manifest: Manifest) -> str:
    size = sum(file.size for file in manifest.files.values())
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
