"""Promotions that disturb each other, or are killed, on SQLite and on PostgreSQL: consistent."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from registry.alias_moves import AliasMoved
from registry.ledger import Entry, Ledger
from registry.promotion import Backing, plan_rollback, promote, roll_back
from registry.versions import CANDIDATE, CHAMPION, PREVIOUS, PromotionRefused
from tasks.promoting import SmokeFailed
from tests.forked import PROCESSES, Place, empty, run, together
from tests.pretend_smoke import SILENT, THROUGH, Engine, back
from tests.pretend_smoke import promoting as promote_named
from tests.promotion_builders import MODEL, bundle, held, is_sound, judged, registered

pytest_plugins = ["tests.postgres"]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def migrated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Place, Path]:
    """MLflow's tables in a database of either kind, to be copied; a folder for the copies."""
    kind = request.param
    server = request.getfixturevalue("postgres_server") if kind == "postgresql" else ""
    folder = tmp_path_factory.mktemp("places")
    return empty(folder / f"races_{kind}", server), folder


def copied(place: Place, folder: Path) -> Place:
    return place.copy(folder / f"{place.home.name[:10]}_{os.urandom(6).hex()}")


@pytest.fixture(scope="module")
def raced(migrated: tuple[Place, Path]) -> tuple[Place, list[str]]:
    """Nine versions, and the digests of three candidates."""
    place = copied(*migrated)
    return place, run(nine_versions, place)


def nine_versions(place: Place) -> list[str]:
    place.open()
    registered(place.tracker, *range(1, PROCESSES + 2))
    return [judged(place.tracker, 30 + each)[0].digest for each in range(3)]


@pytest.fixture(scope="module")
def prepared(migrated: tuple[Place, Path]) -> tuple[Place, str]:
    """Three versions that were champion one after another; the digest of a candidate."""
    place = copied(*migrated)
    return place, run(prepare, place)


def prepare(place: Place) -> str:
    place.open()
    for number in (1, 2, 3):
        ask(place, judged(place.tracker, number)[0].digest)
    return judged(place.tracker, 4)[0].digest


def consistent(place: Place) -> tuple[dict[str, int], list[Entry]]:
    """Aliases as MLflow has them and the ledger's lines; they agree and nothing is left to do."""
    aliases = place.open()
    is_sound(aliases)
    return held(aliases), aliases.ledger.entries(MODEL)


# -- at the same moment ----------------------------------------------------------------------


def race(place: Place, digests: list[str], number: int, barrier: Any) -> list[Any]:
    """Each round register one bundle that all have, and promote a version that nobody else has."""
    from tasks.recorded import recorded
    from tasks.registering import make_version

    aliases = place.open()
    done: list[tuple[int, int | None, str]] = []
    for digest in digests:
        now = aliases.settle().aliases.get(CHAMPION)
        version = number if number != now else PROCESSES + 1
        found = recorded(digest)
        barrier.wait(120)
        made = make_version(
            MODEL, found.outcome, found.bundle, found.facts, model_id=found.model_id,
            run_id=found.run_id, actor=f"process {number}", startup_seconds=4.0,
        )  # fmt: skip
        try:
            promote(
                aliases, version, bundle(version).digest, Backing(f"process {number}"), expected=now
            )
            done.append((made, version, ""))
        except AliasMoved as lost:
            done.append((made, None, str(lost)))
        barrier.wait(120)
    return done


def test_of_eight_promotions_one_wins_and_a_bundle_is_one_version(
    raced: tuple[Place, list[str]], tmp_path: Path
) -> None:
    place, digests = copied(raced[0], tmp_path), raced[1]
    before = PROCESSES + 1
    won = []
    for each, answers in enumerate(zip(*together(race, place, digests), strict=True), start=1):
        assert {made for made, _, _ in answers} == {before + each}, "one version for all"
        winners = [version for _, version, _ in answers if version is not None]
        told = [why for _, _, why in answers if why]
        assert (len(winners), len(told)) == (1, PROCESSES - 1)
        assert all(f"points to version {winners[0]}" in why for why in told)
        won += winners
    aliases, lines = run(consistent, place)
    promotions = [line for line in lines if line.action == "promote"]
    assert [line.moves[CHAMPION].after for line in promotions] == won
    registrations = [line for line in lines if line.action == "register"]
    assert [line.moves[CANDIDATE].after for line in registrations] == [
        before + each for each in (1, 2, 3)
    ]
    assert aliases == {CHAMPION: won[-1], PREVIOUS: won[-2], CANDIDATE: before + 3}


def disturb(place: Place, seconds: float, number: int, barrier: Any) -> tuple[list[str], int]:
    """Promote, repeat and roll back at random; what was written, and how often it was refused."""
    aliases, chance = place.open(), random.Random(number)
    written, refused = [], 0
    barrier.wait(120)
    until = time.monotonic() + seconds
    who = Backing(f"process {number}", "at random")
    version = number
    while time.monotonic() < until:
        what = chance.choice(["promote", "promote", "repeat", "back", "back to"])
        try:
            if what in ("promote", "repeat"):
                version = version if what == "repeat" else chance.randint(1, PROCESSES)
                now = aliases.settle().aliases.get(CHAMPION)
                moved = promote(aliases, version, bundle(version).digest, who, expected=now)
            else:
                to = chance.randint(1, PROCESSES) if what == "back to" else None
                plan = plan_rollback(aliases, to, who.actor, who.reason)
                if plan.done is not None:
                    continue
                moved = roll_back(aliases, plan, who)
            if moved.changed and moved.entry is not None:
                written.append(moved.entry.hash)
        except (AliasMoved, PromotionRefused):
            refused += 1
    return written, refused


