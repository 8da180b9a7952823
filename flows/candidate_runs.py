"""The candidates of a release: measured in its own process, or each in a run of its own.

With PILOTAGE_CANDIDATE_DEPLOYMENT every candidate that is not in the store yet becomes a run of
that deployment; the release waits, then reads everything from the store without starting an engine.
It holds no device meanwhile. What becomes of a run that did not end well:

- it refused the candidate (a stage's result is no good): that is the candidate's verdict, and it is
  not tried again here;
- it crashed, failed of a machine's fault, or never found a worker: measured here, by the release.
  What it finished is reused, and a night survives a worker that died;
- somebody cancelled or deleted it: the release ends too. To measure it here would undo what a
  person decided;
- it ran on an unlike machine, took too long, or left its results in another store: the release ends
  as a fault of the machines, because measured again it would be the same, or hide the mistake.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.utilities.urls import url_for

from flows.candidate import UNLIKE, keys_of, own_stages, reason_of
from flows.endings import REFUSED
from flows.forms import CandidateRequest, RecipeRequest
from flows.measuring import measure_candidate
from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from registry.store import Absent
from tasks.judging import Measured
from tasks.latency import will_run
from tasks.planning import CandidatePlan, ReleasePlan
from tasks.plotting import begin_plots
from tasks.progress import LOG
from tasks.release_capacity import refused_before
from tasks.serving import short_of_memory
from tasks.stages import adopt, leave_out, store

ASK_EVERY = 3.0
"""Seconds between two looks at the runs."""

TRIES = 9
"""Runs of one candidate that one release may start, all its retries together."""

SERVER_FAULTS = (PrefectException, httpx.HTTPError, OSError, ValueError)
"""Of a server that is away, refuses, or does not speak as one."""

CANCEL_WAIT = 60.0
"""Seconds for a run that was told to stop: a worker kills it after 30."""


def measure_candidates(todo: ReleasePlan, request: RecipeRequest) -> list[Measured]:
    """Every candidate of the release, in its order. Raises as `measure_candidate` does."""
    deployment = settings().candidate_deployment
    if not deployment:
        return [_measured_here(todo, wanted) for wanted in todo.candidates]
    begun = datetime.now(UTC)
    runs = Runs(deployment)
    with runs.ended():
        for wanted in todo.candidates:
            if is_missing(todo, wanted):
                runs.start(wanted.name, request_of(todo, wanted, request))
        ends = runs.wait()
    return [result(todo, wanted, ends.get(wanted.name), begun) for wanted in todo.candidates]


def _measured_here(todo: ReleasePlan, wanted: CandidatePlan) -> Measured:
    measured = measure_candidate(todo, wanted)
    # While the next one is quantized and its engine starts.
    begin_plots([measured])
    return measured


def result(todo: ReleasePlan, wanted: CandidatePlan, end: End | None, begun: datetime) -> Measured:
    """What a candidate's run came to; None: it needed none. Raises `InfrastructureError`."""
    if end is None:
        return measure_candidate(todo, wanted)
    what = decision(end)
    if what == "stop":
        raise InfrastructureError(f"candidate {wanted.name}: {end}")
    if what == "refused":
        reason = reason_of(wanted.name, end.message)
        LOG.error("%s: %s", wanted.name, reason)
        adopt(own_stages(wanted), begun)
        leave_out(*own_stages(wanted))
        return Measured(wanted.name, failure=reason, draft=wanted.draft is not None)
    if what == "measure":
        LOG.warning("%s: %s; the release measures it itself", wanted.name, end)
        return measure_candidate(todo, wanted)
    if is_missing(todo, wanted, answered=True):
        raise InfrastructureError(
            f"candidate {wanted.name}: {end}, and its results are not in {settings().store_dir}: "
            "the release and the workers of the pool need one store"
        )
    adopt(own_stages(wanted), begun)
    return measure_candidate(todo, wanted, measured_already=True)


def is_missing(todo: ReleasePlan, wanted: CandidatePlan, *, answered: bool = False) -> bool:
    """Whether a candidate has to be made or measured; looks at manifests, reads no weights.

    `answered`: its run has just ended, so a refusal for want of memory counts as an answer too.
    """
    if refused_before(todo, wanted):
        return False
    shelf = store()
    made = [wanted.quantize, wanted.draft_training, wanted.draft]
    if not all(shelf.is_there(stage) for stage in made if stage is not None):
        return True
    try:
        served = shelf.find(wanted.serving).summary
    except Absent:
        return True
    if not served["feasible"]:
        return short_of_memory(served) and not answered
    asked = [wanted.accuracy, wanted.accuracy_again]
    if not all(shelf.is_there(stage) for stage in asked if stage is not None):
        return True
    age = todo.resolved.policy.max_age_days
    timed = [wanted.latency, wanted.draft_proof]
    return any(will_run(stage, age) for stage in timed if stage is not None)


# -- how a run ended -------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How the run of a candidate ended. `given_up`: why the release waited no longer."""

    run: str
    state: StateType
    name: str
    message: str = ""
    given_up: Literal["", "never started", "took too long"] = ""

    def __str__(self) -> str:
        how = self.given_up or f"ended as {self.name}"
        return f"its run {self.run} {how}{f': {self.message}' if self.message else ''}"


