"""The last line of a run and the pages that stay with it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flows import benchmark, pages
from flows.endings import LONGEST, failure, move_ended, release_ended
from flows.making import made
from flows.rendering import outcome_text
from registry.alias_outcome import AliasOutcome
from registry.artifacts import ArtifactRef
from registry.errors import InfrastructureError, UserError
from registry.outcome import Champion, ReleaseOutcome, Verdict
from registry.settings import settings
from tasks import run_log
from tasks.benchmarking import Benchmark
from tasks.engines.subprocesses import identity
from tasks.progress import LOG
from tasks.run_pages import (
    artifact_key,
    code,
    failure_page,
    fenced,
    gate_rows,
    latency_rows,
    mlflow_words,
    show_failure,
    summary,
)
from tasks.service_notes import MLFLOW, Note, write_note
from tests.promotion_builders import bundle, gate
from tests.promotion_builders import outcome as judged
from tests.unit.evidence_builders import latency, point


def release(**changes: Any) -> ReleaseOutcome:
    one = bundle(1)
    fields: dict[str, Any] = {
        "release": "ab" * 32,
        "name": "freight_demo",
        "verdict": Verdict.PASS,
        "model": "freight-assistant",
        "version": 3,
        "promoted": "c1",
        "champion": Champion(version=3, bundle=one.digest),
        "candidates": [judged(one)],
        "report": Path("/r/1.html"),
        "run_id": "0f" * 16,
        "finished_at": datetime(2030, 1, 1, tzinfo=UTC),
        "seconds": 1.0,
    }
    return ReleaseOutcome.model_validate({**fields, **changes})


def test_a_promotion_says_what_the_champion_is() -> None:
    end = release_ended(release(), moved=True)
    short = bundle(1).digest[:12]
    assert (end.name, end.refused) == ("Promoted", False)
    assert end.message == (
        f"PASS: freight-assistant@champion is version 3 (c1, bundle {short}); report /r/1.html"
    )
    again = release_ended(release(), moved=False)
    assert (again.name, again.refused) == ("Passed", False)
    assert "is version 3 already (c1" in again.message


def test_a_version_that_waits_for_a_person_passed() -> None:
    waiting = release(promoted=None, version=None, awaits_approval=4)
    end = release_ended(waiting, moved=False)
    assert (end.name, end.refused) == ("Passed", False)
    assert end.message == ("PASS: freight-assistant: version 4 awaits approval; report /r/1.html")


def test_a_terminal_says_how_a_person_answers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form is named only where a server is there to show it."""
    waiting = release(promoted=None, version=None, awaits_approval=4)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    alone = outcome_text(waiting)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    served = outcome_text(waiting)
    tool = Path(sys.executable).with_name("pilotage")
    command = f'  {tool} promote freight-assistant@4 --approve --reason "..."\n'
    assert command in alone and command in served
    assert "no form will come, as no Prefect server runs" in alone
    assert "promote/on-candidate" not in alone and "promote/on-candidate" in served


@pytest.mark.parametrize("verdict", [one for one in Verdict if one is not Verdict.PASS])
def test_a_refusal_is_red_and_says_why_in_one_line(verdict: Verdict) -> None:
    reasons = ["bf16: too\nslow", "w8a8: wrong " + "x" * 2000]
    end = release_ended(
        release(verdict=verdict, promoted=None, version=None, reasons=reasons), moved=False
    )
    assert (end.name, end.refused) == ("Refused", True)
    assert end.message.startswith(f"{verdict}: nothing was promoted: bf16: too slow; w8a8: wrong")
    assert end.message.endswith("; report /r/1.html")
    assert "\n" not in end.message
    assert len(end.message) == LONGEST


