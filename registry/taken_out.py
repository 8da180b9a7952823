"""What a person took out of production or said no to, and that does not come back by itself.

By version and by bundle: the ledger keeps both when somebody has deleted the version, and the same
bundle may be asked for by its digest, or be registered anew under another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from registry.alias_moves import State, shown
from registry.approval import TOO_LATE, NotApproved
from registry.ledger_lines import Entry
from registry.versions import CANDIDATE, CHAMPION, PromotionRefused

REJECTED = "rejected"
ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class TakenOut:
    """A version that a person decided against. bundle: empty where no line of the ledger tells."""

    version: int
    bundle: str
    what: str
    line: Entry


def taken_out(state: State) -> list[TakenOut]:
    """What was decided against and not promoted since, in the order of the decisions. Pure.

    By a rollback, by moving the alias outside and owning up to it, or by a no to a question. A
    question that ran out of time is no such no: the next release asks again. Nor is a no that came
    after somebody else's yes: what is in production leaves it by a rollback.
    """
    found: list[TakenOut] = []
    for line in state.entries:
        move = line.moves.get(CHAMPION)
        if line.action == "reject" and TOO_LATE not in line.details:
            version, what = int(line.details["version"]), REJECTED
        elif line.action in ("rollback", "adopt") and move is not None and move.before is not None:
            version, what = move.before, ROLLED_BACK
        else:
            version, what = 0, ""
        if version:
            bundle = told_bundle(state.entries, version)
            found = _without(found, version, bundle)
            found.append(TakenOut(version, bundle, what, line))
        if move is not None and move.after is not None:
            found = _without(found, move.after, told_bundle(state.entries, move.after))
    return found


def told_bundle(entries: Sequence[Entry], version: int) -> str:
    """The bundle of a version by the ledger, which keeps it when the version is gone. Pure.

    Empty where no line tells: it was `candidate` or champion before there was a ledger.
    """
    for entry in reversed(entries):
        moves = [entry.moves[alias] for alias in (CHAMPION, CANDIDATE) if alias in entry.moves]
        said_no = entry.action == "reject" and entry.details.get("version") == str(version)
        if entry.bundle and (said_no or any(move.after == version for move in moves)):
            return entry.bundle
    return ""


def check_not_taken_out(
    model: str, state: State, version: int | None, bundle: str, reason: str = ""
) -> None:
    """Raises `NotApproved` for a no, else `PromotionRefused`; a reason, a person's, lifts both.

    version: None for a bundle that is no version now, as after somebody deleted it.
    """
    against = [one for one in taken_out(state) if _same(one, version, bundle)]
    if not against or reason:
        return
    one = against[-1]
    named = f"{model}@{version}" if version is not None else bundle[:12]
    was = "" if one.version == version else f" as version {one.version}"
    what = (
        f"was {one.what}{was} on {one.line.at:%Y-%m-%d %H:%M} UTC by {shown(one.line.actor)}: "
        f"{shown(one.line.reason)}"
    )
    where = f"models:/{model}/{version}" if version is not None else f"{model}: bundle {named}"
    if one.what == REJECTED:
        command = f'pilotage promote {named} --approve --reason "..."'
        raise NotApproved.at(where, what, f"to ask for it anew: `{command}`")
    command = f'pilotage promote {named} --reason "..."'
    raise PromotionRefused.at(where, what, f"to promote it all the same: `{command}`")


def _same(one: TakenOut, version: int | None, bundle: str) -> bool:
    return one.version == version or bool(bundle and one.bundle == bundle)


def _without(found: Sequence[TakenOut], version: int, bundle: str) -> list[TakenOut]:
    return [one for one in found if not _same(one, version, bundle)]
