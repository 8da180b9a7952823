"""What a person said of a version that passed, as lines of the ledger.

A yes stands in the line of the promotion (`details`). A no and a question that ran out of time move
no alias and have lines of their own, `reject` and `lapse`; they name the version in their details.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from registry.alias_moves import Aliases, State, shown
from registry.ledger import Draft, Entry
from registry.promotion import Backing
from registry.versions import CHAMPION, PromotionRefused

NOBODY = "nobody (deadline)"
"""The actor of a line about a question that nobody answered."""

QUESTION_RUN = "question"
"""Among a line's details: id of the flow run that asked."""


class NotApproved(PromotionRefused):
    """A person said no, or nobody answered in time."""


@dataclass(frozen=True)
class Answer:
    """What somebody answered. stated: nothing vouches for the name, as in a form without login."""

    approve: bool
    answered_by: str
    reason: str
    at: datetime
    stated: bool = True

    def told(self) -> dict[str, str]:
        """For the details of a ledger's line."""
        name = "as stated, nobody checked it" if self.stated else "the login name"
        return {
            "answered_by": self.answered_by,
            "answered_at": self.at.isoformat(timespec="seconds"),
            "answer": "yes" if self.approve else "no",
            "answer_reason": self.reason,
            "answerer": name,
        }


def record_no(
    aliases: Aliases,
    version: int,
    bundle: str,
    backing: Backing,
    *,
    question: str,
    lapsed: bool,
) -> Entry:
    """The line that says no, once per question: a run that is killed and retried adds no second.

    lapsed: nobody answered. Returns the line.
    """
    for entry in aliases.settle().entries:
        if entry.action in ("reject", "lapse") and entry.details.get(QUESTION_RUN) == question:
            return entry
    return aliases.move(
        Draft(
            actor=NOBODY if lapsed else backing.actor,
            action="lapse" if lapsed else "reject",
            moves={},
            bundle=bundle,
            evidence=dict(backing.evidence),
            policy=backing.policy,
            reason=backing.reason,
            details={**backing.details, "version": str(version), QUESTION_RUN: question},
        )
    )


def rejected(state: State) -> dict[int, Entry]:
    """Versions that a person said no to, and that were not promoted since, by line.

    A question that ran out of time is no such no: the next release asks again.
    """
    found: dict[int, Entry] = {}
    for entry in state.entries:
        if entry.action == "reject":
            found[int(entry.details["version"])] = entry
        move = entry.moves.get(CHAMPION)
        if move is not None and move.after is not None:
            found.pop(move.after, None)
    return found


def check_not_rejected(model: str, state: State, version: int, reason: str = "") -> None:
    """Raises `NotApproved`; a reason, given by a person, lifts it."""
    line = rejected(state).get(version)
    if line is not None and not reason:
        raise NotApproved.at(
            f"models:/{model}/{version}",
            f"was rejected on {line.at:%Y-%m-%d %H:%M} UTC by {shown(line.actor)}: "
            f"{shown(line.reason)}",
            f'to ask for it anew: `pilotage promote {model}@{version} --approve --reason "..."`',
        )
