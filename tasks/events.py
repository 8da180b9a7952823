"""Our own events, which start deployments and notifications: told by a run, to its server."""

from __future__ import annotations

from registry.outcome import ReleaseOutcome

CANDIDATE_PASSED = "pilotage.candidate.passed"
"""A version passed and is `candidate`; its policy asks a person, so the release left it there."""

APPROVAL_ASKED = "pilotage.approval.asked"
"""A version waits for a person's yes."""

ALIAS_MOVED = "pilotage.alias.moved"
"""An alias points to another version."""


def emit(
    event: str,
    model: str,
    version: int,
    payload: dict[str, str],
    labels: dict[str, str] | None = None,
) -> None:
    """About one version of a registered model. Outside of a flow run nobody listens: nothing."""
    from prefect.context import FlowRunContext
    from prefect.events import emit_event

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    resource = {
        "prefect.resource.id": f"pilotage.version.{model}.{version}",
        "prefect.resource.name": f"{model}@{version}",
        **(labels or {}),
    }
    emit_event(event, resource=resource, payload=payload)


def emit_candidate_passed(outcome: ReleaseOutcome) -> None:
    """Where a release ends with a version that awaits approval; starts promote/on-candidate."""
    version = outcome.awaits_approval
    if version is None:
        return
    chosen = outcome.selection.chosen if outcome.selection is not None else None
    digest = next((one.bundle for one in outcome.candidates if one.name == chosen), "")
    emit(
        CANDIDATE_PASSED,
        outcome.model,
        version,
        {"message": f"{outcome.model}@{version} ({chosen}) passed policy {outcome.policy}"},
        {
            "pilotage.bundle": f"{outcome.model}@{version}",
            "pilotage.model": outcome.model,
            "pilotage.digest": digest,
        },
    )
