"""The draft flow: as far as quantization, ─► EAGLE3 draft ─► the checkpoint the engine chose."""

from __future__ import annotations

from prefect import flow

from flows.endings import Ended, told
from flows.forms import DraftRequest
from flows.making import after_student, begin, candidates_of, drafted, made, quantized, student
from registry.artifacts import ArtifactRef, Stage
from registry.errors import UserError
from tasks.planning import CandidatePlan, ReleasePlan


@flow(name="draft", flow_run_name="draft-{request.recipe}", validate_parameters=True)
@told
def train_release_draft(request: DraftRequest) -> Ended[dict[str, ArtifactRef]]:
    """Make or find the drafts of a release recipe, by candidate.

    Raises `UserError` where no candidate that was asked for has one.
    """

    def wanted(todo: ReleasePlan) -> list[Stage]:
        stages = [
            stage
            for one in asked(todo, request.candidate)
            for stage in (one.quantize, one.draft_training, one.draft)
        ]
        return after_student(todo, *stages)

    todo = begin(request, wanted)
    student(todo)
    found = {}
    for one in asked(todo, request.candidate):
        quantized(todo, one)
        ref = drafted(todo, one)
        if ref is not None:
            found[one.name] = ref
    said = {
        name if ref.summary["measured"] else f"{name} (not measured: {ref.summary['reason']})": ref
        for name, ref in found.items()
    }
    return made(found, said)


def asked(todo: ReleasePlan, name: str) -> list[CandidatePlan]:
    """The candidates with a draft, of those that `name` asks for."""
    found = [one for one in candidates_of(todo, name) if one.draft_training is not None]
    if not found:
        raise UserError.at(
            f"candidate {name!r}" if name else f"recipe {todo.resolved.name}",
            "has no draft",
            "name a candidate with `draft: true`, or a recipe that has one",
        )
    return found
