"""The promotion flow: an alias moves to a bundle on its recorded evidence, or stays where it is.

    recorded evidence ─► smoke prompt ─► line of the ledger ─► alias ─► smoke prompt through it
                              │                                             └─► not answered: back
                              └─► a policy that asks a person: suspended until an answer or the
                                  deadline, then from the start again (tasks/approval.py)

Nothing is measured. What was killed between two steps is finished by the next run: the ledger
says what was decided, a version's tag whether the alias answered after it.
"""

from __future__ import annotations

import re
import time

from prefect import flow
from prefect.runtime import flow_run
from pydantic import ValidationError

from eval_suites.loader import load_policy
from flows.approving import (
    answer_at_hand,
    ask_person,
    asks_a_person,
    check_answer,
    check_late_no,
    tell_moved,
)
from flows.endings import Ended, line, move_ended, told
from flows.forms import PromoteRequest
from flows.smoke import ask_smoke
from registry.alias_moves import Aliases, AliasMoved
from registry.alias_outcome import AliasOutcome, SmokeAnswer
from registry.approval import QUESTION_RUN, Answer
from registry.digests import digest_of
from registry.errors import InfrastructureError, PilotageError
from registry.promotion import (
    Backing,
    Moved,
    check_alias,
    check_promotable,
    confirm,
    is_confirmed,
    promote,
    restore,
)
from registry.provenance import actor_name
from registry.taken_out import check_not_taken_out
from registry.versions import CANDIDATE, CHAMPION
from tasks import approval
from tasks.bundles import aliases_of_model
from tasks.champion import check_policy
from tasks.progress import LOG
from tasks.promoting import check_answered_on, check_recorded
from tasks.recorded import Recorded, judged_digest, recorded
from tasks.registering import make_version

COMPLETED = "Completed"
"""Of a run that moved nothing because there was nothing to do."""


def run_name() -> str:
    """What is promoted; a whole digest would be cut off wherever the name is shown."""
    try:
        request = PromoteRequest.model_validate(flow_run.parameters["request"])
    except ValidationError:
        # What is wrong is the flow's to say.
        return "promote"
    bundle = re.sub(r"^([0-9a-f]{12})[0-9a-f]{52}$", r"\1", request.bundle)
    return f"promote-{bundle}-to-{request.alias}"


@flow(name="promote", flow_run_name=run_name, validate_parameters=True)
@told
def promote_bundle(request: PromoteRequest) -> Ended[AliasOutcome | None]:
    """Point an alias to a bundle that passed, or refuse.

    Raises `PromotionRefused` for what was recorded, `AliasMoved` when another move came first,
    `SmokeFailed` when the bundle does not answer, `NotApproved` for a person's no.
    """
    asking = approval.closes()
    if asking is not None:
        return Ended(None, COMPLETED, line(approval.close(asking)))
    try:
        moved = move_ended(promoted(request))
        return Ended(moved.outcome, moved.name, moved.message)
    except approval.AskedAlready as already:
        return Ended(None, COMPLETED, line(str(already)))


