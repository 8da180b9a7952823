"""How far a release is made before anything is judged: shared by the release and the single stages.

prompts ─► teacher data ─► LoRA distillation ─► quantization ─► EAGLE3 draft ─► bundle

Every step asks the store first, so a flow that stops after its own stage makes what is missing
before it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from flows.endings import COMPLETED, Ended, line
from flows.forms import RecipeRequest
from registry.artifacts import ArtifactRef, Stage
from registry.bundle import Bundle
from registry.errors import UserError
from tasks.distillation import distill
from tasks.draft_checkpoints import CHOSEN, choose_checkpoint
from tasks.engines.subprocesses import end_leftovers
from tasks.models import prepare_model
from tasks.planning import CandidatePlan, ReleasePlan, plan, resolve
from tasks.progress import LOG, spell
from tasks.prompts import prepare_prompts
from tasks.quantization import quantize
from tasks.serving import RemoteTeacher, Served, ServedBundle, bundle_of, part_of
from tasks.speculation import train_draft
from tasks.stages import begin_run
from tasks.student_template import check_student_template
from tasks.teacher_data import generate_teacher_data

T = TypeVar("T")


def begin(
    request: RecipeRequest, wanted: Callable[[ReleasePlan], Sequence[Stage]] = ReleasePlan.stages
) -> ReleasePlan:
    """End what a crash left behind, read the recipe, begin a run of the `wanted` stages.

    Raises `UserError` with every mistake of the recipe and what it names.
    """
    for pid in end_leftovers():
        LOG.warning("ended process %d, left behind by a run that crashed", pid)
    todo = plan(resolve(request.recipe, request.overrides, request.prompts))
    stages = list({stage.key: stage for stage in wanted(todo)}.values())
    begin_run(len(stages), stages)
    return todo


def prepare_teacher(todo: ReleasePlan) -> None:
    """Prompts, and the teacher's model where it is served here."""
    recipes = todo.resolved
    prepare_prompts(todo.prompts, recipes.release.prompts)
    if todo.teacher_model is not None and recipes.teacher.model is not None:
        prepare_model(todo.teacher_model, recipes.teacher.model)


def prepare_inputs(todo: ReleasePlan) -> None:
    """Prompts, and the models that everything is made of."""
    recipes = todo.resolved
    prepare_teacher(todo)
    prepare_model(todo.student_base, recipes.distill.student)
    check_student_template(todo.student_base, todo.prompts)


def served_teacher(todo: ReleasePlan) -> Served:
    """The teacher behind a server of ours, or behind somebody else's URL."""
    if todo.teacher_model is None:
        return RemoteTeacher(todo.resolved.teacher)
    target = part_of(todo.teacher_model)
    return ServedBundle(bundle_of("teacher", target, None, todo.teacher_config))


def answers(todo: ReleasePlan) -> ArtifactRef:
    """The teacher's answers, from a server that is started only where one is missing."""
    prepare_inputs(todo)
    with served_teacher(todo) as teacher:
        return generate_teacher_data(todo.teacher_data, todo.resolved.teacher, teacher)


def student(todo: ReleasePlan) -> ArtifactRef:
    """The merged student."""
    answers(todo)
    return distill(todo.distill, todo.resolved.distill.checkpoint)


def quantized(todo: ReleasePlan, wanted: CandidatePlan) -> ArtifactRef | None:
    """The quantized student of a candidate; None where it serves the student itself."""
    if wanted.quantize is None:
        return None
    return quantize(wanted.quantize, todo.resolved.quantize[wanted.candidate.quantize])


def drafted(todo: ReleasePlan, wanted: CandidatePlan) -> ArtifactRef | None:
    """The draft of a candidate, the checkpoint that the engine chose; None where it has none."""
    if not (wanted.draft_training and wanted.draft and todo.resolved.draft):
        return None
    train_draft(wanted.draft_training, todo.resolved.draft)
    return choose_checkpoint(wanted.draft, part_of(wanted.target, wanted.below))


def make_bundle(todo: ReleasePlan, wanted: CandidatePlan) -> Bundle:
    """What a candidate's server is started from. Raises `StageFailed` where a stage is no good."""
    quantized(todo, wanted)
    target = part_of(wanted.target, wanted.below)
    draft = None
    if drafted(todo, wanted) is not None and wanted.draft is not None:
        draft = part_of(wanted.draft, CHOSEN)
    return bundle_of(wanted.name, target, draft, wanted.config)


def made(outcome: T, refs: Mapping[str, ArtifactRef]) -> Ended[T]:
    """What a flow of stages alone ends with: each by its name, whether it was there, and where."""
    told = [
        f"{name}: {'reused' if ref.reused else f'made in {spell(ref.seconds)}'}: {ref.path}"
        for name, ref in refs.items()
    ]
    return Ended(outcome, COMPLETED, line("; ".join(told)))


def inputs_of(todo: ReleasePlan) -> list[Stage]:
    """The stages of `answers`, in their order."""
    stages = [todo.prompts, todo.teacher_model, todo.student_base, todo.teacher_data]
    return [stage for stage in stages if stage is not None]


def after_student(todo: ReleasePlan, *stages: Stage | None) -> list[Stage]:
    """The stages of `student`, and those of `stages` that there are."""
    return [*inputs_of(todo), todo.distill, *(stage for stage in stages if stage is not None)]


def candidates_of(todo: ReleasePlan, name: str) -> list[CandidatePlan]:
    """The one candidate of that name, or all for an empty one. Raises `UserError`."""
    found = [one for one in todo.candidates if name in ("", one.name)]
    if not found:
        known = ", ".join(one.name for one in todo.candidates)
        raise UserError.at(f"candidate {name!r}", "is none of the recipe's", f"one of: {known}")
    return found