@pytest.mark.parametrize(
    ("action", "changed", "name", "says"),
    [
        ("promote", True, "Promoted", "PASS: m@champion: version 1 -> version 2 (bundle bbbbbb"),
        ("rollback", True, "RolledBack", "PASS: m@champion: version 1 -> version 2 (bundle"),
        ("promote", False, "Passed", "PASS: m@champion is version 2 (bundle bbbbbbbbbbbb) already"),
    ],
)
def test_a_move_says_from_where_to_where(action: str, changed: bool, name: str, says: str) -> None:
    moved = AliasOutcome.model_validate(
        {
            "action": action, "model": "m", "alias": "champion", "version": 2, "bundle": "b" * 64,
            "before": 1, "changed": changed, "line": 2, "seconds": 1.0,
            "finished_at": datetime(2030, 1, 1, tzinfo=UTC),
        }
    )  # fmt: skip
    end = move_ended(moved)
    assert end.name == name
    assert end.message.startswith(says)


def test_a_mistake_keeps_its_own_words_and_hides_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_JUDGE_API_KEY", "planted-secret")
    assert failure(UserError.at("a.yaml", "is wrong", "mend it")).startswith("a.yaml: is wrong\n")
    assert failure(ValueError("with planted-secret\nin it")) == "ValueError: with *** in it"
    assert failure(ValueError()) == "ValueError"


def test_a_stage_alone_says_what_is_there_and_whether_it_was() -> None:
    ref = ArtifactRef(
        stage="quantize", key="ab" * 32, digest="cd" * 32, path=Path("/store/q"),
        made_at=datetime(2030, 1, 1, tzinfo=UTC), seconds=75.0, reused=False,
    )  # fmt: skip
    refs = {"w8a8": ref, "fp8": ref.model_copy(update={"reused": True})}
    end = made(refs, refs)
    assert (end.outcome, end.name, end.refused) == (refs, "Completed", False)
    assert end.message == "w8a8: made in 1 min 15 s: /store/q; fp8: reused: /store/q"


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_benchmark_is_green_only_where_it_passed(verdict: Verdict) -> None:
    evidence = latency("a" * 64, point(1.0), sla=["e2el p99 2s"], kept_rate=(0.5, None))
    done = Benchmark(verdict, evidence, Path("/evidence"), 100)
    end = benchmark.ended(done, "ab" * 32)
    assert end.refused == (verdict is not Verdict.PASS)
    assert end.name == ("Passed" if verdict is Verdict.PASS else "Refused")
    assert end.message == (
        f"{verdict}: bundle abababababab keeps 0.5 requests/s: e2el p99 2s; evidence /evidence"
    )
    none = evidence.model_copy(update={"kept_rate": (None, 1.0)})
    said = benchmark.ended(Benchmark(verdict, none, Path("/evidence"), 1), "ab" * 32).message
    assert said.startswith(f"{verdict}: bundle abababababab keeps no rate: ")


# -- pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["release-freight_demo", "Release ÄÖ/..", "_-x"])
def test_keys_are_what_prefect_takes(name: str) -> None:
    from prefect.client.schemas.actions import ArtifactCreate

    assert ArtifactCreate(key=artifact_key(name, "gates")).key


def test_mlflow_is_a_link_only_where_there_is_an_address() -> None:
    home = settings()
    there = home.model_copy(update={"mlflow_uri": "http://ci:password1@ml.example:5000/base"})
    assert mlflow_words(there, "7", "r1") == (
        "[run r1](http://ml.example:5000/base/#/experiments/7/runs/r1)"
    )
    words = mlflow_words(home, "7", "r1")
    assert "](" not in words
    assert f"ui --backend-store-uri {home.tracking_uri}" in words
    database = home.model_copy(update={"mlflow_uri": "postgresql://ci:password1@db/mlflow"})
    assert mlflow_words(database, "7", "r1") == "run `r1`, where PILOTAGE_MLFLOW_URI points"


