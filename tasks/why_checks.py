"""What has to agree about a version: its files with each other, with its tags and its ledger.

Each check adds to `Findings` and gives what it read; a file that cannot be read is a problem and
reads as nothing. Nothing is raised for what a file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from eval_suites.verdicts import verdict_of
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import UserError
from registry.evidence import AccuracyEvidence, Evidence, LatencyEvidence
from registry.ledger import (
    Entry,
    Ledger,
    LedgerDamaged,
    anchor_of,
    left_behind,
    verify,
)
from registry.lineage import BUNDLE, LINEAGE_FILE, PROMPTS, Lineage, whole_store
from registry.outcome import CandidateOutcome, Verdict
from registry.release_facts import RELEASE_FILE
from registry.settings import settings
from registry.tracking import BUNDLE_FILE, OUTCOME_FILE, asking_mlflow
from registry.versions import CHAMPION, PREVIOUS
from tasks.bundles import tracker
from tasks.lineage import lineage_for
from tasks.logged_files import ModelFiles
from tasks.recorded import EVIDENCE, judged_digest, not_judged
from tasks.registering import model_behind
from tasks.version_files import VersionFiles, with_evidence

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

TAG_PROMPTS = "pilotage.prompts"
"""On a version: digests of the prompt sets behind it, comma separated."""

TAG_EVIDENCE = "pilotage.evidence."
"""On a version: what its bundle was measured with last, by kind."""

Found = TypeVar("Found")


@dataclass
class Findings:
    problems: list[str] = field(default_factory=list)
    """What contradicts, or lacks, what an alias has to rest on."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know, and contradicts nothing."""

    def read(self, name: str, reader: Callable[[], Found], *, needed: bool = True) -> Found | None:
        """What a reader of `ModelFiles` gives; None, with the problem told, where it cannot."""
        try:
            found = reader()
        except ValueError as error:
            what = " ".join(str(error).split())
            self.problems.append(f"{name} cannot be read: {what}")
            return None
        if found is None and needed:
            self.problems.append(f"{name} is missing")
        return found


class Judged(NamedTuple):
    """The judgement on which a version stands, and the folder that it was read from."""

    files: ModelFiles
    outcome: CandidateOutcome | None
    evidence: dict[str, Evidence]
    told: dict[str, Mapping[str, Any]]
    """Every kind of evidence that the outcome names, as JSON; empty where it cannot be read."""

    @property
    def digests(self) -> dict[str, str]:
        return self.outcome.evidence if self.outcome is not None else {}


# -- the ledger ------------------------------------------------------------------------------


def read_ledger(model: str, tags: Mapping[str, str], findings: Findings) -> list[Entry] | None:
    """The model's lines; None where they cannot be read, or are gone."""
    try:
        entries = Ledger(settings().ledger_uri).entries(model)
    except LedgerDamaged as error:
        findings.problems.append(f"the ledger is damaged: {error.broken}")
        return None
    except UserError as error:
        findings.problems.append(f"the ledger could not be asked: {error.problems[0].what}")
        return None
    try:
        anchor = anchor_of(tags, model)
    except UserError as error:
        findings.problems.append(f"the ledger's anchor is damaged: {error.problems[0].what}")
        broken = verify(entries, None)
    else:
        broken = verify(entries, anchor) or left_behind(len(entries), anchor)
        if broken is None and len(entries) > (anchor.length if anchor is not None else 0):
            findings.notes.append(
                f"line {len(entries)} of the ledger has no anchor in MLflow yet: its move was not "
                "finished"
            )
    if broken is not None:
        findings.problems.append(f"the ledger is damaged: {broken}")
        return entries or None
    return entries


def judging_line(entries: Sequence[Entry] | None, number: int) -> Entry | None:
    """The line that says on what the version stands: its last promotion, else its registering."""
    own = [
        line
        for line in entries or ()
        if any(move.after == number for name, move in line.moves.items() if name != PREVIOUS)
    ]
    promoted = [line for line in own if line.action == "promote" and CHAMPION in line.moves]
    registered = [line for line in own if line.action == "register"]
    return next(iter([*promoted[-1:], *registered[-1:]]), None)


# -- the files -------------------------------------------------------------------------------


def check_bundle(files: VersionFiles, tagged: str, findings: Findings) -> Bundle | None:
    found = findings.read(BUNDLE_FILE, files.read_bundle)
    if found is None:
        return None
    bundle, named = found
    if named != bundle.digest:
        findings.problems.append(
            f"{BUNDLE_FILE} names the digest {cut(named)}, its content is {cut(bundle.digest)}: "
            "it was changed after it was gated"
        )
    if bundle.digest != tagged:
        findings.problems.append(
            f"{BUNDLE_FILE} is bundle {cut(bundle.digest)}, the version's tag says {cut(tagged)}"
        )
    return bundle


