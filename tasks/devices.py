"""One heavy stage at a time on one device: what times, trains or serves enters `exclusive`.

A kernel file lock per device is what holds: everybody on this host takes it, whatever home, user
or Prefect server, and the kernel releases it when its holder is killed. The processes that work
for the holder keep the same lock open, so that a killed run's engine still holds the device until
it has ended. Inside a flow run the device is also a Prefect concurrency limit of one slot,
`pilotage-<host>-<device>`, for people to see; it is a courtesy, and no release waits for it or
dies of it. Who holds the file lock knows that whatever slot is taken was left by a killed run.

Devices are GPUs (MIG instances where a GPU is divided) by UUID: those of CUDA_VISIBLE_DEVICES, else
all. Without a GPU the machine itself is the device, `cpu`.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import platform
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from registry.errors import InfrastructureError, UserError
from registry.provenance import nvidia_smi
from registry.settings import settings
from tasks.device_slots import Slot
from tasks.engines.guards import kept_open
from tasks.engines.subprocesses import identity
from tasks.progress import LOG, spell

CPU = "cpu"
HELD = "PILOTAGE_DEVICES_HELD"
"""Environment variable by which a child knows what its parent holds: `pid:start:device,device`."""

PLACES = ("/run/lock", "/tmp")
"""Where every user of a host may write; the first one that is such a folder, so all agree."""

ASK_EVERY, SAY_EVERY = 0.2, 600.0
"""Seconds between two tries for a lock, and between two lines about one long wait."""

HANDS_OVER = 2.0
"""Seconds without a holder's record that need no word: the next one is about to write its own."""

_mutex = threading.RLock()
_depth = 0
_held = ExitStack()


@contextmanager
def exclusive(what: str) -> Iterator[None]:
    """Hold this process's devices; `what` is told to those who wait for them.

    Entered again by the same process or by a child of it, it costs nothing. Waits its turn, at most
    `PILOTAGE_DEVICE_WAIT` seconds, then raises `InfrastructureError`.
    """
    global _depth
    entered = False
    try:
        with _mutex:
            if not _depth and not held_by_parent(devices()):
                _held.enter_context(_holding(devices(), what))
            _depth += 1
            entered = True
        yield
    finally:
        with _mutex:
            _depth -= entered
            if not _depth:
                # Who leaves last gives back: a stage starts the server that the next ones ask.
                _held.close()


def is_held() -> bool:
    """Whether this process, or the one that started it, has its devices."""
    return _depth > 0 or held_by_parent(devices())


@contextmanager
def _holding(names: Sequence[str], what: str) -> Iterator[None]:
    deadline = time.monotonic() + settings().device_wait
    with ExitStack() as held:
        # In sorted order: two that take several devices never wait for each other.
        locks = [held.enter_context(_locked(name, what, deadline)) for name in names]
        os.environ[HELD] = _held_mark(names)
        held.callback(os.environ.pop, HELD, None)
        if _in_flow_run():
            slot = Slot([limit_name(name) for name in names], [one.left_lease for one in locks])
            held.enter_context(slot.taken([one.note for one in locks]))
        yield


# -- the file lock ---------------------------------------------------------------------------


class _Lock:
    """An open lock file that is locked, and the record of its holder in it."""

    def __init__(self, descriptor: int, what: str) -> None:
        self._descriptor = descriptor
        before = _record(descriptor)
        self.left_lease = str(before.get("lease") or "")
        """The slot of a holder that was killed: one that ends properly empties its record."""
        self._mine = {
            **(identity(os.getpid()) or {}),
            "user": _user(),
            "what": what,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if before.get("pid"):
            LOG.info("%s ended without giving the device back", holder_text(before))
        self.note(None)

    def note(self, lease: str | None) -> None:
        text = json.dumps({**self._mine, "lease": lease}).encode()
        with suppress(OSError):  # a full disk: the lock holds without its record
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))

    def forget(self) -> None:
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)


