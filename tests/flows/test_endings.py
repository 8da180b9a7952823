"""What a person sees of a run in Prefect: its last state, its artifacts, its log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, LogFilter
from prefect.logging.handlers import APILogHandler
from pydantic import BaseModel

from flows.endings import Ended, Refused, outcome_of, told
from flows.promote import run_name as promote_run_name
from registry.artifacts import Stage
from registry.errors import InfrastructureError, UserError
from tasks import run_progress
from tasks.engines import log_following
from tasks.engines.subprocesses import run_job
from tasks.stages import TASK_OPTIONS, begin_run, log_file, make

pytestmark = pytest.mark.usefixtures("prefect")


class Request(BaseModel):
    name: str = "x"


def run(body: Callable[[Request], Ended[Any]], name: str = "night_1") -> tuple[Any, Any]:
    """The state that the caller gets, and the run as the server has it."""
    state = flow(name="told", flow_run_name=name)(told(body))(Request(), return_state=True)
    with get_client(sync_client=True) as client:
        return state, client.read_flow_run(state.state_details.flow_run_id)


def artifacts(run_id: Any) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter.model_validate({"flow_run_id": {"any_": [run_id]}})
        )
    return {one.key: one for one in found}


def log_lines(run_id: Any) -> list[Any]:
    APILogHandler().flush()
    with get_client(sync_client=True) as client:
        return client.read_logs(
            LogFilter.model_validate({"flow_run_id": {"any_": [run_id]}}), limit=200
        )


# -- the last state --------------------------------------------------------------------------


def test_what_was_promoted_is_the_state_and_its_message() -> None:
    def body(request: Request) -> Ended[int]:
        begin_run(0)
        return Ended(7, "Promoted", "PASS: m@champion is version 3")

    state, seen = run(body)
    assert state.result() == 7
    assert (seen.state.type.value, seen.state.name) == ("COMPLETED", "Promoted")
    assert seen.state.message == "PASS: m@champion is version 3"
    progress = artifacts(seen.id)["night-1-progress"]
    assert (progress.data, progress.description) == (100.0, "PASS: m@champion is version 3")


def test_a_refusal_is_red_and_who_calls_has_the_outcome() -> None:
    def body(request: Request) -> Ended[int]:
        begin_run(0)
        return Ended(7, "Refused", "FAIL: nothing was promoted: w8a8: too slow", refused=True)

    state, seen = run(body)
    assert (seen.state.type.value, seen.state.name) == ("FAILED", "Refused")
    assert seen.state.message == "FAIL: nothing was promoted: w8a8: too slow"
    assert artifacts(seen.id)["night-1-progress"].data == 100.0
    with pytest.raises(Refused, match="too slow"):
        state.result()
    asked = flow(name="told")(told(body))
    assert outcome_of(asked, Request()) == 7


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (UserError.at("recipe.yaml: epochs", "is 0", "1 or more"), "recipe.yaml: epochs: is 0"),
        (InfrastructureError("the disk is full"), "the disk is full"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_a_fault_says_itself_in_the_first_line(error: Exception, begins: str) -> None:
    def body(request: Request) -> Ended[int]:
        begin_run(0)
        raise error

    state, seen = run(body)
    assert (seen.state.type.value, seen.state.name) == ("FAILED", "Failed")
    assert seen.state.message.startswith(begins)
    assert "Traceback" not in seen.state.message
    with pytest.raises(type(error)):
        state.result()
    shown = artifacts(seen.id)
    assert begins in shown["night-1-failure"].data
    assert shown["night-1-progress"].data < 100
    with_traceback = [line for line in log_lines(seen.id) if "Traceback" in line.message]
    assert len(with_traceback) == isinstance(error, KeyError)


def test_a_run_that_is_stopped_never_shows_its_whole_progress() -> None:
    def body(request: Request) -> Ended[int]:
        begin_run(0)
        raise SystemExit(130)

    with pytest.raises(SystemExit):
        flow(name="told", flow_run_name="cancelled")(told(body))(Request())
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter.model_validate({"key": {"any_": ["cancelled-progress"]}})
        )
    assert [(one.data, one.description) for one in found] == [(0.0, "stopped while at cancelled")]


def test_an_inner_flow_ends_for_itself_and_its_error_is_its_callers() -> None:
    @flow(name="inner", flow_run_name="inner")
    @told
    def inner(request: Request) -> Ended[int]:
        raise InfrastructureError("the alias was held")

    def body(request: Request) -> Ended[str]:
        with pytest.raises(InfrastructureError, match="was held"):
            inner(request)
        begin_run(0)
        return Ended("went on", "Passed", "PASS: all the same")

    state, seen = run(body)
    assert state.result() == "went on"
    assert seen.state.message == "PASS: all the same"
    progress = artifacts(seen.id)["night-1-progress"]
    assert progress.description == "PASS: all the same"


def test_a_flow_that_plans_no_stages_shows_no_progress() -> None:
    _, seen = run(lambda request: Ended(7, "Passed", "PASS"))
    assert artifacts(seen.id) == {}


def test_outside_of_a_run_a_flow_is_its_function() -> None:
    asked = flow(name="told")(told(lambda request: Ended(7, "Passed", "")))
    assert asked.fn(Request()) == 7


# -- stages ----------------------------------------------------------------------------------

ENGINE = """
import json, sys
print("INFO loading", flush=True)
print("WARNING slow disk with key", json.load(open(sys.argv[1]))["key"], flush=True)
for step in range(500):
    print("step", step, flush=True)