def check_judged(
    files: VersionFiles, bundle: Bundle | None, line: Entry | None, tagged: str, findings: Findings
) -> Judged:
    """Verdict, gates and evidence, as the promotion read them where its line says from where."""
    read = _judged_files(files, line, findings)
    place = read or files
    outcome = findings.read(OUTCOME_FILE, place.read_outcome)
    if outcome is None:
        findings.problems.append("verdict and gates are not known")
        return Judged(place, None, {}, {})
    _check_outcome(outcome, tagged, findings)
    # Of another judgement the candidate may have had another name.
    if bundle is not None and place is files and bundle.name != outcome.name:
        findings.problems.append(
            f"{BUNDLE_FILE} is candidate {bundle.name!r}, {OUTCOME_FILE} judged {outcome.name!r}"
        )
    _check_policy(place, outcome, line, findings)
    _check_named(outcome, line, files.version, findings)
    evidence, told = _evidence(place, outcome, tagged, findings)
    # What could not be read is a problem already, and has no digest to compare.
    readable = set(outcome.evidence) & set(EVIDENCE) <= set(evidence)
    recorded = line.details.get("judged") if line is not None and read is not None else None
    if recorded and readable and judged_digest(outcome, _all_there(place, evidence)) != recorded:
        findings.problems.append("verdict or evidence were changed since the promotion read them")
    return Judged(place, outcome, evidence, told)


