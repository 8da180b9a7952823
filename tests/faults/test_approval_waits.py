"""A promotion that waits for a person, on a real Prefect server: suspended, answered, run out."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow_sync
from prefect.flow_runs import resume_flow_run
from prefect.testing.utilities import prefect_test_harness

from flows import promote, smoke
from registry.alias_moves import Aliases
from registry.approval import NotApproved
from registry.errors import InfrastructureError, UserError
from registry.versions import CHAMPION
from tasks.bundles import tracker
from tasks.promoting import SmokeFailed
from tests.faults.conftest import Tell
from tests.pretend_smoke import SILENT, Engine, actions
from tests.promotion_builders import MODEL, POLICY, facts, held, is_sound, judged

pytestmark = pytest.mark.fault
pytest_plugins = ["tests.promotion_fixtures"]

YES = {"answer": "yes", "answered_by": "Mei", "reason": "looked at the report"}


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def client(server: None) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as asked:
        yield asked


@pytest.fixture
def deployment(client: SyncPrefectClient) -> UUID:
    known = client.create_flow(promote.promote_bundle)
    return client.create_deployment(known, "on-candidate")


def asking(number: int = 1, hours: float = 12) -> str:
    told = facts({**POLICY, "approval": {"deadline_hours": hours}}, release=f"release {number}")
    return judged(tracker(), number, told=told)[0].digest


def started(client: SyncPrefectClient, deployment: UUID, bundle: str) -> FlowRun:
    return client.create_flow_run_from_deployment(
        deployment, parameters={"request": {"bundle": bundle}}
    )


def work(client: SyncPrefectClient, run: FlowRun) -> Any:
    """What a worker's process does with a run, from its top."""
    now = client.read_flow_run(run.id)
    return run_flow_sync(promote.promote_bundle, flow_run=now, parameters=now.parameters)


def suspended(client: SyncPrefectClient, run: FlowRun) -> None:
    with pytest.raises(Pause):
        work(client, run)
    state = client.read_flow_run(run.id).state
    assert state is not None and (state.type, state.name) == ("PAUSED", "Suspended")
    assert state.state_details.pause_timeout is None, "Prefect's own end says no reason"


def deadline_of(client: SyncPrefectClient, run: FlowRun) -> list[FlowRun]:
    return [one for one in client.read_flow_runs() if f"pilotage.closes.{run.id}" in one.tags]


def test_yes_in_the_form_promotes_and_the_deadline_is_called_off(
    client: SyncPrefectClient, deployment: UUID, aliases: Aliases, engine: Engine, tell: Tell
) -> None:
    """yes in the form"""
    run = started(client, deployment, asking())
    suspended(client, run)
    assert held(aliases) == {"candidate": 1}
    (closing,) = deadline_of(client, run)
    assert closing.state is not None and closing.state.state_details.scheduled_time is not None
    away = closing.state.state_details.scheduled_time - datetime.now(UTC)
    assert timedelta(hours=11.8) < away < timedelta(hours=12.1)
    with pytest.raises(Exception, match="answered_by"):
        resume_flow_run(run.id, run_input={"answer": "yes", "reason": "no name"})
    with pytest.raises(Exception, match="does not match"):
        resume_flow_run(run.id, run_input={**YES, "answered_by": "  "})
    resume_flow_run(run.id, run_input=YES)

    assert work(client, run).changed
    assert held(aliases)[CHAMPION] == 1
    assert aliases.ledger.entries(MODEL)[-1].details["answered_by"] == "Mei"
    assert deadline_of(client, run) == []
    assert engine.asked == [f"{MODEL}@1", f"{MODEL}@1", f"{MODEL}@{CHAMPION}"]
    is_sound(aliases)
    tell(
        caused="form sent with answer, name and reason; before that without a name",
        stage="promote",
        seen="a form without a name is not taken; the ledger names who answered",
        then="promoted once; the run of the deadline is gone",
    )


def test_no_in_the_form_ends_refused(
    client: SyncPrefectClient, deployment: UUID, aliases: Aliases, engine: Engine, tell: Tell
) -> None:
    """no in the form"""
    run = started(client, deployment, asking())
    suspended(client, run)
    resume_flow_run(run.id, run_input={**YES, "answer": "no"})
    with pytest.raises(NotApproved, match="Mei"):
        work(client, run)
    state = client.read_flow_run(run.id).state
    assert state is not None and (state.type, state.name) == ("FAILED", "Refused")
    assert state.message is not None and "said no: looked at the report" in state.message
    assert actions(aliases) == ["register", "reject"]
    tell(
        caused="form sent with `no`",
        stage="promote",
        seen="the run is Refused with name and reason; ledger: register, reject",
        then="nothing moved",
    )


