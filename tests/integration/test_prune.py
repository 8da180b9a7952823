"""`pilotage prune` on a real store and a real MLflow: what is referred to stays, whoever refers."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from typer import Typer
from typer.testing import CliRunner

from flows import prune_command
from registry.artifacts import Stage
from registry.bundle import Bundle, Part
from registry.digests import digest_of_folder
from registry.errors import InfrastructureError, UserError
from registry.ledger import EMPTY, Draft, Ledger, Move
from registry.outcome import CandidateOutcome, Verdict
from registry.settings import settings
from registry.store import Store
from registry.tracking import TAG_KEY, StageRecord
from registry.versions import TAG_PROMOTED, PromotionRefused, register_version
from tasks import pruning
from tasks.bundles import gated_bundle, remember, serve_command, tracker
from tasks.pruning import prune

pytest_plugins = ["tests.promotion_fixtures"]

MODEL = "support-student"
LONG_AGO = datetime.now(UTC) - timedelta(days=60)


@pytest.fixture(autouse=True)
def registry(migrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(migrated, settings().home / "mlflow.db")
    monkeypatch.setattr("tasks.bundles.engine_version", lambda: "0.32.0")
    monkeypatch.setattr(pruning, "LOCK_WAIT", 0.2)


def store() -> Store:
    return Store(settings().store_dir)


def made(name: str, **parents: Stage) -> Stage:
    """An artifact in the store, made and last used two months ago."""
    stage = Stage(name=name, version=1, label=f"{name} of {len(parents)}", parents=parents)
    found = store().make(stage, lambda folder: write(folder, stage.key), {})
    content = json.loads((found.path.parent / "manifest.json").read_text())
    content["made_at"] = LONG_AGO.isoformat()
    file = found.path.parent / "manifest.json"
    file.write_text(json.dumps(content))
    os.utime(file, (LONG_AGO.timestamp(), LONG_AGO.timestamp()))
    return stage


def write(folder: Path, text: str) -> dict[str, Any]:
    (folder / "weights").write_text(text * 10)
    return {}


class Line:
    """A release's artifacts: one prompt set, a student, its draft, two quantizations, evidence."""

    def __init__(self) -> None:
        self.prompts = made("prompts")
        self.data = made("teacher_data", prompts=self.prompts)
        self.student = made("distill", data=self.data)
        self.draft = made("draft", student=self.student, prompts=self.prompts)
        self.good = made("quantize", student=self.student, calibration=self.data)
        self.bad = made("quantize", student=self.student)
        self.latency = made("latency", target=self.good, draft=self.draft)
        self.other_latency = made("latency", target=self.bad)

    @property
    def all(self) -> set[str]:
        return {entry.key for entry in store().entries()[0]}

    @property
    def lineage(self) -> set[str]:
        kept = (self.prompts, self.data, self.student, self.draft, self.good, self.latency)
        return {stage.key for stage in kept}

    def bundle(self, target: Stage | None = None) -> Bundle:
        def part(stage: Stage) -> Part:
            folder = store().folder(stage) / "files"
            return Part(stage=stage.name, key=stage.key, digest=digest_of_folder(folder))

        return Bundle(
            name="good",
            target=part(target or self.good),
            draft=part(self.draft),
            num_speculative_tokens=3,
            engine_version="0.32.0",
        )

    def register(self, *, release: datetime = LONG_AGO, stages: tuple[Stage, ...] = ()) -> int:
        """A version with its LoggedModel and evidence; the runs are as old as `release`."""
        records = tracker()
        bundle = self.bundle()
        outcome = CandidateOutcome(
            name="good",
            bundle=bundle.digest,
            verdict=Verdict.PASS,
            reasons=[],
            metrics={},
            evidence={"latency": store().recorded_digest(self.latency)},
        )
        run = records.release_run(MODEL, f"r{release}", "demo")
        records.stage_runs(
            run,
            [
                StageRecord(key=one.key, name=one.title, made_at=LONG_AGO, seconds=1, reused=False)
                for one in stages
            ],
        )
        models = records.candidates(run, [(outcome, bundle)], measured_at=LONG_AGO)
        version = register_version(
            records.client, MODEL, outcome, model_id=models["good"], run_id=run, tags={}
        )
        backdated(run, release)
        return version


