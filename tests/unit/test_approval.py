"""A policy that asks for a person, and what a no does: digests, loosening, the ledger's lines."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from eval_suites.loosening import loosened
from eval_suites.policy import Policy
from registry.alias_moves import State, told
from registry.approval import NotApproved, check_not_rejected, rejected
from registry.digests import digest_of
from registry.ledger_lines import EMPTY, Draft, Entry, Head, Move, chained, verify

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


def test_what_was_rejected_needs_a_reason_until_it_is_promoted():
    register = ("register", {"candidate": Move(before=None, after=3)}, {})
    reject = ("reject", {}, {"version": "3"})
    state = State(chain(register, reject), {"candidate": 3})
    assert set(rejected(state)) == {3}
    with pytest.raises(NotApproved, match=r"was rejected on .* by mei: too slow"):
        check_not_rejected("m", state, 3)
    check_not_rejected("m", state, 3, "measured again, with care")
    check_not_rejected("m", state, 4)
    promote = ("promote", {"champion": Move(before=None, after=3)}, {})
    assert rejected(State(chain(register, reject, promote), {"champion": 3})) == {}


def test_a_question_nobody_answered_rejects_nothing():
    assert rejected(State(chain(("lapse", {}, {"version": "3"})), {})) == {}
