"""What may stand in a recipe: seven kinds, each one YAML file and one model in its own module.

People write these files, so unknown keys are errors (`extra="forbid"`) and every field says what
it is in. Arguments of a tool keep the tool's own names and travel unchanged: `engine_args` are
vLLM's, a `recipe` is llmcompressor's, `lora` is peft's.
"""

from __future__ import annotations

from recipes.disjoint_recipe import Disjointness
from recipes.distill_recipe import DistillRecipe
from recipes.draft_recipe import DraftRecipe
from recipes.hardware_recipe import HardwareRecipe
from recipes.model_sources import DemoModel, ModelSource, PackagedGguf, PathModel, PrunedModel
from recipes.prompt_recipe import ColumnMapping, DemoPrompts, FilePrompts, Part, Prompts
from recipes.quality_recipe import JudgePick, Pick, Quality, ReferencePick, RubricPick
from recipes.quantize_recipe import CalibrationSet, QuantizeRecipe
from recipes.release_recipe import Axis, Candidate, Promotion, ProveDraft, ReleaseRecipe
from recipes.serve_recipe import ServeRecipe
from recipes.teacher_recipe import Sampling, TeacherRecipe
from recipes.written import Written

__all__ = [
    "KINDS",
    "Axis",
    "CalibrationSet",
    "Candidate",
    "ColumnMapping",
    "DemoModel",
    "DemoPrompts",
    "Disjointness",
    "DistillRecipe",
    "DraftRecipe",
    "FilePrompts",
    "HardwareRecipe",
    "JudgePick",
    "ModelSource",
    "PackagedGguf",
    "Part",
    "PathModel",
    "Pick",
    "Promotion",
    "Prompts",
    "ProveDraft",
    "PrunedModel",
    "Quality",
    "QuantizeRecipe",
    "Recipe",
    "ReferencePick",
    "ReleaseRecipe",
    "RubricPick",
    "Sampling",
    "ServeRecipe",
    "TeacherRecipe",
    "Written",
]

Recipe = (
    TeacherRecipe
    | DistillRecipe
    | QuantizeRecipe
    | DraftRecipe
    | ServeRecipe
    | HardwareRecipe
    | ReleaseRecipe
)

KINDS: dict[str, type[Written]] = {
    "teacher": TeacherRecipe,
    "distill": DistillRecipe,
    "quantize": QuantizeRecipe,
    "draft": DraftRecipe,
    "serve": ServeRecipe,
    "hardware": HardwareRecipe,
    "release": ReleaseRecipe,
}
