"""The wait for a person: a suspended run of the promote flow, its form, and its deadline.

No process waits. The run is suspended in Prefect's database, so it outlives workers, servers and
machines; whoever fills in its form has it scheduled anew, and any worker of the pool goes on. What
ends it on time is a second run of the same deployment, scheduled for the deadline: it answers no in
nobody's name. Prefect's own time-out of a pause would end the run as a failure without a reason.

    question (an input of the run) ─► suspended ─► form, or deadline ─► the run from its top
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from uuid import UUID

from prefect.input import RunInput
from pydantic import Field

from registry.approval import NOBODY, Answer
from registry.errors import InfrastructureError
from tasks.events import APPROVAL_ASKED, emit
from tasks.progress import LOG

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, FlowRunInput

QUESTION = "pilotage-question"
_KEY = "approval"
_ASKS = "pilotage.asks."
_CLOSES = "pilotage.closes."
_LIVE = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED")

CLOSE_WAIT = 900.0
"""Seconds that a question may be late: its run starts an engine before it asks."""

CLOSE_EVERY = 5.0


class Approval(RunInput):
    """What a person answers. There is no login: the name is as it is stated."""

    # Without a default: with one the form calls it optional, and a person who wrote a name and a
    # reason would say no unasked.
    answer: Literal["no", "yes"] = Field(
        description="yes: the version becomes the champion, once everything was checked again. "
        "no: no release asks about it again.",
        json_schema_extra={"position": 0},
    )
    answered_by: str = Field(
        pattern=r"\S",
        max_length=200,
        description="Your name. Nobody checks it; the ledger says that it is as stated.",
        json_schema_extra={"position": 1},
    )
    reason: str = Field(
        pattern=r"\S",
        max_length=1000,
        description="Why; it stands in the ledger.",
        json_schema_extra={"position": 2},
    )


@dataclass(frozen=True)
class Question:
    """What a run of the promote flow (its id) asks about. champion: who held the alias then."""

    model: str
    version: int
    bundle: str
    champion: int | None
    deadline: datetime
    run: str

    @property
    def reference(self) -> str:
        return f"{self.model}@{self.version}"


class AskedAlready(Exception):
    """Another run waits for an answer about the same version."""


def this_run() -> FlowRun | None:
    """The run that can be suspended: of a deployment, and nobody's child. None: there is none."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None or run.parent_task_run_id is not None:
        return None
    return run


def asked() -> Question | None:
    """The question that this run asked before it was suspended; None: it has not asked."""
    run = this_run()
    if run is None:
        return None
    with _client() as client:
        return _question_of(client, run.id)


def answered() -> Answer | None:
    """What was answered in this run's form; None: nothing yet."""
    run = this_run()
    if run is None:
        return None
    with _client() as client:
        found = _responses(client, run.id)
    if not found:
        return None
    newest = max(found, key=_moment)
    form = Approval.model_validate(newest.decoded_value)
    return Answer(
        form.answer == "yes", form.answered_by.strip(), form.reason.strip(), _moment(newest)
    )


def lapsed(question: Question, answer: Answer) -> bool:
    """Whether the answer is that of the deadline, or came after it."""
    return answer.answered_by == NOBODY or answer.at > question.deadline


def claim(question: Question) -> None:
    """This run is the one that asks. To be called under the ledger's lock of the model.

    Raises `AskedAlready` while another run asks about the same version. One whose deadline has
    passed unseen (its closing run was deleted) is closed here.
    """
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        FlowRunFilterTags,
    )
    from prefect.client.schemas.objects import StateType

    run = _needed_run()
    tag = f"{_ASKS}{question.reference}"
    with _client() as client:
        others = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                tags=FlowRunFilterTags(all_=[tag]),
                state=FlowRunFilterState(
                    type=FlowRunFilterStateType(any_=[StateType(one) for one in _LIVE])
                ),
            )
        )
        for other in others:
            if other.id == run.id:
                continue
            first = _question_of(client, other.id)
            until = f"until {spelled(first.deadline)}" if first is not None else "since a moment"
            waits = other.state is not None and other.state.is_paused()
            if waits and first is not None and first.deadline < datetime.now(UTC):
                until = f"{until}; {close(other.id)}"
            raise AskedAlready(
                f"{question.reference} is asked about already: run {other.name} waits {until}"
            )
        client.update_flow_run(run.id, tags=sorted({*run.tags, tag}))