def test_nobody_answers(
    client: SyncPrefectClient, deployment: UUID, aliases: Aliases, engine: Engine, tell: Tell
) -> None:
    """the deadline passes"""
    run = started(client, deployment, asking(hours=1e-6))
    suspended(client, run)
    (closing,) = deadline_of(client, run)
    assert work(client, closing) is None
    ended = client.read_flow_run(closing.id).state
    assert ended is not None and ended.is_completed()
    with pytest.raises(NotApproved, match=r"nobody answered until .* UTC; not promoted"):
        work(client, run)
    assert actions(aliases) == ["register", "lapse"]
    assert held(aliases) == {"candidate": 1}
    # Given again, the closing run finds nothing to close.
    assert "was answered" in promote.approval.close(run.id)
    tell(
        caused="a deadline of 4 ms",
        stage="promote",
        seen="the run of the deadline woke the asking run; ledger: register, lapse",
        then="nothing moved; the deadline's run once more closes nothing",
    )


def test_a_second_event_asks_nobody(
    client: SyncPrefectClient, deployment: UUID, aliases: Aliases, engine: Engine, tell: Tell
) -> None:
    """two events for one version"""
    run = started(client, deployment, asking())
    suspended(client, run)
    second = started(client, deployment, f"{MODEL}@candidate")
    assert work(client, second) is None
    state = client.read_flow_run(second.id).state
    assert state is not None and state.is_completed() and "is asked about already" in state.message
    # Withdrawn: the next one asks.
    client.set_flow_run_state(run.id, _cancelled())
    third = started(client, deployment, f"{MODEL}@1")
    suspended(client, third)
    client.set_flow_run_state(third.id, _cancelled())
    tell(
        caused="two runs for one version, then the first is cancelled",
        stage="promote",
        seen="the second ends with `is asked about already`",
        then="the next one asks",
    )


def test_a_yes_whose_run_died_is_used_when_it_is_run_again(
    client: SyncPrefectClient, deployment: UUID, aliases: Aliases, engine: Engine, tell: Tell
) -> None:
    """killed after the yes"""
    run = started(client, deployment, asking())
    suspended(client, run)
    resume_flow_run(run.id, run_input=YES)
    engine.raises = {f"{MODEL}@1": InfrastructureError("no memory")}
    with pytest.raises(InfrastructureError):
        work(client, run)
    engine.raises = {}
    from prefect.states import Scheduled

    client.set_flow_run_state(run.id, Scheduled(), force=True)  # the button Retry
    assert work(client, run).changed
    assert aliases.ledger.entries(MODEL)[-1].details["answered_by"] == "Mei"
    tell(
        caused="the smoke prompt fails after the yes; Retry",
        stage="promote",
        seen="the first try ends as an infrastructure fault",
        then="promoted with the answer of before; nobody is asked again",
    )


def test_the_deadline_comes_while_the_run_is_about_to_ask(
    client: SyncPrefectClient,
    deployment: UUID,
    aliases: Aliases,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tell: Tell,
) -> None:
    """the deadline passes before the question is put"""
    monkeypatch.setattr(promote.approval, "CLOSE_EVERY", 0.05)
    run = started(client, deployment, asking(hours=1e-6))
    said: list[str] = []

    def close() -> None:
        said.append(promote.approval.close(run.id))

    # The server of these tests is known to their context.
    closing = Thread(target=copy_context().run, args=(close,))
    closing.start()
    with pytest.raises(Pause):
        work(client, run)
    closing.join(60)
    assert said == ["nobody answered in time: the run that asked goes on and refuses"]
    with pytest.raises(NotApproved, match="nobody answered until"):
        work(client, run)
    # A run that never asks is told, and not waited for without an end.
    monkeypatch.setattr(promote.approval, "CLOSE_WAIT", 0.0)
    silent = started(client, deployment, asking(2))
    with pytest.raises(InfrastructureError, match="has not put its question within"):
        promote.approval.close(silent.id)
    tell(
        caused="the run of the deadline is started before the question stands",
        stage="promote",
        seen="it waits for the question; a run that never asks is named after a limit",
        then="refused: nobody answered",
    )


def test_a_run_that_is_tried_again_after_its_deadline_is_closed_again(
    client: SyncPrefectClient, deployment: UUID, aliases: Aliases, engine: Engine, tell: Tell
) -> None:
    """killed while it asked, tried again after the deadline"""
    from prefect.states import Crashed, Scheduled

    run = started(client, deployment, asking(hours=1e-6))
    suspended(client, run)
    client.set_flow_run_state(run.id, Crashed(), force=True)
    (first,) = deadline_of(client, run)
    assert work(client, first) is None  # it finds a run that has ended
    client.set_flow_run_state(run.id, Scheduled(), force=True)  # the button Retry
    suspended(client, run)
    (second,) = [one for one in deadline_of(client, run) if one.id != first.id]
    assert work(client, second) is None
    with pytest.raises(NotApproved, match="nobody answered until"):
        work(client, run)
    assert actions(aliases) == ["register", "lapse"]
    tell(
        caused="the asking run is set to Crashed, the deadline passes, then Retry",
        stage="promote",
        seen="asked again with a deadline of its own; ledger: register, lapse",
        then="refused: nobody answered",
    )