def promoted(request: PromoteRequest) -> AliasOutcome:
    """The promotion. Where a person has to be asked the run is suspended, and begins again here."""
    started = time.monotonic()
    check_alias(request.alias)
    question, answer = approval.asked(), approval.answered()
    # What a person was asked about, wherever the alias `candidate` points since.
    reference = question.reference if question is not None else request.bundle
    found = recorded(reference)
    aliases = aliases_of_model(found.model)
    state = aliases.settle()
    holder = state.aliases.get(request.alias)
    expected = expected_holder(request, question, holder)
    actor = request.actor or actor_name()
    reason = request.reason
    if question is not None and answer is not None:
        check = check_late_no if holder == question.version else check_answer
        check(aliases, found, question, answer)
    if found.version is None or holder != found.version:
        aliases.check_holder(state, request.alias, expected)
        policy = digest_of(load_policy(request.policy)) if request.policy else None
        check_recorded(found, reference, state.aliases.get(CHAMPION), policy)
        if answer is None:
            check_not_taken_out(found.model, state, found.version, found.bundle.digest, reason)
        if request.alias == CHAMPION:
            check_baseline(aliases, found)
        if answer is None and asks_a_person(found, request.alias):
            answer = answer_at_hand(request, found)
    version = found.version
    behind = version is not None and version > (state.aliases.get(CANDIDATE) or 0)
    if version is None or (holder != version and behind):
        # `behind`: killed while it became a version; what is left of that is done.
        version = make_version(
            found.model,
            found.outcome,
            found.bundle,
            found.facts,
            model_id=found.model_id,
            run_id=found.run_id,
            actor=actor,
            startup_seconds=found.startup_seconds,
        )
    answers: list[SmokeAnswer] = []
    if holder != version:
        first = ask_smoke(f"{found.model}@{version}", found.bundle.digest, found.facts.smoke)
        check_answered_on(found, reference, first.hardware)
        answers.append(first)
        if answer is None and asks_a_person(found, request.alias):
            ask_person(aliases, found, version, holder, first)
    backing = backing_of(found, actor, reason, answer, question)
    moved = promote(
        aliases,
        version,
        found.bundle.digest,
        backing,
        expected=expected,
        alias=request.alias,
    )
    if not is_confirmed(aliases, moved):
        answers.append(ask_through(aliases, found, request.alias, moved, actor))
        confirm(aliases, moved, request.alias)
    outcome = AliasOutcome.of(
        "promote",
        found.model,
        request.alias,
        found.bundle.digest,
        moved,
        answers,
        time.monotonic() - started,
    )
    if outcome.changed:
        tell_moved(outcome, answer)
    return outcome


def expected_holder(
    request: PromoteRequest, question: approval.Question | None, holder: int | None
) -> int | None:
    """The version that must hold the alias: as asked for, as a person was shown, or as it is."""
    if request.expected is not None:
        return request.expected or None
    return question.champion if question is not None else holder


def check_baseline(aliases: Aliases, found: Recorded) -> None:
    """A champion that is there was not promoted by a stricter policy; one that is not was not lost.

    Raises `PromotionRefused`, or `UserError` for a looser policy that nobody owned up to.
    """
    state = check_promotable(aliases, first_release=found.facts.first_release)
    if CHAMPION in state.aliases:
        check_policy(found.model, state, found.policy)


def ask_through(
    aliases: Aliases, found: Recorded, alias: str, moved: Moved, actor: str
) -> SmokeAnswer:
    """The smoke prompt by way of the alias; where it fails, the alias goes back to where it was."""
    reference = f"{found.model}@{alias}"
    try:
        return ask_smoke(reference, found.bundle.digest, found.facts.smoke)
    except BaseException as error:
        # Whatever it was, a signal too: nobody has seen this alias answer.
        why = " ".join(str(error).split())[:500] or type(error).__name__
        try:
            line = restore(aliases, moved, actor, f"after the move: {why}")
        except AliasMoved as other:
            LOG.error("%s was not taken back: %s", reference, other)
        except PilotageError as other:
            raise InfrastructureError(
                f"{reference} points to version {moved.version}, which did not answer ({why}), and "
                f"could not be taken back: {other}"
            ) from error
        else:
            if line is not None:
                LOG.error("%s was taken back (line %d): %s", reference, line.sequence, why)
        raise


def backing_of(
    found: Recorded,
    actor: str,
    reason: str,
    answer: Answer | None = None,
    question: approval.Question | None = None,
) -> Backing:
    """What the ledger's line names: evidence, policy, waivers, and the release that made them.

    answer: of the person who was asked; question: None where the actor answered it.
    """
    waived = [
        f"{gate.name}: {gate.waived.owner}, until {gate.waived.expires}, {gate.waived.reason}"
        for gate in found.outcome.gates
        if gate.waived is not None
    ]
    return Backing(
        actor=actor,
        reason=reason or (answer.reason if answer is not None else ""),
        evidence=found.outcome.evidence,
        policy=found.facts.policy_digest,
        waivers=waived,
        details={
            "candidate": found.outcome.name,
            "recipe": found.facts.recipe,
            "release": found.facts.release,
            "run": found.run_id,
            "logged_model": found.model_id,
            "judged": judged_digest(found.outcome, found.evidence),
            **(answer.told() if answer is not None else {}),
            **({QUESTION_RUN: question.run} if question is not None else {}),
        },
    )
