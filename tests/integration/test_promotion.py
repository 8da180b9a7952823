"""Aliases on a real MLflow with SQLite: never guessed, moved once, explained, taken back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.alias_moves import Aliases, AliasMoved
from registry.errors import InfrastructureError
from registry.ledger import Ledger
from registry.outcome import Champion, Verdict
from registry.promotion import (
    Backing,
    champion_of,
    champions,
    check_alias,
    check_promotable,
    confirm,
    is_confirmed,
    plan_rollback,
    point_candidate,
    promote,
    restore,
    roll_back,
    straighten_previous,
)
from registry.taken_out import taken_out
from registry.tracking import Tracker
from registry.versions import (
    CANDIDATE,
    CHAMPION,
    PREVIOUS,
    TAG_PROMOTED,
    PromotionRefused,
    current_champion,
    find_version,
    register_version,
    standing,
)
from tests.promotion_builders import BY, MODEL, bundle, held, is_sound, passed, promoted, registered

pytest_plugins = ["tests.promotion_fixtures"]


@pytest.fixture
def aliases(tracker: Tracker) -> Aliases:
    return Aliases(tracker.client, Ledger(tracker.uri), MODEL)


# -- the six situations ----------------------------------------------------------------------


def test_normal_release(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1, 2, 3, 4)
    promoted(aliases, 1, 2, 3)
    assert held(aliases) == {CHAMPION: 3, PREVIOUS: 2}
    moved = promote(aliases, 4, bundle(4).digest, BY, expected=3)
    confirm(aliases, moved)
    assert (moved.changed, moved.before) == (True, 3)
    assert held(aliases) == {CHAMPION: 4, PREVIOUS: 3}
    assert champion_of(aliases, 4) == Champion(version=4, bundle=bundle(4).digest)
    version = tracker.client.get_model_version(MODEL, "4")
    assert version.tags[TAG_PROMOTED] == "true"
    assert version.tags["pilotage.evidence.accuracy"] == "acc4"
    assert version.tags["pilotage.policy"] == "demo"
    line = aliases.settle().entries[-1]
    assert (line.actor, line.action, line.bundle) == ("release demo", "promote", bundle(4).digest)
    assert line.evidence == {"accuracy": "acc"}
    is_sound(aliases)


@pytest.mark.parametrize("lost", ["alias removed", "version deleted"])
@pytest.mark.parametrize("first_release", [True, False])
def test_promoted_version_without_alias_stops(
    tracker: Tracker, aliases: Aliases, lost: str, first_release: bool
) -> None:
    registered(tracker, 1)
    promoted(aliases, 1)
    if lost == "alias removed":
        tracker.client.delete_registered_model_alias(MODEL, CHAMPION)
    else:
        tracker.client.delete_model_version(MODEL, "1")
    with pytest.raises(PromotionRefused, match="version 1 was promoted") as refused:
        check_promotable(aliases, first_release=first_release)
    assert "pilotage rollback" in refused.value.problems[0].remedy
    assert len(aliases.ledger.entries(MODEL)) == 1


@pytest.mark.parametrize("lost", ["alias removed", "version deleted"])
def test_promoted_before_there_was_a_ledger_and_lost(
    tracker: Tracker, aliases: Aliases, lost: str
) -> None:
    registered(tracker, 1)
    if lost == "alias removed":
        tracker.client.set_model_version_tag(MODEL, "1", TAG_PROMOTED, "true")
    else:
        tracker.client.set_registered_model_tag(MODEL, "pilotage.last_champion", "1")
        tracker.client.delete_model_version(MODEL, "1")
    with pytest.raises(PromotionRefused, match="version 1 was promoted"):
        check_promotable(aliases, first_release=True)


def test_first_release(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1)
    assert check_promotable(aliases, first_release=True).aliases == {}
    moved = promote(aliases, 1, bundle(1).digest, BY, expected=None)
    assert (moved.version, moved.before) == (1, None)
    assert held(aliases) == {CHAMPION: 1}


def test_new_model_without_the_flag_is_refused(tracker: Tracker, aliases: Aliases) -> None:
    with pytest.raises(PromotionRefused, match="has no champion, so there is no baseline"):
        check_promotable(aliases, first_release=False)
    assert not tracker.client.search_registered_models()
    tracker.client.create_registered_model(MODEL)
    with pytest.raises(PromotionRefused, match="has no champion"):
        check_promotable(aliases, first_release=False)


def test_unreachable_registry_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = Tracker("http://127.0.0.1:9", tmp_path)
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    with pytest.raises(InfrastructureError, match="could not read the aliases"):
        check_promotable(Aliases(away.client, ledger, MODEL), first_release=True)
    with pytest.raises(InfrastructureError, match="could not read alias"):
        standing(away.client, MODEL)
    with pytest.raises(InfrastructureError):
        away.release_run(MODEL, "r1", "demo")
    with pytest.raises(InfrastructureError, match="sqlite"):
        _ = Tracker("sqlite:////proc/none/mlflow.db", tmp_path).client


def test_three_answers_are_told_apart(tracker: Tracker, aliases: Aliases) -> None:
    nothing = standing(tracker.client, MODEL)
    assert (nothing.model_exists, nothing.version) == (False, None)
    registered(tracker, 1)
    bare = standing(tracker.client, MODEL)
    assert (bare.model_exists, bare.version) == (True, None)
    promoted(aliases, 1)
    champion = current_champion(tracker.client, MODEL)
    assert champion is not None
    assert int(champion.version) == 1


# -- once, and only what passed --------------------------------------------------------------


def test_same_promotion_twice_is_one_version_and_one_line(
    tracker: Tracker, aliases: Aliases
) -> None:
    registered(tracker, 1, 2)
    promoted(aliases, 1, 2)
    before = held(aliases)
    again = promote(aliases, 2, bundle(2).digest, BY, expected=2)
    assert (again.changed, again.version, again.before) == (False, 2, 1)
    assert is_confirmed(aliases, again)
    assert held(aliases) == before
    registered(tracker, 2)
    assert len(tracker.client.search_model_versions(f"name = '{MODEL}'")) == 2
    assert [one.action for one in aliases.settle().entries] == ["promote", "promote"]


def test_candidate_alias_is_kept_by_promotion(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1)
    point_candidate(aliases, 1, bundle(1).digest, BY)
    point_candidate(aliases, 1, bundle(1).digest, BY)
    assert held(aliases) == {CANDIDATE: 1}
    promoted(aliases, 1)
    assert held(aliases) == {CANDIDATE: 1, CHAMPION: 1}
    assert [one.action for one in aliases.settle().entries] == ["register", "promote"]
    # The downloaded version says which bundle it is.
    source = Path(tracker.client.get_model_version_download_uri(MODEL, "1").removeprefix("file:"))
    assert json.loads((source / "bundle.json").read_text())["digest"] == bundle(1).digest


def test_only_a_pass_becomes_a_version(tracker: Tracker) -> None:
    failed = passed(1).model_copy(update={"verdict": Verdict.FAIL, "reasons": ["too slow"]})
    with pytest.raises(PromotionRefused, match="too slow"):
        register_version(tracker.client, MODEL, failed, model_id="m", run_id="r", tags={})
    assert not tracker.client.search_registered_models()
    assert find_version(tracker.client, MODEL, bundle(1).digest) is None


@pytest.mark.parametrize("alias", ["candidate", "previous", "latest", "v7", "Champion", "", "a b"])
def test_aliases_that_nobody_may_promote_to(alias: str) -> None:
    from registry.errors import UserError

    with pytest.raises(UserError, match="cannot be promoted to"):
        check_alias(alias)


def test_another_alias_moves_alone(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1, 2)
    promoted(aliases, 1)
    check_alias("canary")
    promote(aliases, 2, bundle(2).digest, BY, expected=None, alias="canary")
    assert held(aliases) == {CHAMPION: 1, "canary": 2}


# -- somebody else was there -----------------------------------------------------------------


def test_the_second_of_two_is_told_who_was_first(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1, 2, 3)
    promoted(aliases, 1, 2)
    with pytest.raises(AliasMoved, match=r"version 2 \(line 2, promote by release demo") as lost:
        promote(aliases, 3, bundle(3).digest, BY, expected=1)
    assert lost.value.exit_status == 10
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    assert len(aliases.settle().entries) == 2


def test_a_champion_moved_by_hand_stops_promotions_until_somebody_owns_up(
    tracker: Tracker, aliases: Aliases
) -> None:
    registered(tracker, 1, 2, 3)
    promoted(aliases, 1, 2)
    tracker.client.set_registered_model_alias(MODEL, CHAMPION, "1")
    with pytest.raises(PromotionRefused, match="points to version 1; version 2 was promoted"):
        promote(aliases, 3, bundle(3).digest, BY, expected=2)
    plan = plan_rollback(aliases, 1, "mei", "2 was wrong about customs")
    assert plan.done is not None
    assert (plan.done.action, plan.done.actor) == ("adopt", "mei")
    assert plan.done.moves[CHAMPION].model_dump() == {"before": 2, "after": 1}
    straighten_previous(aliases, plan, Backing("mei", "2 was wrong about customs"))
    assert held(aliases) == {CHAMPION: 1}, "not both on 1"
    # By hand or by us: what a person took out does not come back by itself.
    with pytest.raises(PromotionRefused, match="2 was wrong about customs"):
        promote(aliases, 2, bundle(2).digest, BY, expected=1)
    promoted(aliases, 3)
    assert held(aliases) == {CHAMPION: 3, PREVIOUS: 1}
    is_sound(aliases)


def test_an_alias_of_less_weight_moved_by_hand_is_noted(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1, 2)
    promoted(aliases, 1, 2)
    tracker.client.delete_registered_model_alias(MODEL, PREVIOUS)
    line = aliases.settle().entries[-1]
    assert (line.action, line.actor) == ("adopt", "somebody outside of pilotage")
    assert line.moves[PREVIOUS].model_dump() == {"before": 1, "after": None}
    is_sound(aliases)


def test_champions_from_before_the_ledger_are_taken_over(
    tracker: Tracker, aliases: Aliases
) -> None:
    registered(tracker, 1)
    tracker.client.set_registered_model_alias(MODEL, CHAMPION, "1")
    assert check_promotable(aliases, first_release=False).aliases == {CHAMPION: 1}
    line = aliases.settle().entries[0]
    assert (line.action, line.actor) == ("adopt", "pilotage")
    assert line.reason == "stood so when the ledger began"


def test_a_broken_chain_moves_nothing(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1, 2)
    promoted(aliases, 1)
    _sql(tracker, "DROP TRIGGER pilotage_ledger_no_update")
    _sql(tracker, "UPDATE pilotage_ledger SET body = replace(body, 'demo', 'night')")
    with pytest.raises(PromotionRefused, match=r"line 1 was changed.*nothing is moved"):
        promote(aliases, 2, bundle(2).digest, BY, expected=1)
    assert held(aliases) == {CHAMPION: 1}


def test_a_ledger_that_is_gone_is_no_new_ledger(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1)
    promoted(aliases, 1)
    _sql(tracker, "DROP TABLE pilotage_ledger")
    with pytest.raises(PromotionRefused, match="all lines are gone"):
        Aliases(tracker.client, Ledger(tracker.uri), MODEL).settle()


def test_alias_that_did_not_move_is_an_error(
    tracker: Tracker, aliases: Aliases, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(tracker, 1)
    with monkeypatch.context() as patched:
        patched.setattr(tracker.client, "set_registered_model_alias", lambda *_: None)
        with pytest.raises(InfrastructureError, match="reads as nothing"):
            promote(aliases, 1, bundle(1).digest, BY, expected=None)
    # It is decided; the next one that asks finishes it.
    assert aliases.settle().aliases == {CHAMPION: 1}
    is_sound(aliases)


# -- killed between two steps ----------------------------------------------------------------

Step = Callable[..., Any]


def _dies_at(monkeypatch: pytest.MonkeyPatch, client: Any, number: int) -> None:
    """Every write to MLflow counts; the one with this number is not made any more."""
    made = 0

    def counted(step: Step) -> Step:
        def write(*words: Any, **named: Any) -> Any:
            nonlocal made
            made += 1
            if made >= number:
                raise KeyboardInterrupt
            return step(*words, **named)

        return write

    for name in (
        "set_registered_model_alias",
        "delete_registered_model_alias",
        "set_registered_model_tag",
        "set_model_version_tag",
    ):
        monkeypatch.setattr(client, name, counted(getattr(client, name)))


@pytest.mark.parametrize("number", range(1, 8))
def test_killed_before_any_write_and_repeated(
    tracker: Tracker, aliases: Aliases, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    registered(tracker, 1, 2)
    promoted(aliases, 1)
    with monkeypatch.context() as patched:
        _dies_at(patched, tracker.client, number)
        try:
            promoted(aliases, 2)
        except KeyboardInterrupt:
            assert number <= 6, "previous, champion, head, length, confirmed, promoted"
    promoted(aliases, 2)
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    assert [one.action for one in aliases.settle().entries] == ["promote", "promote"]
    assert tracker.client.get_model_version(MODEL, "2").tags[TAG_PROMOTED] == "true"
    is_sound(aliases)


@pytest.mark.parametrize("number", range(1, 6))
def test_rollback_killed_before_any_write_and_repeated(
    tracker: Tracker, aliases: Aliases, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    registered(tracker, 1, 2, 3)
    promoted(aliases, 1, 2, 3)

    def back() -> None:
        plan = plan_rollback(aliases, None, "mei", "wrong")
        if plan.done is None:
            roll_back(aliases, plan, Backing("mei", "wrong"))

    with monkeypatch.context() as patched:
        _dies_at(patched, tracker.client, number)
        try:
            back()
        except KeyboardInterrupt:
            assert number <= 4
    if number <= 4:
        back()
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}, "one step back, not two"
    assert [one.action for one in aliases.settle().entries][3:] == ["rollback"]
    is_sound(aliases)


def test_moved_by_hand_after_a_kill_is_not_overwritten(
    tracker: Tracker, aliases: Aliases, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(tracker, 1, 2, 3)
    promoted(aliases, 1)
    with monkeypatch.context() as patched:
        _dies_at(patched, tracker.client, 1)
        with pytest.raises(KeyboardInterrupt):
            promoted(aliases, 2)
    tracker.client.set_registered_model_alias(MODEL, CHAMPION, "3")
    with pytest.raises(PromotionRefused, match="points to version 3; version 2 was promoted"):
        aliases.settle()
    assert held(aliases)[CHAMPION] == 3


# -- taken back, rolled back -----------------------------------------------------------------


def test_a_promotion_that_does_not_answer_is_taken_back(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1, 2, 3)
    promoted(aliases, 1, 2)
    moved = promote(aliases, 3, bundle(3).digest, BY, expected=2)
    line = restore(aliases, moved, "release demo", "after the move: no token")
    assert line is not None
    assert (line.action, line.details) == ("restore", {"takes_back": "3"})
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    assert champions(aliases.settle()) == {1, 2}
    with pytest.raises(PromotionRefused, match="never was champion"):
        plan_rollback(aliases, 3, "mei", "why not")
    is_sound(aliases)


def test_a_first_promotion_that_is_taken_back_leaves_no_champion(
    tracker: Tracker, aliases: Aliases
) -> None:
    registered(tracker, 1)
    moved = promote(aliases, 1, bundle(1).digest, BY, expected=None)
    restore(aliases, moved, "release demo", "no token")
    assert held(aliases) == {}
    # Nothing was lost: the next first release may go on.
    assert check_promotable(aliases, first_release=True).aliases == {}


def test_nothing_is_taken_back_after_somebody_else_moved_on(
    tracker: Tracker, aliases: Aliases
) -> None:
    registered(tracker, 1, 2, 3)
    promoted(aliases, 1)
    moved = promote(aliases, 2, bundle(2).digest, BY, expected=1)
    promoted(aliases, 3)
    with pytest.raises(AliasMoved):
        restore(aliases, moved, "release demo", "no token")
    assert held(aliases) == {CHAMPION: 3, PREVIOUS: 2}


def test_rollback_goes_one_step_and_then_asks(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1, 2, 3)
    promoted(aliases, 1, 2, 3)
    plan = plan_rollback(aliases, None, "mei", "wrong")
    assert (plan.version, plan.bundle, plan.before) == (2, bundle(2).digest, 3)
    roll_back(aliases, plan, Backing("mei", "wrong"))
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    with pytest.raises(PromotionRefused, match="was rolled back to version 2 already"):
        plan_rollback(aliases, None, "mei", "wrong")
    roll_back(aliases, plan_rollback(aliases, 1, "mei", "2 too"), Backing("mei", "2 too"))
    assert held(aliases) == {CHAMPION: 1}
    assert {one.version for one in taken_out(aliases.settle())} == {2, 3}
    is_sound(aliases)


def test_what_was_rolled_back_does_not_come_back_by_itself(
    tracker: Tracker, aliases: Aliases
) -> None:
    registered(tracker, 1, 2)
    promoted(aliases, 1, 2)
    roll_back(aliases, plan_rollback(aliases, None, "mei", "wrong"), Backing("mei", "wrong"))
    with pytest.raises(PromotionRefused, match=r"was rolled back on .* by mei: wrong"):
        promote(aliases, 2, bundle(2).digest, BY, expected=1)
    meant = Backing("mei", "it was the prompt, not the model")
    promote(aliases, 2, bundle(2).digest, meant, expected=1)
    assert held(aliases) == {CHAMPION: 2, PREVIOUS: 1}
    assert taken_out(aliases.settle()) == []


def test_rollback_without_anywhere_to_go(tracker: Tracker, aliases: Aliases) -> None:
    registered(tracker, 1, 2)
    promoted(aliases, 1)
    with pytest.raises(PromotionRefused, match="no earlier champion"):
        plan_rollback(aliases, None, "mei", "wrong")
    with pytest.raises(PromotionRefused, match="never was champion"):
        plan_rollback(aliases, 2, "mei", "wrong")
    with pytest.raises(PromotionRefused, match="no such version"):
        plan_rollback(aliases, 9, "mei", "wrong")
    assert plan_rollback(aliases, 1, "mei", "wrong").done is not None, "it is there already"


def _sql(tracker: Tracker, statement: str) -> None:
    import sqlite3

    with sqlite3.connect(tracker.uri.removeprefix("sqlite:///")) as database:
        database.execute(statement)
