"""The ledger's lines, and what makes them a chain. Nothing is read or written here.

Each registered model has its own chain: a line holds the SHA-256 of the line before it, so that
no line can be changed, taken out or put in without every later hash being wrong. Where somebody
makes all later hashes anew, or cuts lines off at the end, an anchor tells: number and hash of a
line, kept outside of the table, as tags of the registered model in MLflow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from registry.digests import canonical_json, digest_of
from registry.errors import EXIT_REFUSED, PilotageError, UserError

TAG_LENGTH = "pilotage.ledger.length"
TAG_HEAD = "pilotage.ledger.head"
"""The anchor, on the registered model: number and hash of its newest line."""

NO_HASH = "0" * 64
"""What the first line of a chain names as the line before it."""

Action = Literal["adopt", "register", "promote", "rollback", "restore", "reject", "lapse"]
"""`reject` and `lapse` move no alias: a person said no, or nobody answered in time."""

Moment = Annotated[AwareDatetime, AfterValidator(lambda at: at.astimezone(UTC))]


class Move(BaseModel):
    """Where an alias pointed and where it points now; None where no version holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    before: int | None
    after: int | None


class _Told(BaseModel):
    """What whoever adds a line has to say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    actor: str = Field(description="Who or what did it.")
    action: Action
    moves: dict[str, Move] = Field(description="By alias: champion, previous, candidate.")
    bundle: str = Field(default="", description="Digest of what the line is about.")
    evidence: dict[str, str] = Field(default_factory=dict, description="Digests by kind.")
    policy: str = Field(default="", description="Digest of the policy it was judged by.")
    waivers: list[str] = Field(default_factory=list)
    reason: str = ""
    details: dict[str, str] = Field(default_factory=dict)


class Draft(_Told):
    """A line that is not in a chain yet. Without `at`, the moment of adding it."""

    at: Moment | None = None


class Entry(_Told):
    """One line of a chain."""

    model: str
    sequence: int = Field(ge=1)
    at: Moment = Field(description="UTC.")
    previous: str = Field(description="Hash of the line before; 64 zeros in the first.")
    hash: str = Field(default="", description="SHA-256 of the canonical JSON of everything else.")

    @property
    def body(self) -> str:
        """What is hashed and stored: canonical JSON of everything but the hash.

        Fields that a later version adds are not in a line that was written without them.
        """
        return canonical_json(self._content())

    @property
    def digest(self) -> str:
        """What `hash` has to be."""
        return digest_of(self._content())

    def _content(self) -> dict[str, object]:
        return self.model_dump(mode="json", exclude={"hash"}, exclude_unset=True)


class Head(NamedTuple):
    """The end of a chain: its number of lines and the hash of the last one."""

    length: int
    hash: str


EMPTY = Head(0, NO_HASH)


class LedgerMoved(Exception):
    """Another line was added meanwhile: the chain ends at `head`, not where it was thought to."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self.head = head

    def __str__(self) -> str:
        return f"the ledger ends at line {self.head.length} ({self.head.hash[:12]}) now"


@dataclass(frozen=True)
class Broken:
    """The first line that is not as it was written, and what is wrong with it."""

    sequence: int
    what: str

    def __str__(self) -> str:
        return f"line {self.sequence} {self.what}"


class LedgerDamaged(PilotageError):
    """A row of the table, or a line of an export, is not what was written."""

    exit_status = EXIT_REFUSED

    def __init__(self, place: str, broken: Broken) -> None:
        super().__init__(place, broken)
        self.broken = broken
        self.place = place

    def __str__(self) -> str:
        return f"{self.place}: {self.broken}"


# -- the chain -------------------------------------------------------------------------------


def chained(model: str, draft: Draft, head: Head) -> Entry:
    """The line that `draft` is after `head`."""
    told = draft.model_dump() | {"at": draft.at or datetime.now(UTC)}
    place = {"model": model, "sequence": head.length + 1, "previous": head.hash}
    entry = Entry.model_validate({**told, **place})
    return entry.model_copy(update={"hash": entry.digest})


def aliases_of(entries: Iterable[Entry]) -> dict[str, int | None]:
    """Where each alias should point after these lines."""
    return {alias: move.after for entry in entries for alias, move in entry.moves.items()}


