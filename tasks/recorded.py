"""What was recorded of a bundle: found by a name, read whole, nothing judged and nothing measured.

A version, or a LoggedModel that passed and is no version yet; all of its JSON files, checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from eval_suites.policy import Policy
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import UserError
from registry.evidence import Evidence, ServingEvidence
from registry.outcome import CandidateOutcome
from registry.release_facts import RELEASE_FILE, ReleaseFacts
from registry.tracking import (
    BUNDLE_FILE,
    OUTCOME_FILE,
    TAG_BUNDLE,
    TAG_JUDGED,
    asking_mlflow,
    pages,
)
from registry.versions import find_version
from tasks.bundles import FEWEST_DIGITS, tracker, version_named
from tasks.logged_files import ModelFiles

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

EVIDENCE = ("accuracy", "latency", "serving")
WHOLE_DIGEST = 64

WRITTEN_ANEW = "release again: it is written anew"

Found = TypeVar("Found")


@dataclass(frozen=True)
class Recorded:
    """What was recorded of one bundle. `version` None: it passed and is no version yet."""

    model: str
    version: int | None
    model_id: str
    run_id: str
    bundle: Bundle
    outcome: CandidateOutcome
    facts: ReleaseFacts
    evidence: dict[str, Evidence]
    unreadable: dict[str, str]

    @property
    def policy(self) -> Policy:
        return Policy.model_validate(self.facts.policy)

    @property
    def startup_seconds(self) -> float | None:
        serving = self.evidence.get("serving")
        return serving.startup_seconds if isinstance(serving, ServingEvidence) else None


def judged_digest(outcome: CandidateOutcome, evidence: Mapping[str, Evidence]) -> str:
    """Of verdict, gates and every number of the evidence: a line of the ledger holds it."""
    return digest_of({"outcome": outcome, "evidence": dict(evidence)})


def not_judged(outcome: CandidateOutcome, policy: Policy, champion: int | None) -> list[str]:
    """Critical gates without a result. Those against a champion need one."""
    results = {gate.name for gate in outcome.gates}
    return [
        gate.name
        for gate in policy.gates
        if gate.tier == "critical"
        and gate.name not in results
        and (gate.reference != "champion" or champion is not None)
    ]


def recorded(reference: str) -> Recorded:
    """By MODEL@ALIAS, MODEL@VERSION, or the first digits of a bundle's digest.

    What counts is the newest judgement of the bundle, whichever release registered its version.
    Raises `UserError` where there is no such bundle, or what was recorded of it cannot be read.
    """
    if "@" in reference:
        named = version_named(reference)
        judged = _judged(named.version.tags.get(TAG_BUNDLE, ""), named.model)
        if not judged:
            raise UserError.at(
                reference,
                "was not registered by a release: nothing is recorded of it",
                "release it: a promotion reads evidence and measures nothing",
            )
        return _read(_newest(judged), named.model, int(named.version.version))
    if not re.fullmatch(rf"[0-9a-f]{{{FEWEST_DIGITS},64}}", reference):
        raise UserError.at(
            reference,
            f"is neither MODEL@ALIAS nor at least {FEWEST_DIGITS} digits of a bundle's digest",
            "the report and `pilotage release --json` show the digests",
        )
    judged = _judged(reference)
    bundles = {one.tags[TAG_BUNDLE] for one in judged}
    experiments = {one.experiment_id for one in judged}
    if len(bundles) != 1 or len(experiments) != 1:
        what = "several bundles begin so" if len(bundles) > 1 else "several models have this bundle"
        what = what if bundles else "no release recorded such a bundle"
        raise UserError.at(reference, what, "name more digits, or MODEL@VERSION")
    with asking_mlflow("read an experiment"):
        model = tracker().client.get_experiment(experiments.pop()).name
    known = find_version(tracker().client, model, bundles.pop())
    return _read(_newest(judged), model, int(known.version) if known is not None else None)


def _judged(digits: str, model: str | None = None) -> list[LoggedModel]:
    """Every LoggedModel of the bundles that begin with these digits, refused ones too."""
    if not digits:
        return []
    client = tracker().client
    with asking_mlflow(f"look for bundle {digits[:12]}"):
        experiments = [
            one.experiment_id
            for one in pages(client.search_experiments)
            if model is None or one.name == model
        ]
        condition = f"tags.`{TAG_BUNDLE}` = '{digits}'" if len(digits) == WHOLE_DIGEST else None
        if not experiments:
            return []
        return [
            one
            for one in pages(client.search_logged_models, experiments, condition)
            if one.tags.get(TAG_BUNDLE, "").startswith(digits) and TAG_JUDGED in one.tags
        ]


def _newest(judged: list[LoggedModel]) -> LoggedModel:
    return max(judged, key=lambda one: (one.tags[TAG_JUDGED], one.model_id))


def _read(logged: LoggedModel, model: str, version: int | None) -> Recorded:
    where = f"models:/{logged.model_id}"
    files = ModelFiles(str(logged.artifact_location), where)
    bundle, _ = _needed(where, BUNDLE_FILE, files.read_bundle)
    if bundle.digest != logged.tags[TAG_BUNDLE]:
        raise UserError.at(
            f"{where}/{BUNDLE_FILE}",
            f"is bundle {bundle.digest[:12]}, recorded as {logged.tags[TAG_BUNDLE][:12]}",
            WRITTEN_ANEW,
        )
    facts, _ = _needed(where, RELEASE_FILE, files.read_facts)
    outcome = _needed(where, OUTCOME_FILE, files.read_outcome)
    evidence: dict[str, Evidence] = {}
    unreadable: dict[str, str] = {}
    for kind in EVIDENCE:
        try:
            found = files.read_evidence(kind)
        except ValueError as error:
            unreadable[kind] = str(error)
        else:
            if found is not None:
                evidence[kind] = found
    return Recorded(
        model=model,
        version=version,
        model_id=str(logged.model_id),
        run_id=str(logged.source_run_id),
        bundle=bundle,
        outcome=outcome,
        facts=facts,
        evidence=evidence,
        unreadable=unreadable,
    )


def _needed(where: str, name: str, read: Callable[[], Found | None]) -> Found:
    """What `read` finds in a file that a promotion cannot do without."""
    try:
        found = read()
    except ValueError as error:
        raise UserError.at(f"{where}/{name}", str(error), WRITTEN_ANEW) from None
    if found is None:
        raise UserError.at(f"{where}/{name}", "is missing", WRITTEN_ANEW)
    return found
