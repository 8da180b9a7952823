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
from dataclasses import replace

from prefect import flow

from flows.candidate_runs import measure_candidates
from flows.endings import Ended, release_ended, told
from flows.forms import PromoteRequest, ReleaseRequest
from flows.making import begin, prepare_inputs, served_teacher
from flows.promote import promote_bundle
from registry.alias_moves import AliasMoved
from registry.alias_outcome import AliasOutcome
from registry.errors import PilotageError
from registry.outcome import ReleaseOutcome
from registry.versions import CHAMPION, PromotionRefused
from tasks.accuracy import measure_accuracy
from tasks.champion import check_registry, measure_champion
from tasks.distillation import distill
from tasks.events import emit_candidate_passed
from tasks.judging import Measured, judge_candidates, judged_policy
from tasks.planning import ResolvedRelease
from tasks.plotting import begin_plots
from tasks.progress import LOG
from tasks.promoting import SmokeFailed
from tasks.publishing import Awaiting, RecordedRelease, conclude, record
from tasks.run_slots import outlive_lost_slot
from tasks.teacher_data import generate_teacher_data

outlive_lost_slot()


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

    measured = measure_candidates(todo, request)
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
    # While the engine answers that is asked before the alias moves.
    begin_plots(measured, recorded.digest)
    promotion = promote_chosen(recipes, recorded, incumbent.version)
    spent = time.monotonic() - started
    outcome = conclude(
        todo, judged, measured, others, recorded, promotion, spent, notes, incumbent.loosened
    )
    moved = isinstance(promotion, AliasOutcome) and promotion.changed
    # Only now: the report that a person is asked about is there.
    emit_candidate_passed(outcome)
    return release_ended(outcome, moved)


def promote_chosen(
    recipes: ResolvedRelease, recorded: RecordedRelease, champion: int | None
) -> AliasOutcome | Awaiting | PilotageError | None:
    """The promotion of the chosen version, by its own flow; the error where it is refused.

    A refusal ends the release with its reason and its report; a fault of a machine ends the run.
    Where the policy asks a person nothing is promoted here: nobody waits on the GPU.
    """
    if recorded.version is None:
        return None
    if recipes.policy.approval is not None and recorded.version != champion:
        return Awaiting(recorded.version)
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
