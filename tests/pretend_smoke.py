"""The flows promote and rollback, asked with one line, and what stands for the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flows.forms import PromoteRequest, RollbackRequest
from flows.promote import promote_bundle
from flows.rollback import roll_back_model
from registry.alias_moves import Aliases
from registry.alias_outcome import AliasOutcome, SmokeAnswer
from registry.bundle import Bundle
from registry.provenance import hardware_fingerprint
from registry.versions import CHAMPION
from tasks.bundles import tracker
from tasks.promoting import SmokeFailed
from tests.promotion_builders import (
    MODEL,
    facts,
    judged,
)


@dataclass
class Engine:
    """Answers every smoke prompt, unless told to raise at a reference."""

    asked: list[str] = field(default_factory=list)
    raises: dict[str, BaseException] = field(default_factory=dict)
    then: Callable[[str], None] = lambda reference: None

    def __call__(
        self, reference: str, expected: str, messages: list[dict[str, str]]
    ) -> SmokeAnswer:
        self.asked.append(reference)
        self.then(reference)
        if reference in self.raises:
            raise self.raises[reference]
        return SmokeAnswer(
            reference=reference, bundle=expected, text="In Oslo.", tokens=3,
            prompt=messages[-1]["content"] if messages else "", startup_seconds=1.0, seconds=1.5,
            hardware=hardware_fingerprint(),
        )  # fmt: skip


THROUGH = f"{MODEL}@{CHAMPION}"
SILENT = SmokeFailed("no token\nwithin 120 s")


def promoting(bundle: str, **words: object) -> AliasOutcome:
    done = promote_bundle.fn(PromoteRequest.model_validate({"bundle": bundle, **words}))
    assert done is not None
    return done


def back(**words: object) -> AliasOutcome:
    request = {"model": MODEL, "reason": "too many misroutings", **words}
    return roll_back_model.fn(RollbackRequest.model_validate(request))


def candidate(number: int, champion: int | None = None) -> Bundle:
    told = facts(release=f"release {number}", champion=champion)
    return judged(tracker(), number, told=told)[0]


def actions(aliases: Aliases) -> list[str]:
    return [line.action for line in aliases.ledger.entries(MODEL)]


def versions() -> int:
    return len(tracker().client.search_model_versions(f"name = '{MODEL}'"))


def flip(file: Path) -> None:
    """One bit of a file is another."""
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(bytes(content))