def test_eight_that_promote_and_roll_back_at_random_end_consistent(
    raced: tuple[Place, list[str]], tmp_path: Path
) -> None:
    place = copied(raced[0], tmp_path)
    found = together(disturb, place, 3.0)
    _, lines = run(consistent, place)
    assert Counter(hash for hashes, _ in found for hash in hashes) == Counter(
        line.hash for line in lines
    ), "what a process was told stands in the ledger, once, and nothing else"
    assert len(lines) >= 3
    for before, after in pairwise(lines):
        assert after.moves[CHAMPION].before == before.moves[CHAMPION].after


# -- killed between two steps ----------------------------------------------------------------

WRITES = (
    "create_registered_model", "create_model_version", "set_logged_model_tags",
    "log_model_artifacts", "set_registered_model_alias", "delete_registered_model_alias",
    "set_registered_model_tag", "set_model_version_tag",
)  # fmt: skip


def kill_after(number: int) -> None:
    """This process is gone, without another instruction, after its n-th write."""
    from mlflow import MlflowClient

    made = 0

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def write(*words: Any, **named: Any) -> Any:
            nonlocal made
            done = step(*words, **named)
            made += 1
            if made == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return write

    for name in WRITES:
        setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))
    Ledger.append = counted(Ledger.append)  # type: ignore[method-assign]


def ask(place: Place, command: str, answers: bool = True) -> list[str]:
    """`promote DIGEST` or `rollback`, as typed; which smoke prompts were asked."""
    from flows import promote as promoting
    from flows import rollback as rolling_back

    place.open()
    engine = Engine(raises={} if answers else {THROUGH: SILENT})
    promoting.ask_smoke = rolling_back.ask_smoke = engine  # type: ignore[assignment]
    if command == "rollback":
        try:
            back()
        except PromotionRefused as told:
            # Killed after the last write: it is done.
            assert "was rolled back to version 2 already" in str(told)
    elif answers:
        promote_named(command)
    else:
        with pytest.raises(SmokeFailed):
            promote_named(command)
    return engine.asked


def ask_and_die(place: Place, command: str, answers: bool, number: int) -> None:
    kill_after(number)
    ask(place, command, answers)


def ask_and_look(
    place: Place, command: str, answers: bool
) -> tuple[list[str], dict[str, int], list[tuple[str, int | None]], int, str]:
    """Smoke prompts asked, aliases, the champion's moves since `prepare`, number of versions."""
    asked = ask(place, command, answers)
    aliases, lines = consistent(place)
    moves = [(one.action, one.moves[CHAMPION].after) for one in lines if CHAMPION in one.moves]
    found = place.tracker.client.search_model_versions()
    newest = max(found, key=lambda version: int(version.version))
    logged = place.tracker.client.get_logged_model(newest.source.split("/")[-2])
    linked = logged.tags["mlflow.modelVersions"]
    return asked, aliases, moves[3:], len(found), linked


def killed_after(
    place: Place, folder: Path, writes: range, command: str, answers: bool = True
) -> list[tuple[Any, ...]]:
    """Killed after each of these writes, then asked again: a row of what is to be seen then.

    The last of them has to be the command's last. On a server, where copies take longer, every
    sixth is enough.
    """
    steps = writes if place.uri.startswith("sqlite:") else writes[::6]
    places = [copied(place, folder) for _ in (*steps, "whole")]
    assert run(ask_and_die, places.pop(), command, answers, writes.stop) is None, "one more write"

    def killed(number: int, one: Place) -> tuple[Any, ...]:
        assert run(ask_and_die, one, command, answers, number) == -signal.SIGKILL
        return number, *run(ask_and_look, one, command, answers)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(killed, steps, places))


LINK = json.dumps([{"name": MODEL, "version": 4}])


def test_a_promotion_killed_after_any_write_and_asked_again(
    prepared: tuple[Place, str], tmp_path: Path
) -> None:
    place, digest = prepared
    rows = killed_after(place, tmp_path, range(1, 17), digest)
    for number, asked, aliases, moves, versions, linked in rows:
        assert aliases == {CANDIDATE: 4, CHAMPION: 4, PREVIOUS: 3}, number
        assert moves == [("promote", 4)], number
        assert (versions, linked) == (4, LINK), number
        assert asked in ([f"{MODEL}@4", THROUGH], [THROUGH], []), number


def test_a_rollback_killed_after_any_write_and_asked_again(
    prepared: tuple[Place, str], tmp_path: Path
) -> None:
    place, _ = prepared
    rows = killed_after(place, tmp_path, range(1, 6), "rollback")
    for number, _, aliases, moves, _, _ in rows:
        assert aliases == {CANDIDATE: 3, CHAMPION: 2, PREVIOUS: 1}, number
        assert moves == [("rollback", 2)], number


def test_a_promotion_taken_back_killed_after_any_write_and_asked_again(
    prepared: tuple[Place, str], tmp_path: Path
) -> None:
    place, digest = prepared
    # The writes up to the promotion's line are those of the other test.
    rows = killed_after(place, tmp_path, range(10, 20), digest, answers=False)
    for number, _, aliases, moves, versions, linked in rows:
        assert aliases == {CANDIDATE: 4, CHAMPION: 3, PREVIOUS: 2}, number
        once = [("promote", 4), ("restore", 3)]
        # Killed once the line of taking it back stood: asked again is a promotion of its own.
        assert moves in (once, once * 2), number
        assert (versions, linked) == (4, LINK), number