def decision(end: End) -> Literal["read", "refused", "measure", "stop"]:
    """What the release does about it; the reasons stand at the top. Pure."""
    if end.given_up:
        return "measure" if end.given_up == "never started" else "stop"
    if end.state is StateType.COMPLETED:
        return "read"
    if end.state is StateType.FAILED and end.name == REFUSED:
        return "refused"
    if end.state is StateType.CANCELLED or end.name == UNLIKE:
        return "stop"
    return "measure"


# -- the runs --------------------------------------------------------------------------------


class Runs:
    """One run for each candidate: started once, looked at until all have ended, or cancelled."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._open: dict[str, UUID] = {}
        self._states: dict[str, State[Any]] = {}
        self._ends: dict[str, End] = {}
        self._unanswered = False

    @contextmanager
    def ended(self) -> Iterator[None]:
        """A release that is stopped here stops the runs that it has started."""
        try:
            yield
        finally:
            self._cancel(list(self._open))

    def start(self, name: str, request: CandidateRequest) -> None:
        """Start the run of a candidate, or find the one that this release started before.

        Raises `UserError` where there is no such deployment, `InfrastructureError`.
        """
        context = FlowRunContext.get()
        parent = context.flow_run.id if context and context.flow_run else uuid4()
        for attempt in range(1, TRIES + 1):
            try:
                run = cast(
                    FlowRun,
                    run_deployment(
                        self._deployment,
                        parameters={"request": request.model_dump(mode="json")},
                        idempotency_key=f"{parent}:{name}:{attempt}",
                        timeout=0,
                    ),
                )
            except ObjectNotFound:
                raise UserError.at(
                    f"PILOTAGE_CANDIDATE_DEPLOYMENT={self._deployment}",
                    "the Prefect server has no such deployment",
                    "`pilotage deploy` registers candidate/one; or leave the variable empty",
                ) from None
            except SERVER_FAULTS as error:
                raise InfrastructureError(f"candidate {name} was not started: {error}") from error
            # One of an earlier try of this release that has ended is not asked again: what it
            # left is gone or too old, or nobody would start a run.
            if run.state is None or not run.state.is_final():
                break
        self._open[name] = run.id
        self._link(name, run.id)

    def wait(self) -> dict[str, End]:
        """How each run ended, by candidate."""
        began = waiting_since = time.monotonic()
        while self._open:
            time.sleep(ASK_EVERY)
            changed = self._look()
            now = time.monotonic()
            if changed or any(state.is_running() for state in self._states.values()):
                waiting_since = now
            if now - began > settings().candidate_timeout:
                self._give_up("took too long")
            elif now - waiting_since > settings().candidate_start:
                # Cancelled first: one that starts after all would measure beside the release.
                self._give_up("never started")
        return self._ends

    def _look(self) -> bool:
        """Read the states of the open runs; whether one of them is another than before."""
        changed = False
        for name, run in list(self._open.items()):
            try:
                with get_client(sync_client=True) as client:
                    state = client.read_flow_run(run).state
            except ObjectNotFound:
                self._end(name, End(str(run), StateType.CANCELLED, "Deleted"))
                changed = True
                continue
            except SERVER_FAULTS as error:
                if not self._unanswered:
                    LOG.warning("candidate %s: Prefect does not answer (%s)", name, error)
                self._unanswered = True
                continue
            if self._unanswered:
                LOG.info("Prefect answers again")
            self._unanswered = False
            if state is None:
                continue
            before = self._states.get(name)
            changed |= before is None or before.type is not state.type
            self._states[name] = state
            if state.is_final():
                self._end(name, End(str(run), state.type, str(state.name), state.message or ""))
        return changed

    def _end(self, name: str, end: End) -> None:
        del self._open[name]
        self._states.pop(name, None)
        self._ends[name] = end
        LOG.info("candidate %s: %s", name, end)

    def _give_up(self, why: Literal["never started", "took too long"]) -> None:
        given_up = dict(self._open)
        self._cancel(list(given_up))
        deadline = time.monotonic() + CANCEL_WAIT
        while self._open and time.monotonic() < deadline:
            time.sleep(ASK_EVERY)
            self._look()
        for name, run in given_up.items():
            end = self._ends.get(name)
            if end is not None and end.state is not StateType.CANCELLED:
                continue  # it ended by itself at last
            self._open.pop(name, None)
            self._ends[name] = End(str(run), StateType.CANCELLED, "Cancelled", given_up=why)

    def _cancel(self, names: list[str]) -> None:
        for name in names:
            try:
                with get_client(sync_client=True) as client:
                    state = State(type=StateType.CANCELLING, message="the release ended")
                    client.set_flow_run_state(self._open[name], state)
                LOG.warning("candidate %s: its run %s is cancelled", name, self._open[name])
            except Exception as error:
                # What stopped the release is told, not that a run could not be told of it.
                LOG.warning("candidate %s: its run was not cancelled: %s", name, error)

    def _link(self, name: str, run: UUID) -> None:
        address = url_for("flow-run", obj_id=run) or f"flow run {run}"
        LOG.info("candidate %s: measured by a run of its own: %s", name, address)


def request_of(todo: ReleasePlan, wanted: CandidatePlan, asked: RecipeRequest) -> CandidateRequest:
    """What the run of a candidate is asked; files by their whole path, for it runs elsewhere."""
    return CandidateRequest(
        recipe=_whole(asked.recipe),
        overrides=asked.overrides,
        prompts=_whole(asked.prompts) if asked.prompts else None,
        candidate=wanted.name,
        expected=keys_of(todo, wanted),
    )


def _whole(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).is_file() else name
