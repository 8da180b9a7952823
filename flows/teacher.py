"""The teacher flow: prompts ─► teacher data, and nothing after it."""

from __future__ import annotations

from prefect import flow

from flows.forms import TeacherRequest
from flows.making import answers, begin, inputs_of
from registry.artifacts import ArtifactRef


@flow(name="teacher", flow_run_name="teacher-{request.recipe}", validate_parameters=True)
def generate_answers(request: TeacherRequest) -> ArtifactRef:
    """Make or find the teacher's answers of a release recipe."""
    return answers(begin(request, inputs_of))