def _cancelled() -> Any:
    from prefect.states import Cancelled

    return Cancelled()


# -- the smoke prompt elsewhere --------------------------------------------------------------


@flow(name="smoke")
def child(request: dict[str, str]) -> None:
    """What is registered; the tests say what becomes of its runs."""


@pytest.fixture
def elsewhere(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    known = client.create_flow(child)
    client.create_deployment(known, "on-gpu")
    monkeypatch.setattr(smoke, "POLL", 0.1)


def ask(wait: float = 1.0) -> Any:
    return smoke._ask_elsewhere("smoke/on-gpu", f"{MODEL}@1", "d" * 64, wait)


def test_no_worker_takes_the_smoke_run(
    elsewhere: None, client: SyncPrefectClient, tell: Tell
) -> None:
    """no worker for the smoke prompt"""
    with pytest.raises(InfrastructureError, match="was not started within 1 s: no worker"):
        ask()
    newest = max(client.read_flow_runs(), key=lambda one: one.created)
    assert newest.state is not None and newest.state.type in ("CANCELLED", "CANCELLING")
    tell(
        caused="a deployment without a worker",
        stage="promote",
        seen="`was not started within 1 s: no worker`",
        then="the run is cancelled and starts later no more",
    )


def test_the_smoke_run_ends_in_every_way(
    elsewhere: None, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """the smoke run crashes, is cancelled, refuses, answers"""
    from prefect import states

    ends = {
        states.Crashed(message="exit code -9"): (InfrastructureError, "Crashed: exit code -9"),
        states.Cancelled(): (InfrastructureError, "ended as Cancelled"),
        states.Failed(name="Refused", message=str(SILENT)): (SmokeFailed, "no token"),
    }
    for state, (error, text) in ends.items():

        def end(run: FlowRun, wait: float, state: Any = state) -> FlowRun:
            client.set_flow_run_state(run.id, state, force=True)
            return client.read_flow_run(run.id)

        with monkeypatch.context() as patched:
            patched.setattr(smoke, "_ended", end)
            with pytest.raises(error, match=text):
                ask()

    def answers(run: FlowRun, wait: float) -> FlowRun:
        said = Engine()(f"{MODEL}@1", "d" * 64, [{"role": "user", "content": "Where?"}])
        client.create_flow_run_input(run.id, smoke.ANSWER, said.model_dump_json())
        client.set_flow_run_state(run.id, states.Completed(), force=True)
        return client.read_flow_run(run.id)

    monkeypatch.setattr(smoke, "_ended", answers)
    assert ask().text == "In Oslo."
    tell(
        caused="the run of the smoke prompt is set to Crashed, Cancelled, Refused, Completed",
        stage="promote",
        seen="each end is told as what it is",
        then="only an answer counts",
    )


def test_a_server_that_is_away_is_the_reason_that_is_told(
    client: SyncPrefectClient, elsewhere: None, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """the server goes away for good"""
    import httpx

    monkeypatch.setattr(smoke, "LONGEST_SILENCE", 0.0)
    asked: list[int] = []

    def away() -> Any:
        asked.append(1)
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(smoke, "_client", away)
    with pytest.raises(InfrastructureError, match="Prefect's server is away: connection refused"):
        ask()
    # The child was to be cancelled as well, which cannot be.
    assert len(asked) == 2
    tell(
        caused="every call of the server is refused",
        stage="promote",
        seen="`Prefect's server is away: connection refused`",
        then="an infrastructure fault, nothing moved",
    )


def test_a_deployment_that_is_not_there(server: None, tell: Tell) -> None:
    """smoke deployment missing"""
    with pytest.raises(UserError, match="no such deployment"):
        smoke._ask_elsewhere("smoke/nowhere", f"{MODEL}@1", "d" * 64, 1.0)
    tell(
        caused="smoke/nowhere",
        stage="promote",
        seen="`no such deployment`",
        then="a mistake of the setting, told as one",
    )


def test_a_flow_keeps_its_answer_for_who_asked(
    client: SyncPrefectClient, engine: Engine, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """the answer crosses machines by the server"""
    monkeypatch.setattr(smoke, "smoke", engine)
    monkeypatch.setattr(smoke, "smoke_prompt", lambda reference: [])
    request = smoke.SmokeRequest(reference=f"{MODEL}@1", bundle="d" * 64)
    state = smoke.smoke_bundle(request, return_state=True)
    assert state.is_completed()
    run = state.state_details.flow_run_id
    assert '"text":"In Oslo."' in client.read_flow_run_input(run, smoke.ANSWER)
    tell(
        caused="the smoke flow runs by itself",
        stage="promote",
        seen="its answer stands at the server under the run",
        then="whoever started it reads it there",
    )