def _judged_files(files: VersionFiles, line: Entry | None, findings: Findings) -> ModelFiles | None:
    """What the promotion read: the version's own files or a later judgement's; None: it is gone."""
    from mlflow.exceptions import MlflowException

    read = line.details.get("logged_model") if line is not None else None
    if not read or read == model_behind(files.version):
        return files
    where = f"models:/{read}"
    with asking_mlflow(f"read {where}"):
        try:
            source = str(tracker().client.get_logged_model(read).artifact_location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            findings.problems.append(
                f"{where} is gone, whose verdict and evidence the promotion read; shown is what "
                "was judged when the version was made"
            )
            return None
    findings.notes.append(
        f"the promotion read a later judgement than the version's own, {where}; it is shown here"
    )
    return ModelFiles(source, where)


def _check_outcome(outcome: CandidateOutcome, tagged: str, findings: Findings) -> None:
    if outcome.bundle != tagged:
        findings.problems.append(
            f"{OUTCOME_FILE} judged bundle {cut(outcome.bundle)}, the version is of {cut(tagged)}"
        )
    if outcome.verdict is not Verdict.PASS:
        findings.problems.append(f"its verdict is {outcome.verdict}; only PASS becomes a version")
    if verdict_of(outcome.gates) is not outcome.verdict:
        findings.problems.append(
            f"its gates make {verdict_of(outcome.gates)}, its verdict says {outcome.verdict}"
        )


def _check_policy(
    files: ModelFiles, outcome: CandidateOutcome, line: Entry | None, findings: Findings
) -> None:
    found = findings.read(RELEASE_FILE, files.read_facts, needed=False)
    if found is None:
        return
    facts, policy = found
    if left := not_judged(outcome, policy, facts.champion):
        findings.problems.append(f"gates of its policy were not judged: {', '.join(left)}")
    if digest_of(policy) != facts.policy_digest:
        findings.problems.append("the recorded policy is not the one of its digest")
    asked = line.policy if line is not None and line.action == "promote" else ""
    if line is not None and asked and asked != facts.policy_digest:
        findings.problems.append(
            f"it was judged by policy {cut(facts.policy_digest)}, the ledger's line "
            f"{line.sequence} says {cut(asked)}"
        )


def _check_named(
    outcome: CandidateOutcome, line: Entry | None, version: ModelVersion, findings: Findings
) -> None:
    """Evidence that the outcome names, beside what the ledger and the version's tags name."""
    held = outcome.evidence
    tags = {
        name.removeprefix(TAG_EVIDENCE): digest
        for name, digest in version.tags.items()
        if name.startswith(TAG_EVIDENCE)
    }
    told = line.evidence if line is not None else {}
    for kind in sorted({*told, *held} if told else ()):
        named, own = told.get(kind, ""), held.get(kind, "")
        # A bundle that is measured again is registered again, and its first files stay.
        again = line is not None and line.action == "register" and own and named == tags.get(kind)
        if line is not None and named != own and not again:
            findings.problems.append(
                f"{OUTCOME_FILE} names {kind} evidence {cut(own)}, the ledger's line "
                f"{line.sequence} {cut(named)}"
            )
    for kind, digest in tags.items():
        if kind not in held and kind not in told:
            findings.problems.append(
                f"{OUTCOME_FILE} names no {kind} evidence, the version's tag names {cut(digest)}"
            )
        elif kind in held and held[kind] != digest:
            findings.notes.append(
                f"{kind} was measured again later (evidence {cut(digest)}); shown is what was "
                "judged before"
            )


def _evidence(
    files: ModelFiles, outcome: CandidateOutcome, tagged: str, findings: Findings
) -> tuple[dict[str, Evidence], dict[str, Mapping[str, Any]]]:
    """What the outcome names, by kind; and the same as JSON, also of kinds without a model."""
    found: dict[str, Evidence] = {}
    told: dict[str, Mapping[str, Any]] = {}
    for kind in outcome.evidence:
        name = f"evidence-{kind}.json"
        document: Mapping[str, Any] | None
        if kind in EVIDENCE:
            evidence: Evidence | None = findings.read(name, partial(files.read_evidence, kind))
            if evidence is not None:
                found[kind] = evidence
            document = evidence.model_dump(mode="json") if evidence is not None else None
        else:
            document = findings.read(name, partial(files.document, name))
        told[kind] = document or {}
        bundle = told[kind].get("bundle", tagged)
        if bundle != tagged:
            findings.problems.append(f"{name} was measured on bundle {cut(str(bundle))}")
    _check_numbers(outcome, found, findings)
    return found, told


def _check_numbers(
    outcome: CandidateOutcome, evidence: Mapping[str, Evidence], findings: Findings
) -> None:
    """The outcome repeats the means and the load points of its evidence."""
    accuracy, load = evidence.get("accuracy"), evidence.get("latency")
    if isinstance(accuracy, AccuracyEvidence) and outcome.metrics:
        odd = sorted(
            name
            for name, value in outcome.metrics.items()
            if name in accuracy.metrics and accuracy.metrics[name] != value
        )
        if odd:
            findings.problems.append(
                f"{OUTCOME_FILE} and evidence-accuracy.json differ in {', '.join(odd)}"
            )
    if isinstance(load, LatencyEvidence) and outcome.latency and outcome.latency != load.points:
        findings.problems.append(f"{OUTCOME_FILE} and evidence-latency.json differ in their points")


def _all_there(files: ModelFiles, evidence: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """With what lies there and the outcome does not name: a promotion reads that too."""
    found = dict(evidence)
    for kind in EVIDENCE:
        if kind not in found:
            try:
                more = files.read_evidence(kind)
            except ValueError:
                continue
            if more is not None:
                found[kind] = more
    return found


# -- the lineage -----------------------------------------------------------------------------


def check_lineage(
    judged: Judged, bundle: Bundle | None, version: ModelVersion, tagged: str, findings: Findings
) -> Lineage | None:
    """What the bundle was made of; None where it cannot be read, or nothing says so."""
    before = len(findings.problems)
    lineage = findings.read(LINEAGE_FILE, judged.files.read_lineage, needed=False)
    if len(findings.problems) > before:
        return None
    if lineage is None and bundle is not None:
        store = whole_store(settings().store_dir)[0]
        lineage = with_evidence(lineage_for(bundle, {}), judged.digests, store)
        findings.notes.append(
            "the version has no lineage of its own: the chain is as this machine's store has it"
        )
    tops = lineage.of_kind(BUNDLE) if lineage is not None else []
    if lineage is None or len(tops) != 1:
        findings.problems.append("nothing says what the bundle was made of")
        return None
    (top,) = tops
    if top.digest != tagged:
        findings.problems.append(f"its lineage is that of bundle {cut(top.digest)}")
    _check_links(lineage, bundle, findings)
    for role, node in lineage.parents(top.id).items():
        kind = role.removeprefix("evidence.")
        if kind != role and judged.digests.get(kind, node.digest) != node.digest:
            findings.problems.append(
                f"its lineage names {kind} evidence {cut(node.digest)}, "
                f"judged was {cut(judged.digests[kind])}"
            )
    prompts = version.tags.get(TAG_PROMPTS)
    if prompts is not None and prompts != lineage.prompts_digest():
        # The tag is of the last release that measured the bundle, the lineage of the first.
        tags = version.tags
        again = any(tags.get(f"{TAG_EVIDENCE}{k}", d) != d for k, d in judged.digests.items())
        told = f"its tag {TAG_PROMPTS} is not the prompts of its lineage"
        (findings.notes if again else findings.problems).append(told)
    gone = [node.title for node in lineage.ordered() if node.gone]
    if gone:
        findings.notes.append(f"known by digest only, their content is gone: {', '.join(gone)}")
    if not lineage.of_kind(PROMPTS):
        findings.notes.append("the chain ends before the prompts")
    return lineage


def _check_links(lineage: Lineage, bundle: Bundle | None, findings: Findings) -> None:
    """The bundle leads to its weights, and to everything else that the lineage has."""
    top = lineage.of_kind(BUNDLE)[0]
    below = lineage.below([top.id])
    loose = [node.title for node in lineage.ordered() if node.id not in below]
    if loose:
        findings.problems.append(f"in its lineage nothing was made of: {', '.join(loose)}")
    if bundle is None or bundle.digest != top.digest:
        return
    parents = lineage.parents(top.id)
    for role, part in (("target", bundle.target), ("draft", bundle.draft)):
        held = parents.get(role)
        if part is not None and (held is None or (held.kind, held.key) != (part.stage, part.key)):
            findings.problems.append(f"its lineage does not lead to the {role} of {BUNDLE_FILE}")


def cut(digest: str) -> str:
    return digest[:12] or "nothing"
