"""What the proof of a draft means for its candidate: every decision, and evidence that is none."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from eval_suites.draft_gate import DRAFT_PAYS, DraftEvidence, with_draft_gate
from eval_suites.policy import Policy
from eval_suites.verdicts import reasons_of, verdict_of
from registry.artifacts import ArtifactRef
from registry.digests import digest_of
from registry.gate_outcome import CandidateVerdict, GateOutcome
from registry.gate_report import junit, markdown, text
from registry.outcome import GateResult, Verdict, Waived
from tasks.judging import Measured, judge_candidates
from tests.unit.turn_builders import bundle

EAGLE = bundle("eagle", 3)


def gate(result: Verdict = Verdict.PASS, **changes: Any) -> GateResult:
    fields: dict[str, Any] = {
        "name": "recovery", "kind": "floor", "metric": "hit_rate", "tier": "critical",
        "result": result, "estimate": 1.0, "margin": 0.9, "candidate": 1.0, "n": 100,
        "reason": "recovery it is",
    }  # fmt: skip
    return GateResult.model_validate(fields | changes)


def written(stays: bool | None, best: int | None = 2, **changes: Any) -> dict[str, Any]:
    """A `draft.json`, also with what the gate does not read."""
    turns = [{"name": "01-a", "void": "", "point": {"total": 20, "ok": 20}}] * 4
    turns.append({"name": "03-a", "void": "cache", "point": {"total": 20, "ok": 20}})
    tpot = {"value": 0.7, "low": 0.6, "high": 0.8, "repeats": 2, "level": 0.95, "reason": ""}
    return {
        "bundle": EAGLE.digest,
        "stays": stays,
        "reason": "kept rate 4 to 5 requests/s with it",
        "num_speculative_tokens": best,
        "tokens": None,
        "tries": {
            "off": [turns[0]],
            "1": [{"infeasible": "no kernel"}],
            "3": [{**turns[0], "tpot_p50_over_off": 1.25}, {"void": "cache"}],
        },
        "turns": {"rate": 4.0, "turns": turns, "ratios": {"tpot_p50": tpot, "e2el_p50": tpot}},
    } | changes


def proof(stays: bool | None, best: int | None = 2, **changes: Any) -> DraftEvidence:
    return DraftEvidence.model_validate(written(stays, best, **changes))


def judged(found: DraftEvidence | str, gates: list[GateResult] | None = None) -> list[GateResult]:
    return with_draft_gate([gate()] if gates is None else gates, found, EAGLE.digest, 3)


@pytest.mark.parametrize("stays", [True, False, None])
def test_times_of_an_emulated_kernel_prove_no_draft_in_production(stays: bool | None) -> None:
    found = judged(proof(stays, 3, emulated=True, production=True))
    assert verdict_of(found) is Verdict.INFEASIBLE
    assert "emulated" in found[-1].reason
    shown = judged(proof(True, 3, emulated=True, production=False))
    assert verdict_of(shown) is Verdict.PASS


def test_an_older_proof_that_does_not_say_is_judged_as_before(tmp_path: Path) -> None:
    (tmp_path / "draft.json").write_text(json.dumps(written(True, 3)))
    found = DraftEvidence.read(tmp_path / "draft.json")
    assert isinstance(found, DraftEvidence)
    assert (found.emulated, found.production) == (None, True)
    assert verdict_of(judged(found)) is Verdict.PASS


def test_a_draft_that_does_not_pay_fails_with_reason_and_numbers() -> None:
    gates = judged(proof(False))
    assert verdict_of(gates) is Verdict.FAIL
    found = gates[-1]
    assert (found.name, found.tier, found.kind) == (DRAFT_PAYS, "critical", "draft")
    assert (found.estimate, found.opposite_bound, found.bound) == (0.7, 0.6, 0.8)
    assert (found.rate, found.n, found.units) == (4.0, 80, None)
    assert "2 ratios" in found.method
    assert reasons_of(gates) == [
        "draft_pays FAIL: the draft does not pay: kept rate 4 to 5 requests/s with it; "
        "k=2 was best, this candidate is served with k=3 (its TPOT over that without the draft "
        "was 1.250)"
    ]
    (untried,) = with_draft_gate([], proof(False), EAGLE.digest, 1)
    assert untried.reason.endswith("is served with k=1 (not measured)")


def test_an_undecided_draft_is_inconclusive() -> None:
    gates = judged(proof(None, best=None, turns=None))
    assert verdict_of(gates) is Verdict.INCONCLUSIVE
    assert gates[-1].reason.startswith("whether the draft pays is not decided: kept rate")
    assert "k=" not in gates[-1].reason
    assert (gates[-1].estimate, gates[-1].n) == (None, None)


def test_a_draft_that_stays_adds_nothing_to_the_verdict() -> None:
    gates = judged(proof(True, best=3))
    assert verdict_of(gates) is Verdict.PASS
    assert reasons_of(gates) == []
    assert gates[-1].reason.endswith("; k=3 was best")
    lost = judged(proof(True, best=3), [gate(Verdict.FAIL)])
    assert verdict_of(lost) is Verdict.FAIL
    assert len(reasons_of(lost)) == 1


def test_a_draft_that_pays_with_another_number_promotes_nothing() -> None:
    gates = judged(proof(True, best=2))
    assert verdict_of(gates) is Verdict.INCONCLUSIVE
    assert gates[-1].reason.startswith(
        "a draft pays with k=2, and k=3 is what would be promoted: kept rate"
    )


def test_a_draft_that_stays_does_not_pass_a_candidate_by_itself() -> None:
    waived = Waived(owner="a", reason="b", expires=datetime.now(UTC).date())
    for others in ([], [gate(tier="advisory")], [gate(waived=waived)]):
        assert judged(proof(True, best=3), others) == others
        assert verdict_of(judged(proof(True, best=3), others)) is Verdict.INVALID
        assert verdict_of(judged(proof(False), others)) is Verdict.FAIL


@pytest.mark.parametrize(
    "changes",
    [
        {"stays": "yes"},
        {"reason": None},
        {"bundle": None},
        {"turns": {"rate": 4.0}},
        {"turns": {"rate": float("nan"), "turns": [], "ratios": {}}},
    ],
)
def test_evidence_that_cannot_be_read_is_invalid(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = tmp_path / "draft.json"
    file.write_text(json.dumps(written(True) | changes))
    found = DraftEvidence.read(file)
    assert isinstance(found, str)
    assert verdict_of(judged(found)) is Verdict.INVALID


def test_missing_evidence_and_another_bundles_are_invalid(tmp_path: Path) -> None:
    assert "cannot be read" in str(DraftEvidence.read(tmp_path / "draft.json"))
    gates = judged(proof(True, bundle="0" * 64))
    assert verdict_of(gates) is Verdict.INVALID
    assert "the proof is of bundle 000000000000" in gates[-1].reason


# -- in a release ----------------------------------------------------------------------------


POLICY = Policy.model_validate(
    {
        "kind": "policy",
        "description": "for a test",
        "gates": [{"name": "answers", "metric": "hit_rate", "kind": "floor", "margin": 0.5}],
    }
)


def ref(folder: Path, digest: str = "d") -> ArtifactRef:
    return ArtifactRef(
        stage="draft_proof", key="k", digest=digest, path=folder,
        made_at=datetime.now(UTC), seconds=1.0, reused=False,
    )  # fmt: skip


def test_only_the_candidate_with_the_draft_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "draft.json").write_text(json.dumps(written(False)))
    plain = bundle("plain")
    measured = [
        Measured("plain", digest=plain.digest, bundle=plain),
        Measured("eagle", digest=EAGLE.digest, bundle=EAGLE, draft_proof=ref(tmp_path), draft=True),
        Measured("broken", failure="it broke", draft=True),
    ]
    found = judge_candidates(POLICY, measured, {"student": measured[0]})
    names = [[one.name for one in candidate.gates] for candidate in found]
    assert names == [["answers"], ["answers", DRAFT_PAYS], []]
    assert found[1].evidence == {"draft": "d"}
    assert any("the draft does not pay" in reason for reason in found[1].reasons)
    assert found[2].reasons == ["it broke"]
    assert measured[1].summaries() == {"draft": tmp_path / "draft.json"}


@pytest.mark.parametrize("stays", [True, False, None])
def test_the_gate_is_shown_wherever_gates_are_shown(stays: bool | None) -> None:
    gates = judged(proof(stays, best=3))
    verdict = verdict_of(gates)
    outcome = GateOutcome(
        verdict=verdict, promotable=False, settings="recorded", policy="p",
        policy_digest=digest_of(POLICY), seconds=1.0,
        candidates=[
            CandidateVerdict(
                name="eagle", folder="", bundle=EAGLE.digest, verdict=verdict,
                reasons=reasons_of(gates), gates=gates, level_share=1.0, settings="recorded",
            )
        ],
    )  # fmt: skip
    (case,) = ElementTree.fromstring(junit(outcome)).findall(".//testcase[@name='draft_pays']")
    assert (case.find("failure") is None) is (stays is True)
    assert "draft_pays" in markdown(outcome)
    assert "draft_pays" in text(outcome)
