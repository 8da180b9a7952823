"""What a home holds, counted: nothing lost, nothing twice, nothing moved that should not be.

`holdings` reads a home without the tool's own code where that is possible (the store's files and
manifests are read here again, MLflow by its client), so that a mistake of the tool does not hide
itself. Two of them are compared by `differences`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from registry.ledger import TAG_HEAD, TAG_LENGTH, Head, Ledger
from tests.faults.world import World

MODEL = "tiny-assistant"


@dataclass
class Holdings:
    """One home at one moment."""

    entries: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Whole entries of the store, by stage and label."""
    broken: list[str] = field(default_factory=list)
    """Entries whose files are not what their manifest says."""
    half: list[str] = field(default_factory=list)
    """Half-written folders and stale notes."""
    rows: dict[str, int] = field(default_factory=dict)
    """Lines of the files of prompts and of answers, by file."""
    twice: list[str] = field(default_factory=list)
    """Ids that stand twice in one file; runs and models that are recorded twice."""
    versions: dict[int, str] = field(default_factory=dict)
    """The candidate's name by version."""
    aliases: dict[str, int] = field(default_factory=dict)
    ledger: list[tuple[str, dict[str, int | None]]] = field(default_factory=list)
    """Action and where each alias went."""
    chain: str = ""
    """What is wrong with the ledger's chain or its anchor."""
    models: Counter[str] = field(default_factory=Counter)
    """LoggedModels by candidate, one for each judgement."""
    unfinished: list[str] = field(default_factory=list)
    """Runs and LoggedModels of MLflow that are not finished."""
    releases: int = 0
    """Parent runs."""


def holdings(world: World) -> Holdings:
    """Read in a process of its own: MLflow keeps a database open, also after another lies there."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        return apart.submit(_read, world.root).result(300)


def _read(root: Path) -> Holdings:
    world, found = World(root), Holdings()
    _store(world, found)
    _mlflow(world, found)
    return found


def _store(world: World, found: Holdings) -> None:
    for manifest in sorted(world.store.glob("[!.]*/*")):
        file = manifest / "manifest.json"
        try:
            written = json.loads(file.read_text())
        except (OSError, ValueError):
            found.half.append(str(manifest.relative_to(world.home)))
            continue
        found.entries[written["stage"], written["label"]] += 1
        files = manifest / "files"
        there = {path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()}
        same = there == set(written["files"]) and all(
            hashlib.sha256((files / name).read_bytes()).hexdigest() == one["sha256"]
            for name, one in written["files"].items()
        )
        if not same:
            found.broken.append(str(manifest.relative_to(world.home)))
        if written["stage"] in ("prompts", "teacher_data"):
            _lines(files, written["stage"], found)
    found.half += [str(path.relative_to(world.home)) for path in world.store.glob(".incoming/*")]
    found.half += [str(path.relative_to(world.home)) for path in world.home.glob("run/*")]
    found.half += [str(path.relative_to(world.home)) for path in world.home.rglob("*.partial")]


def _lines(files: Path, stage: str, found: Holdings) -> None:
    for file in sorted(files.glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        name = f"{stage}/{file.name}"
        found.rows[name] = found.rows.get(name, 0) + len(rows)
        ids = Counter(str(row["id"]) for row in rows if "id" in row)
        found.twice += [f"{name}: {one}" for one, count in ids.items() if count > 1]


def _mlflow(world: World, found: Holdings) -> None:
    if not world.database.exists():
        return
    import mlflow

    uri = f"sqlite:///{world.database}"
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name(MODEL)
    if experiment is None:
        return
    runs = client.search_runs([experiment.experiment_id], max_results=5000)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    found.releases = len(parents)
    names = Counter(run.data.tags.get("pilotage.release", "") for run in parents)
    found.twice += [f"release {name[:12]}" for name, count in names.items() if count > 1]
    nested = Counter(
        (run.data.tags["mlflow.parentRunId"], run.data.tags.get("pilotage.key", ""))
        for run in runs
        if "mlflow.parentRunId" in run.data.tags
    )
    found.twice += [f"stage run {one}" for one, count in nested.items() if count > 1]
    found.unfinished += [run.info.run_name for run in runs if run.info.status != "FINISHED"]
    models = client.search_logged_models([experiment.experiment_id])
    found.models = Counter(model.name for model in models)
    found.unfinished += [model.name for model in models if model.status.name != "READY"]
    judged = Counter(
        (model.source_run_id, model.name, model.tags.get("pilotage.recorded")) for model in models
    )
    found.twice += [f"LoggedModel {one}" for one, count in judged.items() if count > 1]
    versions = client.search_model_versions(f"name = '{MODEL}'")
    found.versions = {
        int(one.version): str(one.tags.get("pilotage.candidate", "")) for one in versions
    }
    bundles = Counter(one.tags.get("pilotage.bundle", "") for one in versions)
    found.twice += [f"version of {one[:12]}" for one, count in bundles.items() if count > 1]
    if not versions:
        return
    registered = client.get_registered_model(MODEL)
    found.aliases = {name: int(number) for name, number in registered.aliases.items()}
    ledger = Ledger(uri)
    entries = ledger.entries(MODEL)
    found.ledger = [
        (entry.action, {alias: move.after for alias, move in sorted(entry.moves.items())})
        for entry in entries
    ]
    tags = registered.tags
    anchor = Head(int(tags[TAG_LENGTH]), tags[TAG_HEAD])
    broken = ledger.check(MODEL, anchor)
    found.chain = str(broken) if broken else ""


def check_whole(world: World, expected: Holdings, *, releases: int | None = None) -> None:
    """The home holds what an undisturbed one holds, once each, and no process works in it.

    releases: parent runs, where a stage that was made again makes the release another one; its
    candidates are recorded with it.
    """
    world.no_process_left()
    found = holdings(world)
    assert (found.broken, found.half, found.twice, found.unfinished) == ([], [], [], [])
    assert found.chain == ""
    assert found.entries == expected.entries
    assert found.rows == expected.rows
    assert found.versions == expected.versions
    assert found.aliases == expected.aliases
    assert found.ledger == expected.ledger
    assert found.releases == (expected.releases if releases is None else releases)
    if releases is None:
        assert found.models == expected.models


def check_not_moved(world: World, expected: Holdings) -> None:
    """After a run that failed: what is promoted is what was promoted, and the chain is whole."""
    world.no_process_left()
    found = holdings(world)
    assert found.chain == ""
    assert found.versions == expected.versions
    assert found.aliases == expected.aliases
    assert found.ledger == expected.ledger