if len(sys.argv[0]) > 0 and json.load(open(sys.argv[1]))["die"]:
    sys.exit("RuntimeError: out of patience")
open(sys.argv[2], "w").write("{}")
"""


def engine_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "loud_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@task(name="loud", **TASK_OPTIONS)
def loud(stage: Stage, job: dict[str, Any]) -> Any:
    def produce(folder: Path) -> dict[str, Any]:
        (folder / "made").write_text("x")
        environment = {"VLLM_API_KEY": "planted-secret-1"}
        run_job("loud_engine", job, log=log_file(stage), python=sys.executable, env=environment)
        return {}

    return make(stage, produce)


def test_a_stage_names_its_task_run_and_its_engine_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_in(tmp_path, monkeypatch)
    monkeypatch.setenv("PILOTAGE_JUDGE_API_KEY", "planted-secret-2")
    stage = Stage(name="quantize", label="w8a8", version=1)

    def body(request: Request) -> Ended[int]:
        begin_run(1, [stage])
        loud(stage, {"key": "planted-secret-1 planted-secret-2", "die": False})
        return Ended(1, "Passed", "PASS")

    _, seen = run(body)
    lines = log_lines(seen.id)
    engine = [line for line in lines if line.name == "pilotage.engine"]
    assert all(line.message.startswith("[quantize w8a8] quantize-w8a8-") for line in engine)
    texts = [line.message for line in engine]
    assert any(text.endswith("step 499") for text in texts)
    assert any("more in" in text and str(log_file(stage)) in text for text in texts)
    assert len(engine) <= log_following.MOST + 1
    (warning,) = [line for line in engine if "slow disk" in line.message]
    assert warning.level == 30
    assert set(warning.message.partition("with key ")[2]) == {"*", " "}
    assert not any("planted" in line.message for line in lines)
    with get_client(sync_client=True) as client:
        tasks = {one.id: one.name for one in client.read_task_runs()}
    assert {tasks[line.task_run_id] for line in engine} == {"quantize w8a8"}


def test_the_last_lines_of_an_engine_that_died_are_in_log_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_in(tmp_path, monkeypatch)
    monkeypatch.setattr("tasks.stages.TRIES", 1)
    stage = Stage(name="distill", version=1)

    def body(request: Request) -> Ended[int]:
        begin_run(1, [stage])
        loud(stage, {"key": "", "die": True})
        return Ended(1, "Passed", "PASS")

    _, seen = run(body)
    assert seen.state.message.startswith("loud_engine ended with status 1")
    texts = [line.message for line in log_lines(seen.id) if line.name == "pilotage.engine"]
    assert any("RuntimeError: out of patience" in text for text in texts)
    assert any(text.endswith("step 499") for text in texts)
    page = artifacts(seen.id)["night-1-failure"].data
    assert "**distill**" in page
    assert "RuntimeError: out of patience" in page
    assert str(log_file(stage)) in page


def test_a_server_that_takes_no_artifact_fails_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **options: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr("prefect.artifacts.create_progress_artifact", refuses)
    monkeypatch.setattr(run_progress, "BETWEEN", 0.01)

    def body(request: Request) -> Ended[int]:
        begin_run(1, [])
        time.sleep(0.1)
        return Ended(1, "Passed", "PASS")

    state, seen = run(body)
    assert (state.result(), seen.state.name) == (1, "Passed")
    assert artifacts(seen.id) == {}


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"request": {"bundle": "ab" * 32}}, "promote-abababababab-to-champion"),
        ({"request": {"bundle": "m@2", "alias": "canary"}}, "promote-m@2-to-canary"),
        ({"request": {"bundle": 7}}, "promote"),
    ],
)
def test_the_name_of_a_promotion_can_be_read(
    monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr("flows.promote.flow_run", SimpleNamespace(parameters=parameters))
    assert promote_run_name() == name
