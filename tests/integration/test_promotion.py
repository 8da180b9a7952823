"""MLflow, the real one on SQLite: runs and candidates recorded once, aliases never guessed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from registry.bundle import Bundle, Part
from registry.errors import InfrastructureError
from registry.evidence import LoadPoint
from registry.outcome import CandidateOutcome, Champion, ReleaseOutcome, Verdict
from registry.promotion import (
    CANDIDATE,
    PREVIOUS,
    TAG_PROMOTED,
    PromotionRefused,
    check_promotable,
    current_champion,
    find_version,
    promote,
    register_candidate,
    standing,
)
from registry.tracking import StageRecord, Tracker

MODEL = "support-student"
NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables: making them takes seconds, copying them does not."""
    database = tmp_path_factory.mktemp("mlflow") / "migrated.db"
    tracker = Tracker(f"sqlite:///{database}", database.parent / "artifacts")
    assert tracker.client.search_experiments()
    return database


@pytest.fixture
def tracker(migrated: Path, tmp_path: Path) -> Iterator[Tracker]:
    database = tmp_path / "mlflow.db"
    shutil.copy(migrated, database)
    yield Tracker(f"sqlite:///{database}", tmp_path / "mlartifacts")


def bundle(number: int) -> Bundle:
    part = Part(stage="quantize", key=f"k{number}", digest=f"d{number}")
    return Bundle(name=f"c{number}", target=part, engine_version="0.32.0")


