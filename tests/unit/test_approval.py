"""A policy that asks for a person, and what a no does: digests, loosening, the ledger's lines."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from eval_suites.loosening import loosened
from eval_suites.policy import Policy
from registry.alias_moves import State, told
from registry.approval import NotApproved
from registry.digests import digest_of
from registry.ledger_lines import EMPTY, Draft, Entry, Head, Move, chained, verify
from registry.taken_out import check_not_taken_out, taken_out
from registry.versions import PromotionRefused

GATES = [{"name": "hit", "metric": "hit_rate", "kind": "floor", "margin": 0.9}]


def policy(**changes: object) -> Policy:
    return Policy.model_validate({"kind": "policy", "description": "d", "gates": GATES, **changes})


def line(head: Head, action: str, moves: dict[str, Move] | None = None, **told: object) -> Entry:
    fields = {"actor": "mei", "action": action, "moves": moves or {}, "reason": "too slow", **told}
    return chained("m", Draft.model_validate(fields), head)


def chain(*drafts: tuple[str, dict[str, Move], dict[str, str]]) -> list[Entry]:
    entries: list[Entry] = []
    head = EMPTY
    for action, moves, details in drafts:
        entries.append(line(head, action, moves, details=details))
        head = Head(entries[-1].sequence, entries[-1].hash)
    return entries


def test_a_policy_without_approval_has_the_digest_it_had_before_there_was_any():
    written = policy().model_dump(mode="json")
    assert "approval" not in written
    assert digest_of(policy()) == digest_of(written)
    assert Policy.model_validate(written) == policy()


def test_approval_counts_in_the_digest():
    asks, longer = policy(approval={}), policy(approval={"deadline_hours": 24})
    assert asks.approval is not None and asks.approval.deadline_hours == 12
    assert len({digest_of(one) for one in (policy(), asks, longer)}) == 3
    assert Policy.model_validate(asks.model_dump(mode="json")) == asks


@pytest.mark.parametrize("hours", [0, -1, 721, True, "soon", float("nan")])
def test_a_deadline_is_a_time(hours: object):
    with pytest.raises(ValidationError, match="deadline_hours"):
        policy(approval={"deadline_hours": hours})


def test_taking_approval_out_is_looser_and_a_longer_deadline_is_not():
    asks = policy(approval={})
    (found,) = loosened(asks, policy())
    assert (found.gate, found.what) == ("policy", "no person is asked any more")
    assert loosened(policy(), asks) == []
    assert loosened(asks, policy(approval={"deadline_hours": 48})) == []


def test_a_no_is_a_line_that_moves_nothing_and_the_chain_stays_whole():
    entries = chain(
        ("register", {"candidate": Move(before=None, after=3)}, {}),
        ("reject", {}, {"version": "3", "question": "q"}),
        ("lapse", {}, {"version": "3", "question": "r"}),
    )
    assert verify(entries, Head(3, entries[-1].hash)) is None
    assert "reject by mei: no alias moved: too slow" in told(entries[1])


Drafted = tuple[str, dict[str, Move], dict[str, str], str]


def state_of(*drafts: Drafted) -> State:
    """A ledger of lines: what was done, the moves, details, and the bundle it names."""
    entries: list[Entry] = []
    head = EMPTY
    for action, moves, details, bundle in drafts:
        entries.append(line(head, action, moves, details=details, bundle=bundle))
        head = Head(entries[-1].sequence, entries[-1].hash)
    return State(entries, {})


def champion(before: int | None, after: int) -> dict[str, Move]:
    return {"champion": Move(before=before, after=after)}


REGISTER: Drafted = ("register", {"candidate": Move(before=None, after=3)}, {}, "b3")
REJECT: Drafted = ("reject", {}, {"version": "3"}, "b3")
TWO: Drafted = ("promote", champion(None, 2), {}, "b2")
THREE: Drafted = ("promote", champion(2, 3), {}, "b3")
BACK: Drafted = ("rollback", champion(3, 2), {}, "b2")


def told_of(state: State) -> list[tuple[int, str, str]]:
    return [(one.version, one.bundle, one.what) for one in taken_out(state)]


def test_what_was_rejected_needs_a_reason_until_it_is_promoted():
    state = state_of(REGISTER, REJECT)
    assert told_of(state) == [(3, "b3", "rejected")]
    with pytest.raises(NotApproved, match=r"was rejected on .* by mei: too slow") as refused:
        check_not_taken_out("m", state, 3, "b3")
    assert "pilotage promote m@3 --approve" in str(refused.value)
    check_not_taken_out("m", state, 3, "b3", "measured again, with care")
    check_not_taken_out("m", state, 4, "b4")
    assert told_of(state_of(REGISTER, REJECT, THREE)) == []


def test_a_bundle_that_was_taken_out_is_known_without_its_version():
    for state, what in [
        (state_of(TWO, THREE, BACK), "rolled back"),
        (state_of(REJECT), "rejected"),
    ]:
        assert told_of(state) == [(3, "b3", what)]
        # None: somebody deleted it. 5: it was registered anew since.
        for version, named in [(None, "b3"), (5, "m@5")]:
            with pytest.raises(PromotionRefused, match=rf"was {what} as version 3 on") as refused:
                check_not_taken_out("m", state, version, "b3")
            assert f"pilotage promote {named} --" in str(refused.value)
        check_not_taken_out("m", state, None, "b4")


def test_a_reason_given_for_the_bundle_anew_counts_for_the_version_that_is_gone():
    """The nights after it would leave the bundle out for ever."""
    anew: Drafted = ("promote", champion(2, 5), {}, "b3")
    assert told_of(state_of(TWO, THREE, BACK, anew)) == []
    again: Drafted = ("rollback", champion(5, 2), {}, "b2")
    assert told_of(state_of(TWO, THREE, BACK, anew, again)) == [(5, "b3", "rolled back")]


def test_a_champion_from_before_the_ledger_is_known_by_its_version():
    state = state_of(("adopt", champion(3, 2), {}, ""))
    assert told_of(state) == [(3, "", "rolled back")]
    with pytest.raises(PromotionRefused, match="was rolled back on"):
        check_not_taken_out("m", state, 3, "b3")
    check_not_taken_out("m", state, None, "")


def test_a_question_nobody_answered_rejects_nothing():
    assert told_of(state_of(("lapse", {}, {"version": "3"}, "b3"))) == []
