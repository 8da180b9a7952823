"""What may become of an alias: promote, roll back, take a promotion back.

The decisions about a registered model, on top of `alias_moves`. Nothing here measures or starts
anything; the flows `promote` and `rollback` ask a bundle its smoke prompt around these moves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from registry.alias_moves import Aliases, AliasMoved, State, holder, shown
from registry.errors import UserError
from registry.ledger import Action, Draft, Entry, Move
from registry.outcome import Champion
from registry.taken_out import check_not_taken_out
from registry.tracking import TAG_BUNDLE, asking_mlflow
from registry.versions import (
    CANDIDATE,
    CHAMPION,
    PREVIOUS,
    TAG_PROMOTED,
    NoBaseline,
    PromotionRefused,
    numbered_version,
    versions_with,
)

TAG_CONFIRMED = "pilotage.confirmed"
"""On a version: hash of the ledger's line whose alias answered a smoke prompt after the move."""

_ALIAS = r"[a-z][a-z0-9_-]{0,49}"
_TAKEN = (PREVIOUS, CANDIDATE, "latest")


@dataclass(frozen=True)
class Backing:
    """What a line of the ledger says about a move beside the move itself."""

    actor: str
    reason: str = ""
    evidence: Mapping[str, str] = field(default_factory=dict)
    policy: str = ""
    waivers: Sequence[str] = ()
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """An alias that points where it should, read back. `entry` None: it did before."""

    version: int
    before: int | None
    changed: bool
    entry: Entry | None


def check_alias(alias: str) -> None:
    """Raises `UserError` for an alias that MLflow reserves or that moves by itself."""
    if not re.fullmatch(_ALIAS, alias) or alias in _TAKEN or re.fullmatch(r"v\d+", alias):
        raise UserError.at(
            f"--alias {alias}",
            "cannot be promoted to",
            f"lower-case letters, digits, - and _, e.g. champion; not {', '.join(_TAKEN)} or vN",
        )


def check_promotable(aliases: Aliases, *, first_release: bool) -> State:
    """Whether a promotion to champion could go on. Ask before the work, not after a night of it.

    A move that was killed half-way is finished. Raises `PromotionRefused` when the champion was
    moved or removed outside, and when there is no champion and this is not said to be the first
    release.
    """
    state = aliases.settle()
    if CHAMPION in state.aliases:
        return state
    model = aliases.model
    if not state.entries:
        _refuse_lost_champion(aliases)
    if not first_release:
        raise NoBaseline.at(
            f"models:/{model}@{CHAMPION}",
            f"registered model {model!r} has no champion, so there is no baseline",
            "for the first release set `promotion.first_release: true` in the release recipe",
        )
    return state


def point_candidate(aliases: Aliases, version: int, bundle: str, backing: Backing) -> None:
    """Alias `candidate`: the newest version that passed, whether or not it is promoted."""
    while True:
        now = aliases.settle().aliases.get(CANDIDATE)
        if now == version:
            return
        move = {CANDIDATE: Move(before=now, after=version)}
        try:
            aliases.move(_draft("register", move, bundle, backing))
        except AliasMoved:
            # Another one was registered in between; the alias compares nothing, the last has it.
            continue
        return


def promote(
    aliases: Aliases,
    version: int,
    bundle: str,
    backing: Backing,
    *,
    expected: int | None,
    alias: str = CHAMPION,
) -> Moved:
    """Point the alias to the version, and `previous` to the champion that it replaces.

    expected: the version that held the alias when the evidence was judged; None for nothing. Where
    the alias points to `version` already nothing is written. Raises `AliasMoved` when it points to
    neither, `PromotionRefused` for one that was rolled back or rejected when no reason is given:
    what a person took out does not come back by itself.
    """
    state = aliases.settle()
    now = state.aliases.get(alias)
    if now == version:
        return Moved(version, _before(state, alias, version), False, state.moved(alias))
    check_not_taken_out(aliases.model, state, version, bundle, backing.reason)
    moves = {alias: Move(before=expected, after=version)}
    if alias == CHAMPION and expected is not None:
        moves[PREVIOUS] = Move(before=state.aliases.get(PREVIOUS), after=expected)
    entry = aliases.move(_draft("promote", moves, bundle, backing))
    return Moved(version, expected, True, entry)


