"""The teacher flow: prompts ─► teacher data, and nothing after it."""

from __future__ import annotations

from prefect import flow

from flows.endings import Ended, told
from flows.forms import TeacherRequest
from flows.making import answers, begin, inputs_of, made
from registry.artifacts import ArtifactRef


@flow(name="teacher", flow_run_name="teacher-{request.recipe}", validate_parameters=True)
@told
def generate_answers(request: TeacherRequest) -> Ended[ArtifactRef]:
    """Make or find the teacher's answers of a release recipe."""
    ref = answers(begin(request, inputs_of))
    return made(ref, {"answers": ref})
