"""The releases of a night: started once, waited for, each by itself.

A release is a run of its own: of a deployment, or in this process, one after the other. What it is
known by is its tag (night, attempt, recipe), so a nightly that is started again, or was killed,
finds what there is and starts nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import httpx
from prefect import tags
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException, PrefectHTTPStatusError
from prefect.states import Cancelling, Crashed
from prefect.utilities.urls import url_for

from flows.forms import ReleaseRequest
from flows.release import release_model
from tasks.home_locks import only_in_this_home
from tasks.night_digest import Row, not_known, not_started, row_of
from tasks.progress import LOG

EVERY = 5.0
"""Seconds between two looks at the runs of a night."""

ASK_WAIT = 600.0
"""Seconds for which the server may be away while the runs of a night are asked for."""

CANCEL_WAIT = 180.0
"""Seconds that a run may take to end after it was cancelled."""

SERVER_FAULTS = (PrefectException, httpx.HTTPError, OSError)
"""What a server that is away, or refuses, raises."""


@dataclass(frozen=True)
class Night:
    """Which night it is, and how long one of its releases may run."""

    date: str
    attempt: int
    hours: float

    @property
    def title(self) -> str:
        again = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"Night of {self.date}{again}"

    def tag(self, recipe: str) -> str:
        """What a release of this night is known by; the idempotency key of its run."""
        return f"nightly:{self.date}:{self.attempt}:{recipe}"


# -- in this process ---------------------------------------------------------------------------


def run_inline(night: Night, recipes: Sequence[str]) -> list[Row]:
    """One release after the other in this process. Raises `InfrastructureError` where another
    nightly of this home is at it."""
    with only_in_this_home("nightly"):
        return [_release(night, recipe) for recipe in recipes]


def _release(night: Night, recipe: str) -> Row:
    """A release that raises, or takes too long, is a row; it stops no other."""
    try:
        known = _known(night, recipe)
    except Exception as error:
        LOG.exception("%s was not started", recipe)
        return not_started(recipe, f"{type(error).__name__}: {error}")
    if known is not None:
        return known
    try:
        with tags(night.tag(recipe)):
            release = release_model.with_options(timeout_seconds=night.hours * 3600)
            state = release(ReleaseRequest(recipe=recipe), return_state=True)
    except Exception as error:
        # A server that is away when the run ends as well: it may have promoted before.
        LOG.exception("%s: nobody knows how it ended", recipe)
        return not_known(recipe, f"{type(error).__name__}: {error}")
    run_id = state.state_details.flow_run_id
    try:
        with get_client(sync_client=True) as client:
            return _row(client, recipe, client.read_flow_run(UUID(str(run_id))))
    except SERVER_FAULTS as error:
        LOG.warning("%s has ended; the server cannot be asked more: %s", recipe, error)
        name = state.name or state.type
        return row_of(recipe, name, state.type, state.message, None, str(run_id))


def _known(night: Night, recipe: str) -> Row | None:
    """What there is of this recipe in this night; None: it is to be run (again).

    The newest run counts: those before it were tries that a kill ended.
    """
    with get_client(sync_client=True) as client:
        for run in runs_of(client, night.tag(recipe))[:1]:
            if run.state is not None and run.state.is_final():
                LOG.info("%s was run in this night: %s", recipe, run.state.name)
                return _row(client, recipe, run)
            if run.deployment_id is not None:
                why = f"run {run.name} of a deployment is at it, or waits for a worker"
                return not_known(recipe, why, url_for("flow-run", run.id) or str(run.id))
            # Nightlies of one home take turns, so nobody is at it any more.
            client.set_flow_run_state(run.id, Crashed(message="its process is gone"), True)
    return None


# -- by a deployment ---------------------------------------------------------------------------


@dataclass
class _Waited:
    """A run of the night that is waited for."""

    recipe: str
    run: UUID
    began: float | None = None
    cancelled_at: float | None = None
    """Both by the monotonic clock."""
    why: str = ""
    """Why it was cancelled: of a run that never began Prefect keeps no reason (3.9)."""


def run_deployed(
    night: Night, recipes: Sequence[str], deployment: str, every: float = EVERY
) -> list[Row]:
    """One run of `deployment` per recipe, all asked for at once; a worker takes them in turn.

    A run is cancelled once it has run for the night's hours; one that no worker takes, once all
    the others could have taken theirs.
    """
    rows: dict[str, Row] = {}
    waited: list[_Waited] = []
    patience = time.monotonic() + ASK_WAIT
    for recipe in recipes:
        try:
            run = _asked_for(night, recipe, deployment, until=patience, every=every)
            waited.append(_Waited(recipe, run))
        except ObjectNotFound:
            rows[recipe] = not_started(recipe, f"no deployment {deployment}: `pilotage deploy`")
        except PrefectHTTPStatusError as error:
            # Most likely the recipe is none of those that the deployment knows: `pilotage deploy`.
            rows[recipe] = not_started(recipe, f"refused by the server: {detail_of(error)}")
        except Exception as error:
            LOG.exception("%s was not started", recipe)
            rows[recipe] = not_started(recipe, f"{type(error).__name__}: {error}")
    deadline = time.monotonic() + night.hours * 3600 * len(recipes)
    while waited:
        try:
            with get_client(sync_client=True) as client:
                for one in list(waited):
                    try:
                        row = _looked_at(client, night, one, late=time.monotonic() > deadline)
                    except ObjectNotFound:
                        row = not_known(one.recipe, "somebody deleted its run")
                    if row is not None:
                        LOG.info("%s: %s %s", one.recipe, row.state, row.what)
                        rows[one.recipe] = row
                        waited.remove(one)
        except SERVER_FAULTS as error:
            # The runs go on without the server; so does the wait, for a while.
            LOG.warning("the server cannot be asked: %s", error)
            if time.monotonic() > deadline + CANCEL_WAIT:
                why = f"the server cannot be asked what came of it: {error}"
                rows |= {one.recipe: not_known(one.recipe, why) for one in waited}
                break
        if waited:
            time.sleep(every)
    return [rows[recipe] for recipe in recipes]


def _asked_for(night: Night, recipe: str, deployment: str, *, until: float, every: float) -> UUID:
    """The run of this night and recipe: made, or the one that there is already.

    A server that is away, or has a fault of its own (5xx), is asked again until `until`
    (`time.monotonic`): by its key nothing is made twice.
    """
    request = ReleaseRequest(recipe=recipe)
    while True:
        try:
            run = run_deployment(
                deployment,
                parameters={"request": request.model_dump(mode="json")},
                flow_run_name=f"{night.date} {recipe}",
                idempotency_key=night.tag(recipe),
                tags=[night.tag(recipe)],
                timeout=0,
                # A run of its own: not a part of this one, which may be gone before it.
                as_subflow=False,
            )
        except (httpx.TransportError, PrefectHTTPStatusError) as error:
            refused = isinstance(error, PrefectHTTPStatusError) and error.response.is_client_error
            if refused or time.monotonic() > until:
                raise
            LOG.warning("%s: the server cannot be asked for its run: %s", recipe, error)
            time.sleep(every)
        else:
            assert isinstance(run, FlowRun), "called from synchronous code"
            return run.id


def detail_of(error: PrefectHTTPStatusError) -> str:
    """What the server says of a refusal, without the rest of Prefect's message."""
    try:
        return str(error.response.json()["detail"])
    except (ValueError, LookupError, TypeError):
        return str(error)


