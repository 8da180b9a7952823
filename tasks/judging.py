"""From what was measured to a judged candidate. The decisions are those of `eval_suites.gates`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval_suites.gates import CandidateEvidence, judge_all, reasons_of, verdict_of
from eval_suites.schema import Policy
from registry.artifacts import ArtifactRef
from registry.bundle import Bundle
from registry.outcome import CandidateOutcome, Verdict
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
    draft: bool = False
    failure: str = ""

    def evidence(self) -> CandidateEvidence:
        return CandidateEvidence.read(
            self.digest,
            accuracy=self.accuracy.path if self.accuracy else None,
            latency=self.latency.path if self.latency else None,
            serving=self.serving.path if self.serving else None,
        )

    def refs(self) -> dict[str, ArtifactRef]:
        """The artifacts of the evidence, by kind."""
        found = {"accuracy": self.accuracy, "latency": self.latency, "serving": self.serving}
        return {kind: ref for kind, ref in found.items() if ref is not None}


def judge_candidate(
    policy: Policy, measured: Measured, *, teacher: Measured, student: Measured
) -> CandidateOutcome:
    """Every gate on one candidate. A candidate that was never made is INVALID, with the reason."""
    if measured.bundle is None:
        outcome = CandidateOutcome(
            name=measured.name,
            bundle="",
            verdict=Verdict.INVALID,
            reasons=[measured.failure],
            draft=measured.draft,
        )
    else:
        evidence = measured.evidence()
        references = {"teacher": teacher.evidence(), "student": student.evidence()}
        gates = judge_all(policy.gates, evidence, references)
        parts = (evidence.accuracy, evidence.latency, evidence.serving)
        outcome = CandidateOutcome(
            name=measured.name,
            bundle=measured.digest,
            verdict=verdict_of(gates),
            reasons=reasons_of(gates),
            gates=gates,
            metrics=evidence.accuracy.metrics if evidence.accuracy else {},
            latency=evidence.latency.points if evidence.latency else [],
            target=measured.bundle.target.digest,
            draft=measured.draft,
            size_bytes=sum(
                path.stat().st_size for path in measured.bundle.target.path.glob("*.safetensors")
            ),
            engines={part.kind: part.engine for part in parts if part is not None},
            evidence={kind: ref.digest for kind, ref in measured.refs().items()},
        )
    LOG.info("%s: %s%s", outcome.name, outcome.verdict, _because(outcome.reasons))
    return outcome


def select(candidates: Sequence[CandidateOutcome], objective: str, rate: float) -> str | None:
    """Name of the best passing candidate, or None when none passed.

    `fastest`: lowest P99 E2EL at `rate` requests/s; `most_accurate`: highest mean over its
    accuracy metrics; `smallest`: fewest bytes of weights. Ties go to the earlier candidate.
    """
    passed = [candidate for candidate in candidates if candidate.verdict is Verdict.PASS]
    if not passed:
        return None

    def cost(candidate: CandidateOutcome) -> float:
        if objective == "most_accurate":
            known = [value for value in candidate.metrics.values() if value is not None]
            return -sum(known) / len(known) if known else float("inf")
        if objective == "smallest":
            return float(candidate.size_bytes or float("inf"))
        times = [point.e2el_ms.get("p99") for point in candidate.latency if point.rate == rate]
        return times[0] if times and times[0] is not None else float("inf")

    return min(passed, key=cost).name


def _because(reasons: list[str]) -> str:
    if not reasons:
        return ""
    more = f"; and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f" ({reasons[0]}{more})"
