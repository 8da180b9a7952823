"""The nightly on pretend releases: whatever becomes of one, the others are run and shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelled, Completed, Failed, Running

from flows import night_runs
from flows.endings import outcome_in
from flows.forms import NightlyRequest, ReleaseRequest
from flows.night_runs import Night
from flows.nightly import night_of, run_nightly
from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from tasks.home_locks import only_in_this_home
from tasks.night_digest import Row

BEGUN: list[str] = []


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


def test_a_night_that_was_killed_twice_goes_on(prefect: None) -> None:
    from prefect.states import Crashed

    night = Night("2026-12-05", 1, 1.0)
    with get_client(sync_client=True) as client:
        for state in (Crashed(message="its process is gone"), Running()):
            client.create_flow_run(
                pretend_release, state=state, tags=[night.tag("passes")],
                parameters={"request": {"recipe": "passes"}},
            )  # fmt: skip
    state, rows = rows_of(NightlyRequest(recipes=["passes"], night="2026-12-05"))
    assert state.is_completed() and BEGUN == ["passes"], rows


def test_a_run_of_a_deployment_is_left_to_its_worker(prefect: None) -> None:
    """`pilotage nightly` in the morning, while the night of the schedule is still at it."""
    night = Night("2026-12-06", 1, 1.0)
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(pretend_release), "manual")
        run = client.create_flow_run_from_deployment(
            deployment, tags=[night.tag("passes")], parameters={"request": {"recipe": "passes"}}
        )
        state, (row,) = rows_of(NightlyRequest(recipes=["passes"], night="2026-12-06"))
        assert client.read_flow_run(run.id).state_type is StateType.SCHEDULED
    assert state.is_failed() and BEGUN == []
    assert (row.state, row.passed) == ("Unknown", False)
    assert row.what == f"run {run.name} of a deployment is at it, or waits for a worker"


def test_a_server_that_goes_away_after_the_release_hides_no_verdict(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(night_runs, "_row", away)
    row = night_runs._release(Night("2026-12-07", 1, 1.0), "passes")
    assert (row.state, row.passed, row.what) == ("Promoted", True, "m@champion is version 3")


def test_a_release_whose_end_nobody_saw_was_not_never_started(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away:
        def with_options(self, **options: Any) -> Any:
            return self

        __call__ = staticmethod(away)

    monkeypatch.setattr(night_runs, "release_model", Away())
    row = night_runs._release(Night("2026-12-08", 1, 1.0), "passes")
    assert (row.state, row.what) == ("Unknown", "ConnectError: connection refused")


# -- runs of a deployment ----------------------------------------------------------------------


class Clock:
    """The module's time; whatever is to happen while it waits, happens when it sleeps."""

    def __init__(self, *happens: Callable[[], None]) -> None:
        self.now, self.happens = 0.0, list(happens)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.happens, "nothing more happens, and it still waits"
        self.happens.pop(0)()


