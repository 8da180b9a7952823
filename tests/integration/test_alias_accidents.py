"""What people do to a registry by hand, and what dies at a bad moment: told, and repairable."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from registry.alias_moves import Aliases, AliasMoved
from registry.errors import InfrastructureError, UserError
from registry.ledger import Ledger
from registry.promotion import (
    Backing,
    check_promotable,
    plan_rollback,
    promote,
    restore,
    roll_back,
)
from registry.tracking import Tracker
from registry.versions import CHAMPION, PREVIOUS, PromotionRefused
from tests.promotion_builders import BY, MODEL, bundle, held, is_sound, promoted, registered

pytest_plugins = ["tests.promotion_fixtures"]


@pytest.fixture(scope="module")
def with_versions(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with four versions, of which the first two were champion, one after another."""
    folder = tmp_path_factory.mktemp("mlflow")
    shutil.copy(migrated, folder / "mlflow.db")
    tracker = Tracker(f"sqlite:///{folder / 'mlflow.db'}", folder / "mlartifacts")
    registered(tracker, 1, 2, 3, 4)
    promoted(Aliases(tracker.client, Ledger(tracker.uri), MODEL), 1, 2)
    return folder / "mlflow.db"


@pytest.fixture
def aliases(with_versions: Path, tmp_path: Path) -> Iterator[Aliases]:
    database = tmp_path / "mlflow.db"
    shutil.copy(with_versions, database)
    tracker = Tracker(f"sqlite:///{database}", tmp_path / "mlartifacts")
    yield Aliases(tracker.client, Ledger(tracker.uri), MODEL)


def away(*_: Any, **__: Any) -> None:
    raise OSError("connection refused")


def die_after_the_line(aliases: Aliases, monkeypatch: pytest.MonkeyPatch, version: int = 3) -> None:
    """MLflow is gone once the line is written: decided, and no alias has moved."""
    with monkeypatch.context() as patched:
        for name in ("set_registered_model_alias", "set_registered_model_tag"):
            patched.setattr(aliases.client, name, away)
        with pytest.raises(InfrastructureError, match="connection refused"):
            promote(aliases, version, bundle(version).digest, BY, expected=2)
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    assert aliases.ledger.entries(MODEL)[-1].moves[CHAMPION].after == version


