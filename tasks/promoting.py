"""What a promotion demands of what was recorded, and the smoke prompt.

Nothing is measured here. `problems_of` says what speaks against a bundle.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import task
from pydantic import SecretStr

from eval_suites.verdicts import verdict_of
from recipes.schema import Sampling
from registry.alias_moves import holder, shown
from registry.alias_outcome import SmokeAnswer
from registry.digests import digest_of
from registry.draft_binding import acceptance_problem, binding_problems
from registry.errors import EXIT_REFUSED, PilotageError, Problem, UserError
from registry.evidence import LatencyEvidence, ServingEvidence
from registry.outcome import Verdict
from registry.provenance import hardware_fingerprint
from registry.settings import settings
from registry.versions import PromotionRefused
from tasks.bundles import promoted_bundle, weights_as_gated
from tasks.engines.openai_chat import ChatRequest, Endpoint, generate
from tasks.logged_files import no_numbers
from tasks.progress import LOG
from tasks.recorded import EVIDENCE, Recorded, not_judged, recorded
from tasks.serving import ServedBundle
from tasks.stages import TASK_OPTIONS

SMOKE_TOKENS = 32
SMOKE_TIMEOUT = 120.0
"""Seconds for one answer of a server that has just generated its first token."""

FALLBACK_PROMPT = "Where is my shipment?"
"""Asked of versions from before releases recorded a prompt of their own."""

CLOCKS_DIFFER = timedelta(hours=1)
"""Evidence may be this much younger than now: the clock that stamped it was another one."""


class SmokeFailed(PilotageError):
    """A bundle that passed does not answer. The message says what it did instead."""

    exit_status = EXIT_REFUSED


def problems_of(
    found: Recorded,
    *,
    hardware: str | None,
    champion: int | None,
    now: datetime,
    policy: str | None = None,
) -> list[str]:
    """What speaks against promoting a bundle on the strength of what was recorded; empty: nothing.

    hardware: fingerprint of the machine that will serve, None where it is not known yet; champion:
    version that holds the alias now; policy: digest of the policy that is demanded, None for the
    one it was judged by.
    """
    outcome, facts, digest = found.outcome, found.facts, found.bundle.digest
    problems = []
    if outcome.verdict is not Verdict.PASS:
        because = "; ".join(outcome.reasons[:3])
        problems.append(f"its verdict is {outcome.verdict}: {because}")
    elif verdict_of(outcome.gates) is not Verdict.PASS:
        problems.append(f"its gates make {verdict_of(outcome.gates)}, its verdict says PASS")
    elif left := not_judged(outcome, found.policy, facts.champion):
        problems.append(f"gates of its policy were not judged: {', '.join(left)}")
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
    for name, record in {"outcome": outcome, **found.evidence}.items():
        problems += [f"{name}: {place} is no number" for place in no_numbers(record.model_dump())]
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


def _evidence_problems(
    found: Recorded, digest: str, hardware: str | None, now: datetime
) -> list[str]:
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
    if hardware is not None:
        problems += hardware_problems(found, hardware)
    load = found.evidence.get("latency")
    if isinstance(load, LatencyEvidence):
        if load.profile != found.facts.profile:
            problems.append(f"latency was measured with {load.profile}, not {found.facts.profile}")
        # A time without a zone is UTC, as this project writes them.
        measured = load.measured_at
        age = now - (measured if measured.tzinfo else measured.replace(tzinfo=UTC))
        if age > timedelta(days=found.policy.max_age_days):
            problems.append(
                f"its latency is {age / timedelta(days=1):.0f} days old; its policy allows "
                f"{found.policy.max_age_days:g}"
            )
        if age < -CLOCKS_DIFFER:
            problems.append(f"its latency is from the future ({measured:%Y-%m-%d %H:%M})")
    serving = found.evidence.get("serving")
    if isinstance(serving, ServingEvidence) and not serving.feasible:
        problems.append(f"this hardware cannot serve it: {serving.reason}")
    return problems


def hardware_problems(found: Recorded, hardware: str) -> list[str]:
    """Evidence of another machine than the one that will serve."""
    return [
        f"evidence {kind} was measured on hardware {evidence.hardware}; this is {hardware}"
        for kind, evidence in found.evidence.items()
        if isinstance(evidence, LatencyEvidence | ServingEvidence) and evidence.hardware != hardware
    ]


def _draft_problems(found: Recorded) -> list[str]:
    if found.bundle.draft is None:
        return []
    problems = binding_problems(found.bundle)
    load = found.evidence.get("latency")
    if isinstance(load, LatencyEvidence):
        told = acceptance_problem(load, found.bundle.num_speculative_tokens or 1)
        problems += [told] if told else []
    return problems


def check_recorded(
    found: Recorded, reference: str, champion: int | None, policy: str | None = None
) -> None:
    """Raises `PromotionRefused` with everything that speaks against the bundle at once.

    Where the smoke prompt is asked on another machine, that one's hardware counts, and not this
    one's: `check_answered_on` compares it.
    """
    problems = problems_of(
        found,
        hardware=None if settings().smoke_deployment else hardware_fingerprint(),
        champion=champion,
        now=datetime.now(UTC),
        policy=policy,
    )
    _refuse(found, reference, problems)


def check_answered_on(found: Recorded, reference: str, hardware: str) -> None:
    """Raises `PromotionRefused` where the evidence is not of the machine that answered."""
    _refuse(found, reference, hardware_problems(found, hardware))


def _refuse(found: Recorded, reference: str, problems: list[str]) -> None:
    if problems:
        remedy = f"`pilotage release {found.facts.recipe}`: what still holds is reused"
        raise PromotionRefused([Problem(f"promote {reference}", one, remedy) for one in problems])


# -- the smoke prompt ------------------------------------------------------------------------


@task(name="smoke", **TASK_OPTIONS)
def smoke(reference: str, expected: str, messages: list[dict[str, Any]]) -> SmokeAnswer:
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
    LOG.info("%s answers: %s", reference, shown(answer.text, 120))
    return SmokeAnswer(
        reference=reference,
        bundle=bundle.digest,
        prompt=asked[-1]["content"],
        text=answer.text,
        tokens=answer.completion_tokens,
        hardware=hardware_fingerprint(),
        startup_seconds=round(server.startup_seconds, 2),
        seconds=round(time.monotonic() - started, 2),
    )


def smoke_prompt(reference: str) -> list[dict[str, Any]]:
    """The prompt that was recorded with a version; none for one from before there was any."""
    try:
        return recorded(reference).facts.smoke
    except UserError as error:
        LOG.warning("%s: no recorded smoke prompt (%s)", reference, error.problems[0].what)
        return []