@contextmanager
def _locked(device: str, what: str, deadline: float) -> Iterator[_Lock]:
    descriptor = _Wait(device, deadline).descriptor()
    try:
        lock = _Lock(descriptor, what)
        try:
            with kept_open(descriptor):
                yield lock
        finally:
            lock.forget()
    finally:
        # Processes of ours may have it open as well: closing alone would not release it.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


class _Wait:
    """One wait for a device: first to be the next, then for the device itself.

    Tries alone are not fair: who gives the device back and wants it again at once is always sooner
    than one that tries every `ASK_EVERY` seconds. Whoever is the next holds a lock of its own,
    which all others, the holder too, want before the device.
    """

    def __init__(self, device: str, deadline: float) -> None:
        self._device, self._deadline = device, deadline
        self._path = lock_file(device)
        self._began = self._said_at = time.monotonic()
        self._said = ""

    def descriptor(self) -> int:
        """Of the device's file, locked. Raises `InfrastructureError` after the deadline."""
        turn = self._lock(self._path.with_suffix(".next"))
        try:
            descriptor = self._lock(self._path)
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)
            os.close(turn)
        if self._said:
            LOG.info("%s is free after %s", self._device, spell(time.monotonic() - self._began))
        return descriptor

    def _lock(self, path: Path) -> int:
        while True:
            descriptor = _opened(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever cleans the folder may have removed the file: then a newcomer locks
                # another.
                if _same_file(descriptor, path):
                    return descriptor
            except BlockingIOError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            self._tell()
            time.sleep(ASK_EVERY)

    def _tell(self) -> None:
        device = _opened(self._path)
        record = _record(device)
        os.close(device)
        holder, now = holder_text(record), time.monotonic()
        if now > self._deadline:
            raise InfrastructureError(
                f"{self._device} was not free within {settings().device_wait:.0f} s "
                f"(PILOTAGE_DEVICE_WAIT): {holder} holds it ({self._path})"
            )
        changes_hands = not record and now - self._began < HANDS_OVER
        if not changes_hands and (holder != self._said or now - self._said_at > SAY_EVERY):
            LOG.info("waiting for %s: %s holds it", self._device, holder)
            self._said, self._said_at = holder, now


def _opened(path: Path) -> int:
    # The kernel lets nobody open another user's file in such a folder with O_CREAT
    # (fs.protected_regular), not even root: created only where there is none.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError.at(path, f"{error.strerror}", PLACE_REMEDY) from None
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError.at(path, f"{error.strerror}", PLACE_REMEDY) from None
        os.fchmod(descriptor, 0o666)  # for every user, whatever the umask
        return descriptor


PLACE_REMEDY = (
    "let PILOTAGE_DEVICE_LOCKS name a folder of this machine in which everybody who uses its "
    "devices may create and open files, the same for all"
)


def lock_file(device: str) -> Path:
    """Raises `UserError` when there is no folder for it."""
    if settings().device_locks:
        place = Path(settings().device_locks)
        if not place.is_dir():
            raise UserError.at(f"PILOTAGE_DEVICE_LOCKS={place}", "no such folder", PLACE_REMEDY)
        return place / f"pilotage-{device}.lock"
    for name in PLACES:
        place = Path(name)
        # Asked of the folder, not of this user: root and everybody else must choose the same.
        if place.is_dir() and place.stat().st_mode & stat.S_IWOTH:
            return place / f"pilotage-{device}.lock"
    raise UserError.at("device locks", f"none of {', '.join(PLACES)} is open to all", PLACE_REMEDY)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        there, mine = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _record(descriptor: int) -> dict[str, Any]:
    """What a holder wrote; empty when it wrote nothing that can be read."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def holder_text(record: dict[str, Any]) -> str:
    """`process 12 of root (latency bf16, since 14:05:00 UTC)`. Pure."""
    if not record.get("pid"):
        return "a process that left no record"
    return (
        f"process {record['pid']} of {record.get('user')} ({record.get('what')}, "
        f"since {record.get('since')})"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}"


# -- what a parent holds ---------------------------------------------------------------------


def _held_mark(names: Sequence[str]) -> str:
    me = identity(os.getpid())
    assert me is not None, "this process has no entry in /proc"
    return f"{me['pid']}:{me['start']}:{','.join(names)}"


def held_by_parent(names: Sequence[str]) -> bool:
    """Whether a live ancestor of this process holds all of these devices."""
    try:
        pid, start, held = os.environ.get(HELD, "").split(":")
        holder = {"pid": int(pid), "start": int(start)}
    except ValueError:
        return False
    if identity(holder["pid"]) != holder or not set(names) <= set(held.split(",")):
        return False
    with suppress(psutil.Error):
        return holder["pid"] in {parent.pid for parent in psutil.Process().parents()}
    return False


# -- which devices ---------------------------------------------------------------------------


def devices() -> tuple[str, ...]:
    """The devices that a process started by this one would use, sorted; `cpu` without a GPU.

    Raises `InfrastructureError` where there is a GPU and nobody knows which: locking `cpu` instead
    would let two on it.
    """
    named, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    return visible(_listing(), named, order) or (CPU,)


@lru_cache(maxsize=1)
def _listing() -> str:
    return nvidia_smi("-L")


def visible(listing: str, named: str | None, order: str | None) -> tuple[str, ...]:
    """UUIDs, sorted, from `nvidia-smi -L` and CUDA_VISIBLE_DEVICES (None: not set). Pure.

    A divided GPU stands for all its MIG instances. CUDA counts from the fastest GPU on unless
    CUDA_DEVICE_ORDER is PCI_BUS_ID: numbers on a machine with unlike GPUs then mean all of them.
    """
    gpus: list[tuple[str, str, list[str]]] = []
    for line in listing.splitlines():
        gpu = re.match(r"GPU \d+: (?P<name>.*) \(UUID: (?P<uuid>[\w-]+)\)", line)
        mig = re.match(r"\s+MIG .*\(UUID: (?P<uuid>[\w/-]+)\)", line)
        if gpu:
            gpus.append((gpu["name"], gpu["uuid"], []))
        elif mig and gpus:
            gpus[-1][2].append(mig["uuid"].replace("/", "-"))
    parts = [instances or [uuid] for _, uuid, instances in gpus]
    if named is None:
        return tuple(sorted(one for part in parts for one in part))
    unlike = len({name for name, _, _ in gpus}) > 1 and order != "PCI_BUS_ID"
    found: set[str] = set()
    for word in (word.strip() for word in named.split(",")):
        chosen = _chosen(word, gpus, parts, unlike)
        if not chosen:
            break  # as CUDA does: what comes after a wrong name is not seen
        found.update(chosen)
    return tuple(sorted(found))


def _chosen(
    word: str, gpus: list[tuple[str, str, list[str]]], parts: list[list[str]], unlike: bool
) -> list[str]:
    if word.isdecimal():
        if int(word) >= len(gpus):
            return []
        return [one for part in parts for one in part] if unlike else parts[int(word)]
    word = word.replace("/", "-")
    if not word.startswith(("GPU-", "MIG-")):
        return []
    for (_, uuid, _), part in zip(gpus, parts, strict=True):
        if uuid.startswith(word):
            return part
        instances = [one for one in part if one.startswith(word)]
        if instances:
            return instances[:1]
    return []


# -- Prefect ---------------------------------------------------------------------------------


def limit_name(device: str) -> str:
    """Of the concurrency limit in Prefect: the name of the host and of the device."""
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", platform.node()) or "host"
    return f"pilotage-{host}-{device}"


def _in_flow_run() -> bool:
    if "prefect.context" not in sys.modules:
        return False
    from prefect.context import FlowRunContext, TaskRunContext

    return FlowRunContext.get() is not None or TaskRunContext.get() is not None
