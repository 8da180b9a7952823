"""How an alias moves: a line of the ledger decides, MLflow's alias follows it.

MLflow has no compare-and-set on an alias and keeps no history. So a move is, under the ledger's
lock of the model:

1. settle: MLflow's aliases are brought to what the ledger says, where a killed move left them
   behind; an alias that somebody moved outside is refused, or adopted when a person owns up to it;
2. compare: every alias of the move still points to where the caller saw it;
3. append the line, in one transaction of the ledger's database. From here on it is decided;
4. set the aliases in MLflow and read them back;
5. anchor: hash and number of the last line as tags of the registered model, the number last.

A process killed after 3 leaves a line whose aliases have not followed, and an anchor that is one
line behind: the next one that asks finishes the move. An anchor that covers the last line says
that the aliases had followed, so a difference then is somebody else's doing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from registry.errors import EXIT_REFUSED, InfrastructureError, PilotageError, UserError
from registry.ledger import (
    EMPTY,
    TAG_HEAD,
    TAG_LENGTH,
    Broken,
    Draft,
    Entry,
    Head,
    Ledger,
    LedgerDamaged,
    Move,
    aliases_of,
    anchor_of,
    left_behind,
    verify,
)
from registry.tracking import asking_mlflow
from registry.versions import CHAMPION, PromotionRefused, numbered_version

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

LOG = logging.getLogger("pilotage")

LOCK_WAIT = 120.0
"""Seconds that a move waits for another one of the same model."""

ACTOR_OUTSIDE = "somebody outside of pilotage"


class AliasMoved(PilotageError):
    """Another move came first: what the caller compared with is not there any more."""

    exit_status = EXIT_REFUSED


@dataclass(frozen=True)
class State:
    """The ledger and MLflow at one moment, in agreement."""

    entries: list[Entry]
    aliases: dict[str, int]
    finished: Entry | None = None
    """A line whose move an earlier process did not live to finish; it is finished now."""

    @property
    def head(self) -> Head:
        return _head(self.entries)

    def moved(self, alias: str) -> Entry | None:
        """The last line that moved the alias."""
        return next((one for one in reversed(self.entries) if alias in one.moves), None)


@dataclass(frozen=True)
class Aliases:
    """The aliases of one registered model."""

    client: MlflowClient
    ledger: Ledger
    model: str

    def settle(self, *, owner: str = "", reason: str = "") -> State:
        """Bring MLflow to what the ledger says; the agreed state. See the module for the order.

        With `owner` and `reason` a champion that was moved outside is adopted in their name. Raises
        `PromotionRefused` where it was moved outside and nobody owns up to it, and where the
        ledger's chain is broken.
        """
        with self.ledger.lock(self.model, LOCK_WAIT):
            return self._settled(owner, reason)

    def move(self, draft: Draft) -> Entry:
        """Move aliases as the draft says, or none. Returns the line that was written.

        Raises `AliasMoved` when one of them does not point to its `before` any more,
        `PromotionRefused` as `settle` does and for a version that was deleted,
        `InfrastructureError` when MLflow does not obey.
        """
        with self.ledger.lock(self.model, LOCK_WAIT):
            state = self._settled()
            for alias, move in draft.moves.items():
                self.check_holder(state, alias, move.before)
                if move.after is not None and not self._is_there(move.after):
                    raise PromotionRefused.at(
                        f"models:/{self.model}/{move.after}",
                        f"no such version any more; {alias} was not moved",
                        f"see `pilotage ledger {self.model}` for the others",
                    )
            entry = self._append(draft, state.head)
            self._follow(entry, entry.moves)
            return entry

    def check_holder(self, state: State, alias: str, expected: int | None) -> None:
        """Raises `AliasMoved`, naming who came first, when the alias points elsewhere."""
        if state.aliases.get(alias) == expected:
            return
        by = state.moved(alias)
        who = ""
        if by is not None:
            at = f"{by.at:%Y-%m-%d %H:%M} UTC"
            who = f" (line {by.sequence}, {by.action} by {shown(by.actor)}, {at})"
        raise AliasMoved(
            f"models:/{self.model}@{alias}: points to {holder(state.aliases.get(alias))}{who}, not "
            f"to {holder(expected)}: another move came first, and nothing was moved by this one"
        )

    def tags(self) -> dict[str, str]:
        """Tags of the registered model; none where there is no such model."""
        registered = self._registered()
        return dict(registered.tags) if registered is not None else {}

    # -- parts -----------------------------------------------------------------------------

    def _settled(self, owner: str = "", reason: str = "") -> State:
        found, anchor = self._read()
        entries, broken = self._lines(anchor)
        if broken is not None:
            raise PromotionRefused.at(
                f"ledger of {self.model}",
                f"{broken}; nothing is moved until somebody has looked into it",
                f"compare with an export: `pilotage ledger {self.model} --verify FILE`",
            )
        finished = None
        if len(entries) - (anchor.length if anchor is not None else 0) == 1:
            finished = entries[-1]
            self._finish(finished, found, owner)
            found, _ = self._read()
        told = aliases_of(entries)
        odd = {
            alias: Move(before=told.get(alias), after=found.get(alias))
            for alias in {*told, *found}
            if told.get(alias) != found.get(alias)
        }
        if not odd:
            return State(entries, found, finished)
        if entries and CHAMPION in odd and not owner:
            raise self._lost(
                odd[CHAMPION], next(e for e in reversed(entries) if CHAMPION in e.moves)
            )
        draft = Draft(
            actor=owner or (ACTOR_OUTSIDE if entries else "pilotage"),
            action="adopt",
            moves=odd,
            reason=reason or _adopted(entries, odd),
        )
        entry = self._append(draft, _head(entries))
        self._anchor(entry)
        LOG.info("%s: the ledger took over %s", self.model, spelled(odd))
        return State([*entries, entry], found, finished)

    def lines(self) -> tuple[list[Entry], Broken | None]:
        """The lines, and what is wrong with them beside MLflow's anchor. Changes nothing."""
        return self._lines(self._read()[1])

    def _lines(self, anchor: Head | None) -> tuple[list[Entry], Broken | None]:
        try:
            entries = self.ledger.entries(self.model)
        except LedgerDamaged as damaged:
            return [], damaged.broken
        return entries, verify(entries, anchor) or left_behind(len(entries), anchor)

    def _append(self, draft: Draft, head: Head) -> Entry:
        try:
            return self.ledger.append(self.model, draft, head)
        except UnicodeEncodeError:
            # A terminal hands over bytes that are no UTF-8 as half characters.
            raise UserError.at(
                f"ledger of {self.model}", "reason or actor is no text", "write it in UTF-8"
            ) from None

    def _finish(self, line: Entry, found: Mapping[str, int], owner: str) -> None:
        """Do what a killed move left undone.

        An alias that somebody moved since, or whose version was deleted since, stays as it is. Is
        it the champion's, then so do all of the line's, and only with an `owner`, who says so.
        """
        stays = set()
        for alias, move in line.moves.items():
            gone = move.after is not None and not self._is_there(move.after)
            if not gone and found.get(alias) in (move.before, move.after):
                continue
            if alias == CHAMPION:
                if not owner:
                    raise self._lost(Move(before=move.after, after=found.get(alias)), line, gone)
                stays = set(line.moves)
                break
            stays.add(alias)
        done = {alias: move for alias, move in line.moves.items() if alias not in stays}
        if done:
            LOG.warning(
                "%s: finished what line %d of the ledger decided (%s)",
                self.model, line.sequence, spelled(done),
            )  # fmt: skip
        self._follow(line, done)

    def _follow(self, entry: Entry, moves: Mapping[str, Move]) -> None:
        """MLflow's aliases as a line says, the champion last, each read back; then the anchor."""
        for alias in sorted(moves, key=lambda name: name == CHAMPION):
            self._point(alias, moves[alias].after)
        self._anchor(entry)

    def _is_there(self, version: int) -> bool:
        return numbered_version(self.client, self.model, version) is not None

    def _point(self, alias: str, version: int | None) -> None:
        found, _ = self._read()
        if found.get(alias) == version:
            return
        with asking_mlflow(f"move alias {alias} of {self.model}"):
            if version is None:
                self.client.delete_registered_model_alias(self.model, alias)
            else:
                self.client.set_registered_model_alias(self.model, alias, str(version))
        found, _ = self._read()
        if found.get(alias) != version:
            raise InfrastructureError(
                f"MLflow: alias {alias} of {self.model} was set to {holder(version)} and reads as "
                f"{holder(found.get(alias))}"
            )

    def _anchor(self, entry: Entry) -> None:
        with asking_mlflow(f"anchor the ledger of {self.model}"):
            self.client.set_registered_model_tag(self.model, TAG_HEAD, entry.hash)
            self.client.set_registered_model_tag(self.model, TAG_LENGTH, str(entry.sequence))

    def _read(self) -> tuple[dict[str, int], Head | None]:
        """Aliases and anchor as MLflow has them; nothing of either for a model that is not there.

        Searching shows no aliases; the registered model, asked for by name, does.
        """
        registered = self._registered()
        if registered is None:
            return {}, None
        aliases = {name: int(version) for name, version in registered.aliases.items()}
        return aliases, anchor_of(registered.tags, self.model)

    def _registered(self) -> RegisteredModel | None:
        from mlflow.exceptions import MlflowException

        with asking_mlflow(f"read the aliases of {self.model}"):
            try:
                return self.client.get_registered_model(self.model)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return None
                raise

    def _lost(self, odd: Move, last: Entry, gone: bool = False) -> PromotionRefused:
        where = f"models:/{self.model}@{CHAMPION}"
        since = f"line {last.sequence} of the ledger, {last.action} by {shown(last.actor)}"
        if gone:
            what = (
                f"version {odd.before} was promoted ({since}), but somebody deleted it since; "
                f"{CHAMPION!r} points to {holder(odd.after)}"
            )
        elif odd.after is None:
            what = (
                f"version {odd.before} was promoted ({since}), but no version holds the alias "
                f"{CHAMPION!r}: somebody removed the alias, or deleted the version that held it"
            )
        else:
            what = (
                f"points to version {odd.after}; version {odd.before} was promoted ({since}): "
                "somebody moved the alias outside of pilotage"
            )
        return PromotionRefused.at(
            where,
            what,
            f"say which version is in production: `pilotage rollback {self.model} --to VERSION "
            '--reason "..."`; then release again',
        )