def backdated(run: str, moment: datetime) -> None:
    """MLflow stamps a run with the time of writing; a test cannot wait for two months."""
    import sqlite3

    at = round(moment.timestamp() * 1000)
    with sqlite3.connect(settings().home / "mlflow.db") as database:
        database.execute(
            "UPDATE runs SET start_time = ?, end_time = ? WHERE run_uuid = ?", (at, at, run)
        )


def alias(version: int, name: str = "champion") -> None:
    tracker().client.set_registered_model_alias(MODEL, name, str(version))


# -- who refers ------------------------------------------------------------------------------


def test_a_champion_keeps_its_lineage_and_its_evidence_and_still_starts() -> None:
    line = Line()
    alias(line.register())
    dry = prune()
    assert {entry.key for entry in dry.removed} == {line.bad.key, line.other_latency.key}
    assert len(line.all) == 8, "a dry run removes nothing"
    done = prune(yes=True)
    assert line.all == line.lineage
    assert done.document["stages"]["quantize"] == {
        "kept": 1,
        "kept_bytes": done.document["stages"]["quantize"]["kept_bytes"],
        "removed": 1,
        "removed_bytes": done.removed[-1].size,
    }
    assert {reason for kept in done.plan.keep for reason in kept.reasons} == {f"{MODEL}@champion"}
    champion = f"{MODEL}@champion"
    words, _ = serve_command(gated_bundle(champion), champion, 8000)
    assert str(store().folder(line.good)) in " ".join(words)
    assert not list((store().root / ".incoming").iterdir())
    assert prune(yes=True).removed == []


def test_what_went_is_made_anew_when_a_release_wants_it() -> None:
    line = Line()
    alias(line.register())
    prune(yes=True)
    again = store().make(line.bad, lambda folder: write(folder, "again"), {})
    assert not again.reused
    assert store().find(line.bad)


def test_without_any_reference_everything_goes() -> None:
    line = Line()
    line.register()
    prune(yes=True)
    assert line.all == set()


def test_a_version_that_a_ledger_line_names_stays_without_an_alias() -> None:
    line = Line()
    version = line.register()
    ledger = Ledger(settings().ledger_uri)
    moves = {"champion": Move(before=version, after=None)}
    ledger.append(MODEL, Draft(actor="a", action="rollback", moves=moves), EMPTY)
    done = prune(yes=True)
    assert line.all == line.lineage
    reasons = {reason for kept in done.plan.keep for reason in kept.reasons}
    assert reasons == {f"{MODEL} version {version}, ledger line 1"}


def test_a_ledger_line_keeps_its_bundle_though_the_version_was_deleted() -> None:
    line = Line()
    bundle = line.bundle()
    remember(bundle)
    kept = settings().home / "bundles" / f"{bundle.digest}.json"
    os.utime(kept, (LONG_AGO.timestamp(), LONG_AGO.timestamp()))
    evidence = {"latency": store().recorded_digest(line.latency)}
    moves = {"champion": Move(before=None, after=7)}
    Ledger(settings().ledger_uri).append(
        MODEL,
        Draft(actor="a", action="promote", moves=moves, bundle=bundle.digest, evidence=evidence),
        EMPTY,
    )
    prune(yes=True)
    assert line.all == line.lineage


def test_a_version_that_was_promoted_before_there_was_a_ledger_stays() -> None:
    line = Line()
    version = line.register()
    tracker().client.set_model_version_tag(MODEL, str(version), TAG_PROMOTED, "true")
    prune(yes=True)
    assert line.all == line.lineage


