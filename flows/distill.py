"""The distill flow: prompts ─► teacher data ─► LoRA distillation, and nothing after it."""

from __future__ import annotations

from prefect import flow

from flows.forms import DistillRequest
from flows.making import begin, inputs_of, student
from registry.artifacts import ArtifactRef


@flow(name="distill", flow_run_name="distill-{request.recipe}", validate_parameters=True)
def distill_student(request: DistillRequest) -> ArtifactRef:
    """Make or find the merged student of a release recipe."""
    return student(begin(request, lambda todo: [*inputs_of(todo), todo.distill]))
