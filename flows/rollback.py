"""The rollback flow: the champion goes back to an earlier one, smoke-tested before it moves.

version that was champion ─► weights as gated, smoke prompt ─► line of the ledger ─► alias
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from prefect import flow

from flows.forms import RollbackRequest
from registry.alias_outcome import AliasOutcome
from registry.promotion import Backing, Moved, plan_rollback, roll_back, straighten_previous
from registry.provenance import actor_name
from registry.versions import CHAMPION
from tasks.bundles import aliases_of_model
from tasks.progress import LOG
from tasks.promoting import smoke, smoke_prompt


@flow(name="rollback", flow_run_name="rollback-{request.model}", validate_parameters=True)
def roll_back_model(request: RollbackRequest) -> AliasOutcome:
    """Point the champion back. Raises `PromotionRefused`, `AliasMoved`, `SmokeFailed`.

    The one start before the move is the whole wait: a rollback is wanted when production is bad.
    """
    started = time.monotonic()
    aliases = aliases_of_model(request.model)
    actor = request.actor or actor_name()
    plan = plan_rollback(aliases, request.to, actor, request.reason)
    answers = []
    if plan.done is not None:
        LOG.info("%s@%s is version %d already", request.model, CHAMPION, plan.version)
        straighten_previous(aliases, plan, Backing(actor, request.reason))
        moved = Moved(plan.version, plan.before, False, plan.done)
    else:
        if request.smoke:
            reference = f"{request.model}@{plan.version}"
            answers.append(smoke(reference, plan.bundle, smoke_prompt(reference)))
        asked = {"smoke": "answered" if answers else "skipped on request"}
        moved = roll_back(aliases, plan, Backing(actor, request.reason, details=asked))
    entry = moved.entry
    return AliasOutcome(
        action="rollback",
        model=request.model,
        alias=CHAMPION,
        version=moved.version,
        bundle=plan.bundle,
        before=moved.before,
        changed=moved.changed,
        line=entry.sequence if entry else None,
        line_hash=entry.hash if entry else "",
        actor=entry.actor if entry else "",
        reason=entry.reason if entry else "",
        smoke=answers,
        finished_at=datetime.now(UTC),
        seconds=round(time.monotonic() - started, 2),
    )
