"""What each flow is asked for: one pydantic model per flow, which Prefect shows as a form.

Model validators do not run in the browser, so what can be said in JSON schema is said there: the
server checks a form's values against it before a run exists. Drop-downs hold what the folders of
the checkout hold when the deployment is registered; a path to a file of one's own stays possible.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)

from eval_suites.loader import shipped as shipped_suites
from recipes.loader import shipped as shipped_recipes
from registry.errors import Problem, UserError

Reason = Annotated[str, StringConstraints(strip_whitespace=True, max_length=1000)]
Actor = Annotated[str, StringConstraints(strip_whitespace=True, max_length=300)]

OWN_FILE = r"^(.*/.*|.*\.ya?ml)$"
"""A path and not a name, by the rule of `recipes.loader.find`."""


def _choice(names: list[str], *, optional: bool = False) -> WithJsonSchema:
    """A drop-down of `names`, or the path of a file; the value is text either way.

    Whether the name or file is there is said by the flow, with the nearest name: a drop-down is as
    old as its deployment.
    """
    none = [{"type": "null", "title": "none"}] if optional else []
    return WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "title": "of the checkout", "enum": names},
                {"type": "string", "title": "own file", "pattern": OWN_FILE, "maxLength": 4096},
                *none,
            ]
        }
    )


ReleaseRecipe = Annotated[str, _choice(shipped_recipes("release"))]
LoadProfile = Annotated[str, _choice(shipped_suites("load"))]
Policy = Annotated[str, _choice(shipped_suites("policy"))]
OptionalPolicy = Annotated[str | None, _choice(shipped_suites("policy"), optional=True)]
OptionalHardware = Annotated[str | None, _choice(shipped_recipes("hardware"), optional=True)]
Override = Annotated[str, StringConstraints(pattern=r"^[^=.]+(\.[^=.]+)*=", max_length=4096)]
Folder = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
NamedFolder = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+=.+", max_length=4096)]
TEACHER = "teacher"
"""Asked for in the place of a candidate."""

ANY_CANDIDATE = "Name of one candidate of the recipe; empty: every candidate."


def at(position: int, **more: Any) -> dict[str, Any]:
    """Where a field stands in the form; pydantic's order is lost on the way to the browser."""
    return {"position": position, **more}


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


F = TypeVar("F", bound=Request)


def request_of(form: type[F], **words: Any) -> F:
    """A command line's words as a request. Raises `UserError` with all that the form refuses."""
    try:
        return form.model_validate(words)
    except ValidationError as error:
        raise UserError(
            [
                Problem(
                    f"{'.'.join(map(str, one['loc']))} {one['input']!r}",
                    one["msg"],
                    str(form.model_fields[str(one["loc"][0])].description),
                )
                for one in error.errors()
            ]
        ) from None


class RecipeRequest(Request):
    """A release recipe, perhaps changed, perhaps with other prompts."""

    recipe: ReleaseRecipe = Field(
        default="freight_demo",
        description="A release recipe of the checkout, or the path of your own.",
        json_schema_extra=at(0),
    )
    overrides: list[Override] = Field(
        default=[],
        max_length=200,
        description="Changes to the recipe, each KEY.KEY=VALUE, e.g. distill.epochs=1.",
        json_schema_extra=at(1),
    )
    prompts: str | None = Field(
        default=None,
        max_length=4096,
        description="A CSV, JSONL or Parquet file on the worker's machine instead of the "
        "recipe's prompts.",
        json_schema_extra=at(2),
    )


class ReleaseRequest(RecipeRequest):
    """Run one release recipe, to a promoted version or a refusal."""


class PromptsRequest(RecipeRequest):
    """Check and split the prompts of a release recipe, and stop there."""


class TeacherRequest(RecipeRequest):
    """Ask the teacher of a release recipe for its answers, and stop there."""


class DistillRequest(RecipeRequest):
    """Make the student of a release recipe, and stop there."""


class QuantizeRequest(RecipeRequest):
    """Quantize the student of a release recipe, for all its candidates or one, and stop there."""

    candidate: str = Field(
        default="", max_length=200, description=ANY_CANDIDATE, json_schema_extra=at(3)
    )


class DraftRequest(RecipeRequest):
    """Train the draft of a release recipe, for all its candidates or one, and stop there."""

    candidate: str = Field(
        default="", max_length=200, description=ANY_CANDIDATE, json_schema_extra=at(3)
    )


class CandidateRequest(RecipeRequest):
    """Make and measure one candidate of a release recipe, and judge nothing."""

    candidate: str = Field(
        default="bf16",
        max_length=200,
        description="The candidate of the recipe that is made, or reused, and measured.",
        json_schema_extra=at(3),
    )
    # Not `keys`: Prefect takes an argument with such an attribute for a mapping.
    expected: dict[str, str] = Field(
        default={},
        max_length=200,
        description="Filled in by a release: under which keys it looks for the results. A worker "
        "that would use others stops at once.",
        json_schema_extra=at(4),
    )


class AccuracyRequest(RecipeRequest):
    """Score one candidate of a release recipe, or its teacher, and judge nothing."""

    candidate: str = Field(
        default="bf16",
        min_length=1,
        max_length=200,
        description="The candidate of the recipe whose bundle is made, or reused, and scored; or "
        f"`{TEACHER}`.",
        json_schema_extra=at(3),
    )