def test_a_run_that_somebody_deletes_hides_no_other(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = Night("2026-12-09", 1, 1.0)
    with get_client(sync_client=True) as client:
        client.create_deployment(client.create_flow(pretend_release), "manual")

        def one_is_deleted_the_other_ends() -> None:
            (gone,) = night_runs.runs_of(client, night.tag("refuses"))
            (other,) = night_runs.runs_of(client, night.tag("passes"))
            client.delete_flow_run(gone.id)
            client.set_flow_run_state(other.id, Completed(message="PASS: m is 3"), force=True)

        monkeypatch.setattr(night_runs, "time", Clock(one_is_deleted_the_other_ends))
        rows = night_runs.run_deployed(night, ["refuses", "passes"], "release/manual")
    assert [(row.state, row.what, row.passed) for row in rows] == [
        ("Unknown", "somebody deleted its run", False),
        ("Completed", "m is 3", True),
    ]


def test_a_server_that_is_away_for_a_moment_is_asked_again(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its key nothing is made twice, so nothing is given up at the first try."""
    night = Night("2026-12-10", 1, 1.0)
    asked: list[str] = []

    def away_twice(*arguments: Any, **options: Any) -> Any:
        asked.append(options["idempotency_key"])
        if len(asked) == 1:
            raise httpx.ConnectError("connection refused")
        if len(asked) == 2:
            raise answered(500, text="database is locked")
        return run_deployment(*arguments, **options)

    monkeypatch.setattr(night_runs, "run_deployment", away_twice)
    with get_client(sync_client=True) as client:
        client.create_deployment(client.create_flow(pretend_release), "manual")

        def it_ends() -> None:
            (run,) = night_runs.runs_of(client, night.tag("passes"))
            client.set_flow_run_state(run.id, Completed(message="PASS: m is 3"), force=True)

        monkeypatch.setattr(night_runs, "time", Clock(lambda: None, lambda: None, it_ends))
        (row,) = night_runs.run_deployed(night, ["passes"], "release/manual")
    assert row.passed and asked == [night.tag("passes")] * 3

    # For ever it is not: then the row says what the server is.
    monkeypatch.setattr(night_runs, "ASK_WAIT", 10.0)
    monkeypatch.setattr(night_runs, "time", Clock(*[lambda: None] * 3))
    monkeypatch.setattr(night_runs, "run_deployment", away)
    (row,) = night_runs.run_deployed(night, ["passes"], "release/manual")
    assert (row.state, row.what) == ("Not started", "ConnectError: connection refused")


def answered(status: int, **answer: Any) -> PrefectHTTPStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", "http://x"), **answer)
    return PrefectHTTPStatusError(str(status), request=response.request, response=response)


def away(*arguments: Any, **options: Any) -> Any:
    raise httpx.ConnectError("connection refused")


def test_a_run_that_no_worker_takes_is_cancelled_with_its_reason(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def ten_hours_pass() -> None:
        clock.now += 36_000

    clock.happens = [ten_hours_pass, lambda: None]
    monkeypatch.setattr(night_runs, "time", clock)
    with get_client(sync_client=True) as client:
        client.create_deployment(client.create_flow(pretend_release), "manual")
        night = Night("2026-12-12", 1, 10.0)
        (row,) = night_runs.run_deployed(night, ["passes"], "release/manual")
        (run,) = night_runs.runs_of(client, night.tag("passes"))
    assert run.state_type is StateType.CANCELLED
    assert row.what == "cancelled by the nightly: no worker took it; it is Scheduled"


@pytest.mark.parametrize("skew", [-timedelta(days=3), timedelta(0), timedelta(days=3)])
def test_the_limit_of_a_run_is_kept_whatever_the_clock_does(
    skew: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is set anew while a release runs: it is cancelled after its hours all the same."""
    clock = Clock()
    monkeypatch.setattr(night_runs, "time", clock)
    night, run_id = Night("2026-12-11", 1, 10.0), uuid4()
    one = night_runs._Waited("passes", run_id)
    run = SimpleNamespace(id=run_id, start_time=datetime.now(UTC), state=Running(), name="x")
    told: list[State[Any]] = []
    client: Any = SimpleNamespace(
        read_flow_run=lambda _: run, set_flow_run_state=lambda _, state: told.append(state)
    )
    assert night_runs._looked_at(client, night, one, late=False) is None
    run.start_time += skew
    for hours, cancelled in ((9.9, 0), (10.1, 1)):
        clock.now = hours * 3600
        # `late`: the others' hours are over too; one that runs has its own.
        assert night_runs._looked_at(client, night, one, late=True) is None
        assert len(told) == cancelled
    assert told[0].message == "cancelled by the nightly: it took longer than 10 h"


def test_two_nightlies_of_one_home_take_no_turns(prefect: None) -> None:
    with only_in_this_home("nightly"):
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
        return night_runs.detail_of(answered(409, **answer))

    assert refused(json={"detail": "'freight_dmo' is not valid"}) == "'freight_dmo' is not valid"
    assert refused(text="<html>") == "409"


def test_a_night_that_is_taken_late_keeps_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for 01:00 in Shanghai, taken a day later: the next night has a date of its own."""
    planned = SimpleNamespace(scheduled_start_time=datetime(2026, 11, 29, 17, tzinfo=UTC))
    monkeypatch.setattr("flows.nightly.flow_run", planned)
    assert night_of(NightlyRequest()).date == "2026-11-30"
    assert night_of(NightlyRequest(timezone="UTC")).date == "2026-11-29"
    assert night_of(NightlyRequest(night="2026-11-28")).date == "2026-11-28"


def test_the_date_is_the_one_of_the_time_zone() -> None:
    assert night_of(NightlyRequest(night="2026-11-30")).date == "2026-11-30"
    assert len(night_of(NightlyRequest(timezone="UTC")).date) == 10
    with pytest.raises(UserError, match="no time zone"):
        night_of(NightlyRequest(timezone="Mars/Olympus"))
