"""The smoke prompt where the engine is: a run of its own on the GPU pool, asked by promotions.

A promotion runs on the CPU pool, and may wait there for days. With PILOTAGE_SMOKE_DEPLOYMENT it
has a run of that deployment start the version and ask it; the answer, with the hardware that it
came from, is kept by Prefect's server as an input of that run, which every machine can read.
Without it, the promotion's own process asks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from prefect import flow
from pydantic import Field

from flows.endings import PASSED, REFUSED, Ended, line, told
from flows.forms import Request, at
from registry.alias_outcome import SmokeAnswer
from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from tasks.bundles import promoted_bundle
from tasks.progress import LOG, spell
from tasks.promoting import SmokeFailed, smoke, smoke_prompt

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

ANSWER = "pilotage-smoke-answer"
"""Key of the run's input that holds the answer."""

POLL = 2.0
"""Seconds between two looks at the child's state."""

LONGEST_SILENCE = 300.0
"""Seconds for which Prefect's server may be away while a child is waited for."""


class SmokeRequest(Request):
    """Start a version as it was gated and ask it one business prompt."""

    reference: str = Field(
        default="freight-assistant@champion",
        min_length=1,
        max_length=300,
        description="MODEL@ALIAS or MODEL@VERSION.",
        json_schema_extra=at(0, examples=["freight-assistant@champion"]),
    )
    bundle: str = Field(
        default="",
        max_length=64,
        description="Digest of the bundle that it must be; empty: whatever it is.",
        json_schema_extra=at(1),
    )


@flow(name="smoke", flow_run_name="smoke-{request.reference}", validate_parameters=True)
@told
def smoke_bundle(request: SmokeRequest) -> Ended[SmokeAnswer]:
    """Ask a version its smoke prompt on this machine. Raises `SmokeFailed`."""
    expected = request.bundle or promoted_bundle(request.reference).digest
    answer = smoke(request.reference, expected, smoke_prompt(request.reference))
    _keep(answer)
    return Ended(answer, PASSED, line(f"PASS: {answer.reference} answers: {answer.text}"))


def ask_smoke(reference: str, expected: str, messages: list[dict[str, Any]]) -> SmokeAnswer:
    """Where the engine is: here, or by a run of PILOTAGE_SMOKE_DEPLOYMENT.

    Raises `SmokeFailed` for a version that does not answer, `InfrastructureError` for a run that
    crashed, was cancelled, or was not started or not done in time.
    """
    deployment = settings().smoke_deployment
    if not deployment:
        return smoke(reference, expected, messages)
    return _ask_elsewhere(deployment, reference, expected, settings().smoke_wait)


def _keep(answer: SmokeAnswer) -> None:
    """Leave the answer where whoever asked finds it; nothing outside of a run."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        with _client() as client:
            client.create_flow_run_input(context.flow_run.id, ANSWER, answer.model_dump_json())


def _ask_elsewhere(deployment: str, reference: str, expected: str, wait: float) -> SmokeAnswer:
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    request = {"reference": reference, "bundle": expected}
    try:
        run = cast(
            "FlowRun", run_deployment(deployment, parameters={"request": request}, timeout=0)
        )
    except ObjectNotFound:
        raise UserError.at(
            f"PILOTAGE_SMOKE_DEPLOYMENT={deployment}",
            "no such deployment",
            "`pilotage deploy` registers it; empty asks in the promotion's own process",
        ) from None
    LOG.info("%s: the smoke prompt is asked by run %s (%s)", reference, run.name, deployment)
    try:
        run = _ended(run, wait)
        if run.state is not None and run.state.is_completed():
            with _client() as client:
                return SmokeAnswer.model_validate_json(client.read_flow_run_input(run.id, ANSWER))
    except BaseException:
        _cancel(run)
        raise
    if run.state is None or not run.state.is_final():
        _cancel(run)
    raise unanswered(reference, run, wait)


def _ended(run: FlowRun, wait: float) -> FlowRun:
    """The run when it has ended, or as it is after `wait` seconds."""
    from httpx import TransportError
    from prefect.exceptions import PrefectHTTPStatusError

    started = heard = time.monotonic()
    while time.monotonic() - started < wait:
        try:
            with _client() as client:
                run = client.read_flow_run(run.id)
        except (TransportError, PrefectHTTPStatusError) as error:
            if time.monotonic() - heard > LONGEST_SILENCE:
                raise InfrastructureError(f"Prefect's server is away: {error}") from None
        else:
            heard = time.monotonic()
            if run.state is not None and run.state.is_final():
                return run
        time.sleep(POLL)
    return run


def unanswered(reference: str, run: FlowRun, wait: float) -> SmokeFailed | InfrastructureError:
    """Why there is no answer, from the state that the child is in. Pure."""
    state = run.state
    name = state.name if state is not None else "unknown"
    said = f": {state.message}" if state is not None and state.message else ""
    where = f"{reference}: the smoke run {run.name}"
    if name == REFUSED:
        return SmokeFailed(state.message if state is not None and state.message else where)
    if state is not None and state.is_final():
        return InfrastructureError(f"{where} ended as {name}{said}")
    if state is None or state.is_scheduled() or state.is_pending():
        return InfrastructureError(
            f"{where} was not started within {spell(wait)}: no worker of its pool took it "
            "(does one run, and is it not busy?); it was cancelled"
        )
    return InfrastructureError(f"{where} did not end within {spell(wait)}; it was cancelled")


def _cancel(run: FlowRun) -> None:
    """End a child that nobody waits for any more; it must not hold the GPU."""
    from httpx import HTTPError
    from prefect.exceptions import PrefectException
    from prefect.states import Cancelling

    LOG.warning("the smoke run %s is cancelled", run.name)
    try:
        with _client() as client:
            now = client.read_flow_run(run.id)
            if now.state is not None and not now.state.is_final():
                client.set_flow_run_state(run.id, Cancelling())
    except (PrefectException, HTTPError, OSError) as error:
        # Why it is not waited for is what has to be told.
        LOG.warning("the smoke run %s could not be cancelled: %s", run.name, error)


def _client() -> SyncPrefectClient:
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)
