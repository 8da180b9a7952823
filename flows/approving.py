"""What a promotion makes of a policy that asks for a person: whom it asks, and what a no ends with.

Nothing here moves an alias. How the run waits is in tasks/approval.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import NoReturn

from flows.forms import PromoteRequest
from registry.alias_moves import LOCK_WAIT, Aliases, shown
from registry.alias_outcome import AliasOutcome, SmokeAnswer
from registry.approval import TOO_LATE, Answer, NotApproved, record_no
from registry.errors import UserError
from registry.promotion import Backing
from registry.provenance import actor_name
from registry.versions import CHAMPION
from tasks import approval
from tasks.approval import Question
from tasks.approval_page import page, question_line
from tasks.events import ALIAS_MOVED, emit
from tasks.progress import LOG
from tasks.recorded import Recorded


def asks_a_person(found: Recorded, alias: str) -> bool:
    """Whether somebody has to say yes: the policy asks, and it is about production."""
    return alias == CHAMPION and found.policy.approval is not None


def answer_at_hand(request: PromoteRequest, found: Recorded) -> Answer | None:
    """The yes that came with the request; None where the run can wait for one.

    Raises `UserError` for a yes without a reason or, from a form, without a name, `NotApproved`
    where there is no yes and nothing that could wait.
    """
    waits = approval.this_run() is not None
    command = f'pilotage promote {request.bundle} --approve --reason "..."'
    if request.approve:
        if not request.reason:
            raise UserError.at("--approve", "needs a reason: it stands in the ledger", command)
        if waits and not request.actor:
            # The worker's login name is nobody's answer.
            raise UserError.at("approve", "needs an actor: who answers", "fill in `actor`")
        name = request.actor or actor_name()
        return Answer(True, name, request.reason, datetime.now(UTC), stated=waits)
    if waits:
        return None
    raise NotApproved.at(
        f"promote {request.bundle}",
        f"policy {found.facts.policy_name} asks a person, and a command cannot wait for one",
        f"to answer yes yourself: `{command}`; "
        "the deployment promote/on-candidate waits for an answer in Prefect's form",
    )


def ask_person(
    aliases: Aliases, found: Recorded, version: int, champion: int | None, smoke: SmokeAnswer
) -> NoReturn:
    """Suspend this run until somebody answers. Raises `AskedAlready` where another run asks."""
    asks, run = found.policy.approval, approval.this_run()
    assert asks is not None and run is not None
    question = approval.asked() or Question(
        model=found.model,
        version=version,
        bundle=found.bundle.digest,
        champion=champion,
        deadline=datetime.now(UTC) + timedelta(hours=asks.deadline_hours),
        run=str(run.id),
    )
    with aliases.ledger.lock(found.model, LOCK_WAIT):
        approval.claim(question)
    approval.ask(question, page(found, question, smoke), question_line(found, question))


def check_answer(aliases: Aliases, found: Recorded, question: Question, answer: Answer) -> None:
    """A yes in time goes on. A no, and none in time, get their line. Raises `NotApproved`."""
    approval.forget_deadline()
    late = approval.lapsed(question, answer)
    if answer.approve and not late:
        LOG.info("%s (as stated) said yes: %s", shown(answer.answered_by), shown(answer.reason))
        return
    until = approval.spelled(question.deadline)
    if late:
        what = f"nobody answered until {until}; not promoted"
        if answer.answered_by != approval.NOBODY:
            what = f"{shown(answer.answered_by)} answered after {until}; not promoted"
        remedy = "the next release asks again"
    else:
        what = f"{shown(answer.answered_by)} (as stated) said no: {shown(answer.reason)}"
        remedy = "no release asks about it again"
    _tell_no(aliases, found, question, answer, reason=what if late else "", lapsed=late)
    command = f'pilotage promote {question.reference} --approve --reason "..."'
    raise NotApproved.at(
        f"models:/{question.model}/{question.version}", what, f"{remedy}; by hand: `{command}`"
    )


def check_late_no(aliases: Aliases, found: Recorded, question: Question, answer: Answer) -> None:
    """A no to what somebody else has promoted meanwhile gets its line, and takes nothing back.

    Raises `NotApproved` for it: a person said no, and the version is in production. A yes, or a
    deadline that passed, has nothing left to say.
    """
    if answer.approve or answer.answered_by == approval.NOBODY:
        return
    approval.forget_deadline()
    yes = aliases.settle().moved(CHAMPION)
    assert yes is not None, "it holds the alias"
    _tell_no(aliases, found, question, answer, details={TOO_LATE: str(yes.sequence)})
    raise NotApproved.at(
        f"models:/{question.model}/{question.version}",
        f"{shown(answer.answered_by)} (as stated) said no: {shown(answer.reason)}; but it is in "
        f"production since {approval.spelled(yes.at)} by {shown(yes.actor)} (line {yes.sequence})",
        f'to take it out: `pilotage rollback {question.model} --reason "..."`',
    )


def _tell_no(
    aliases: Aliases,
    found: Recorded,
    question: Question,
    answer: Answer,
    *,
    reason: str = "",
    lapsed: bool = False,
    details: Mapping[str, str] | None = None,
) -> None:
    """The line of the ledger. reason: in place of the answer's own."""
    told = {"candidate": found.outcome.name, "run": found.run_id, **answer.told()}
    record_no(
        aliases,
        question.version,
        question.bundle,
        Backing(
            actor=answer.answered_by,
            reason=reason or answer.reason,
            evidence=found.outcome.evidence,
            policy=found.facts.policy_digest,
            details={**told, **(details or {})},
        ),
        question=question.run,
        lapsed=lapsed,
    )


def tell_moved(outcome: AliasOutcome, answer: Answer | None = None) -> None:
    """An event for the notifications: what is in production now, and who said so."""
    before = f"version {outcome.before}" if outcome.before is not None else "nothing"
    said = f"; {shown(answer.answered_by)} said yes" if answer is not None else ""
    message = (
        f"{outcome.model}@{outcome.alias}: {before} -> version {outcome.version} "
        f"(bundle {outcome.bundle[:12]}){said}; line {outcome.line} of the ledger"
    )
    emit(ALIAS_MOVED, outcome.model, outcome.version, {"message": message})