def promoting_run(state: State, version: int) -> str | None:
    """MLflow run of the release whose judgement promoted the version last; None: not told."""
    for entry in reversed(state.entries):
        move = entry.moves.get(CHAMPION)
        if entry.action == "promote" and move is not None and move.after == version:
            return entry.details.get("run")
    return None


def is_confirmed(aliases: Aliases, moved: Moved) -> bool:
    """Whether the alias answered after this very move; a killed promotion lacks that."""
    if moved.entry is None:
        return False
    found = numbered_version(aliases.client, aliases.model, moved.version)
    return found is not None and found.tags.get(TAG_CONFIRMED) == moved.entry.hash


def confirm(aliases: Aliases, moved: Moved, alias: str = CHAMPION) -> None:
    """The alias answered: mark the version with the line, and as one that has been champion."""
    if moved.entry is None:
        return
    tags = {TAG_CONFIRMED: moved.entry.hash}
    if alias == CHAMPION:
        tags[TAG_PROMOTED] = "true"
    with asking_mlflow(f"mark version {moved.version} of {aliases.model}"):
        for name, value in tags.items():
            aliases.client.set_model_version_tag(aliases.model, str(moved.version), name, value)


def restore(aliases: Aliases, moved: Moved, actor: str, reason: str) -> Entry | None:
    """Take a promotion back whose alias did not answer: every alias as it was before that line.

    None where the line was no promotion (there is nothing to go back to). `previous` stays where
    somebody moved it since. Raises `AliasMoved` when the promoted alias was moved since.
    """
    entry = moved.entry
    if entry is None or entry.action != "promote":
        return None
    now = aliases.settle().aliases
    back = {
        alias: Move(before=move.after, after=move.before)
        for alias, move in entry.moves.items()
        if alias != PREVIOUS or now.get(alias) == move.after
    }
    details = {"takes_back": str(entry.sequence)}
    return aliases.move(
        Draft(actor=actor, action="restore", moves=back, reason=reason, details=details)
    )


# -- rollback --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RollbackPlan:
    """Where a rollback goes; `done`: nothing is left to do, and this line did it."""

    version: int
    bundle: str
    before: int | None
    state: State
    done: Entry | None = None


def plan_rollback(aliases: Aliases, to: int | None, owner: str, reason: str) -> RollbackPlan:
    """The version a rollback goes to: `to`, else alias `previous`.

    A champion that was moved outside is adopted in `owner`'s name. Raises `PromotionRefused` when
    there is no such version, when it never was champion, and when the last line is a rollback
    already and no version is named: going back twice by accident is worse than asking.
    """
    model = aliases.model
    state = aliases.settle(owner=owner if to is not None else "", reason=reason)
    now = state.aliases.get(CHAMPION)
    last = state.moved(CHAMPION)
    if to is None and last is not None and last.action == "rollback":
        if state.finished == last and now is not None:
            return RollbackPlan(now, last.bundle, last.moves[CHAMPION].before, state, last)
        raise PromotionRefused.at(
            f"models:/{model}@{CHAMPION}",
            f"was rolled back to {holder(now)} already (line {last.sequence}, {shown(last.actor)}, "
            f"{last.at:%Y-%m-%d %H:%M} UTC)",
            "to go back further name the version: --to VERSION",
        )
    wanted = to if to is not None else state.aliases.get(PREVIOUS)
    if wanted is None:
        raise PromotionRefused.at(
            f"models:/{model}@{PREVIOUS}",
            "there is no earlier champion to go back to",
            f"name a version that was champion: --to VERSION (`pilotage ledger {model}`)",
        )
    version = numbered_version(aliases.client, model, wanted)
    if version is None:
        raise PromotionRefused.at(
            f"models:/{model}/{wanted}", "no such version", f"see `pilotage ledger {model}`"
        )
    if wanted not in champions(state) and version.tags.get(TAG_PROMOTED) != "true":
        raise PromotionRefused.at(
            f"models:/{model}/{wanted}",
            "never was champion, so there is nothing to go back to",
            f"`pilotage promote {model}@{wanted}` asks for its evidence",
        )
    bundle = version.tags.get(TAG_BUNDLE, "")
    if now == wanted and last is not None:
        return RollbackPlan(wanted, bundle, last.moves[CHAMPION].before, state, last)
    return RollbackPlan(wanted, bundle, now, state)


