"""The runs of candidates as a Prefect server knows them. A real server, no worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Running

from flows import candidate_runs
from flows.candidate_runs import Runs, decision
from flows.forms import CandidateRequest
from registry.errors import InfrastructureError, UserError
from tests.flows.test_device_slots import Login

NAME = "candidate/one"
REQUEST = CandidateRequest(candidate="w8a8")


@pytest.fixture(scope="module", autouse=True)
def deployed(prefect: None) -> None:
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="gpu", type="process"))
        flow_id = client.create_flow_from_name("candidate")
        client.create_deployment(flow_id=flow_id, name="one", work_pool_name="gpu")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_runs, "ASK_EVERY", 0.05)


def in_a_release(body: Callable[[], Any]) -> Any:
    """In one flow run, by which the runs of its candidates are found again."""
    return flow(name="release")(body)()


def set_state(run: UUID, state: Any) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, state, force=True)


def state_of(run: UUID) -> Any:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run).state


def started() -> UUID:
    runs = Runs(NAME)
    runs.start("w8a8", REQUEST)
    return runs._open["w8a8"]


def test_a_run_that_goes_on_is_found_and_one_that_ended_is_not_asked_again() -> None:
    """A release that is retried a week later finds its old runs completed, and their times old."""

    def body() -> list[UUID]:
        found = [started()]
        for state in (Running(), Completed(), Running(), Crashed()):
            set_state(found[-1], state)
            found.append(started())
        return found

    first, again, second, still, third = in_a_release(body)
    assert first == again
    assert second == still
    assert len({first, second, third}) == 3


def test_a_release_that_ends_while_it_starts_runs_cancels_those_it_started() -> None:
    def body() -> UUID:
        runs = Runs(NAME)
        with pytest.raises(InfrastructureError, match="went away"), runs.ended():
            runs.start("w8a8", REQUEST)
            raise InfrastructureError("the server went away")
        return runs._open["w8a8"]

    assert state_of(in_a_release(body)).type in (StateType.CANCELLING, StateType.CANCELLED)


def test_a_run_that_somebody_deleted_ends_the_release() -> None:
    def body() -> dict[str, Any]:
        runs = Runs(NAME)
        with runs.ended():
            runs.start("w8a8", REQUEST)
            with get_client(sync_client=True) as client:
                client.delete_flow_run(runs._open["w8a8"])
            return runs.wait()

    (end,) = in_a_release(body).values()
    assert str(end).endswith("ended as Deleted")
    assert decision(end) == "stop"


def test_a_page_in_place_of_an_answer_is_a_server_that_is_away() -> None:
    login = ThreadingHTTPServer(("127.0.0.1", 0), Login)
    threading.Thread(target=login.serve_forever, daemon=True).start()

    address = f"http://127.0.0.1:{login.server_address[1]}/api"
    runs = Runs(NAME)
    # Not in a flow: its client would go on asking the address of before.
    try:
        runs.start("w8a8", REQUEST)
        with temporary_settings({PREFECT_API_URL: address}):
            assert not runs._look()
            with pytest.raises(InfrastructureError, match="fp8 was not started"):
                runs.start("fp8", REQUEST)
    finally:
        login.shutdown()
        login.server_close()
    set_state(runs._open["w8a8"], Completed(name="Measured", message="w8a8: measured"))
    assert decision(runs.wait()["w8a8"]) == "read"


def test_a_deployment_that_is_not_there_is_named() -> None:
    def body() -> None:
        with pytest.raises(UserError, match=r"DEPLOYMENT=candidate/two.* no such deployment"):
            Runs("candidate/two").start("w8a8", REQUEST)

    in_a_release(body)