class BenchmarkRequest(RecipeRequest):
    """Find the largest request rate at which a bundle keeps its SLA."""

    candidate: str = Field(
        default="bf16",
        max_length=200,
        description="The candidate of the recipe whose bundle is made, or reused, and measured.",
        json_schema_extra=at(3),
    )
    bundle: str = Field(
        default="",
        max_length=300,
        description="MODEL@ALIAS, MODEL@VERSION or a digest: measured instead of a candidate; "
        "recipe, overrides and candidate are then not looked at.",
        json_schema_extra=at(4, examples=["freight-assistant@champion"]),
    )
    load: LoadProfile = Field(
        default="freight_cpu_2core",
        description="A load profile with an SLA, or the path of your own.",
        json_schema_extra=at(5),
    )
    hardware: OptionalHardware = Field(
        default=None,
        description="A hardware file with a price per hour, for the costs.",
        json_schema_extra=at(6),
    )
    generator: Literal["vllm", "guidellm"] = Field(
        default="vllm", description="What sends the load.", json_schema_extra=at(7)
    )


class GateRequest(Request):
    """Judge folders of evidence by a policy. Starts nothing and measures nothing."""

    policy: Policy = Field(
        default="retention_hit_rate",
        description="A policy of the checkout, or the path of your own.",
        json_schema_extra=at(0),
    )
    candidates: list[Folder] = Field(
        default=["evidence/candidate"],
        min_length=1,
        max_length=200,
        description="[NAME=]DIR, one line a candidate: folders of evidence on the worker's "
        "machine.",
        json_schema_extra=at(1),
    )
    references: list[NamedFolder] = Field(
        default=["teacher=evidence/teacher"],
        max_length=3,
        description="NAME=DIR, NAME one of teacher, student, champion.",
        json_schema_extra=at(2),
    )
    repeated: list[Folder] = Field(
        default=[],
        max_length=2,
        description="Two runs of one bundle, for the noise: two folders, or none.",
        json_schema_extra=at(3),
    )
    planned: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="How many candidates the release has; 0: those given here.",
        json_schema_extra=at(4),
    )
    champion_policy: OptionalPolicy = Field(
        default=None,
        description="The policy that promoted the champion; a looser one is refused.",
        json_schema_extra=at(5),
    )


class PromoteRequest(Request):
    """Point an alias to a bundle that passed, on its recorded evidence alone."""

    bundle: str = Field(
        min_length=1,
        max_length=300,
        description="MODEL@candidate, MODEL@VERSION, or the first digits of a bundle's digest.",
        json_schema_extra=at(0, examples=["freight-assistant@candidate"]),
    )
    alias: str = Field(
        default="champion", description="The alias to move.", json_schema_extra=at(1)
    )
    policy: OptionalPolicy = Field(
        default=None,
        description="A policy that it must have been judged by; none: the one it was judged by.",
        json_schema_extra=at(2),
    )
    reason: Reason = Field(
        default="",
        description="For the ledger; needed for a version that was rolled back.",
        json_schema_extra=at(3),
    )
    expected: int | None = Field(
        default=None,
        ge=0,
        description="Version that must hold the alias still, 0 for none; empty: whichever does.",
        json_schema_extra=at(4),
    )
    actor: Actor = Field(default="", description="Who or what asks.", json_schema_extra=at(5))
    approve: bool = Field(
        default=False,
        description="The actor says yes where the policy asks a person; needs reason and actor. "
        "Off: the run waits for an answer.",
        json_schema_extra=at(6),
    )


class RollbackRequest(Request):
    """Point the champion back to an earlier one."""

    model: str = Field(
        min_length=1,
        description="Registered model.",
        json_schema_extra=at(0, examples=["freight-assistant"]),
    )
    reason: Reason = Field(
        min_length=1, description="Why; it stands in the ledger.", json_schema_extra=at(1)
    )
    to: int | None = Field(
        default=None,
        ge=1,
        description="A version that was champion; empty: the one before.",
        json_schema_extra=at(2),
    )
    smoke: bool = Field(
        default=True,
        description="Start it and ask it a prompt first. Off only where no engine is at hand.",
        json_schema_extra=at(3),
    )
    actor: Actor = Field(default="", description="Who or what asks.", json_schema_extra=at(4))


class NightlyRequest(Request):
    """One release per recipe of the matrix, and a table of what came of each."""

    recipes: list[ReleaseRecipe] = Field(
        default=["freight_demo"],
        min_length=1,
        max_length=100,
        description="The matrix: release recipes, in the order in which they are started.",
        json_schema_extra=at(0),
    )
    night: date | None = Field(
        default=None,
        description="The date that the night belongs to; empty: the day for which this run was "
        "planned, in the time zone below. A night that was run is shown again, and starts nothing.",
        json_schema_extra=at(1),
    )
    timezone: str = Field(
        default="Asia/Shanghai",
        pattern=r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$",
        max_length=64,
        description="Whose date it is, by its name in the IANA list.",
        json_schema_extra=at(2, examples=["Asia/Shanghai", "UTC"]),
    )
    attempt: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Raise it to run a night once more.",
        json_schema_extra=at(3),
    )
    hours: float = Field(
        default=10.0,
        gt=0,
        le=48,
        description="How long one release may run before it is cancelled; the others go on.",
        json_schema_extra=at(4),
    )


class MaintainRequest(Request):
    """Remove what nothing refers to any more, and keep the databases small."""

    days: int = Field(
        default=30,
        ge=1,
        le=36_500,
        description="What is younger stays: artifacts of the store, runs of Prefect, deleted "
        "runs of MLflow.",
        json_schema_extra=at(0),
    )
    minutes: float = Field(
        default=60.0,
        gt=0,
        le=600,
        description="After this no step begins, and one that works on a database stops; the next "
        "maintenance goes on with the rest.",
        json_schema_extra=at(1),
    )
