"""The release flow: prompts, a teacher and a student in; a promoted bundle or a refusal out.

    prompts ─► teacher data ─► LoRA distillation ─► quantization ─► EAGLE3 draft ─► served bundle
                                                                                     ├─► accuracy
                                                                                     ├─► latency
                                                                                     └─► draft proof
                       evidence ─► gates ─► verdict ─► version ─► promote flow: alias ─► report
                                 (teacher, student and champion are the references)

Every arrow is a stage with a key; a stage whose artifact is in the store is reused, so the flow
may be killed at any moment and run again. Needs the serve environment; heavy stages run in
processes of their own and this one stays small.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from prefect import flow

from flows.endings import Ended, release_ended, told
from flows.forms import PromoteRequest, ReleaseRequest
from flows.making import begin, make_bundle, prepare_inputs, served_teacher
from flows.promote import promote_bundle
from registry.alias_moves import AliasMoved
from registry.alias_outcome import AliasOutcome
from registry.artifacts import ArtifactRef, Stage
from registry.bundle import Bundle
from registry.errors import Infeasible, InfrastructureError, PilotageError, StageFailed
from registry.outcome import ReleaseOutcome
from registry.versions import CHAMPION, PromotionRefused
from tasks.accuracy import measure_accuracy
from tasks.bundles import remember
from tasks.champion import check_registry, measure_champion
from tasks.distillation import distill
from tasks.draft_stage import prove_candidate
from tasks.judging import Measured, judge_candidates, judged_policy
from tasks.latency import measure_latency, will_run
from tasks.planning import CandidatePlan, ReleasePlan, ResolvedRelease
from tasks.progress import LOG
from tasks.promoting import SmokeFailed
from tasks.publishing import RecordedRelease, conclude, record
from tasks.serving import (
    ServedBundle,
    known_infeasible,
    prove_serving,
    serving_evidence,
)
from tasks.stages import leave_out
from tasks.teacher_data import generate_teacher_data


@flow(name="release", flow_run_name="release-{request.recipe}", validate_parameters=True)
@told
def release_model(request: ReleaseRequest) -> Ended[ReleaseOutcome]:
    """Make, measure, judge and publish every candidate of a release recipe."""
    started = time.monotonic()
    todo = begin(request)
    recipes = todo.resolved

    incumbent = check_registry(
        recipes.release.model, recipes.release.promotion.first_release, recipes.policy
    )
    policy, notes = judged_policy(recipes.policy, champion=incumbent.version is not None)
    prepare_inputs(todo)
    with served_teacher(todo) as teacher:
        generate_teacher_data(todo.teacher_data, recipes.teacher, teacher)
        teacher_accuracy = measure_accuracy(
            todo.teacher_accuracy, recipes.accuracy, recipes.release.accuracy, teacher
        )
        teacher_measured = Measured("teacher", digest=teacher.digest, accuracy=teacher_accuracy)
    distill(todo.distill, recipes.distill.checkpoint)

    measured = [measure_candidate(todo, candidate) for candidate in todo.candidates]
    student = next(m for m in measured if m.name == recipes.release.reference_candidate)
    references = {"teacher": teacher_measured, "student": student}
    if any(gate.reference == "champion" for gate in policy.gates):
        references["champion"] = measure_champion(todo, measured)
    others = [teacher_measured]
    if CHAMPION in references:
        # It may be a candidate of this release as well.
        others.append(replace(references[CHAMPION], name=CHAMPION))
    judged = judge_candidates(policy, measured, references)
    recorded = record(todo, judged, measured, incumbent.version)
    promotion = promote_chosen(recipes, recorded, incumbent.version)
    spent = time.monotonic() - started
    outcome = conclude(
        todo, judged, measured, others, recorded, promotion, spent, notes, incumbent.loosened
    )
    moved = isinstance(promotion, AliasOutcome) and promotion.changed
    return release_ended(outcome, moved)


def promote_chosen(
    recipes: ResolvedRelease, recorded: RecordedRelease, champion: int | None
) -> AliasOutcome | PilotageError | None:
    """The promotion of the chosen version, by its own flow; the error where it is refused.

    A refusal ends the release with its reason and its report; a fault of a machine ends the run.
    """
    if recorded.version is None:
        return None
    request = PromoteRequest(
        bundle=f"{recipes.release.model}@{recorded.version}",
        actor=f"release {recipes.name}",
        expected=champion or 0,
    )
    try:
        return promote_bundle(request)
    except (AliasMoved, PromotionRefused, SmokeFailed) as refused:
        LOG.error("not promoted: %s", refused)
        return refused


def measure_candidate(todo: ReleasePlan, wanted: CandidatePlan) -> Measured:
    """Make one bundle, start it once and measure everything on it.

    A candidate whose own stage fails, or that this hardware cannot serve, ends with its reason
    and does not stop the others.
    """
    recipes = todo.resolved
    try:
        bundle = make_bundle(todo, wanted)
    except StageFailed as error:
        LOG.error("%s: %s", wanted.name, error)
        leave_out(*measurements(wanted), wanted.serving)
        return Measured(wanted.name, failure=str(error), draft=wanted.draft is not None)
    remember(bundle)
    with ServedBundle(bundle) as served, served_as_before(wanted.name):
        if will_run(wanted.latency, recipes.policy.max_age_days) and not known_infeasible(
            wanted.serving
        ):
            # Its import takes as long as the server's start; the two overlap.
            _ = served.load_generator
        serving = prove_serving(wanted.serving, served)
        feasible = serving_evidence(serving).feasible
        accuracy: ArtifactRef | None
        latency, again = None, None
        if feasible:
            accuracy = measure_accuracy(
                wanted.accuracy, recipes.accuracy, recipes.release.accuracy, served
            )
            if wanted.accuracy_again is not None:
                again = measure_accuracy(
                    wanted.accuracy_again, recipes.accuracy, recipes.release.accuracy, served
                )
            latency = measure_latency(
                wanted.latency,
                recipes.load,
                recipes.release.load,
                recipes.policy.max_age_days,
                served,
            )
        else:
            leave_out(*measurements(wanted))
            accuracy = reference_accuracy(todo, wanted, served)
    proof = prove_its_draft(todo, wanted, bundle) if feasible else None
    return Measured(
        wanted.name,
        digest=bundle.digest,
        bundle=bundle,
        serving=serving,
        accuracy=accuracy,
        latency=latency,
        again=again,
        draft_proof=proof,
        draft=bundle.draft is not None,
    )


def measurements(wanted: CandidatePlan) -> list[Stage]:
    """What is measured on a candidate that is served."""
    stages = [wanted.accuracy, wanted.accuracy_again, wanted.latency, wanted.draft_proof]
    return [stage for stage in stages if stage is not None]


def prove_its_draft(todo: ReleasePlan, wanted: CandidatePlan, bundle: Bundle) -> ArtifactRef | None:
    """Whether its draft pays, where that is asked for; once the candidate's own server has ended.

    The proof starts a server for every turn, and two at once would slow each other down.
    """
    recipes = todo.resolved
    asked, profile = recipes.release.prove_draft, recipes.draft_load
    if wanted.draft_proof is None or asked is None or profile is None:
        return None
    with served_as_before(wanted.name):
        return prove_candidate(
            wanted.draft_proof, asked, profile, recipes.policy.max_age_days, bundle
        )


@contextmanager
def served_as_before(name: str) -> Iterator[None]:
    """A bundle that was proved and does not start now is a fault of the machine, no verdict."""
    try:
        yield
    except Infeasible as reason:
        raise InfrastructureError(f"{name} was served before and is not now: {reason}") from None


def reference_accuracy(
    todo: ReleasePlan, wanted: CandidatePlan, served: ServedBundle
) -> ArtifactRef | None:
    """Accuracy by the reference engine where the serving engine has no kernel: for the report.

    The candidate is INFEASIBLE whatever comes of it, so a failure here is only logged.
    """
    recipes = todo.resolved
    try:
        return measure_accuracy(
            wanted.accuracy_reference, recipes.accuracy, recipes.release.accuracy, served
        )
    except PilotageError as error:
        LOG.warning("%s: no accuracy from the reference engine: %s", wanted.name, error)
        return None
