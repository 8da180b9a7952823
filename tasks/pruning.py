"""`pilotage prune`: remove from the store what nothing refers to any more.

Who refers is asked of the registry, the ledger, the recorded runs and the bundles that were
served here. Where one of them cannot be asked, nothing is removed: "could not ask" is not
"nobody refers to it". While it is decided, no alias can move (the ledger's locks are held), and
what is in use right now was used within a day and stays.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from registry.bundle import Bundle
from registry.errors import InfrastructureError, UserError
from registry.ledger import Entry as LedgerEntry
from registry.ledger import Ledger
from registry.lineage import BUNDLE
from registry.retention import Entry, Kept, Name, Plan, plan
from registry.settings import settings
from registry.store import Absent, Store, size_on_disk
from registry.tracking import TAG_KEY, asking_mlflow, pages
from registry.versions import TAG_PROMOTED, PromotionRefused
from tasks.bundles import aliases_of_model, tracker
from tasks.home_locks import only_in_this_home
from tasks.version_files import VersionFiles, registered_versions

DAYS = 30
LOCK_WAIT = 120.0
"""Seconds that a prune waits for an alias that is moving."""
UNTOUCHED = (
    "MLflow's runs, models and weights",
    "the ledger",
    "reports",
    "logs",
    "Prefect's database",
    "results in bench/",
)
"""What a prune leaves alone."""

_UNFINISHED = re.compile(r"(answers|distill|draft|release)-[0-9a-f]{24,64}(-[0-9a-f]{12})?")
_PARENT_RUN = "mlflow.parentRunId"
_EVIDENCE = "pilotage.evidence."


@dataclass
class Pruned:
    """What was decided, and what of it was done (`done` False: a dry run)."""

    days: int
    done: bool
    entries: list[Entry]
    plan: Plan
    unreadable: list[Path]
    leftovers: list[tuple[Path, int]]
    stayed: dict[Name, str] = field(default_factory=dict)
    """Entries that were to go and are in use now, each with the reason."""

    @property
    def removed(self) -> list[Entry]:
        """What went, or would go."""
        return [entry for entry in self.plan.remove if entry.name not in self.stayed]

    @property
    def document(self) -> dict[str, Any]:
        """As JSON: `stages` with counts and bytes, then the lists."""
        known = {entry.name: entry for entry in self.entries}
        reasons = {kept.name: list(kept.reasons) for kept in self.plan.keep}
        reasons |= {name: [reason] for name, reason in self.stayed.items()}
        return {
            "days": self.days,
            "dry_run": not self.done,
            "stages": self.stages,
            "removed": [_described(entry) for entry in self.removed],
            "kept": [{**_described(known[name]), "reasons": why} for name, why in reasons.items()],
            "unreadable": [str(path) for path in self.unreadable],
            "leftovers": [{"path": str(path), "bytes": size} for path, size in self.leftovers],
            "untouched": list(UNTOUCHED),
        }

    @property
    def stages(self) -> dict[str, dict[str, int]]:
        """Per stage: kept, kept_bytes, removed, removed_bytes."""
        gone = {entry.name for entry in self.removed}
        table: dict[str, dict[str, int]] = defaultdict(
            lambda: dict.fromkeys(("kept", "kept_bytes", "removed", "removed_bytes"), 0)
        )
        for entry in self.entries:
            what = "removed" if entry.name in gone else "kept"
            table[entry.stage][what] += 1
            table[entry.stage][f"{what}_bytes"] += entry.size
        return dict(sorted(table.items()))


def prune(days: int = DAYS, *, yes: bool = False) -> Pruned:
    """Decide what goes, and with `yes` remove it.

    days: runs and bundles younger than this are referred to. Raises `UserError` where there is
    no registry, `InfrastructureError` where it cannot be asked or another prune is running, and
    `PromotionRefused` where a ledger is broken, or shorter than its anchor in MLflow says.
    """
    store = Store(settings().store_dir)
    # Of a database that is lost nobody knows any more what it referred to.
    database = settings().home / "mlflow.db"
    if not settings().mlflow_uri and not database.exists():
        raise UserError.at(
            database,
            "there is no registry that says what is referred to",
            "put its backup in place, or run `pilotage release`",
        )
    with alone() as held:
        if yes:
            no_alias_moves(held)
        now = datetime.now(UTC)
        since = now - timedelta(days=days)
        entries, unreadable = store.entries()
        decided = plan(entries, referred(entries, since), now)
        done = Pruned(
            days=days,
            done=yes,
            entries=entries,
            plan=decided,
            unreadable=unreadable,
            leftovers=[
                (path, size_on_disk(path))
                for path in (*store.leftovers(since), *abandoned(settings().home / "bench", since))
            ],
        )
        if not yes:
            return done
        rubbish = [path for path, _ in done.leftovers]
        for entry in decided.remove:
            try:
                rubbish.append(store.withdraw(entry))
            except Absent as reason:
                done.stayed[entry.name] = str(reason)
    # Deleting takes long and is nobody's business any more; a kill leaves it to the next one.
    for path in rubbish:
        shutil.rmtree(path, ignore_errors=True)
    return done


def abandoned(bench: Path, before: datetime) -> list[Path]:
    """What stages kept to go on from, and nobody has touched since `before`.

    Answers of a teacher, checkpoints of a student, finished steps of a load test or of a draft's
    proof, each in a folder named by the stage's key. Results that a person asked for lie in folders
    named by their profile, and stay.
    """
    return [
        folder
        for folder in sorted(bench.glob("*"))
        if _UNFINISHED.fullmatch(folder.name) and _touched(folder) < before.timestamp()
    ]


def _touched(folder: Path) -> float:
    """When something in a folder was last changed; of a link its own time counts."""
    newest = 0.0
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):  # somebody works in it
            newest = max(newest, path.lstat().st_mtime)
    return newest


def referred(entries: Iterable[Entry], since: datetime) -> dict[Name, list[str]]:
    """Everything that is referred to, with who does. Raises where one of them cannot be asked."""
    found = _References(entries)
    found.add_versions()
    found.add_ledger_lines()
    found.add_runs(since)
    found.add_bundles(since)
    return found.reasons


class _References:
    """Collects names of entries; what is not in the store is left out."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.reasons: dict[Name, list[str]] = defaultdict(list)
        self._names: set[Name] = set()
        self._by_key: dict[str, list[Name]] = defaultdict(list)
        self._by_digest: dict[str, list[Name]] = defaultdict(list)
        for entry in entries:
            self._names.add(entry.name)
            self._by_key[entry.key].append(entry.name)
            self._by_digest[entry.digest].append(entry.name)
        self._lines = {model: _sound_lines(model) for model in _models()}

    def _add(self, names: Iterable[Name], reason: str) -> None:
        for name in names:
            if name in self._names and reason not in self.reasons[name]:
                self.reasons[name].append(reason)

    def _add_bundle(self, bundle: Bundle, reason: str) -> None:
        parts = filter(None, (bundle.target, bundle.draft))
        self._add(((part.stage, part.key) for part in parts), reason)

    def _add_evidence(self, digests: Iterable[str], reason: str) -> None:
        for digest in digests:
            self._add(self._by_digest.get(digest, ()), reason)

    def add_versions(self) -> None:
        """Versions with an alias, ones that were promoted, and ones that a ledger line names."""
        for version, aliases in registered_versions():
            model, number = version.name, int(version.version)
            lines = [
                line.sequence
                for line in self._lines.get(model, ())
                if number
                in {end for move in line.moves.values() for end in (move.before, move.after)}
            ]
            reasons = [f"{model}@{alias}" for alias in aliases]
            reasons += [f"{model} version {number}, ledger line {line}" for line in lines[-1:]]
            if not reasons and version.tags.get(TAG_PROMOTED) == "true":
                reasons = [f"{model} version {number}, promoted once"]
            if reasons:
                self._add_version(VersionFiles(version), reasons)

    def _add_version(self, files: VersionFiles, reasons: Iterable[str]) -> None:
        if files.bundle is None:
            raise InfrastructureError(
                f"what {files.title} consists of cannot be read, so nothing is removed: give it "
                "back its bundle.json, or delete the version in MLflow"
            )
        bundle, _ = files.bundle
        tags = files.version.tags.items()
        evidence = [digest for name, digest in tags if name.startswith(_EVIDENCE)]
        lineage = files.recorded_lineage()
        nodes = lineage.nodes.values() if lineage is not None else ()
        artifacts = [(node.kind, node.key) for node in nodes if node.kind != BUNDLE]
        for reason in reasons:
            self._add_bundle(bundle, reason)
            self._add_evidence(evidence, reason)
            self._add(artifacts, reason)

    def add_ledger_lines(self) -> None:
        """What a line says itself: it outlives the version that it is about."""
        for model, lines in self._lines.items():
            for line in lines:
                reason = f"{model}, ledger line {line.sequence}"
                self._add_evidence(line.evidence.values(), reason)
                bundle = _remembered(settings().home / "bundles" / f"{line.bundle}.json")
                if bundle is not None:
                    self._add_bundle(bundle, reason)

    def add_runs(self, since: datetime) -> None:
        """Stages of releases that were begun or ended since then."""
        client = tracker().client
        with asking_mlflow("list the runs"):
            experiments = [one.experiment_id for one in pages(client.search_experiments)]
            runs = list(pages(client.search_runs, experiments)) if experiments else []
        begun = since.timestamp() * 1000
        recent = {
            run.info.run_id: run.info.run_name
            for run in runs
            if max(run.info.start_time or 0, run.info.end_time or 0) >= begun
        }
        for run in runs:
            tags = run.data.tags
            # Its own time is the artifact's; of a release that never ended there is no other.
            own = recent.get(run.info.run_id)
            release = recent.get(tags.get(_PARENT_RUN, ""), own)
            if TAG_KEY in tags and release is not None:
                self._add(self._by_key.get(tags[TAG_KEY], ()), f"recent run {release}")

    def add_bundles(self, since: datetime) -> None:
        """What was served here, and may be asked for by its digest."""
        for file in sorted((settings().home / "bundles").glob("*.json")):
            bundle = _remembered(file)
            if bundle is not None and file.stat().st_mtime >= since.timestamp():
                self._add_bundle(bundle, "a bundle served here lately")