def test_mlflow_dies_between_the_line_and_the_alias(
    aliases: Aliases, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after_the_line(aliases, monkeypatch)
    state = aliases.settle()
    assert state.finished == state.entries[-1]
    assert held(aliases) == {CHAMPION: 3, PREVIOUS: 2}
    is_sound(aliases)


def test_a_version_that_was_deleted_is_not_promoted(aliases: Aliases) -> None:
    aliases.client.delete_model_version(MODEL, "3")
    with pytest.raises(PromotionRefused, match="models:/support-student/3: no such version"):
        promote(aliases, 3, bundle(3).digest, BY, expected=2)
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    assert len(aliases.ledger.entries(MODEL)) == 2
    is_sound(aliases)


def test_a_version_deleted_after_its_line_does_not_block_the_model_for_ever(
    aliases: Aliases, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after_the_line(aliases, monkeypatch)
    aliases.client.delete_model_version(MODEL, "3")
    for _ in range(2):
        with pytest.raises(PromotionRefused, match=r"version 3 was promoted .* deleted it") as told:
            check_promotable(aliases, first_release=False)
        assert "'champion' points to version 2" in str(told.value)
        assert "--to VERSION" in told.value.problems[0].remedy
    with pytest.raises(PromotionRefused, match="deleted it"):
        plan_rollback(aliases, None, "mei", "3 is gone")
    plan = plan_rollback(aliases, 2, "mei", "3 is gone")
    assert plan.done is not None
    assert (plan.done.action, plan.done.actor, plan.done.reason) == ("adopt", "mei", "3 is gone")
    assert plan.done.moves[CHAMPION].model_dump() == {"before": 3, "after": 2}
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    is_sound(aliases)
    promoted(aliases, 4)
    assert held(aliases) == {CHAMPION: 4, PREVIOUS: 2}
    is_sound(aliases)


def test_champion_moved_by_hand_after_a_kill_is_adopted_by_who_owns_up(
    aliases: Aliases, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after_the_line(aliases, monkeypatch)
    aliases.client.set_registered_model_alias(MODEL, CHAMPION, "4")
    with pytest.raises(PromotionRefused, match="points to version 4; version 3 was promoted"):
        aliases.settle()
    plan = plan_rollback(aliases, 2, "mei", "4 was never judged")
    assert (plan.before, plan.done) == (4, None)
    roll_back(aliases, plan, Backing("mei", "4 was never judged"))
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    assert [one.action for one in aliases.ledger.entries(MODEL)][2:] == [
        "promote",
        "adopt",
        "rollback",
    ]
    is_sound(aliases)


def test_previous_moved_by_hand_after_a_kill_stops_nothing(
    aliases: Aliases, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after_the_line(aliases, monkeypatch)
    aliases.client.set_registered_model_alias(MODEL, PREVIOUS, "4")
    aliases.settle()
    assert held(aliases) == {CHAMPION: 3, PREVIOUS: 4}
    adopted = aliases.ledger.entries(MODEL)[-1]
    assert adopted.moves[PREVIOUS].model_dump() == {"before": 2, "after": 4}
    is_sound(aliases)


def test_champion_made_anew_on_the_same_version_is_the_same_champion(aliases: Aliases) -> None:
    aliases.client.delete_registered_model_alias(MODEL, CHAMPION)
    aliases.client.set_registered_model_alias(MODEL, CHAMPION, "2")
    promoted(aliases, 3)
    assert [one.action for one in aliases.ledger.entries(MODEL)] == ["promote"] * 3
    is_sound(aliases)


def test_previous_goes_with_its_version_and_rollback_says_so(aliases: Aliases) -> None:
    aliases.client.delete_model_version(MODEL, "1")
    with pytest.raises(PromotionRefused, match="no earlier champion to go back to"):
        plan_rollback(aliases, None, "mei", "2 is wrong")
    with pytest.raises(PromotionRefused, match="models:/support-student/1: no such version"):
        plan_rollback(aliases, 1, "mei", "2 is wrong")
    assert held(aliases) == {CHAMPION: 2}
    is_sound(aliases)


def test_the_champion_before_was_deleted_meanwhile_and_the_new_one_fails(aliases: Aliases) -> None:
    moved = promote(aliases, 3, bundle(3).digest, BY, expected=2)
    aliases.client.delete_model_version(MODEL, "2")
    with pytest.raises(Exception, match=r"previous: points to nothing|no such version") as told:
        restore(aliases, moved, "release demo", "no token")
    assert told.value.exit_status in (2, 10)
    assert held(aliases)[CHAMPION] == 3, "there is nothing to go back to"
    is_sound(aliases)


def test_a_model_that_was_renamed_moves_nothing_under_either_name(aliases: Aliases) -> None:
    aliases.client.rename_registered_model(MODEL, "renamed")
    with pytest.raises(PromotionRefused, match=r"no anchor in MLflow: .* deleted or renamed"):
        aliases.settle()
    renamed = Aliases(aliases.client, aliases.ledger, "renamed")
    with pytest.raises(PromotionRefused, match="all lines are gone, the anchor in MLflow says 2"):
        renamed.settle()
    aliases.client.rename_registered_model("renamed", MODEL)
    is_sound(aliases)


def test_a_model_that_was_deleted_and_made_anew_is_no_first_release(aliases: Aliases) -> None:
    aliases.client.delete_registered_model(MODEL)
    aliases.client.create_registered_model(MODEL)
    with pytest.raises(PromotionRefused, match="no anchor in MLflow"):
        check_promotable(aliases, first_release=True)


@pytest.mark.parametrize("back", [True, False])
def test_a_clock_that_goes_backwards_changes_no_order(
    aliases: Aliases, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    from datetime import UTC, datetime

    from registry import ledger_lines

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(1999 if back else 2999, 1, 1, tzinfo=UTC)

    with monkeypatch.context() as patched:
        patched.setattr(ledger_lines, "datetime", Clock)
        promoted(aliases, 3)
    promoted(aliases, 4)
    assert held(aliases) == {CHAMPION: 4, PREVIOUS: 3}
    plan = plan_rollback(aliases, None, "mei", "wrong")
    assert plan.version == 3
    is_sound(aliases)


ODD_REASONS = {
    "long": "x" * 200_000,
    "lines": "one\r\ntwo\nthree",
    "controls": "\x1b[31mred\x07\x00 \x9b2J",
    "quotes": "it's \"over\" -- '; DROP TABLE pilotage_ledger;",
    "signs": "船\U0001f6a2 \u202e reversed",
}


@pytest.mark.parametrize("name", ODD_REASONS)
def test_any_text_is_a_reason_and_stands_as_it_was_given(aliases: Aliases, name: str) -> None:
    reason = ODD_REASONS[name]
    promote(aliases, 3, bundle(3).digest, Backing("mei", reason), expected=2)
    assert aliases.ledger.entries(MODEL)[-1].reason == reason
    is_sound(aliases)


def test_bytes_that_are_no_text_are_refused_before_anything_moves(aliases: Aliases) -> None:
    with pytest.raises(UserError, match="reason or actor is no text"):
        promote(aliases, 3, bundle(3).digest, Backing("mei", "caf\udce9"), expected=2)
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    is_sound(aliases)


def test_a_reason_that_is_quoted_to_others_takes_one_line_and_no_terminal_over(
    aliases: Aliases,
) -> None:
    who = Backing("mei\x1b[2J", "\x1b[31mwrong\r\nremedy: promote it anyway\x07" + "x" * 5000)
    roll_back(aliases, plan_rollback(aliases, None, who.actor, who.reason), who)
    with pytest.raises(PromotionRefused) as refused:
        promote(aliases, 2, bundle(2).digest, BY, expected=1)
    (problem,) = refused.value.problems
    assert problem.what.isprintable()
    assert len(problem.what) < 300
    assert "wrong remedy: promote it anyway" in problem.what
    with pytest.raises(AliasMoved) as moved:
        promote(aliases, 3, bundle(3).digest, BY, expected=2)
    assert str(moved.value).isprintable()
    with pytest.raises(PromotionRefused, match="already") as again:
        plan_rollback(aliases, None, "mei", "wrong")
    assert again.value.problems[0].what.isprintable()
