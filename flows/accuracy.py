"""The accuracy flow: a candidate, or the teacher ─► served ─► scored, and nothing after it."""

from __future__ import annotations

from prefect import flow

from flows.endings import Ended, told
from flows.forms import TEACHER, AccuracyRequest
from flows.making import (
    after_student,
    begin,
    candidates_of,
    made,
    make_bundle,
    prepare_teacher,
    served_teacher,
    student,
)
from flows.measuring import planned_bundle, refused, served_as_before
from registry.artifacts import ArtifactRef, Stage
from registry.errors import Infeasible
from tasks.accuracy import measure_accuracy
from tasks.bundles import remember
from tasks.planning import CandidatePlan, ReleasePlan
from tasks.serving import ServedBundle, prove_serving, serving_evidence


@flow(name="accuracy", flow_run_name="accuracy-{request.recipe}", validate_parameters=True)
@told
def score_candidate(request: AccuracyRequest) -> Ended[ArtifactRef]:
    """Make or find the accuracy evidence of one candidate of a release recipe, or of its teacher.

    Raises `Infeasible` where this hardware cannot serve the candidate.
    """
    if request.candidate == TEACHER:
        todo = begin(request, of_teacher)
        ref = score_teacher(todo)
    else:
        todo = begin(request, lambda todo: of_candidate(todo, request.candidate))
        student(todo)
        ref = score(todo, *candidates_of(todo, request.candidate))
    return made(ref, {f"accuracy of {request.candidate}": ref})


def of_teacher(todo: ReleasePlan) -> list[Stage]:
    stages = [todo.prompts, todo.teacher_model, todo.teacher_accuracy]
    return [stage for stage in stages if stage is not None]


def of_candidate(todo: ReleasePlan, name: str) -> list[Stage]:
    (one,) = candidates_of(todo, name)
    made_for_it = (one.quantize, one.draft_training, one.draft)
    return after_student(todo, *made_for_it, one.serving, one.accuracy)


def score_teacher(todo: ReleasePlan) -> ArtifactRef:
    prepare_teacher(todo)
    recipes = todo.resolved
    with served_teacher(todo) as teacher:
        return measure_accuracy(
            todo.teacher_accuracy, recipes.accuracy, recipes.release.accuracy, teacher
        )


def score(todo: ReleasePlan, wanted: CandidatePlan) -> ArtifactRef:
    """As a release scores it: the served bundle, with production arguments and its draft on."""
    recipes = todo.resolved
    if why := refused(todo, wanted):
        raise Infeasible(f"{wanted.name}: {why}")
    bundle = make_bundle(todo, wanted)
    remember(bundle)
    with ServedBundle(bundle) as served:
        with served_as_before(wanted.name):
            proof = prove_serving(wanted.serving, served, planned_bundle(todo, wanted, bundle))
        evidence = serving_evidence(proof)
        if not evidence.feasible:
            raise Infeasible(f"{wanted.name}: {evidence.reason}")
        with served_as_before(wanted.name):
            return measure_accuracy(
                wanted.accuracy, recipes.accuracy, recipes.release.accuracy, served
            )
