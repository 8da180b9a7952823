"""The gate `draft_pays`: what the proof of a draft means for its candidate. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from eval_suites.load_points import EMULATED
from registry.outcome import GateResult, Verdict

DRAFT_PAYS = "draft_pays"


class _Read(BaseModel):
    """Of what the proof wrote only what is judged."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class _Ratio(_Read):
    value: float | None
    low: float | None
    high: float | None
    repeats: int


class _Ratios(_Read):
    tpot_p50: _Ratio


class _Point(_Read):
    total: int


class _Turn(_Read):
    void: str
    point: _Point


class _Turns(_Read):
    rate: float
    ratios: _Ratios
    turns: list[_Turn]


class _Try(_Read):
    tpot_p50_over_off: float | None = None


class DraftEvidence(_Read):
    """`draft.json`: the decision and the numbers behind it. `stays` None: not decided."""

    bundle: str
    stays: bool | None
    reason: str
    num_speculative_tokens: int | None
    production: bool = True
    emulated: bool | None = None
    tries: dict[str, list[_Try]]
    turns: _Turns | None

    @classmethod
    def read(cls, file: Path) -> DraftEvidence | str:
        """The evidence, or why it cannot be used."""
        try:
            return cls.model_validate_json(file.read_bytes(), strict=True)
        except (OSError, ValidationError) as error:
            return f"{file.name} cannot be read: {error}"


def with_draft_gate(
    gates: Sequence[GateResult], proof: DraftEvidence | str, bundle: str, served: int | None
) -> list[GateResult]:
    """The gates of a candidate and `draft_pays`: what does not pay is refused.

    `bundle` is the candidate's digest, `served` its number of speculative tokens: a draft that pays
    with another number is not what would be promoted. A draft that stays is shown beside gates that
    decide; alone it would pass a candidate whose answers nobody judged. Evidence that cannot be
    used, or is of another bundle, is INVALID; times of an emulated kernel under a production
    profile are INFEASIBLE (see `eval_suites.load_points.check_real`).
    """
    if isinstance(proof, str):
        return [*gates, _result(Verdict.INVALID, proof)]
    if proof.bundle != bundle:
        why = f"the proof is of bundle {proof.bundle[:12]}, not of {bundle[:12]}"
        return [*gates, _result(Verdict.INVALID, why)]
    if proof.emulated and proof.production:
        return [*gates, _result(Verdict.INFEASIBLE, f"whether the draft pays: {EMULATED}", proof)]
    told = f"{proof.reason}{_advice(proof, served)}"
    if proof.stays and proof.num_speculative_tokens != served:
        why = (
            f"a draft pays with k={proof.num_speculative_tokens}, and k={served} is what would be "
            f"promoted: {told}; serve the proved number, or prove the served one"
        )
        return [*gates, _result(Verdict.INCONCLUSIVE, why, proof)]
    if proof.stays:
        shown = [_result(Verdict.PASS, f"the draft pays: {told}", proof)]
        return [*gates, *(shown if any(gate.decides for gate in gates) else [])]
    if proof.stays is None:
        why = f"whether the draft pays is not decided: {told}"
        return [*gates, _result(Verdict.INCONCLUSIVE, why, proof)]
    return [*gates, _result(Verdict.FAIL, f"the draft does not pay: {told}", proof)]


def _advice(proof: DraftEvidence, served: int | None) -> str:
    """Which number of tokens was best, and what is known of the served one where it was not."""
    best = proof.num_speculative_tokens
    if best is None:
        return ""
    if best == served:
        return f"; k={best} was best"
    tried = [one.tpot_p50_over_off for one in proof.tries.get(str(served), [])]
    ratios = [f"{one:.3f}" for one in tried if one is not None]
    known = f"its TPOT over that without the draft was {', '.join(ratios)}"
    served_so = f"this candidate is served with k={served}"
    return f"; k={best} was best, {served_so} ({known if ratios else 'not measured'})"


def _result(verdict: Verdict, reason: str, proof: DraftEvidence | None = None) -> GateResult:
    """The ratio of TPOT with over without the draft beside the verdict, where it was measured."""
    numbers: dict[str, Any] = {}
    turns = proof.turns if proof else None
    if turns is not None:
        tpot = turns.ratios.tpot_p50
        numbers = {
            "bound": tpot.high,
            "opposite_bound": tpot.low,
            "ratio": tpot.value,
            "rate": turns.rate,
            "method": f"Student's t on logarithms of {tpot.repeats} ratios of turns; kept rates",
        }
    return GateResult(
        name=DRAFT_PAYS,
        kind="draft",
        metric="draft.tpot_p50_ratio",
        tier="critical",
        result=verdict,
        estimate=numbers.get("ratio"),
        margin=1.0,
        candidate=None,
        n=sum(turn.point.total for turn in turns.turns if not turn.void) if turns else None,
        reason=reason,
        **numbers,
    )