def holder(version: int | None) -> str:
    return "nothing" if version is None else f"version {version}"


def shown(text: str, longest: int = 200) -> str:
    """What a person wrote, or a model said, on one line and without what a terminal obeys."""
    line = " ".join(text.split())
    line = "".join(one if one.isprintable() else "\ufffd" for one in line)
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def spelled(moves: Mapping[str, Move]) -> str:
    """`champion: version 3 -> version 4, previous: ...`"""
    if not moves:
        return "no alias moved"
    return ", ".join(
        f"{alias}: {holder(move.before)} -> {holder(move.after)}"
        for alias, move in sorted(moves.items())
    )


def told(entry: Entry) -> str:
    """One line of the ledger as a sentence."""
    reason = f": {entry.reason}" if entry.reason else ""
    return (
        f"line {entry.sequence}, {entry.at:%Y-%m-%d %H:%M} UTC, {entry.action} by {entry.actor}: "
        f"{spelled(entry.moves)}{reason}"
    )


def _head(entries: Sequence[Entry]) -> Head:
    return Head(entries[-1].sequence, entries[-1].hash) if entries else EMPTY


def _adopted(entries: Sequence[Entry], odd: Mapping[str, Move]) -> str:
    if not entries:
        return "stood so when the ledger began"
    return f"moved outside of pilotage: {spelled(odd)}"