def roll_back(aliases: Aliases, plan: RollbackPlan, backing: Backing) -> Moved:
    """Point `champion` to the plan's version, and `previous` to the champion before that one."""
    older = _before(plan.state, CHAMPION, plan.version)
    held = plan.state.aliases.get(PREVIOUS)
    moves = {CHAMPION: Move(before=plan.before, after=plan.version)}
    if held != older:
        moves[PREVIOUS] = Move(before=held, after=older)
    entry = aliases.move(_draft("rollback", moves, plan.bundle, backing))
    return Moved(plan.version, plan.before, True, entry)


def straighten_previous(aliases: Aliases, plan: RollbackPlan, backing: Backing) -> None:
    """Where the champion was put back by hand, `previous` still names the same version: mend it."""
    held = plan.state.aliases.get(PREVIOUS)
    if held == plan.version:
        moves = {PREVIOUS: Move(before=held, after=_before(plan.state, CHAMPION, plan.version))}
        aliases.move(_draft("rollback", moves, plan.bundle, backing))


def champions(state: State) -> set[int]:
    """Every version that was champion, but for those whose promotion was taken back."""
    lines = {one.sequence: one for one in state.entries if CHAMPION in one.moves}
    taken_back = {
        int(one.details["takes_back"]) for one in lines.values() if one.action == "restore"
    }
    held = {one.moves[CHAMPION].after for number, one in lines.items() if number not in taken_back}
    return {version for version in held if version is not None}


# -- parts -----------------------------------------------------------------------------------


def _draft(action: Action, moves: dict[str, Move], bundle: str, backing: Backing) -> Draft:
    return Draft(
        actor=backing.actor,
        action=action,
        moves=moves,
        bundle=bundle,
        evidence=dict(backing.evidence),
        policy=backing.policy,
        waivers=list(backing.waivers),
        reason=backing.reason,
        details=dict(backing.details),
    )


def _before(state: State, alias: str, version: int) -> int | None:
    """Who held the alias before the version got it the last time by a promotion."""
    for entry in reversed(state.entries):
        move = entry.moves.get(alias)
        if entry.action == "promote" and move is not None and move.after == version:
            return move.before
    return None


def _refuse_lost_champion(aliases: Aliases) -> None:
    """A champion from before the ledger whose alias is gone; only its tag tells of it."""
    model = aliases.model
    promoted = versions_with(aliases.client, model, f"tags.`{TAG_PROMOTED}` = 'true'")
    numbers = sorted(int(version.version) for version in promoted)
    if not numbers:
        # The version itself may have been deleted; releases before the ledger left this tag.
        last = aliases.tags().get("pilotage.last_champion")
        numbers = [int(last)] if last else []
    if numbers:
        raise PromotionRefused.at(
            f"models:/{model}@{CHAMPION}",
            f"version {', '.join(map(str, numbers))} was promoted, but no version holds the alias "
            f"{CHAMPION!r}: somebody removed the alias, or deleted the version that held it",
            f"say which version is in production: `pilotage rollback {model} --to VERSION "
            '--reason "..."`; then release again',
        )


def champion_of(aliases: Aliases, version: int, alias: str = CHAMPION) -> Champion:
    """A version as outcomes name it."""
    found = numbered_version(aliases.client, aliases.model, version)
    bundle = found.tags.get(TAG_BUNDLE, "") if found is not None else ""
    return Champion(version=version, bundle=bundle, alias=alias)