def test_stages_of_a_recent_run_stay_and_of_an_old_one_go() -> None:
    line = Line()
    line.register(release=datetime.now(UTC) - timedelta(days=29), stages=(line.other_latency,))
    prune(yes=True)
    kept = (line.prompts, line.data, line.student, line.bad, line.other_latency)
    assert line.all == {stage.key for stage in kept}
    prune(days=28, yes=True)
    assert line.all == set()


def test_a_recent_stage_of_a_release_that_never_ended_stays() -> None:
    line = Line()
    line.register(stages=(line.other_latency,))
    (stage,) = tracker().client.search_runs(["1"], f"tags.`{TAG_KEY}` = '{line.other_latency.key}'")
    backdated(stage.info.run_id, datetime.now(UTC) - timedelta(days=5))
    prune(yes=True)
    assert {line.bad.key, line.other_latency.key} < line.all
    assert line.good.key not in line.all


def test_a_bundle_that_was_served_here_lately_stays() -> None:
    line = Line()
    remember(line.bundle(line.bad))
    prune(yes=True)
    kept = (line.prompts, line.data, line.student, line.draft, line.bad)
    assert line.all == {stage.key for stage in kept}


def test_what_a_running_release_has_found_stays() -> None:
    line = Line()
    store().find(line.other_latency)
    done = prune(yes=True)
    assert line.bad.key in line.all
    assert line.good.key not in line.all
    assert "made or used within a day" in str(done.document["kept"])


# -- who cannot be asked ---------------------------------------------------------------------


def no_database(line: Line) -> None:
    (settings().home / "mlflow.db").unlink()


def broken_database(line: Line) -> None:
    (settings().home / "mlflow.db").write_bytes(b"no database" * 1000)


def no_server(line: Line) -> None:
    os.environ["PILOTAGE_MLFLOW_URI"] = "http://127.0.0.1:9"
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    settings.cache_clear()


def lost_bundle(line: Line) -> None:
    for file in settings().mlartifacts_dir.rglob("bundle.json"):
        file.unlink()


def broken_ledger(line: Line) -> None:
    file = settings().home / "ledger.db"
    file.write_bytes(b"no database" * 1000)
    os.environ["PILOTAGE_LEDGER_URI"] = f"sqlite:///{file}"
    settings.cache_clear()


