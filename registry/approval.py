"""What a person said of a version that passed, as lines of the ledger.

A yes stands in the line of the promotion (`details`). A no and a question that ran out of time move
no alias and have lines of their own, `reject` and `lapse`; they name the version in their details.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from registry.alias_moves import Aliases
from registry.ledger import Draft, Entry
from registry.versions import PromotionRefused

if TYPE_CHECKING:
    from registry.promotion import Backing

NOBODY = "nobody (deadline)"
"""The actor of a line about a question that nobody answered."""

QUESTION_RUN = "question"
"""Among a line's details: id of the flow run that asked."""

TOO_LATE = "too_late"
"""Among a no's details: number of the line by which somebody else had promoted the version."""


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
