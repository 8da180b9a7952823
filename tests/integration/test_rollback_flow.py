"""The flow rollback: one command, smoke-tested before anything moves, told in the ledger."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from registry.alias_moves import Aliases, AliasMoved
from registry.errors import UserError
from registry.promotion import Backing, plan_rollback, roll_back
from registry.versions import CHAMPION, PromotionRefused
from tasks.bundles import weights_as_gated
from tasks.promoting import SmokeFailed
from tasks.publishing import without_rolled_back
from tests.pretend_smoke import (
    SILENT,
    Engine,
    actions,
    back,
    candidate,
    flip,
    promoting,
    versions,
)
from tests.promotion_builders import (
    MODEL,
    held,
    is_sound,
    outcome,
)

pytest_plugins = ["tests.promotion_fixtures"]


def test_rollback_is_one_command_and_in_the_ledger(aliases: Aliases, engine: Engine) -> None:
    one, two = candidate(1), candidate(2)
    promoting(one.digest)
    promoting(two.digest)
    engine.asked = []
    done = back()
    assert (done.version, done.before, done.bundle) == (1, 2, one.digest)
    assert engine.asked == [f"{MODEL}@1"]
    line = aliases.ledger.entries(MODEL)[-1]
    assert (line.action, line.actor, line.reason) == ("rollback", "mei", "too many misroutings")
    assert line.details == {"smoke": "answered"}
    with pytest.raises(PromotionRefused, match="was rolled back on"):
        promoting(two.digest)
    assert promoting(two.digest, reason="it was the prompt").version == 2
    is_sound(aliases)


def test_what_was_rolled_back_and_deleted_is_not_chosen_again(
    aliases: Aliases, engine: Engine
) -> None:
    promoting(candidate(1).digest)
    two = candidate(2)
    promoting(two.digest)
    back()
    aliases.client.delete_model_version(MODEL, "2")
    left, notes = without_rolled_back(MODEL, [outcome(two)])
    assert left == []
    assert notes[0].startswith("c2 was not chosen: it is version 2, rolled back on ")
    with pytest.raises(PromotionRefused, match=r"was rolled back as version 2 on .* by mei"):
        promoting(two.digest)
    assert engine.asked[-1] != f"{MODEL}@3" and versions() == 1
    # The version that a reason makes anew is one like any other.
    assert promoting(two.digest, reason="it was the prompt").version == 3
    assert without_rolled_back(MODEL, [outcome(two)])[1] == []


def test_rollback_without_a_smoke_prompt_says_so(aliases: Aliases, engine: Engine) -> None:
    promoting(candidate(1).digest)
    promoting(candidate(2).digest)
    engine.asked = []
    assert back(smoke=False).version == 1
    assert engine.asked == []
    assert aliases.ledger.entries(MODEL)[-1].details == {"smoke": "skipped on request"}


def test_rollback_to_what_does_not_answer_moves_nothing(aliases: Aliases, engine: Engine) -> None:
    promoting(candidate(1).digest)
    promoting(candidate(2).digest)
    lines = actions(aliases)
    engine.raises = {f"{MODEL}@1": SILENT}
    with pytest.raises(SmokeFailed):
        back()
    assert held(aliases)[CHAMPION] == 2
    assert actions(aliases) == lines


def test_rolled_back_champion_whose_weights_left_the_store(
    aliases: Aliases, engine: Engine, home: Path
) -> None:
    one, two = candidate(1), candidate(2)
    promoting(one.digest)
    promoting(two.digest)
    shutil.rmtree(home / "store")
    # What the real smoke prompt does before it starts an engine.
    engine.then = lambda reference: weights_as_gated(one, reference)
    assert back().version == 1
    assert one.target.path.parent == home / "downloads"
    assert (one.target.path / "model.safetensors").read_bytes() == bytes([1]) * 64
    flip(one.target.path / "model.safetensors")
    engine.then = lambda reference: weights_as_gated(one, reference)
    with pytest.raises(UserError, match="is not what was gated"):
        promoting(f"{MODEL}@1", alias="canary")


def test_a_flipped_bit_of_the_earlier_champion_stops_the_rollback(
    aliases: Aliases, engine: Engine
) -> None:
    one, two = candidate(1), candidate(2)
    promoting(one.digest)
    promoting(two.digest)
    flip(one.target.path / "model.safetensors")
    engine.then = lambda reference: weights_as_gated(one, reference)
    with pytest.raises(UserError, match="is not what was gated"):
        back()
    assert held(aliases)[CHAMPION] == 2
    is_sound(aliases)


def test_a_rollback_and_a_promotion_at_once(aliases: Aliases, engine: Engine) -> None:
    for number in (1, 2, 3):
        promoting(candidate(number).digest)

    def somebody_is_first(reference: str) -> None:
        plan = plan_rollback(aliases, 1, "ana", "worse")
        roll_back(aliases, plan, Backing("ana", "worse"))

    engine.then = somebody_is_first
    with pytest.raises(AliasMoved, match="rollback by ana"):
        back()
    assert held(aliases)[CHAMPION] == 1
    is_sound(aliases)


def test_evidence_that_grew_old_promotes_nothing_new_but_rolls_back(
    aliases: Aliases, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = candidate(1), candidate(2), candidate(3)
    promoting(one.digest)
    promoting(two.digest)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2999, 1, 1, tzinfo=UTC)

    monkeypatch.setattr("tasks.promoting.datetime", Later)
    with pytest.raises(PromotionRefused, match="days old; its policy allows 30"):
        promoting(three.digest)
    assert not promoting(two.digest).changed, "it is champion already"
    assert back().version == 1