def test_mlflow_is_a_link_while_its_server_runs() -> None:
    me = identity(os.getpid())
    assert me is not None
    note = Note(MLFLOW, me["pid"], int(me["start"]), "m", "mlflow.log", "http://127.0.0.1:5000")
    write_note(note)
    assert mlflow_words(settings(), "7", "r1") == (
        "[run r1](http://127.0.0.1:5000/#/experiments/7/runs/r1)"
    )
    assert mlflow_words(settings(), None, "r1") == "[run r1](http://127.0.0.1:5000/#/runs/r1)"
    write_note(replace(note, start=note.start - 1))
    assert "](" not in mlflow_words(settings(), "7", "r1")


def test_the_summary_says_where_everything_lies() -> None:
    home = settings()
    page = summary(release(), home, None, [Path("/logs/a.log")])
    digest = bundle(1).digest
    for said in ("`/r/1.html`", f"`{home.home}/bundles/{digest}.json`", "`/logs/a.log`", "0f" * 16):
        assert said in page


def test_tables_have_a_row_for_each_gate_and_each_load() -> None:
    refused = gate(name="slow", result=Verdict.FAIL, candidate=None, reason="no\nnumber")
    one = judged(bundle(1), gates=[gate(), refused], latency=[point(1.0), point(2.0, failed=3)])
    seen = release(candidates=[one])
    rows = gate_rows(seen)
    assert [(row["candidate"], row["gate"], row["result"]) for row in rows] == [
        ("c1", "hits", "PASS"), ("c1", "slow", "FAIL"),
    ]  # fmt: skip
    assert (rows[0]["asked"], rows[1]["why"]) == ("≥ 0.5000", "no number")
    loads = latency_rows(seen)
    assert [(row["req/s"], row["failed"], row["E2EL p50"]) for row in loads] == [
        ("1", 0, "100 ms"), ("2", 3, "100 ms"),
    ]  # fmt: skip


@pytest.mark.parametrize("fault", [OSError("reset"), ValueError("a page of HTML"), KeyError("id")])
def test_a_page_that_is_not_taken_costs_nothing(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(**content: Any) -> None:
        raise fault

    monkeypatch.setattr(pages, "create_markdown_artifact", refuses)
    monkeypatch.setattr(LOG, "propagate", True)
    pages.show_page("benchmark", "text", "about")
    assert "the page 'benchmark' is not shown in Prefect" in caplog.text


def test_a_page_for_a_server_that_is_stuck_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect import artifacts
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    retries: list[int] = []
    monkeypatch.setattr(
        artifacts,
        "create_markdown_artifact",
        lambda **_: retries.append(PREFECT_CLIENT_MAX_RETRIES.value()),
    )
    show_failure("r1-failure", "disk full", InfrastructureError("disk full"))
    assert retries == [1] and PREFECT_CLIENT_MAX_RETRIES.value() > 1


@pytest.mark.parametrize(
    ("error", "now"),
    [
        (InfrastructureError("disk full"), True),
        (ValueError("a bug"), True),
        (UserError("no such file"), False),
    ],
)
def test_a_fault_is_told_before_the_server_is_asked(
    error: Exception,
    now: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from prefect import artifacts

    monkeypatch.setattr(LOG, "propagate", True)
    monkeypatch.setattr(artifacts, "create_markdown_artifact", lambda **_: None)
    monkeypatch.setattr(run_log, "_mark", run_log.Mark(doing="latency bf16"))
    caplog.set_level("INFO")
    show_failure("r1-failure", str(error), error)
    # A set: the handlers of other tests of the process see a line too.
    said = {one.name for one in caplog.records if one.message == f"failed in latency bf16: {error}"}
    assert said == {"pilotage" if now else "pilotage.run"}


def test_what_an_engine_wrote_stays_inside_of_its_fence() -> None:
    page = failure_page("distill", "it failed", {Path("/l/a.log"): "```\n# not a heading\n```"})
    assert "````text\n```\n# not a heading\n```\n````" in page
    assert fenced("x") == "```text\nx\n```"
    assert code("a`b") == "`` a`b ``"
