"""Judge folders of evidence by a policy: what `pilotage gate` does, with no release around it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from eval_suites.gates import error_of, judge_all
from eval_suites.loader import load_policy
from eval_suites.loosening import loosened
from eval_suites.policy import Policy
from eval_suites.verdicts import reasons_of, release_verdict, verdict_of
from registry.digests import digest_of
from registry.errors import Problem, UserError
from registry.evidence_folders import CandidateEvidence, read_folder
from registry.gate_outcome import CandidateVerdict, GateOutcome
from registry.outcome import GateResult, LoosenedGate, Verdict, WaiverShown


def judge_folders(
    policy_name: str,
    candidates: Mapping[str, Path],
    references: Mapping[str, Path],
    *,
    repeated: Sequence[Path] = (),
    planned: int = 0,
    champion_policy: str | None = None,
    today: date | None = None,
) -> GateOutcome:
    """Every gate of the policy on every candidate.

    `repeated` are two runs of one bundle (A/A); `planned` the number of candidates of the
    release when only some are judged here; `champion_policy` the policy that promoted the
    current champion. Raises `UserError` for a wrong policy, folder or name; what is wrong inside
    a folder is a verdict with its reason.
    """
    started = time.monotonic()
    policy = load_policy(policy_name)
    _check_names(policy, references)
    looser = []
    # An empty name is a variable that somebody forgot to set, not a wish to skip the check.
    if champion_policy is not None:
        looser = check_not_looser(load_policy(champion_policy), policy)
    own = {name: read_folder(folder) for name, folder in candidates.items()}
    theirs = {name: read_folder(folder) for name, folder in references.items()}
    pair = tuple(read_folder(folder) for folder in repeated)
    results = judge_all(
        policy,
        own,
        theirs,
        repeated=(pair[0], pair[1]) if len(pair) == 2 else None,
        planned=planned,
        today=today,
    )
    judged = [
        CandidateVerdict(
            name=name,
            folder=str(candidates[name]),
            bundle=own[name].bundle,
            verdict=verdict_of(gates),
            reasons=reasons_of(gates),
            gates=gates,
            level_share=share_of(policy, gates),
            settings="recorded" if _known(own[name]) else "unknown",
        )
        for name, gates in results.items()
    ]
    verdicts = [one.verdict for one in judged]
    verdict = release_verdict(verdicts, promoted=Verdict.PASS in verdicts)
    known = all(map(_known, (*own.values(), *theirs.values(), *pair)))
    reduced = any(_reduced(policy, evidence) for evidence in own.values())
    return GateOutcome(
        verdict=verdict,
        # A smoke suite or a limit lets no gate pass, but a gate may be waived. Scores that name no
        # bundle say nothing about what could be served.
        promotable=verdict is Verdict.PASS
        and known
        and not reduced
        and all(one.bundle for one in judged),
        settings="recorded" if known else "unknown",
        policy=policy_name,
        policy_digest=digest_of(policy),
        candidates=judged,
        references={name: str(folder) for name, folder in references.items()},
        notes=[
            *notes_of(policy, max(planned, len(own))),
            *_one_folder(candidates, references),
            *_emulated(own),
        ],
        waivers=waivers_of(policy, results, today),
        loosened=looser,
        seconds=round(time.monotonic() - started, 3),
    )


def _known(evidence: CandidateEvidence) -> bool:
    """Whether the evidence says how it was measured."""
    return evidence.source != "table" and (
        evidence.accuracy is None or bool(evidence.accuracy.settings)
    )


def _reduced(policy: Policy, evidence: CandidateEvidence) -> bool:
    """Whether some of it is of a smoke suite, or of a task cut by a limit that is not allowed."""
    accuracy, latency = evidence.accuracy, evidence.latency
    return (latency is not None and latency.smoke) or (
        accuracy is not None and (accuracy.smoke or (accuracy.limited and not policy.allow_limited))
    )


def _emulated(evidence: Mapping[str, CandidateEvidence]) -> list[str]:
    """Of whom times were judged that are not those of the format."""
    return [
        f"times of {name} are of an emulated kernel, judged because the load profile "
        f"{one.latency.profile} is not one of production"
        for name, one in evidence.items()
        if one.latency is not None and one.latency.emulated and one.latency.times_count
    ]


def _one_folder(candidates: Mapping[str, Path], references: Mapping[str, Path]) -> list[str]:
    return [
        f"{name} and the {reference} are one folder, {folder}: it is compared with itself"
        for name, folder in candidates.items()
        for reference, other in references.items()
        if folder.resolve() == other.resolve()
    ]


def check_not_looser(old: Policy, new: Policy) -> list[LoosenedGate]:
    """What the new policy asks less of. Raises `UserError` where nobody owned up to it."""
    found = loosened(old, new)
    problems = [
        Problem(
            f"gate {one.gate}",
            f"is looser than when the champion was promoted: {one.what}",
            "restore it, or name it under `acknowledged` with an owner and a reason",
        )
        for one in found
        if one.acknowledged_by is None
    ]
    if problems:
        raise UserError(problems)
    return found


def share_of(policy: Policy, gates: Sequence[GateResult]) -> float:
    """The part of its gates' error that a candidate was judged with."""
    full = {rule.name: error_of(rule) for rule in policy.gates}
    shares = [gate.level / full[gate.name] for gate in gates if gate.level is not None]
    # 0.05 / 3 / 0.05 is not 1 / 3 in its last digit.
    return float(f"{min(shares, default=1.0):.12g}")


def notes_of(policy: Policy, candidates: int) -> list[str]:
    """The corrections that were made, in words."""
    notes = []
    if candidates > 1:
        notes.append(
            f"{candidates} candidates share the error of every critical gate (Holm): "
            "each is judged at the level shown with its gates"
        )
    if policy.looks:
        looks = ", ".join(f"{look.items} items ({look.share:g})" for look in policy.looks)
        notes.append(f"planned looks and their share of the error: {looks}")
    return notes


def waivers_of(
    policy: Policy, results: Mapping[str, Sequence[GateResult]], today: date | None = None
) -> list[WaiverShown]:
    """Every waiver of the policy: in force and of use, in force for nothing, or expired."""
    day = today or datetime.now(UTC).date()
    refused = {
        gate.name
        for gates in results.values()
        for gate in gates
        if gate.waived is not None and gate.result is not Verdict.PASS
    }
    return [
        WaiverShown(
            gate=waiver.gate,
            owner=waiver.owner,
            reason=waiver.reason,
            expires=waiver.expires,
            state="expired"
            if waiver.expires < day
            else ("active" if waiver.gate in refused else "unused"),
        )
        for waiver in policy.waivers
    ]


def _check_names(policy: Policy, references: Mapping[str, Path]) -> None:
    known = {"teacher", "student", "champion"}
    problems = [
        Problem(f"--reference {name}=...", "is no reference", f"one of {', '.join(sorted(known))}")
        for name in references
        if name not in known
    ]
    if problems:
        raise UserError(problems)