def ledger_that_lost_its_lines(line: Line) -> None:
    client = tracker().client
    client.set_registered_model_tag(MODEL, "pilotage.ledger.head", "a" * 64)
    client.set_registered_model_tag(MODEL, "pilotage.ledger.length", "1")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (ledger_that_lost_its_lines, PromotionRefused),
        (no_database, UserError),
        (broken_database, InfrastructureError),
        (no_server, (InfrastructureError, UserError)),
        (lost_bundle, InfrastructureError),
        (broken_ledger, InfrastructureError),
    ],
)
def test_where_nobody_can_be_asked_nothing_is_removed(
    damage: Callable[[Line], None],
    error: type[Exception] | tuple[type[Exception], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MLFLOW_URI", "LEDGER_URI"):
        monkeypatch.setenv(f"PILOTAGE_{name}", "")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    line = Line()
    alias(line.register())
    damage(line)
    with pytest.raises(error):
        prune(yes=True)
    assert len(line.all) == 8


# -- two at once, and a kill -----------------------------------------------------------------


def test_one_prune_at_a_time() -> None:
    line = Line()
    (settings().home / "locks").mkdir()
    with (
        FileLock(settings().home / "locks" / "prune.lock"),
        pytest.raises(InfrastructureError, match="another prune"),
    ):
        prune(yes=True)
    assert len(line.all) == 8


def test_an_alias_that_is_moving_is_waited_for() -> None:
    line = Line()
    line.register()
    with (
        Ledger(settings().ledger_uri).lock(MODEL, 1.0),
        pytest.raises(InfrastructureError, match=MODEL),
    ):
        prune(yes=True)
    assert len(line.all) == 8
    assert len(prune().removed) == 8


def prune_and_die(home: str, where: str) -> None:
    """In a process of its own: killed after three entries were taken out, or in the deletion."""
    os.environ["PILOTAGE_HOME"] = home
    settings.cache_clear()
    calls = 0
    real = Store.withdraw

    def withdraw(self: Store, entry: Any) -> Path:
        nonlocal calls
        calls += 1
        out = real(self, entry)
        if where == "taking out" and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    def rmtree(path: Path, **options: Any) -> None:
        next(path.rglob("weights")).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    Store.withdraw = withdraw  # type: ignore[method-assign]
    if where == "deleting":
        pruning.shutil = SimpleNamespace(rmtree=rmtree)  # type: ignore[attr-defined]
    prune(yes=True)


@pytest.mark.parametrize(("where", "left"), [("taking out", 5), ("deleting", 6)])
def test_a_kill_leaves_a_store_in_which_everything_is_whole(where: str, left: int) -> None:
    line = Line()
    if where == "deleting":
        alias(line.register())
    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=prune_and_die, args=(str(settings().home), where))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    entries, odd = store().entries()
    assert (len(entries), odd) == (left, [])
    # What is there is whole, and so is all that it was made of.
    present = {entry.name for entry in entries}
    for entry in entries:
        assert set(entry.parents) <= present
    done = prune(yes=True)
    assert done.leftovers
    assert line.all == (line.lineage if where == "deleting" else set())
    assert not list((store().root / ".incoming").iterdir())


def test_what_stages_kept_to_go_on_from_goes_when_nobody_did() -> None:
    line = Line()
    alias(line.register())
    bench = settings().home / "bench"
    key, old = "ab" * 16, time.time() - 40 * 86400
    gone = [f"answers-{key}", f"distill-{key}", f"draft-{key[:24]}-{key[:12]}", f"release-{key}"]
    newer = f"answers-{'cd' * 16}"
    for name in (*gone, newer, f"demo_cpu_2core-{key[:12]}", f"draft-{key[:12]}"):
        (bench / name).mkdir(parents=True)
        kept = bench / name / "kept"
        kept.write_text("a")
        os.utime(bench / name, (old, old))
        if name != newer:
            os.utime(kept, (old, old))
    # A link to weights that are gone themselves.
    (bench / gone[1] / "base").symlink_to("/nowhere/weights")
    os.utime(bench / gone[1] / "base", (old, old), follow_symlinks=False)
    os.utime(bench / gone[1], (old, old))
    done = prune(yes=True)
    assert sorted(path.name for path, _ in done.leftovers) == sorted(gone)
    # What was written lately, and what a person asked for, by its profile's name.
    assert sorted(path.name for path in bench.iterdir()) == sorted(
        [newer, f"demo_cpu_2core-{key[:12]}", f"draft-{key[:12]}"]
    )


# -- the command -----------------------------------------------------------------------------


def run(*words: str) -> Any:
    app = Typer()
    app.command()(prune_command.prune)
    return CliRunner().invoke(app, list(words))


def test_the_command_says_what_would_go_and_what_went() -> None:
    line = Line()
    alias(line.register())
    dry = run()
    assert dry.exit_code == 0, dry.output
    assert "Nothing was removed. `pilotage prune --days 30 --yes` removes 2 entries" in dry.output
    assert f"quantize/{line.bad.key[:12]}" in dry.output
    assert f"{MODEL}@champion" in dry.output
    assert len(line.all) == 8
    document = json.loads(run("--json").stdout.splitlines()[-1])
    assert document["dry_run"] is True
    assert {one["key"] for one in document["removed"]} == {line.bad.key, line.other_latency.key}
    assert {one["key"] for one in document["kept"]} == line.lineage
    assert all(one["reasons"] for one in document["kept"])
    done = run("--yes")
    assert done.exit_code == 0
    assert "2 entries removed" in done.output
    assert line.all == line.lineage


def test_sizes_are_written_for_people() -> None:
    sizes = [0, 1023, 1024, 3 * 1024**3, 5 * 1024**4]
    assert [prune_command.size_text(size) for size in sizes] == [
        *("0 B", "1023 B", "1.0 KiB", "3.0 GiB", "5.0 TiB")
    ]