def _remembered(file: Path) -> Bundle | None:
    """None where there is no such file, or nobody could use it."""
    try:
        return Bundle.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


@contextmanager
def alone() -> Iterator[ExitStack]:
    """No other prune of this home meanwhile; what is entered into the stack is left at the end."""
    with only_in_this_home("prune"), ExitStack() as held:
        yield held


def _models() -> list[str]:
    """Every model that MLflow or the ledger knows."""
    with asking_mlflow("list the registered models"):
        models = {model.name for model in pages(tracker().client.search_registered_models)}
    return sorted({*models, *Ledger(settings().ledger_uri).models()})


def no_alias_moves(held: ExitStack) -> None:
    """Hold every model's lock, so that nothing is promoted between asking and removing."""
    ledger = Ledger(settings().ledger_uri)
    for model in _models():
        held.enter_context(ledger.lock(model, LOCK_WAIT))


def _sound_lines(model: str) -> list[LedgerEntry]:
    """A model's lines. Of a ledger that is cut or changed nobody knows what it referred to."""
    lines, broken = aliases_of_model(model).lines()
    if broken is not None:
        raise PromotionRefused.at(
            f"ledger of {model}",
            f"{broken}; nothing is removed until somebody has looked into it",
            f"compare with an export: `pilotage ledger {model} --verify FILE`",
        )
    return lines


def _described(entry: Entry) -> dict[str, Any]:
    return {
        "stage": entry.stage,
        "key": entry.key,
        "label": entry.label,
        "bytes": entry.size,
        "made_at": entry.made_at.isoformat(),
        "used_at": entry.used_at.isoformat(),
    }


def reasons_of(kept: Iterable[Kept]) -> dict[str, int]:
    """How many entries each reason keeps, the most first."""
    counted: dict[str, int] = defaultdict(int)
    for one in kept:
        for reason in one.reasons:
            counted[reason] += 1
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))
