"""The flow promote where the policy asks a person: who is asked, what each answer does and leaves.

What Prefect does (the suspended run, its form, its deadline) stands in tests/faults; here a run
has its question and its answer, or is a command that cannot wait.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from flows import ledger_commands
from flows.approving import check_answer
from registry.alias_moves import Aliases, AliasMoved
from registry.approval import NOBODY, Answer, NotApproved
from registry.bundle import Bundle
from registry.errors import UserError
from registry.outcome import CandidateOutcome
from registry.settings import settings
from registry.versions import CANDIDATE, CHAMPION, PREVIOUS, PromotionRefused
from tasks import approval_page
from tasks.approval import Question
from tasks.approval_page import page, question_line
from tasks.bundles import tracker
from tasks.publishing import without_rolled_back
from tasks.recorded import recorded
from tests.pretend_smoke import Engine, actions, candidate, promoting
from tests.promotion_builders import MODEL, POLICY, facts, held, is_sound, judged, outcome

pytest_plugins = ["tests.promotion_fixtures"]

ASKS = {**POLICY, "approval": {"deadline_hours": 12}}
NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)

Asked = Callable[..., Question]


def asking(number: int, champion: int | None = None) -> Bundle:
    """A candidate whose policy asks a person."""
    told = facts(ASKS, release=f"release {number}", champion=champion)
    return judged(tracker(), number, told=told)[0]


def answer(approve: bool, by: str = "Mei", at: datetime = NOON) -> Answer:
    return Answer(approve, by, "looked at the report", at)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """This process works on a run that asked about a version and has this answer."""

    def _(version: int, of: Bundle, champion: int | None, said: Answer | None) -> Question:
        question = Question(MODEL, version, of.digest, champion, NOON + timedelta(hours=1), "run-7")
        monkeypatch.setattr("tasks.approval.asked", lambda: question)
        monkeypatch.setattr("tasks.approval.answered", lambda: said)
        monkeypatch.setattr("tasks.approval.forget_deadline", lambda: None)
        return question

    return _


# -- commands --------------------------------------------------------------------------------


def test_a_command_without_a_yes_refuses_and_starts_nothing(
    aliases: Aliases, engine: Engine
) -> None:
    one = asking(1)
    with pytest.raises(NotApproved, match=r"asks a person.*\n.*--approve --reason"):
        promoting(one.digest)
    assert engine.asked == []
    assert not tracker().client.search_registered_models()


def test_a_yes_needs_a_reason(aliases: Aliases, engine: Engine) -> None:
    with pytest.raises(UserError, match="needs a reason"):
        promoting(asking(1).digest, approve=True, reason="  ")
    assert engine.asked == []


def test_a_yes_of_the_actor_stands_in_the_promotions_line(aliases: Aliases, engine: Engine) -> None:
    done = promoting(asking(1).digest, approve=True, reason="the numbers hold")
    assert done.changed and held(aliases) == {CANDIDATE: 1, CHAMPION: 1}
    line = aliases.ledger.entries(MODEL)[-1]
    assert (line.action, line.actor, line.reason) == ("promote", "mei", "the numbers hold")
    assert line.details["answered_by"] == "mei" and line.details["answer"] == "yes"
    assert line.details["answerer"] == "the login name"
    is_sound(aliases)
    assert not promoting(f"{MODEL}@1").changed, "what is champion already asks nobody"


def test_another_alias_asks_nobody(aliases: Aliases, engine: Engine) -> None:
    assert promoting(asking(1).digest, alias="canary").changed
    assert held(aliases) == {CANDIDATE: 1, "canary": 1}


def test_bad_evidence_is_refused_before_anybody_is_asked(aliases: Aliases, engine: Engine) -> None:
    one, _ = judged(tracker(), 1, told=facts(ASKS), without=["latency"])
    with pytest.raises(PromotionRefused, match="no latency evidence") as refused:
        promoting(one.digest)
    assert not isinstance(refused.value, NotApproved)


# -- answers ---------------------------------------------------------------------------------


def waiting(aliases: Aliases) -> Bundle:
    """Version 1 is champion, version 2 passed and is `candidate`."""
    promoting(candidate(1).digest)
    two = asking(2, champion=1)
    promoting(two.digest, alias="canary")
    return two


def test_yes_promotes_once_everything_was_checked_again(
    aliases: Aliases, engine: Engine, asked: Asked
) -> None:
    two = waiting(aliases)
    asked(2, two, 1, answer(True))
    engine.asked = []
    # The alias may have gone on to another version; the question was about this one.
    assert promoting(f"{MODEL}@{CANDIDATE}", actor="event").version == 2
    assert engine.asked == [f"{MODEL}@2", f"{MODEL}@{CHAMPION}"]
    assert held(aliases)[CHAMPION] == 2 and held(aliases)[PREVIOUS] == 1
    line = aliases.ledger.entries(MODEL)[-1]
    assert (line.actor, line.reason) == ("event", "looked at the report")
    told = {name: line.details[name] for name in ("answered_by", "answerer", "question")}
    assert told == {
        "answered_by": "Mei", "answerer": "as stated, nobody checked it", "question": "run-7"
    }  # fmt: skip
    assert "Mei said yes" in ledger_commands._table(MODEL, [line])
    is_sound(aliases)


@pytest.mark.parametrize(
    ("said", "action", "actor", "text"),
    [
        (answer(False), "reject", "Mei", "Mei \\(as stated\\) said no: looked at the report"),
        (
            answer(False, NOBODY, NOON + timedelta(hours=1)),
            "lapse",
            NOBODY,
            "nobody answered until",
        ),
        (answer(True, at=NOON + timedelta(hours=2)), "lapse", NOBODY, "Mei answered after"),
    ],
)
def test_no_and_none_move_nothing_and_have_one_line(
    aliases: Aliases, engine: Engine, asked: Asked, said: Answer, action: str, actor: str, text: str
) -> None:
    two = waiting(aliases)
    before, lines = held(aliases), len(actions(aliases))
    asked(2, two, 1, said)
    engine.asked = []
    for _ in range(2):  # killed after the line, and run again
        with pytest.raises(NotApproved, match=text):
            promoting(f"{MODEL}@2")
    assert engine.asked == [] and held(aliases) == before
    assert len(actions(aliases)) == lines + 1
    line = aliases.ledger.entries(MODEL)[-1]
    assert (line.action, line.actor, line.moves) == (action, actor, {})
    assert (line.details["version"], line.bundle) == ("2", two.digest)
    is_sound(aliases)


def test_a_no_to_what_somebody_promoted_meanwhile_is_told_and_takes_nothing_back(
    aliases: Aliases, engine: Engine, asked: Asked
) -> None:
    two = waiting(aliases)
    promoting(f"{MODEL}@2", approve=True, reason="seen")
    yes = aliases.ledger.entries(MODEL)[-1]
    before = held(aliases)
    asked(2, two, 1, answer(False))
    engine.asked = []
    for _ in range(2):  # killed after the line, and run again
        with pytest.raises(NotApproved, match=r"Mei \(as stated\) said no") as refused:
            promoting(f"{MODEL}@2")
    assert f"in production since {yes.at:%Y-%m-%d %H:%M} UTC by mei" in str(refused.value)
    assert f"pilotage rollback {MODEL} --reason" in str(refused.value)
    assert engine.asked == [] and held(aliases) == before
    *_, last, line = aliases.ledger.entries(MODEL)
    assert last == yes, "one line for one no"
    assert (line.action, line.actor, line.reason) == ("reject", "Mei", "looked at the report")
    assert (line.details["too_late"], line.moves) == (str(yes.sequence), {})
    # The next night may choose it: to stay what it is.
    assert without_rolled_back(MODEL, [outcome(two)])[1] == []
    is_sound(aliases)


def test_a_deadline_of_what_somebody_promoted_meanwhile_says_nothing(
    aliases: Aliases, engine: Engine, asked: Asked
) -> None:
    two = waiting(aliases)
    promoting(f"{MODEL}@2", approve=True, reason="seen")
    lines = len(actions(aliases))
    asked(2, two, 1, answer(False, NOBODY, NOON + timedelta(hours=1)))
    assert not promoting(f"{MODEL}@2").changed
    assert len(actions(aliases)) == lines


def test_the_champion_moved_while_a_person_thought(
    aliases: Aliases, engine: Engine, asked: Asked
) -> None:
    two = waiting(aliases)
    promoting(candidate(3).digest)
    asked(2, two, 1, answer(True))
    with pytest.raises(AliasMoved, match="another move came first"):
        promoting(f"{MODEL}@2")
    assert held(aliases)[CHAMPION] == 3


def test_evidence_that_grew_too_old_meanwhile(
    aliases: Aliases, engine: Engine, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = waiting(aliases)
    asked(2, two, 1, answer(True))

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=40)

    monkeypatch.setattr("tasks.promoting.datetime", Later)
    with pytest.raises(PromotionRefused, match="40 days old"):
        promoting(f"{MODEL}@2")
    assert held(aliases)[CHAMPION] == 1


# -- afterwards ------------------------------------------------------------------------------


def said_no(aliases: Aliases, of: Bundle) -> None:
    question = Question(MODEL, 2, of.digest, 1, NOON + timedelta(hours=1), "run-7")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tasks.approval.forget_deadline", lambda: None)
        with pytest.raises(NotApproved):
            check_answer(aliases, recorded(f"{MODEL}@2"), question, answer(False))


def test_a_rejected_version_is_not_chosen_by_the_next_release(
    aliases: Aliases, engine: Engine
) -> None:
    two = waiting(aliases)
    said_no(aliases, two)
    others: list[CandidateOutcome] = [outcome(two), outcome(candidate(4))]
    left, notes = without_rolled_back(MODEL, others)
    assert [one.name for one in left] == ["c4"]
    assert notes[0].startswith("c2 was not chosen: it is version 2, rejected on ")
    assert notes[0].endswith("by Mei: looked at the report")


def test_a_no_outlives_the_version_that_it_was_said_to(aliases: Aliases, engine: Engine) -> None:
    """To delete a bad version is tidy; the next night makes its bundle a version again."""
    two = waiting(aliases)
    said_no(aliases, two)
    aliases.client.delete_model_version(MODEL, "2")
    never_made = outcome(candidate(4)).model_copy(update={"name": "c9", "bundle": ""})
    left, notes = without_rolled_back(MODEL, [outcome(two), never_made])
    assert [one.name for one in left] == ["c9"]
    assert len(notes) == 1 and notes[0].startswith("c2 was not chosen: it is version 2, rejected")
    with pytest.raises(NotApproved, match="was rejected as version 2 on"):
        promoting(two.digest)


def test_a_rejected_version_needs_a_reason_that_is_given_anew(
    aliases: Aliases, engine: Engine
) -> None:
    two = waiting(aliases)
    said_no(aliases, two)
    with pytest.raises(NotApproved, match=r"was rejected on .* by Mei"):
        promoting(f"{MODEL}@2")
    assert promoting(f"{MODEL}@2", approve=True, reason="a second look").changed
    assert held(aliases)[CHAMPION] == 2
    assert without_rolled_back(MODEL, [outcome(two)])[1] == []


def test_what_a_person_is_shown(
    aliases: Aliases, engine: Engine, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = waiting(aliases)
    question = asked(2, two, 1, None)
    found = recorded(f"{MODEL}@2")
    smoke = engine(f"{MODEL}@2", two.digest, [{"role": "user", "content": "Where | is <it>?"}])
    text = page(found, question, smoke)
    for part in (
        f"## Promote {MODEL}@2?", "**c2** of recipe demo passed policy demo", "version 1",
        "2030-01-02 13:00 UTC", "| hits | PASS | 0.9 | 0.5 | 400 |", r"Where \| is &lt;it&gt;?",
        "> In Oslo.", two.digest[:12], found.run_id,
    ):  # fmt: skip
        assert part in text
    assert "until 2030-01-02 13:00 UTC it is not" in question_line(found, question)
    there = settings().model_copy(update={"mlflow_uri": "http://ci:password1@ml.example/base/"})
    monkeypatch.setattr(approval_page, "settings", lambda: there)
    text = page(found, question, smoke)
    assert f"](http://ml.example/base/#/runs/{found.run_id})" in text
    assert "password1" not in text