def _looked_at(client: SyncPrefectClient, night: Night, one: _Waited, *, late: bool) -> Row | None:
    """The row of a run that has ended, or was given up; None while it is to be waited for."""
    run = client.read_flow_run(one.run)
    if run.state is not None and run.state.is_final():
        return _row(client, one.recipe, run, one.why)
    if one.cancelled_at is not None:
        if time.monotonic() - one.cancelled_at < CANCEL_WAIT:
            return None
        return _row(client, one.recipe, run, one.why)
    if run.start_time is not None and one.began is None:
        # Once: a clock that is set anew later neither ends a run nor lets it go on for ever.
        before = (datetime.now(UTC) - run.start_time).total_seconds()
        one.began = time.monotonic() - max(0.0, before)
    if one.began is not None and time.monotonic() - one.began > night.hours * 3600:
        why = f"it took longer than {night.hours:g} h"
    elif one.began is None and late:
        why = f"no worker took it; it is {run.state.name if run.state is not None else 'new'}"
    else:
        return None
    LOG.warning("%s is cancelled: %s", one.recipe, why)
    one.why = f"cancelled by the nightly: {why}"
    client.set_flow_run_state(run.id, Cancelling(message=one.why))
    one.cancelled_at = time.monotonic()
    return None


# -- what a run says ---------------------------------------------------------------------------


def runs_of(client: SyncPrefectClient, tag: str) -> list[FlowRun]:
    """Runs with a tag, the newest first."""
    wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[tag]))
    return client.read_flow_runs(
        flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=10
    )


def _row(client: SyncPrefectClient, recipe: str, run: FlowRun, why: str = "") -> Row:
    """why: what is said of a run whose state says nothing."""
    state = run.state
    assert state is not None, "a run that was started has a state"
    message = state.message or why
    if state.type is StateType.CANCELLED:
        # Who cancelled it said why; what ended it only says that it did.
        asked = [
            one.message
            for one in client.read_flow_run_states(run.id)
            if one.type is StateType.CANCELLING and one.message
        ]
        message = asked[-1] if asked else message
    seconds = run.total_run_time.total_seconds() if run.start_time is not None else None
    link = url_for("flow-run", run.id) or str(run.id)
    return row_of(recipe, state.name or state.type, state.type, message, seconds, link)
