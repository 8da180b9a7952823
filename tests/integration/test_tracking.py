"""MLflow, the real one on SQLite: runs and candidates recorded once, however often."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow.artifacts import download_artifacts

from flows.quick_start import open_mlflow
from registry.errors import InfrastructureError
from registry.evidence import LoadPoint
from registry.outcome import CandidateOutcome, ReleaseOutcome, Verdict
from registry.settings import settings
from registry.tracking import StageRecord, Tracker
from tasks.bundles import tracker as tasks_tracker
from tests.promotion_builders import MODEL, bundle

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


pytest_plugins = ["tests.promotion_fixtures"]


def passed(number: int) -> CandidateOutcome:
    return CandidateOutcome(
        name=f"c{number}",
        bundle=bundle(number).digest,
        verdict=Verdict.PASS,
        reasons=[],
        metrics={"hit_rate": 0.9, "exact_match,strict-match": 0.5, "odd": None},
        latency=[load_point(1.0), load_point(2.0)],
        kept_rate=(1.0, 2.0),
        emulated=number == 2,
        evidence={"accuracy": f"acc{number}"},
    )


def load_point(rate: float) -> LoadPoint:
    table = {"p50": 10.0 * rate, "p99": None}
    return LoadPoint(
        rate=rate,
        achieved_rate=rate,
        total=10,
        ok=10,
        failed=0,
        duration_s=5.0,
        ttft_ms=table,
        tpot_ms=table,
        itl_ms=table,
        e2el_ms=table,
        output_tokens_per_s=9.0,
    )


def _die(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


# -- recording -------------------------------------------------------------------------------


def stage(number: int) -> StageRecord:
    return StageRecord(
        key=f"key{number}",
        name=f"quantize c{number}",
        made_at=NOW,
        seconds=3.0,
        reused=False,
        params={"bits": 8},
        metrics={"exact_match,strict-match": 0.5, "nothing": None},
        points=[load_point(1.0), load_point(2.0)],
        kept_rate=(1.0, None),
        texts={"recipe.yaml": "kind: quantize\n" * 1000},
    )


def record(tracker: Tracker, plots: Mapping[str, Sequence[Path]] | None = None) -> str:
    parent = tracker.release_run(
        MODEL,
        "r1",
        "demo",
        tags={"git": "abc"},
        params={"seed": 0},
        texts={"recipe.yaml": "kind: release\n"},
    )
    tracker.stage_runs(parent, [stage(number) for number in range(3)])
    refused = passed(2).model_copy(update={"verdict": Verdict.FAIL, "reasons": ["g FAIL: slow"]})
    known = tracker.candidates(
        parent, [(passed(1), bundle(1)), (refused, bundle(2))], measured_at=NOW
    )
    assert set(known) == {"c1", "c2"}
    outcome = ReleaseOutcome(
        release="r1",
        name="demo",
        verdict=Verdict.PASS,
        model=MODEL,
        version=1,
        candidates=[passed(1), refused],
        finished_at=NOW,
        seconds=1.0,
    )
    tracker.finish(parent, outcome, files=plots)
    return parent


def test_recorded_once_however_often(tracker: Tracker) -> None:
    parent = record(tracker)
    assert record(tracker) == parent
    client = tracker.client
    experiment = client.get_run(parent).info.experiment_id
    runs = client.search_runs([experiment])
    assert len(runs) == 4
    assert {run.info.status for run in runs} == {"FINISHED"}
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent]
    assert len(nested) == 3
    first = nested[0]
    assert first.data.metrics["exact_match_strict-match"] == 0.5
    assert "nothing" not in first.data.metrics
    history = client.get_metric_history(first.info.run_id, "latency.rate")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0)]
    assert first.data.metrics["latency.kept_rate_low"] == 1.0
    assert "latency.kept_rate_high" not in first.data.metrics, "none was found"
    assert [file.path for file in client.list_artifacts(first.info.run_id)] == ["recipe.yaml"]

    models = client.search_logged_models([experiment])
    assert {model.name: model.tags["pilotage.verdict"] for model in models} == {
        "c1": "PASS",
        "c2": "FAIL",
    }
    refused = next(model for model in models if model.name == "c2")
    assert refused.tags["pilotage.reasons"] == "g FAIL: slow"
    assert {metric.key for metric in refused.metrics} >= {"c2.hit_rate", "c2.latency.e2el_p50_ms"}
    kept = {m.key: m.value for m in refused.metrics if ".kept_rate_" in m.key}
    assert kept == {"c2.latency.kept_rate_low": 1.0, "c2.latency.kept_rate_high": 2.0}
    release = client.get_run(parent).data
    flags = {name: release.metrics[f"{name}.latency.emulated"] for name in ("c1", "c2")}
    assert flags == {"c1": 0.0, "c2": 1.0}
    assert release.tags["pilotage.verdict"] == "PASS"
    assert release.metrics["c1.latency.kept_rate_high"] == 2.0
    for name in ("latency.rate", "latency.kept_rate_low", "latency.e2el_p50_ms"):
        found = client.get_metric_history(parent, f"c1.{name}")
        expected = {"latency.kept_rate_low": [0]}.get(name, [1, 2])
        assert [metric.step for metric in found] == expected, "once, however often recorded"


def test_what_was_judged_stays_as_a_promotion_read_it(tracker: Tracker) -> None:
    parent = record(tracker)
    first = passed(1)
    again = first.model_copy(update={"reasons": ["judged against a champion too"]})

    def recorded(outcome: CandidateOutcome) -> str:
        made = tracker.candidates(parent, [(outcome, bundle(1))], measured_at=NOW)
        return made["c1"]

    def said(model_id: str) -> list[str]:
        model = tracker.client.get_logged_model(model_id)
        folder = download_artifacts(f"{model.artifact_location}/outcome.json")
        return CandidateOutcome.model_validate_json(Path(folder).read_text()).reasons

    before = recorded(first)
    after = recorded(again)
    assert before != after
    assert (said(before), said(after)) == ([], ["judged against a champion too"])
    assert (recorded(first), recorded(again)) == (before, after)


def test_killed_while_recording_a_stage(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tracker.release_run(MODEL, "r1", "demo")
    with monkeypatch.context() as patched:
        patched.setattr(tracker.client, "set_terminated", _die)
        with pytest.raises(KeyboardInterrupt):
            tracker.stage_runs(parent, [stage(1)])
    run_id = tracker.stage_runs(parent, [stage(1)])[stage(1).key]
    assert tracker.stage_runs(parent, [stage(1)]) == {stage(1).key: run_id}
    assert len(tracker.client.get_metric_history(run_id, "latency.rate")) == 2


def artifacts(tracker: Tracker, run: str, folder: str = "") -> list[str]:
    """All files of a run below a folder."""
    found: list[str] = []
    for file in tracker.client.list_artifacts(run, folder or None):
        found += artifacts(tracker, run, file.path) if file.is_dir else [file.path]
    return found


def test_plots_are_the_same_artifacts_after_a_kill(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("latency_by_rate.png", "timeline_step001_4_per_s.png")]
    for path in files:
        path.write_bytes(b"\x89PNG of " + path.name.encode())
    plots = {"plots/c1": files, "plots/_compared": files[:1]}
    log, wrote = tracker.client.log_artifact, []

    def dies(run: str, path: str, folder: str | None = None) -> None:
        if len(wrote) == 1:
            raise KeyboardInterrupt
        wrote.append(path)
        log(run, path, folder)

    with monkeypatch.context() as patched:
        patched.setattr(tracker.client, "log_artifact", dies)
        with pytest.raises(KeyboardInterrupt):
            record(tracker, plots)
    for _ in range(2):
        parent = record(tracker, plots)
        assert artifacts(tracker, parent, "plots") == [
            "plots/_compared/latency_by_rate.png",
            "plots/c1/latency_by_rate.png",
            "plots/c1/timeline_step001_4_per_s.png",
        ]
    where = Path(tracker.client.get_run(parent).info.artifact_uri.removeprefix("file://"))
    assert (where / "plots" / "c1" / files[1].name).read_bytes() == files[1].read_bytes()
    assert tracker.client.get_run(parent).info.status == "FINISHED"


def test_artifacts_lie_in_the_given_folder(tracker: Tracker) -> None:
    parent = record(tracker)
    where = tracker.client.get_run(parent).info.artifact_uri
    assert where.startswith(tracker.artifacts_dir.resolve().as_uri())


def test_a_process_killed_while_it_made_the_tables_leaves_none(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    # What a kill in the middle of the first migration leaves now: half of it, beside.
    database.with_name("mlflow.db.new").write_bytes(b"half of a database")
    again = Tracker(f"sqlite:///{database}", tmp_path / "artifacts")
    assert again.experiment("model") == again.experiment("model")
    assert database.exists()
    assert not database.with_name("mlflow.db.new").exists()


def test_a_stage_that_was_left_half_written_has_its_tags_and_files(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tracker.release_run(MODEL, "r1", "demo")
    texts = {"recipe.yaml": "kind: quantize\n", "more/page.md": "# 数\n"}
    one = stage(0).model_copy(update={"tags": {"tool, with comma": "1.0"}, "texts": texts})
    with monkeypatch.context() as patched:
        patched.setattr(tracker.client, "log_artifacts", _die)
        with pytest.raises(KeyboardInterrupt):
            tracker.stage_runs(parent, [one])
    (run_id,) = tracker.stage_runs(parent, [one]).values()
    run = tracker.client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["tool_ with comma"] == "1.0"
    assert run.data.tags["pilotage.reused"] == "false"
    where = Path(run.info.artifact_uri.removeprefix("file://"))
    found = {
        path.relative_to(where).as_posix(): path.read_text("utf-8")
        for path in where.rglob("*")
        if path.is_file()
    }
    assert found == texts


def test_opened_early_it_is_there_and_a_fault_is_left_to_who_asks(
    migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(database: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    settings.cache_clear()
    try:
        monkeypatch.setattr(Tracker, "_create", staticmethod(full))
        open_mlflow()
        with pytest.raises(
            InfrastructureError, match=r"open the tracking backend: .*No space left"
        ):
            _ = tasks_tracker().client
        monkeypatch.setattr(Tracker, "_create", staticmethod(partial(shutil.copy, migrated)))
        open_mlflow()
        assert (tmp_path / "mlflow.db").is_file()
    finally:
        settings.cache_clear()
