"""The rollback flow: the champion goes back to an earlier one, smoke-tested before it moves.

version that was champion ─► weights as gated, smoke prompt ─► line of the ledger ─► alias
"""

from __future__ import annotations

import time

from prefect import flow

from flows.approving import tell_moved
from flows.endings import Ended, move_ended, told
from flows.forms import RollbackRequest
from flows.smoke import ask_smoke
from registry.alias_outcome import AliasOutcome
from registry.promotion import Backing, Moved, plan_rollback, roll_back, straighten_previous
from registry.provenance import actor_name
from registry.versions import CHAMPION
from tasks.bundles import aliases_of_model
from tasks.progress import LOG
from tasks.promoting import smoke_prompt


@flow(name="rollback", flow_run_name="rollback-{request.model}", validate_parameters=True)
@told
def roll_back_model(request: RollbackRequest) -> Ended[AliasOutcome]:
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
            answers.append(ask_smoke(reference, plan.bundle, smoke_prompt(reference)))
        asked = {"smoke": "answered" if answers else "skipped on request"}
        moved = roll_back(aliases, plan, Backing(actor, request.reason, details=asked))
    outcome = AliasOutcome.of(
        "rollback",
        request.model,
        CHAMPION,
        plan.bundle,
        moved,
        answers,
        time.monotonic() - started,
    )
    if outcome.changed:
        tell_moved(outcome)
    return move_ended(outcome)