def anchor_of(tags: Mapping[str, str], model: str) -> Head | None:
    """The anchor among a registered model's tags; None where there is none.

    Raises `UserError` for one that only a hand can have written.
    """
    if TAG_LENGTH not in tags or TAG_HEAD not in tags:
        return None
    length, head = tags[TAG_LENGTH], tags[TAG_HEAD]
    if not re.fullmatch("[0-9]{1,9}", length) or not re.fullmatch("[0-9a-f]{64}", head):
        raise UserError.at(
            f"models:/{model}",
            f"its tags {TAG_LENGTH}={length!r} and {TAG_HEAD}={head!r} are no anchor of a ledger",
            "find out who changed them; the last line of an export has the right values",
        )
    return Head(int(length), head)


def verify(entries: Iterable[Entry], anchor: Head | None) -> Broken | None:
    """The first bad line of a chain, given from its first line on; None when it is whole.

    An anchor may be behind: whoever added the last line was killed before moving it. Its two
    tags are not written at once, so the hash may also be of a later line than the number.
    """
    lines: list[Entry] = []
    damage = None
    try:
        for entry in entries:
            lines.append(entry)
    except LedgerDamaged as error:
        damage = error.broken
    return _first_break(lines, anchor) or damage or _beside_anchor(lines, anchor)


def left_behind(lines: int, anchor: Head | None) -> Broken | None:
    """Where MLflow's anchor is further behind than a killed move leaves it; None: it is not.

    Moves of one model take turns, and each begins by setting the anchor, so one line at most has
    none yet. Lines without any anchor are those of a model that MLflow does not know any more.
    """
    behind = lines - (anchor.length if anchor is not None else 0)
    if behind <= 1:
        return None
    if anchor is None:
        return Broken(
            lines,
            "has no anchor in MLflow: the registered model was deleted or renamed, or its tags "
            f"{TAG_HEAD} and {TAG_LENGTH} were removed",
        )
    return Broken(
        lines, f"is {behind - 1} after what a killed move leaves behind the anchor in MLflow"
    )


def misplaced(place: int, sequence: int) -> Broken | None:
    """What it means that the line in this place has that number."""
    if sequence == place:
        return None
    if sequence < place:
        return Broken(sequence, "is there twice, or out of its order")
    return Broken(place, f"is missing: line {sequence} stands in its place")


def parsed(body: str, digest: str) -> Entry:
    """The line that a body is. Raises `ValueError` where it is not a line, letter by letter."""
    try:
        entry = Entry.model_validate_json(body, strict=True).model_copy(update={"hash": digest})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    if entry.body != body:
        raise ValueError("is not written as the ledger writes it")
    return entry


def _first_break(lines: list[Entry], anchor: Head | None) -> Broken | None:
    last = NO_HASH
    for place, entry in enumerate(lines, start=1):
        if entry.hash != entry.digest:
            return Broken(place, "was changed: its content has another hash")
        wrong = misplaced(place, entry.sequence)
        if wrong:
            return wrong
        if entry.previous != last:
            # A line whose hash is named elsewhere is as it was written; the one before is not.
            named = anchor is not None and anchor.hash == entry.hash
            named = named or (place < len(lines) and lines[place].previous == entry.hash)
            if named and place > 1:
                return Broken(
                    place - 1, f"was changed and hashed anew: line {place} names another hash"
                )
            return Broken(place, f"does not follow line {place - 1}: it names another hash")
        if entry.model != lines[0].model:
            return Broken(place, f"belongs to another model, {entry.model!r}")
        last = entry.hash
    return None


def _beside_anchor(lines: list[Entry], anchor: Head | None) -> Broken | None:
    if anchor is None or anchor == EMPTY:
        return None
    if anchor.length > len(lines):
        what = "the ledger was cut off" if lines else "all lines are gone"
        return Broken(
            len(lines) + 1, f"is missing: {what}, the anchor in MLflow says {anchor.length} lines"
        )
    if all(entry.hash != anchor.hash for entry in lines):
        return Broken(
            anchor.length,
            f"is not the one that the anchor in MLflow names ({anchor.hash[:12]}): it, or a line "
            "before it, was changed and every line from there on hashed anew",
        )
    return None