def passed(number: int) -> CandidateOutcome:
    return CandidateOutcome(
        name=f"c{number}",
        bundle=bundle(number).digest,
        verdict=Verdict.PASS,
        reasons=[],
        metrics={"hit_rate": 0.9, "exact_match,strict-match": 0.5, "odd": None},
        latency=[load_point(1.0), load_point(2.0)],
        kept_rate=(1.0, 2.0),
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


def logged(tracker: Tracker, *numbers: int, release: str = "r1") -> dict[int, dict[str, Any]]:
    """Candidates recorded below one release: keyword arguments of `promote` by number."""
    parent = tracker.release_run(MODEL, release, "demo")
    made = tracker.candidates(
        parent, [(passed(number), bundle(number)) for number in numbers], measured_at=NOW
    )
    tags = {"pilotage.policy": "demo"}
    return {
        number: {"model_id": made[f"c{number}"], "run_id": parent, "tags": tags}
        for number in numbers
    }


def promoted(tracker: Tracker, *numbers: int) -> dict[int, dict[str, Any]]:
    """The numbers promoted one after another, the first as the first release."""
    known = logged(tracker, *numbers)
    for place, number in enumerate(numbers):
        promote(tracker.client, MODEL, passed(number), **known[number], first_release=place == 0)
    return known


def aliases(tracker: Tracker) -> dict[str, int]:
    found = tracker.client.get_registered_model(MODEL).aliases
    return {name: int(version) for name, version in found.items()}


# -- the six situations ----------------------------------------------------------------------


def test_normal_release(tracker: Tracker) -> None:
    promoted(tracker, 1, 2, 3)
    assert aliases(tracker) == {"champion": 3, "previous": 2}
    known = logged(tracker, 4, release="r2")
    done = promote(tracker.client, MODEL, passed(4), **known[4], first_release=False)
    assert done.changed
    assert done.champion == Champion(version=4, bundle=bundle(4).digest)
    assert done.previous == Champion(version=3, bundle=bundle(3).digest, alias=PREVIOUS)
    assert aliases(tracker) == {"champion": 4, "previous": 3}
    version = tracker.client.get_model_version(MODEL, "4")
    assert version.tags[TAG_PROMOTED] == "true"
    assert version.tags["pilotage.evidence.accuracy"] == "acc4"
    assert version.tags["pilotage.policy"] == "demo"
    assert version.run_id == known[4]["run_id"]


@pytest.mark.parametrize("lost", ["alias removed", "version deleted"])
@pytest.mark.parametrize("first_release", [True, False])
def test_promoted_version_without_alias_stops(
    tracker: Tracker, lost: str, first_release: bool
) -> None:
    promoted(tracker, 1)
    if lost == "alias removed":
        tracker.client.delete_registered_model_alias(MODEL, "champion")
    else:
        tracker.client.delete_model_version(MODEL, "1")
    known = logged(tracker, 2, release="r2")
    with pytest.raises(PromotionRefused, match="version 1 was promoted") as refused:
        promote(tracker.client, MODEL, passed(2), **known[2], first_release=first_release)
    assert refused.value.problems[0].remedy
    assert find_version(tracker.client, MODEL, bundle(2).digest) is None


def test_first_release(tracker: Tracker) -> None:
    known = logged(tracker, 1)
    done = promote(tracker.client, MODEL, passed(1), **known[1], first_release=True)
    assert (done.champion.version, done.previous) == (1, None)
    assert aliases(tracker) == {"champion": 1}


def test_new_model_without_the_flag_is_refused(tracker: Tracker) -> None:
    known = logged(tracker, 1)
    with pytest.raises(PromotionRefused, match="no baseline"):
        promote(tracker.client, MODEL, passed(1), **known[1], first_release=False)
    assert not tracker.client.search_registered_models()
    tracker.client.create_registered_model(MODEL)
    with pytest.raises(PromotionRefused, match="has no champion"):
        check_promotable(tracker.client, MODEL, first_release=False)


def test_unreachable_registry_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = Tracker("http://127.0.0.1:9", tmp_path)
    with pytest.raises(InfrastructureError, match="could not read alias"):
        check_promotable(away.client, MODEL, first_release=True)
    with pytest.raises(InfrastructureError):
        away.release_run(MODEL, "r1", "demo")
    with pytest.raises(InfrastructureError, match="sqlite"):
        _ = Tracker("sqlite:////proc/none/mlflow.db", tmp_path).client


def test_three_answers_are_told_apart(tracker: Tracker) -> None:
    nothing = standing(tracker.client, MODEL)
    assert (nothing.model_exists, nothing.version) == (False, None)
    tracker.client.create_registered_model(MODEL)
    bare = standing(tracker.client, MODEL)
    assert (bare.model_exists, bare.version) == (True, None)
    promote(tracker.client, MODEL, passed(1), **logged(tracker, 1)[1], first_release=True)
    champion = current_champion(tracker.client, MODEL)
    assert champion is not None
    assert int(champion.version) == 1


# -- once, and only what passed --------------------------------------------------------------


def test_same_promotion_twice_changes_nothing(tracker: Tracker) -> None:
    known = promoted(tracker, 1, 2)
    before = aliases(tracker)
    again = promote(tracker.client, MODEL, passed(2), **known[2], first_release=False)
    assert not again.changed
    assert again.champion.version == 2
    assert again.previous == Champion(version=1, bundle=bundle(1).digest, alias=PREVIOUS)
    assert aliases(tracker) == before
    assert len(tracker.client.search_model_versions(f"name = '{MODEL}'")) == 2


def test_candidate_alias_and_version_are_kept_by_promotion(tracker: Tracker) -> None:
    known = logged(tracker, 1)
    version = register_candidate(tracker.client, MODEL, passed(1), **known[1])
    assert aliases(tracker) == {CANDIDATE: version}
    done = promote(tracker.client, MODEL, passed(1), **known[1], first_release=True)
    assert done.champion.version == version
    # The downloaded version says which bundle it is.
    source = Path(tracker.client.get_model_version_download_uri(MODEL, str(version)))
    named = json.loads((Path(str(source).removeprefix("file:")) / "bundle.json").read_text())
    assert named["digest"] == bundle(1).digest


@pytest.mark.parametrize("step", ["set_registered_model_alias", "set_model_version_tag"])
def test_killed_half_way_and_repeated(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    known = logged(tracker, 1)
    with monkeypatch.context() as patched:
        patched.setattr(tracker.client, step, _die)
        with pytest.raises(KeyboardInterrupt):
            promote(tracker.client, MODEL, passed(1), **known[1], first_release=True)
    promote(tracker.client, MODEL, passed(1), **known[1], first_release=True)
    assert aliases(tracker) == {"champion": 1}
    assert tracker.client.get_model_version(MODEL, "1").tags[TAG_PROMOTED] == "true"


def _die(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_alias_that_did_not_move_is_an_error(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = logged(tracker, 1)
    monkeypatch.setattr(tracker.client, "set_registered_model_alias", lambda *_: None)
    with pytest.raises(InfrastructureError, match="reads as nothing"):
        promote(tracker.client, MODEL, passed(1), **known[1], first_release=True)


def test_only_a_pass_becomes_a_version(tracker: Tracker) -> None:
    known = logged(tracker, 1)
    failed = passed(1).model_copy(update={"verdict": Verdict.FAIL, "reasons": ["too slow"]})
    with pytest.raises(PromotionRefused, match="too slow"):
        promote(tracker.client, MODEL, failed, **known[1], first_release=True)
    assert not tracker.client.search_registered_models()


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
    assert release.tags["pilotage.verdict"] == "PASS"
    assert release.metrics["c1.latency.kept_rate_high"] == 2.0
    for name in ("latency.rate", "latency.kept_rate_low", "latency.e2el_p50_ms"):
        found = client.get_metric_history(parent, f"c1.{name}")
        expected = {"latency.kept_rate_low": [0]}.get(name, [1, 2])
        assert [metric.step for metric in found] == expected, "once, however often recorded"


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
