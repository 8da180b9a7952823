"""The distill flow: prompts ─► teacher data ─► LoRA distillation, and nothing after it."""

from __future__ import annotations

from prefect import flow

from flows.endings import Ended, told
from flows.forms import DistillRequest
from flows.making import after_student, begin, made, student
from registry.artifacts import ArtifactRef


@flow(name="distill", flow_run_name="distill-{request.recipe}", validate_parameters=True)
@told
def distill_student(request: DistillRequest) -> Ended[ArtifactRef]:
    """Make or find the merged student of a release recipe."""
    ref = student(begin(request, after_student))
    return made(ref, {"student": ref})
