"""The gate flow: PASS completes the run, every other verdict ends it as Failed and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.client.schemas.objects import StateType

from flows import gate
from flows.endings import outcome_in
from flows.forms import GateRequest
from flows.gate import gate_evidence, said
from registry.errors import UserError
from registry.gate_outcome import CandidateVerdict, GateOutcome
from registry.outcome import Verdict


def outcome(verdict: Verdict, *reasons: str, promotable: bool = False) -> GateOutcome:
    one = CandidateVerdict(
        name="w8a8", folder="x", verdict=verdict, reasons=list(reasons), settings="recorded"
    )
    return GateOutcome(
        verdict=verdict, promotable=promotable, settings="recorded", policy="demo",
        policy_digest="d" * 64, candidates=[one], seconds=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("verdict", list(Verdict))
def test_the_run_is_green_for_a_pass_alone(
    prefect: None, monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    made = outcome(verdict, *(() if verdict is Verdict.PASS else ("hit_rate: too low", "more")))
    monkeypatch.setattr(gate, "gate_folders", lambda *words: made)
    state = gate_evidence(GateRequest(), return_state=True)
    assert outcome_in(state) == made
    if verdict is Verdict.PASS:
        assert (state.type, state.name) == (StateType.COMPLETED, "Passed")
        assert state.message == "PASS: w8a8 by demo; not promotable by this evidence alone"
    else:
        assert (state.type, state.name) == (StateType.FAILED, "Refused")
        assert state.message == f"{verdict}: w8a8: hit_rate: too low"


def scores(folder: Path, right: int, wrong: int) -> Path:
    folder.mkdir()
    rows = [f"i{number},{int(number < right)}" for number in range(right + wrong)]
    (folder / "items.csv").write_text("\n".join(["item_id,hit_rate", *rows]))
    return folder


def test_real_folders_pass_fail_and_are_missing(prefect: None, tmp_path: Path) -> None:
    teacher = scores(tmp_path / "teacher", 372, 28)
    good, bad = scores(tmp_path / "good", 372, 28), scores(tmp_path / "bad", 200, 200)

    def judged(candidate: Path) -> tuple[StateType, str]:
        request = GateRequest(candidates=[str(candidate)], references=[f"teacher={teacher}"])
        state = gate_evidence(request, return_state=True)
        return state.type, state.message or ""

    assert judged(good)[0] is StateType.COMPLETED
    kind, message = judged(bad)
    assert kind is StateType.FAILED and message.startswith("FAIL: candidate: ")
    kind, message = judged(tmp_path / "nowhere")
    assert kind is StateType.FAILED and "nowhere" in message
    with pytest.raises(UserError):
        gate_evidence(GateRequest(candidates=[str(tmp_path / "nowhere")]))


def test_nobody_with_a_reason_is_said_too() -> None:
    assert said(outcome(Verdict.INVALID)) == "INVALID: nobody passed"
    assert said(outcome(Verdict.PASS, promotable=True)) == "PASS: w8a8 by demo"
