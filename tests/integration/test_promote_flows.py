"""The flow promote: what it asks and moves, what it refuses, and how it takes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from registry.alias_moves import Aliases, AliasMoved
from registry.errors import InfrastructureError, UserError
from registry.outcome import Verdict
from registry.promotion import Backing, promote
from registry.versions import CANDIDATE, CHAMPION, PREVIOUS, PromotionRefused
from tasks.bundles import tracker
from tasks.promoting import SmokeFailed
from tests.pretend_smoke import (
    SILENT,
    THROUGH,
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
    POLICY,
    SMOKE,
    facts,
    gate,
    held,
    is_sound,
    judged,
    stored_bundle,
)

pytest_plugins = ["tests.promotion_fixtures"]


# -- promoted --------------------------------------------------------------------------------


def test_a_candidate_becomes_a_version_with_all_that_a_server_needs(
    aliases: Aliases, engine: Engine
) -> None:
    one = candidate(1)
    done = promoting(one.digest[:12], reason="first")
    assert (done.version, done.before, done.changed, done.line) == (1, None, True, 2)
    assert engine.asked == [f"{MODEL}@1", THROUGH]
    assert [answer.prompt for answer in done.smoke] == [SMOKE[0]["content"]] * 2
    assert held(aliases) == {CANDIDATE: 1, CHAMPION: 1}
    line = aliases.ledger.entries(MODEL)[1]
    assert (line.actor, line.action, line.reason, line.hash) == (
        "mei", "promote", "first", done.line_hash
    )  # fmt: skip
    assert line.evidence == {"accuracy": "a" * 64, "latency": "b" * 64, "serving": "c" * 64}
    assert line.policy == facts().policy_digest
    assert line.details["candidate"] == "c1"
    is_sound(aliases)
    import mlflow

    mlflow.set_tracking_uri(tracker().uri)
    got = Path(mlflow.artifacts.download_artifacts(f"models:/{MODEL}@{CHAMPION}"))
    assert json.loads((got / "bundle.json").read_text())["digest"] == one.digest
    assert (got / "target/model.safetensors").read_bytes() == bytes([1]) * 64
    assert any((got / "deploy").iterdir())


def test_the_same_promotion_twice_is_one_version_and_one_line(
    aliases: Aliases, engine: Engine
) -> None:
    one = candidate(1)
    first = promoting(one.digest)
    asked = list(engine.asked)
    for again in (one.digest, f"{MODEL}@1", f"{MODEL}@{CANDIDATE}", THROUGH):
        done = promoting(again, reason="again")
        assert (done.changed, done.version, done.line_hash) == (False, 1, first.line_hash)
    assert engine.asked == asked, "what answered after this very move is not asked again"
    assert actions(aliases) == ["register", "promote"]
    assert versions() == 1


def test_a_second_release_of_one_bundle_is_the_same_version(
    aliases: Aliases, engine: Engine
) -> None:
    one = candidate(1)
    promoting(one.digest)
    again, _ = judged(tracker(), 1, release="next night")
    assert again.digest == one.digest
    assert not promoting(one.digest).changed
    assert versions() == 1


def test_killed_after_the_move_only_the_alias_is_asked(aliases: Aliases, engine: Engine) -> None:
    one, two = candidate(1), candidate(2)
    promoting(one.digest)
    engine.raises = {THROUGH: SystemExit(137)}
    # A kill leaves no time for anything: neither confirmed nor taken back.
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr("flows.promote.restore", lambda *_: None)
        promoting(two.digest)
    engine.raises, engine.asked = {}, []
    done = promoting(two.digest)
    assert engine.asked == [THROUGH]
    assert (done.changed, done.version, done.before) == (False, 2, 1)
    assert actions(aliases).count("promote") == 2
    assert held(aliases) == {CANDIDATE: 2, CHAMPION: 2, PREVIOUS: 1}


def test_another_alias_is_promoted_to_alone(aliases: Aliases, engine: Engine) -> None:
    promoting(candidate(1).digest)
    engine.asked = []
    promoting(candidate(2).digest, alias="canary")
    assert engine.asked == [f"{MODEL}@2", f"{MODEL}@canary"]
    assert held(aliases) == {CANDIDATE: 2, CHAMPION: 1, "canary": 2}
    tags = tracker().client.get_model_version(MODEL, "2").tags
    assert "pilotage.promoted" not in tags, "it never was champion"


def test_a_version_whose_logged_model_was_deleted(aliases: Aliases, engine: Engine) -> None:
    one, model_id = judged(tracker(), 1)
    promoting(one.digest)
    promoting(candidate(2).digest)
    tracker().client.delete_logged_model(model_id)
    with pytest.raises(UserError, match="nothing is recorded of it"):
        promoting(f"{MODEL}@1", reason="back")
    # Going back needs no evidence; its files lie in MLflow as long as nobody purges them.
    assert back().version == 1
    assert held(aliases)[CHAMPION] == 1


# -- refused ---------------------------------------------------------------------------------


def test_a_refused_candidate_is_no_version_and_says_why(aliases: Aliases, engine: Engine) -> None:
    of, _ = judged(
        tracker(), 1, verdict=Verdict.FAIL, reasons=["hits FAIL: 0.41 is below 0.5"],
        gates=[gate(result=Verdict.FAIL)], without=["latency"],
    )  # fmt: skip
    with pytest.raises(PromotionRefused) as refused:
        promoting(of.digest)
    assert [one.what for one in refused.value.problems] == [
        "its verdict is FAIL: hits FAIL: 0.41 is below 0.5",
        "no latency evidence is recorded",
    ]
    assert engine.asked == []
    assert not tracker().client.search_registered_models()


def test_digits_that_several_bundles_begin_with(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.recorded.FEWEST_DIGITS", 1)
    seen: dict[str, int] = {}
    # Of 17 digests two begin with the same digit.
    for number in range(1, 18):
        digit = stored_bundle(number).digest[0]
        if digit in seen:
            break
        seen[digit] = number
    candidate(seen[digit])
    other = candidate(number)
    with pytest.raises(UserError, match="several bundles begin so"):
        promoting(digit)
    assert promoting(other.digest[:8]).bundle == other.digest


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("00000000", "no release recorded such a bundle"),
        ("abc", "is neither MODEL@ALIAS nor at least 8 digits"),
        (f"{MODEL}@9", "no such model, alias or version"),
        ("it's@champion", "no such model, alias or version"),
        ("@", "is not MODEL@ALIAS"),
        (f"models:/{MODEL}@champion", "is not MODEL@ALIAS"),
        (f"{MODEL}@99999999999", "no such model, alias or version"),
    ],
)
def test_references_that_name_nothing(engine: Engine, reference: str, text: str) -> None:
    candidate(1)
    with pytest.raises(UserError, match=text):
        promoting(reference)


def test_records_that_were_exchanged_are_refused(engine: Engine) -> None:
    of, model_id = judged(tracker(), 1)
    place = Path(
        tracker().client.get_logged_model(model_id).artifact_location.removeprefix("file:")
    )
    document = json.loads((place / "bundle.json").read_text())
    document["engine_args"] = {"max-model-len": 64}
    (place / "bundle.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=f"recorded as {of.digest[:12]}"):
        promoting(of.digest)


def test_a_weight_with_one_flipped_bit_becomes_no_version(engine: Engine, home: Path) -> None:
    of = candidate(1)
    flip(of.target.path / "model.safetensors")
    with pytest.raises(UserError, match="is not what was gated"):
        promoting(of.digest)
    assert not tracker().client.search_registered_models()


def test_the_champion_moved_while_the_smoke_prompt_was_asked(
    aliases: Aliases, engine: Engine
) -> None:
    one, two, three = candidate(1), candidate(2), candidate(3)
    promoting(one.digest)
    promoting(three.digest, alias="canary")

    def somebody_is_first(reference: str) -> None:
        engine.then = lambda reference: None
        promote(aliases, 2, three.digest, Backing("ana"), expected=1)

    engine.then = somebody_is_first
    with pytest.raises(AliasMoved, match="promote by ana"):
        promoting(two.digest)
    assert held(aliases)[CHAMPION] == 2
    is_sound(aliases)


def test_expected_champion_is_compared_first(aliases: Aliases, engine: Engine) -> None:
    one, two = candidate(1), candidate(2)
    promoting(one.digest, expected=0)
    engine.asked = []
    with pytest.raises(AliasMoved):
        promoting(two.digest, expected=0)
    assert engine.asked == []
    assert promoting(two.digest, expected=1).before == 1


# -- the smoke prompt fails ------------------------------------------------------------------


def test_before_the_move_nothing_moves(aliases: Aliases, engine: Engine) -> None:
    promoting(candidate(1).digest)
    promoting(candidate(2).digest, alias="canary")
    lines = actions(aliases)
    engine.raises = {f"{MODEL}@2": SILENT}
    with pytest.raises(SmokeFailed) as failed:
        promoting(f"{MODEL}@2")
    assert failed.value.exit_status == 10
    assert actions(aliases) == lines
    assert held(aliases)[CHAMPION] == 1
    is_sound(aliases)


@pytest.mark.parametrize("error", [SILENT, KeyboardInterrupt(), InfrastructureError("no GPU")])
def test_after_the_move_the_alias_goes_back(
    aliases: Aliases, engine: Engine, error: BaseException
) -> None:
    for number in (1, 2, 3):
        if number == 3:
            engine.raises = {THROUGH: error}
            with pytest.raises(type(error)):
                promoting(candidate(number).digest)
        else:
            promoting(candidate(number).digest)
    assert held(aliases) == {CANDIDATE: 3, CHAMPION: 2, PREVIOUS: 1}
    moved, taken_back = aliases.ledger.entries(MODEL)[-2:]
    assert (moved.action, taken_back.action) == ("promote", "restore")
    assert taken_back.details == {"takes_back": str(moved.sequence)}
    why = {"SmokeFailed": "no token within 120 s", "KeyboardInterrupt": "KeyboardInterrupt"}
    assert taken_back.reason == f"after the move: {why.get(type(error).__name__, 'no GPU')}"
    is_sound(aliases)
    # The engine was repaired: the same promotion again is a new line.
    engine.raises = {}
    assert promoting(f"{MODEL}@3").changed
    assert held(aliases) == {CANDIDATE: 3, CHAMPION: 3, PREVIOUS: 2}


def test_after_the_first_promotion_there_is_no_champion_again(
    aliases: Aliases, engine: Engine
) -> None:
    engine.raises = {THROUGH: SILENT}
    with pytest.raises(SmokeFailed):
        promoting(candidate(1).digest)
    assert held(aliases) == {CANDIDATE: 1}
    assert actions(aliases) == ["register", "promote", "restore"]
    with pytest.raises(PromotionRefused, match="no earlier champion"):
        back()
    is_sound(aliases)


def test_mlflow_away_while_it_is_taken_back_is_no_mere_refusal(
    aliases: Aliases, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoting(candidate(1).digest)
    engine.raises = {THROUGH: SILENT}

    def away(*_: object) -> None:
        raise InfrastructureError("MLflow: connection refused")

    with monkeypatch.context() as patched:
        patched.setattr("flows.promote.restore", away)
        with pytest.raises(InfrastructureError, match="points to version 2, which did not answer"):
            promoting(candidate(2).digest)
    assert held(aliases)[CHAMPION] == 2
    # The same command asks it again, and takes it back.
    with pytest.raises(SmokeFailed):
        promoting(f"{MODEL}@2")
    assert held(aliases)[CHAMPION] == 1
    assert actions(aliases)[-1] == "restore"


def test_a_policy_looser_than_the_champions_promotes_nothing_by_hand_either(
    aliases: Aliases, engine: Engine
) -> None:
    promoting(candidate(1).digest)
    run = aliases.ledger.entries(MODEL)[-1].details["run"]
    tracker().client.log_text(run, json.dumps({"policy": POLICY}), "recipe.json")
    looser = {**POLICY, "gates": [{**POLICY["gates"][0], "margin": 0.3}]}
    two, _ = judged(tracker(), 2, told=facts(looser))
    with pytest.raises(UserError, match=r"hits.*0\.5"):
        promoting(two.digest)
    owned = {
        **looser,
        "acknowledged": [{"gate": "hits", "owner": "wang", "reason": "new hardware"}],
    }
    three, _ = judged(tracker(), 3, told=facts(owned))
    assert promoting(three.digest).changed
    assert held(aliases)[CHAMPION] == 2


def test_previous_that_was_moved_meanwhile_does_not_hold_up_the_taking_back(
    aliases: Aliases, engine: Engine
) -> None:
    one, two, three = candidate(1), candidate(2), candidate(3)
    promoting(one.digest)
    promoting(two.digest)

    def hand(reference: str) -> None:
        if reference == THROUGH:
            tracker().client.delete_registered_model_alias(MODEL, PREVIOUS)

    engine.then, engine.raises = hand, {THROUGH: SILENT}
    with pytest.raises(SmokeFailed):
        promoting(three.digest)
    assert held(aliases)[CHAMPION] == 2
    assert PREVIOUS not in held(aliases)
    assert actions(aliases)[-2:] == ["adopt", "restore"]
    is_sound(aliases)