def ask(question: Question, description: str, message: str) -> NoReturn:
    """Suspend this run until its form is answered, or the deadline answers no.

    description: Markdown above the form. message: one line for notifications. Does not return: the
    run begins again from its top, where `answered` tells what was said.
    """
    from prefect.flow_runs import suspend_flow_run
    from prefect.states import Scheduled
    from prefect.utilities.urls import url_for

    run = _needed_run()
    deployment = run.deployment_id
    with _client() as client:
        if _question_of(client, run.id) is None:
            written = {**asdict(question), "deadline": question.deadline.isoformat()}
            client.create_flow_run_input(run.id, QUESTION, json.dumps(written))
        assert deployment is not None
        client.create_flow_run_from_deployment(
            deployment,
            name=f"deadline-of-{run.name}",
            parameters=run.parameters,
            state=Scheduled(scheduled_time=question.deadline),
            tags=[f"{_CLOSES}{run.id}"],
            # One for each time that this run waits: the one before may have come already.
            idempotency_key=f"closes-{run.id}-{run.run_count}",
        )
    link = url_for(run, url_type="ui") or ""
    emit(APPROVAL_ASKED, question.model, question.version, {"message": message, "link": link})
    until = spelled(question.deadline)
    # Prefect's page has no button for it.
    where = "the menu at the top right of this run's page, Resume"
    LOG.info("%s: waits for a person until %s; to answer: %s", question.reference, until, where)
    form = Approval.with_initial_data(description=description)
    suspend_flow_run(wait_for_input=form, key=f"{_KEY}-{run.run_count}")
    # Only a run that was resumed by hand, around its form, gets here.
    raise InfrastructureError(f"{question.reference}: the run went on without an answer")


def closes() -> UUID | None:
    """The run whose question this run was scheduled to close; None: it is no such run."""
    run = this_run()
    found = [one for one in (run.tags if run else []) if one.startswith(_CLOSES)]
    return UUID(found[0].removeprefix(_CLOSES)) if found else None


def close(asking: UUID) -> str:
    """Answer no in nobody's name where nobody else has answered; what came of it.

    A run that is about to wait is waited for: nobody would close its question later. Raises
    `InfrastructureError` where that takes too long.
    """
    from prefect.exceptions import NotPausedError, ObjectNotFound
    from prefect.flow_runs import resume_flow_run

    words = {"answer": "no", "answered_by": NOBODY, "reason": "nobody answered in time"}
    until = time.monotonic() + CLOSE_WAIT
    while True:
        try:
            resume_flow_run(asking, run_input=words)
        except ObjectNotFound:
            return "the run that asked is gone"
        except NotPausedError:
            if not _will_wait(asking):
                return "the question was answered, or withdrawn, before its deadline"
        else:
            return "nobody answered in time: the run that asked goes on and refuses"
        if time.monotonic() > until:
            raise InfrastructureError(
                f"run {asking} has not put its question within {CLOSE_WAIT:.0f} s of the deadline"
            )
        time.sleep(CLOSE_EVERY)


def forget_deadline() -> None:
    """An answer is there: the run that would close the question need not come."""
    from httpx import HTTPError
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
    from prefect.exceptions import PrefectException

    run = _needed_run()
    # It does no harm where it stays: it finds nothing to close.
    with suppress(PrefectException, HTTPError), _client() as client:
        tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"{_CLOSES}{run.id}"]))
        for one in client.read_flow_runs(flow_run_filter=tagged):
            if one.state is not None and one.state.is_scheduled():
                client.delete_flow_run(one.id)


def spelled(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


# -- parts -----------------------------------------------------------------------------------


def _client() -> SyncPrefectClient:
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _needed_run() -> FlowRun:
    run = this_run()
    if run is None:
        raise RuntimeError("only a run of a deployment can wait for a person")
    return run


def _will_wait(run: UUID) -> bool:
    """Whether a run that does not wait now, goes on and has no answer."""
    from prefect.exceptions import ObjectNotFound

    try:
        with _client() as client:
            state = client.read_flow_run(run).state
            return state is not None and not state.is_final() and not _responses(client, run)
    except ObjectNotFound:
        return False


def _responses(client: SyncPrefectClient, run: UUID) -> list[FlowRunInput]:
    """What was sent by the forms of a run."""
    inputs = client.filter_flow_run_input(
        flow_run_id=run, key_prefix=f"suspended-{_KEY}", limit=200, exclude_keys=set()
    )
    return [one for one in inputs if one.key.endswith("-response")]


def _question_of(client: SyncPrefectClient, run: UUID) -> Question | None:
    inputs = client.filter_flow_run_input(
        flow_run_id=run, key_prefix=QUESTION, limit=1, exclude_keys=set()
    )
    if not inputs:
        return None
    written: dict[str, Any] = inputs[0].decoded_value
    return Question(**{**written, "deadline": datetime.fromisoformat(written["deadline"])})


def _moment(one: Any) -> datetime:
    """When the server took it in; its clock is the one that schedules the deadline."""
    at: datetime = one.created
    return at
