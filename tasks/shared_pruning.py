"""`pilotage prune --shared`: remove from the shared store what no machine uses or refers to.

A decision of its own, never part of the local prune: other machines work from the same entries.
What stays: whatever the registry, the ledger or a recent run refers to, with all it was made of,
and whatever any machine asked for lately (each one leaves a mark there, see `RemoteStore`). Asked
is the registry that machines share; one machine's own knows nothing of the others.

An entry that goes while a machine works with its own copy of it is uploaded again at its next use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from registry.artifacts import Manifest
from registry.errors import UserError
from registry.remote_store import USED, RemoteStore, newest_number
from registry.retention import Entry, Name, Plan, plan
from registry.settings import settings
from tasks.pruning import DAYS, alone, no_alias_moves, reasons_of, referred

GRACE = timedelta(days=2)
"""What belongs to no entry may be an upload that is under way."""

Objects = Mapping[str, tuple[int, datetime]]
"""What lies below a key: bytes and time of writing, by name."""


@dataclass
class SharedPruned:
    """What was decided, and what of it was done (`done` False: a dry run)."""

    url: str
    days: int
    done: bool
    entries: list[Entry]
    plan: Plan
    leftovers: dict[Name, list[str]]
    """Objects of replaced entries, and of uploads that never ended."""
    leftover_bytes: int
    stayed: list[Name] = field(default_factory=list)
    """Were to go, and were used meanwhile."""

    @property
    def removed(self) -> list[Entry]:
        return [entry for entry in self.plan.remove if entry.name not in self.stayed]

    @property
    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "store": self.url,
            "days": self.days,
            "dry_run": not self.done,
            "kept": len(self.plan.keep) + len(self.stayed),
            "reasons": reasons_of(self.plan.keep),
            "removed": [
                {"stage": one.stage, "key": one.key, "label": one.label, "bytes": one.size,
                 "used_at": one.used_at.isoformat()}
                for one in self.removed
            ],
            "leftovers": sum(len(names) for names in self.leftovers.values()),
            "leftover_bytes": self.leftover_bytes,
        }  # fmt: skip


def prune_shared(days: int = DAYS, *, yes: bool = False) -> SharedPruned:
    """Decide what goes, and with `yes` remove it.

    days: what a machine asked for within them stays, so do runs that young. Raises `UserError`
    where there is no shared store or no shared registry, else what `prune` raises.
    """
    remote = _shared()
    with alone() as held:
        if yes:
            no_alias_moves(held)
        now = datetime.now(UTC)
        since = now - timedelta(days=days)
        found = remote.objects()
        entries, leftovers = [], {}
        for name, objects in found.items():
            number = newest_number(objects)
            manifest = remote.read(*name, number) if number else None
            if manifest is not None:
                entries.append(_entry(manifest, objects))
            if rest := orphans(objects, number, manifest, now - GRACE):
                leftovers[name] = rest
        roots = referred(entries, since)
        for entry in entries:
            if entry.used_at >= since:
                roots.setdefault(entry.name, []).append("used lately by some machine")
        done = SharedPruned(
            url=remote.url,
            days=days,
            done=yes,
            entries=entries,
            plan=plan(entries, roots, now),
            leftovers=leftovers,
            leftover_bytes=sum(
                found[name][one][0] for name in leftovers for one in leftovers[name]
            ),
        )
        if not yes:
            return done
        for entry in done.plan.remove:
            if remote.used_at(*entry.name) > entry.used_at:
                done.stayed.append(entry.name)
            else:
                remote.remove(*entry.name, list(found[entry.name]))
        for name, names in leftovers.items():
            remote.remove(*name, names)
    return done


def orphans(
    objects: Objects, number: int, manifest: Manifest | None, before: datetime
) -> list[str]:
    """Names below a key that its entry does not need, and that nobody has touched since `before`.

    `manifest` is that of the highest `number` (0: there is none); None: it cannot be read, perhaps
    because a newer pilotage wrote it. All of the key stays then: what it needs, nobody knows.
    """
    if number and manifest is None:
        return []
    newest = f"{number:06d}.json"
    ours = {newest, USED, *(f"{manifest.digest}/{name}" for name in manifest.files)} if (
        manifest is not None
    ) else {newest, USED}  # fmt: skip
    # A machine may be fetching what was replaced only now; an upload writes one file after another.
    young = {_part(name) for name, (_, written) in objects.items() if written >= before}
    if number and objects[newest][1] >= before:
        return []
    return sorted(name for name in objects if name not in ours and _part(name) not in young)


def _part(name: str) -> str:
    """The folder of one content; a manifest is a part by itself."""
    return re.split("/", name, maxsplit=1)[0]


def _entry(manifest: Manifest, objects: Objects) -> Entry:
    used = objects.get(USED)
    return Entry(
        stage=manifest.stage,
        key=manifest.key,
        digest=manifest.digest,
        label=manifest.label,
        size=sum(size for size, _ in objects.values()),
        made_at=manifest.made_at,
        used_at=max(manifest.made_at, used[1]) if used else manifest.made_at,
        parents=tuple((one["stage"], one["key"]) for one in manifest.parents.values()),
    )


def _shared() -> RemoteStore:
    one = settings()
    if not one.store_url:
        raise UserError.at(
            "PILOTAGE_STORE_URL",
            "is not set: there is no shared store",
            "set it, see docs/scaling.md",
        )
    scheme = urlsplit(one.mlflow_uri).scheme.partition("+")[0]
    if scheme in ("", "file", "sqlite"):
        raise UserError.at(
            f"PILOTAGE_MLFLOW_URI={one.mlflow_uri}",
            "is this machine's own registry: it does not know what other machines refer to",
            "name the MLflow server that all of them use",
        )
    return RemoteStore(one.store_url)
