"""What a promotion needs: the bundle's recorded evidence, whether it holds, and a smoke prompt.

Nothing is measured here. A version, or a LoggedModel that passed and is no version yet, is found
by name; everything that was recorded of it is read; `problems_of` says what speaks against it.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from prefect import task
from pydantic import BaseModel, SecretStr, ValidationError

from eval_suites.policy import Policy
from eval_suites.verdicts import verdict_of
from recipes.schema import Sampling
from registry.alias_moves import holder
from registry.alias_outcome import SmokeAnswer
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.draft_binding import acceptance_record, binding_problems
from registry.errors import EXIT_REFUSED, PilotageError, Problem, UserError
from registry.evidence import SUMMARY, Evidence, LatencyEvidence, ServingEvidence, read_summary
from registry.outcome import CandidateOutcome, Verdict
from registry.provenance import hardware_fingerprint
from registry.release_facts import RELEASE_FILE, ReleaseFacts
from registry.tracking import BUNDLE_FILE, OUTCOME_FILE, TAG_BUNDLE, TAG_JUDGED, asking_mlflow
from registry.versions import (
    PromotionRefused,
    current_champion,
    find_version,
    numbered_version,
)
from tasks.bundles import FEWEST_DIGITS, promoted_bundle, tracker, weights_as_gated
from tasks.engines.openai_chat import ChatRequest, Endpoint, generate
from tasks.progress import LOG
from tasks.serving import ServedBundle
from tasks.stages import TASK_OPTIONS

EVIDENCE = ("accuracy", "latency", "serving")
WHOLE_DIGEST = 64
SMOKE_TOKENS = 32
SMOKE_TIMEOUT = 120.0
"""Seconds for one answer of a server that has just generated its first token."""

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

Model = TypeVar("Model", bound=BaseModel)

FALLBACK_PROMPT = "Where is my shipment?"
"""Asked of versions from before releases recorded a prompt of their own."""


class SmokeFailed(PilotageError):
    """A bundle that passed does not answer. The message says what it did instead."""

    exit_status = EXIT_REFUSED


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


def recorded(reference: str) -> Recorded:
    """By MODEL@ALIAS, MODEL@VERSION, or the first digits of a bundle's digest.

    What counts is the newest judgement of the bundle, whichever release registered its version.
    Raises `UserError` where there is no such bundle, or what was recorded of it cannot be read.
    """
    client = tracker().client
    if "@" in reference:
        model, _, wanted = reference.partition("@")
        number = wanted.isdecimal() and len(wanted) < 10
        version = (
            numbered_version(client, model, int(wanted))
            if number
            else current_champion(client, model, wanted)
        )
        if version is None:
            raise UserError.at(reference, "no such model, alias or version")
        judged = _judged(version.tags.get(TAG_BUNDLE, ""), model)
        if not judged:
            raise UserError.at(
                reference,
                "was not registered by a release: nothing is recorded of it",
                "release it: a promotion reads evidence and measures nothing",
            )
        return _read(_newest(judged), model, int(version.version))
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
        model = client.get_experiment(experiments.pop()).name
    known = find_version(client, model, bundles.pop())
    return _read(_newest(judged), model, int(known.version) if known is not None else None)


def problems_of(
    found: Recorded,
    *,
    hardware: str,
    champion: int | None,
    now: datetime,
    policy: str | None = None,
) -> list[str]:
    """What speaks against promoting a bundle on the strength of what was recorded; empty: nothing.

    hardware: fingerprint of the machine that will serve; champion: version that holds the alias
    now; policy: digest of the policy that is demanded, None for the one it was judged by.
    """
    outcome, facts, digest = found.outcome, found.facts, found.bundle.digest
    problems = []
    if outcome.verdict is not Verdict.PASS:
        because = "; ".join(outcome.reasons[:3])
        problems.append(f"its verdict is {outcome.verdict}: {because}")
    elif verdict_of(outcome.gates) is not Verdict.PASS:
        problems.append(f"its gates make {verdict_of(outcome.gates)}, its verdict says PASS")
    if outcome.bundle != digest:
        problems.append(f"the verdict is about bundle {outcome.bundle[:12]}, not {digest[:12]}")
    if digest_of(found.policy) != facts.policy_digest:
        problems.append("the recorded policy is not the one of its digest")
    if policy is not None and policy != facts.policy_digest:
        problems.append(
            f"it was judged by policy {facts.policy_name} ({facts.policy_digest[:12]}), "
            f"asked for is {policy[:12]}"
        )
    problems += [f"evidence {kind}: {reason}" for kind, reason in found.unreadable.items()]
    problems += _evidence_problems(found, digest, hardware, now)
    expired = sorted(
        f"{gate.name} ({gate.waived.owner}, until {gate.waived.expires})"
        for gate in outcome.gates
        if gate.waived is not None and gate.waived.expires < now.date()
    )
    if expired:
        problems.append(f"a waiver has run out: {', '.join(expired)}")
    compared = any(gate.reference == "champion" for gate in found.policy.gates)
    if compared and facts.champion != champion:
        problems.append(
            f"it was compared with {holder(facts.champion)} as the champion, which now is "
            f"{holder(champion)}"
        )
    return [*problems, *_draft_problems(found)]


def _evidence_problems(found: Recorded, digest: str, hardware: str, now: datetime) -> list[str]:
    problems = []
    missing = [
        kind for kind in EVIDENCE if kind not in found.evidence and kind not in found.unreadable
    ]
    problems += [f"no {kind} evidence is recorded" for kind in missing]
    for kind, evidence in found.evidence.items():
        if evidence.bundle != digest:
            problems.append(
                f"evidence {kind} names bundle {evidence.bundle[:12]}, not {digest[:12]}"
            )
        if not isinstance(evidence, LatencyEvidence | ServingEvidence):
            continue
        if evidence.hardware != hardware:
            problems.append(
                f"evidence {kind} was measured on hardware {evidence.hardware}; this is {hardware}"
            )
    load = found.evidence.get("latency")
    if isinstance(load, LatencyEvidence):
        if load.profile != found.facts.profile:
            problems.append(f"latency was measured with {load.profile}, not {found.facts.profile}")
        age = (now - load.measured_at).total_seconds() / 86_400
        if age > found.policy.max_age_days:
            problems.append(
                f"its latency is {age:.0f} days old; its policy allows "
                f"{found.policy.max_age_days:g}"
            )
    serving = found.evidence.get("serving")
    if isinstance(serving, ServingEvidence) and not serving.feasible:
        problems.append(f"this hardware cannot serve it: {serving.reason}")
    return problems


def _draft_problems(found: Recorded) -> list[str]:
    if found.bundle.draft is None:
        return []
    problems = binding_problems(found.bundle)
    load = found.evidence.get("latency")
    if isinstance(load, LatencyEvidence) and acceptance_record(load) is None:
        problems.append("no acceptance length is recorded for this draft on this target")
    return problems


def check_recorded(
    found: Recorded, reference: str, champion: int | None, policy: str | None = None
) -> None:
    """Raises `PromotionRefused` with everything that speaks against the bundle at once."""
    problems = problems_of(
        found,
        hardware=hardware_fingerprint(),
        champion=champion,
        now=datetime.now(UTC),
        policy=policy,
    )
    if problems:
        remedy = f"`pilotage release {found.facts.recipe}`: what still holds is reused"
        raise PromotionRefused([Problem(f"promote {reference}", one, remedy) for one in problems])


# -- the smoke prompt ------------------------------------------------------------------------


@task(name="smoke", **TASK_OPTIONS)
def smoke(reference: str, expected: str, messages: list[dict[str, str]]) -> SmokeAnswer:
    """Start what the reference points to, as it was gated, and ask it one prompt.

    reference: MODEL@ALIAS or MODEL@VERSION; expected: the bundle it must be. Raises `SmokeFailed`.
    """
    started = time.monotonic()
    bundle = promoted_bundle(reference)
    if bundle.digest != expected:
        raise SmokeFailed(f"{reference} is bundle {bundle.digest[:12]}, not {expected[:12]}")
    asked = messages or [{"role": "user", "content": FALLBACK_PROMPT}]
    try:
        weights_as_gated(bundle, reference)
        with ServedBundle(bundle) as served:
            server = served.server
            request = ChatRequest(
                id="smoke", messages=asked, sampling=Sampling(max_tokens=SMOKE_TOKENS)
            )
            endpoint = Endpoint(
                url=server.url, model=server.served_name, api_key=SecretStr(server.api_key)
            )
            (answer,) = generate(
                [request],
                endpoint,
                concurrency=1,
                max_retry_wait=SMOKE_TIMEOUT,
                request_timeout=SMOKE_TIMEOUT,
            )
    except PilotageError as error:
        raise SmokeFailed(f"{reference} does not start: {error}") from error
    if answer.state != "done" or not answer.text.strip() or not answer.completion_tokens:
        what = answer.reason or f"answered {answer.text!r}"
        raise SmokeFailed(f"{reference} does not answer its smoke prompt: {what}")
    LOG.info("%s answers: %s", reference, " ".join(answer.text.split())[:120])
    return SmokeAnswer(
        reference=reference,
        bundle=bundle.digest,
        prompt=asked[-1]["content"],
        text=answer.text,
        tokens=answer.completion_tokens,
        startup_seconds=round(server.startup_seconds, 2),
        seconds=round(time.monotonic() - started, 2),
    )


def smoke_prompt(reference: str) -> list[dict[str, str]]:
    """The prompt that was recorded with a version; none for one from before there was any."""
    try:
        return recorded(reference).facts.smoke
    except UserError as error:
        LOG.warning("%s: no recorded smoke prompt (%s)", reference, error.problems[0].what)
        return []


# -- reading ---------------------------------------------------------------------------------


def _judged(digits: str, model: str | None = None) -> list[LoggedModel]:
    """Every LoggedModel of the bundles that begin with these digits, refused ones too."""
    if not digits:
        return []
    client = tracker().client
    with asking_mlflow(f"look for bundle {digits[:12]}"):
        experiments = [
            one.experiment_id
            for one in client.search_experiments()
            if model is None or one.name == model
        ]
        condition = f"tags.`{TAG_BUNDLE}` = '{digits}'" if len(digits) == WHOLE_DIGEST else None
        found: list[LoggedModel] = []
        token = None
        while experiments:
            page = client.search_logged_models(experiments, condition, page_token=token)
            found += [
                one
                for one in page
                if one.tags.get(TAG_BUNDLE, "").startswith(digits) and TAG_JUDGED in one.tags
            ]
            token = page.token
            if not token:
                break
        return found


def _newest(judged: list[LoggedModel]) -> LoggedModel:
    return max(judged, key=lambda one: (one.tags[TAG_JUDGED], one.model_id))


def _read(logged: LoggedModel, model: str, version: int | None) -> Recorded:
    where = f"models:/{logged.model_id}"
    with tempfile.TemporaryDirectory(prefix="pilotage-") as folder:
        files = _download(logged, Path(folder))
        document = _json(files, BUNDLE_FILE, where)
        document.pop("digest", None)
        evidence: dict[str, Evidence] = {}
        unreadable: dict[str, str] = {}
        for kind in EVIDENCE:
            file = files.get(f"evidence-{kind}.json")
            if file is None:
                continue
            place = Path(folder) / kind
            place.mkdir()
            (place / SUMMARY).write_bytes(file.read_bytes())
            try:
                evidence[kind] = read_summary(place)
            except UserError as error:
                unreadable[kind] = error.problems[0].what
        return Recorded(
            model=model,
            version=version,
            model_id=str(logged.model_id),
            run_id=str(logged.source_run_id),
            bundle=_parsed(Bundle, document, f"{where}/{BUNDLE_FILE}"),
            outcome=_parsed(
                CandidateOutcome, _json(files, OUTCOME_FILE, where), f"{where}/{OUTCOME_FILE}"
            ),
            facts=_parsed(
                ReleaseFacts, _json(files, RELEASE_FILE, where), f"{where}/{RELEASE_FILE}"
            ),
            evidence=evidence,
            unreadable=unreadable,
        )


def _download(logged: LoggedModel, folder: Path) -> dict[str, Path]:
    """The JSON files of a LoggedModel by name; its weights are left where they are."""
    from mlflow.artifacts import download_artifacts, list_artifacts

    uri = tracker().uri
    with asking_mlflow(f"read models:/{logged.model_id}"):
        source = str(logged.artifact_location).rstrip("/")
        found = list_artifacts(source, tracking_uri=uri)
        # Paths begin at the folder above.
        names = [PurePosixPath(one.path).name for one in found if not one.is_dir]
        return {
            name: Path(
                download_artifacts(f"{source}/{name}", dst_path=str(folder), tracking_uri=uri)
            )
            for name in names
            if name.endswith(".json")
        }


def _json(files: Mapping[str, Path], name: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(files[name].read_text(encoding="utf-8"))
    except (KeyError, ValueError) as error:
        what = "is missing" if isinstance(error, KeyError) else f"cannot be read: {error}"
        raise UserError.at(f"{where}/{name}", what, "release again: it is written anew") from None
    if not isinstance(content, dict):
        raise UserError.at(f"{where}/{name}", "is no JSON object", "release again")
    return content


def _parsed(kind: type[Model], document: Any, where: str) -> Model:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError.at(f"{where}: {place}", first["msg"], "release again") from None
