"""The quantize flow: prompts ─► teacher data ─► LoRA distillation ─► quantization."""

from __future__ import annotations

from prefect import flow

from flows.endings import Ended, told
from flows.forms import QuantizeRequest
from flows.making import after_student, begin, candidates_of, made, quantized, student
from registry.artifacts import ArtifactRef, Stage
from registry.errors import UserError
from tasks.planning import CandidatePlan, ReleasePlan


@flow(name="quantize", flow_run_name="quantize-{request.recipe}", validate_parameters=True)
@told
def quantize_student(request: QuantizeRequest) -> Ended[dict[str, ArtifactRef]]:
    """Make or find the quantized students of a release recipe, by candidate.

    Raises `UserError` where no candidate that was asked for is quantized.
    """

    def wanted(todo: ReleasePlan) -> list[Stage]:
        return after_student(todo, *(one.quantize for one in asked(todo, request.candidate)))

    todo = begin(request, wanted)
    student(todo)
    refs = {one.name: quantized(todo, one) for one in asked(todo, request.candidate)}
    found = {name: ref for name, ref in refs.items() if ref is not None}
    return made(found, found)


def asked(todo: ReleasePlan, name: str) -> list[CandidatePlan]:
    """The candidates that are quantized, of those that `name` asks for."""
    found = [one for one in candidates_of(todo, name) if one.quantize is not None]
    if not found:
        raise UserError.at(
            f"candidate {name!r}" if name else f"recipe {todo.resolved.name}",
            "is not quantized: it serves the student itself",
            "name a candidate or a recipe with a quantization, or run distill/alone",
        )
    return found
