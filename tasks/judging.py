"""From what was measured to a judged candidate. The decisions are those of `eval_suites.gates`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval_suites.draft_gate import DraftEvidence, with_draft_gate
from eval_suites.gates import judge_all
from eval_suites.plan_gate import with_plan_gate
from eval_suites.policy import Policy
from eval_suites.selection import choose
from eval_suites.verdicts import reasons_of, verdict_of
from recipes.schema import Promotion
from registry.artifacts import ArtifactRef
from registry.bundle import Bundle, Part
from registry.errors import UserError
from registry.evidence import SUMMARY
from registry.evidence_folders import CandidateEvidence
from registry.outcome import CandidateOutcome, GateResult, Selection, Verdict
from registry.topology import weight_copies
from tasks import run_log
from tasks.draft_proof import DRAFT
from tasks.progress import LOG


@dataclass(frozen=True)
class Measured:
    """One bundle with the evidence that exists of it; `failure` says why there is none."""

    name: str
    digest: str = ""
    bundle: Bundle | None = None
    serving: ArtifactRef | None = None
    accuracy: ArtifactRef | None = None
    latency: ArtifactRef | None = None
    again: ArtifactRef | None = None
    draft_proof: ArtifactRef | None = None
    draft: bool = False
    failure: str = ""
    infeasible: str = ""
    """Why nothing of it was made: it is certain that the hardware cannot serve it."""

    def evidence(self) -> CandidateEvidence:
        if self.failure or self.infeasible:
            why = self.failure or self.infeasible
            return CandidateEvidence(self.digest, unreadable={"accuracy": why})
        return CandidateEvidence.read(
            self.digest,
            accuracy=self.accuracy.path if self.accuracy else None,
            latency=self.latency.path if self.latency else None,
            serving=self.serving.path if self.serving else None,
        )

    def repeated(self) -> CandidateEvidence | None:
        """Its accuracy measured a second time, where that was asked for (A/A)."""
        if self.again is None:
            return None
        return CandidateEvidence.read(self.digest, accuracy=self.again.path)

    def refs(self) -> dict[str, ArtifactRef]:
        """The artifacts of the evidence, by kind."""
        found = {
            "accuracy": self.accuracy,
            "latency": self.latency,
            "serving": self.serving,
            "draft": self.draft_proof,
        }
        return {kind: ref for kind, ref in found.items() if ref is not None}

    def summaries(self) -> dict[str, Path]:
        """The file with the numbers of each evidence, by kind."""
        return {
            kind: ref.path / (DRAFT if kind == "draft" else SUMMARY)
            for kind, ref in self.refs().items()
        }

    def judged_draft(self, gates: list[GateResult]) -> list[GateResult]:
        """The gates, and whether the draft pays where that was asked for."""
        if self.draft_proof is None or self.bundle is None:
            return gates
        proof = DraftEvidence.read(self.draft_proof.path / DRAFT)
        return with_draft_gate(gates, proof, self.digest, self.bundle.num_speculative_tokens)


def judge_candidates(
    policy: Policy, measured: Sequence[Measured], references: Mapping[str, Measured]
) -> list[CandidateOutcome]:
    """Every gate on every candidate of a release, together: they share the gates' error.

    `references` by the names that rules use. A candidate that was never made is INVALID, or
    INFEASIBLE where nothing of it was even tried, with the reason.
    """
    run_log.doing("gates")
    evidence = {one.name: one.evidence() for one in measured if one.bundle is not None}
    compared = {name: one.evidence() for name, one in references.items()}
    again = references["student"].repeated()
    repeated = (compared["student"], again) if again is not None else None
    results = judge_all(policy, evidence, compared, repeated=repeated, planned=len(measured))
    judged = [
        _outcome(
            one,
            evidence.get(one.name),
            with_plan_gate(one.judged_draft(results.get(one.name, [])), evidence.get(one.name)),
        )
        for one in measured
    ]
    for outcome in judged:
        LOG.info("%s: %s%s", outcome.name, outcome.verdict, _because(outcome.reasons))
    return judged


def judged_policy(policy: Policy, champion: bool) -> tuple[Policy, list[str]]:
    """The policy for this release, and what of it is not judged.

    A first release, asked for by name, has no champion to compare with.
    """
    if champion:
        return policy, []
    left = [gate for gate in policy.gates if gate.reference != "champion"]
    notes = [
        f"{gate.name} was not judged: the model has no champion yet (first release)"
        for gate in policy.gates
        if gate.reference == "champion"
    ]
    if not any(gate.tier == "critical" for gate in left):
        raise UserError.at(
            "policy",
            "has no critical gate for a first release: all compare with the champion",
            "add one that compares with the teacher or the student, or an absolute one",
        )
    return policy.model_copy(update={"gates": left}), notes


def _outcome(
    measured: Measured, evidence: CandidateEvidence | None, gates: list[GateResult]
) -> CandidateOutcome:
    if measured.bundle is None or evidence is None:
        return CandidateOutcome(
            name=measured.name,
            bundle="",
            verdict=Verdict.INFEASIBLE if measured.infeasible else Verdict.INVALID,
            reasons=[measured.infeasible or measured.failure],
            draft=measured.draft,
        )
    parts = (evidence.accuracy, evidence.latency, evidence.serving)
    points = evidence.latency.points if evidence.latency else []
    return CandidateOutcome(
        name=measured.name,
        bundle=measured.digest,
        verdict=verdict_of(gates),
        reasons=reasons_of(gates),
        gates=gates,
        metrics=evidence.accuracy.metrics if evidence.accuracy else {},
        latency=points,
        kept_rate=evidence.latency.kept_rate if evidence.latency else None,
        emulated=evidence.latency.emulated if evidence.latency else None,
        times_count=evidence.latency.times_count if evidence.latency else True,
        target=measured.bundle.target.digest,
        draft=measured.draft,
        topology=measured.bundle.topology.words if measured.bundle.topology else "",
        size_bytes=_weights(measured.bundle.target),
        weight_copies=weight_copies(measured.bundle.engine_args, measured.bundle.topology),
        draft_bytes=_weights(measured.bundle.draft) if measured.bundle.draft else None,
        memory=evidence.serving.compared_memory(points) if evidence.serving else [],
        planned_memory=evidence.serving.planned_memory if evidence.serving else None,
        engines={part.kind: part.engine for part in parts if part is not None},
        evidence={kind: ref.digest for kind, ref in measured.refs().items()},
    )


def selected(
    candidates: Sequence[CandidateOutcome],
    promotion: Promotion,
    rate: float | None,
    incumbent: str | None = None,
) -> Selection:
    """Which candidate the release's recipe picks, and why; see `eval_suites.selection`.

    `rate` in requests/s is where fixed rates are compared; `incumbent` the champion's bundle.
    """
    selection = choose(
        candidates,
        promotion.objective,
        weights={str(axis): weight for axis, weight in promotion.weights.items()},
        rate=rate,
        incumbent=incumbent,
    )
    LOG.info("%s", selection.reason)
    return selection


def _weights(part: Part) -> int:
    """Bytes of the weights in its folder."""
    return sum(path.stat().st_size for path in part.path.glob("*.safetensors"))


def _because(reasons: list[str]) -> str:
    if not reasons:
        return ""
    more = f"; and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f" ({reasons[0]}{more})"
