"""The nightly on pretend releases: whatever becomes of one, the others are run and shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelled, Completed, Failed
from prefect.testing.utilities import prefect_test_harness

from flows import night_runs
from flows.endings import outcome_in
from flows.forms import NightlyRequest, ReleaseRequest
from flows.night_runs import Night
from flows.nightly import night_of, run_nightly
from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from tasks.night_digest import Row

BEGUN: list[str] = []


@pytest.fixture(scope="module")
def prefect() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=180):
        yield


@flow(name="release", flow_run_name="release-{request.recipe}")
def pretend_release(request: ReleaseRequest) -> State[None]:
    """Ends as its recipe is called."""
    BEGUN.append(request.recipe)
    match request.recipe:
        case "passes":
            return Completed(name="Promoted", message="PASS: m@champion is version 3")
        case "refuses":
            return Failed(name="Refused", message="FAIL: nothing was promoted: bf16: slow")
        case "raises":
            raise RuntimeError("engine is gone")
        case "mistaken":
            raise UserError.at("recipe.yaml: seed", "is missing", "add it")
        case "cancelled":
            return Cancelled(message="by mei")
        case "hangs":
            for _ in range(600):
                time.sleep(0.1)
    return Completed(message="no verdict")


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    BEGUN.clear()
    monkeypatch.setattr(night_runs, "release_model", pretend_release)


def rows_of(request: NightlyRequest) -> tuple[State[list[Row]], list[Row]]:
    state = run_nightly(request, return_state=True)
    rows: list[Row] = outcome_in(state)
    return state, rows


MATRIX = ["raises", "passes", "refuses", "mistaken", "cancelled", "hangs", "silent", "passes"]


def test_every_recipe_is_run_and_shown_whatever_becomes_of_the_others(prefect: None) -> None:
    request = NightlyRequest(recipes=MATRIX, night="2026-11-30", hours=2 / 3600)
    state, rows = rows_of(request)
    # A recipe that stands there twice is run once.
    assert MATRIX[:-1] == BEGUN
    assert [(row.recipe, row.type, row.passed) for row in rows] == [
        ("raises", "FAILED", False),
        ("passes", "COMPLETED", True),
        ("refuses", "FAILED", False),
        ("mistaken", "FAILED", False),
        ("cancelled", "CANCELLED", False),
        ("hangs", "FAILED", False),
        ("silent", "COMPLETED", False),
    ]
    what = {row.recipe: row.what for row in rows}
    assert what["passes"] == "m@champion is version 3"
    assert what["refuses"] == "nothing was promoted: bf16: slow"
    assert "engine is gone" in what["raises"]
    assert "recipe.yaml: seed: is missing" in what["mistaken"]
    assert what["cancelled"] == "by mei"
    assert "exceeded timeout" in what["hangs"]
    assert what["silent"] == "the run says no verdict: no verdict"
    assert state.type is StateType.FAILED
    assert state.message is not None and state.message.startswith("1 of 7 passed; raises: Failed")

    # The same night again: nothing is begun, the same is shown.
    BEGUN.clear()
    again, shown = rows_of(request)
    assert (BEGUN, shown) == ([], rows)
    assert (again.type, again.message) == (state.type, state.message)

    with get_client(sync_client=True) as client:
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["nightly-digest"]))
        pages = client.read_artifacts(artifact_filter=key)
        run = client.read_flow_run(state.state_details.flow_run_id)
    assert len(pages) == 2
    assert "| refuses | Refused | FAIL | nothing was promoted: bf16: slow |" in str(pages[0].data)
    assert run.name == "nightly-2026-11-30"


def test_a_night_in_which_all_passed_is_completed_and_may_be_run_once_more(prefect: None) -> None:
    request = NightlyRequest(recipes=["passes"], night="2026-12-01")
    state, _ = rows_of(request)
    assert (state.type, state.message) == (StateType.COMPLETED, "1 of 1 passed")
    rows_of(request.model_copy(update={"attempt": 2}))
    assert BEGUN == ["passes", "passes"]


def test_a_run_whose_process_is_gone_is_told_and_run_again(prefect: None) -> None:
    from prefect.states import Running

    night = Night("2026-12-02", 1, 1.0)
    with get_client(sync_client=True) as client:
        dead = client.create_flow_run(
            pretend_release, state=Running(), tags=[night.tag("passes")],
            parameters={"request": {"recipe": "passes"}},
        )  # fmt: skip
    state, _ = rows_of(NightlyRequest(recipes=["passes"], night="2026-12-02"))
    assert state.is_completed() and BEGUN == ["passes"]
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(dead.id).state_type is StateType.CRASHED


def test_two_nightlies_of_one_home_take_no_turns(prefect: None) -> None:
    with night_runs._alone():
        state, error = rows_of(NightlyRequest(recipes=["passes"], night="2026-12-03"))
    assert state.is_failed() and isinstance(error, InfrastructureError)
    assert BEGUN == []


def test_a_deployment_that_is_not_there_is_a_row_and_no_end(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_RELEASE_DEPLOYMENT", "release/nowhere")
    settings.cache_clear()
    _, rows = rows_of(NightlyRequest(recipes=["passes", "refuses"], night="2026-12-04"))
    assert [row.what for row in rows] == ["no deployment release/nowhere: `pilotage deploy`"] * 2


def test_a_refusal_of_the_server_is_told_in_its_own_words() -> None:
    def refused(**answer: Any) -> str:
        response = httpx.Response(409, request=httpx.Request("POST", "http://x"), **answer)
        return night_runs.detail_of(
            PrefectHTTPStatusError("409", request=response.request, response=response)
        )

    assert refused(json={"detail": "'freight_dmo' is not valid"}) == "'freight_dmo' is not valid"
    assert refused(text="<html>") == "409"


def test_the_date_is_the_one_of_the_time_zone() -> None:
    assert night_of(NightlyRequest(night="2026-11-30")).date == "2026-11-30"
    assert len(night_of(NightlyRequest(timezone="UTC")).date) == 10
    with pytest.raises(UserError, match="no time zone"):
        night_of(NightlyRequest(timezone="Mars/Olympus"))
