"""The prompts flow: a recipe's prompts, read, checked and split, and nothing after it.

It needs no model, no engine and no device, so it runs where neither is.
"""

from __future__ import annotations

from prefect import flow

from flows.endings import Ended, told
from flows.forms import PromptsRequest
from flows.making import made
from registry.artifacts import ArtifactRef
from tasks.planning import prompts_stage, read_prompts, resolve
from tasks.prompts import prepare_prompts
from tasks.stages import begin_run


@flow(name="prompts", flow_run_name="prompts-{request.recipe}", validate_parameters=True)
@told
def split_prompts(request: PromptsRequest) -> Ended[ArtifactRef]:
    """Make or find the parts of a release recipe's prompts.

    Raises `UserError` for a bad file, too few prompts, or parts that share prompts.
    """
    recipes = resolve(request.recipe, request.overrides, request.prompts)
    stage = prompts_stage(recipes, read_prompts(recipes))
    begin_run(1, [stage])
    ref = prepare_prompts(stage, recipes.release.prompts)
    return made(ref, {"prompts": ref})
