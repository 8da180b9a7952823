"""`prefect.yaml` and the files in `automations/`, read strictly: what is wrong is named before
anything is registered.

Prefect ignores a key that it does not know, at every level, so that a `timezon:` or a
`concurency_limit:` becomes a night at the wrong hour or two nights at once. Here it is a mistake.
"""

from __future__ import annotations

import inspect
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from zoneinfo import available_timezones

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from recipes.loader import read_yaml
from registry.errors import Problem, UserError
from registry.settings import CHECKOUT
from tasks.events import ALIAS_MOVED, APPROVAL_ASKED, CANDIDATE_PASSED

DEPLOY_FILE = CHECKOUT / "prefect.yaml"
AUTOMATIONS_DIR = CHECKOUT / "automations"
POOLS = ("cpu", "gpu")
OURS = "pilotage"
"""The tag of every deployment of ours, and the first word of every automation's name."""
EVENTS = (CANDIDATE_PASSED, APPROVAL_ASKED, ALIAS_MOVED)
"""What our code emits; a trigger that waits for anything else of ours waits for ever."""

Text = typing.Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class JobVariables(_Strict):
    """Of Prefect's process workers."""

    env: dict[str, str] = Field(default_factory=dict)
    working_dir: str | None = None
    stream_output: bool = True


class WorkPool(_Strict):
    name: Literal["cpu", "gpu"]
    job_variables: JobVariables = JobVariables()


class Concurrency(_Strict):
    limit: int = Field(ge=1)
    collision_strategy: Literal["ENQUEUE", "CANCEL_NEW"]
    grace_period_seconds: int | None = Field(default=None, ge=60, le=86_400)


class Schedule(_Strict):
    """Times of day by cron, always with the place whose day it is."""

    cron: str
    timezone: str
    slug: Text
    active: bool = True

    @field_validator("cron")
    @classmethod
    def _is_cron(cls, value: str) -> str:
        from prefect.client.schemas.schedules import CronSchedule

        if len(value.split()) != 5:
            raise ValueError("is not a cron line of five fields")
        # Prefect's own check is the one that counts when the run is planned.
        CronSchedule(cron=value, timezone="UTC")
        return value

    @field_validator("timezone")
    @classmethod
    def _is_a_zone(cls, value: str) -> str:
        if value not in available_timezones():
            raise ValueError("is not a time zone of the tz database, such as Asia/Shanghai")
        return value


class Trigger(_Strict):
    """An event that starts a run; `parameters` are Jinja templates over it."""

    name: str = Field(pattern=rf"^{OURS} ", description="Marked as ours.")
    description: str = ""
    type: Literal["event"]
    enabled: bool = True
    expect: list[str] = Field(min_length=1)
    match: dict[str, str | list[str]] = Field(min_length=1)
    for_each: list[str] = Field(default_factory=list)
    posture: Literal["Reactive"] = "Reactive"
    threshold: int = Field(default=1, ge=1)
    within: int = Field(default=0, ge=0)
    parameters: dict[str, Any]

    @field_validator("expect")
    @classmethod
    def _is_emitted(cls, value: list[str]) -> list[str]:
        for name in unheard(value):
            raise ValueError(f"{name!r} is emitted by nobody; known: {', '.join(EVENTS)}")
        return value


class Deployment(_Strict):
    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    description: Text
    entrypoint: str = Field(pattern=r"^flows\.[a-z_]+\.[a-z_]+$")
    parameters: dict[str, Any]
    work_pool: WorkPool
    tags: list[Text] = Field(min_length=1)
    concurrency_limit: Concurrency | None = None
    schedules: list[Schedule] = Field(default_factory=list)
    triggers: list[Trigger] = Field(default_factory=list)

    @field_validator("tags")
    @classmethod
    def _is_marked(cls, value: list[str]) -> list[str]:
        if OURS not in value:
            raise ValueError(f"has no tag {OURS!r}, by which `deploy` knows its own")
        return value

    @model_validator(mode="after")
    def _a_schedule_does_not_double(self) -> Deployment:
        if self.schedules and self.concurrency_limit is None:
            raise ValueError("has a schedule and no concurrency_limit: a late run would be doubled")
        return self


class DeployFile(_Strict):
    name: Text
    definitions: dict[str, Any] = Field(
        default_factory=dict, description="Anchors; read by nobody else."
    )
    pull: list[dict[str, dict[str, str]]] = Field(default_factory=list)
    deployments: list[Deployment] = Field(min_length=1)


def read_deploy_file(path: Path = DEPLOY_FILE) -> DeployFile:
    """The file with everything checked. Raises `UserError` with all mistakes at once."""
    content = read_yaml(path)
    try:
        found = DeployFile.model_validate(content)
    except ValidationError as error:
        raise UserError([_problem(path, content, one) for one in error.errors()]) from None
    problems = [
        problem
        for deployment in found.deployments
        for problem in flow_problems(deployment, f"{path}: {place(deployment)}")
    ]
    if not problems:
        names = Counter(full_name(deployment) for deployment in found.deployments)
        names.update(one.name for deployment in found.deployments for one in deployment.triggers)
        problems = [
            Problem(f"{path}: {name}", "stands there twice", "give each its own name")
            for name, count in names.items()
            if count > 1
        ]
    if problems:
        raise UserError(problems)
    return found


def place(deployment: Deployment) -> str:
    """How a person finds it in the file: many are called `alone`."""
    return f"{deployment.entrypoint} / {deployment.name}"


def full_name(deployment: Deployment) -> str:
    """`FLOW/DEPLOYMENT`, as Prefect calls it."""
    return f"{load_flow(deployment.entrypoint).name}/{deployment.name}"


def load_flow(entrypoint: str) -> Any:
    """The flow behind `flows.module.function`. Raises ImportError or AttributeError."""
    module, _, name = entrypoint.rpartition(".")
    return getattr(import_module(module), name)


def request_model(flow: Any) -> type[BaseModel]:
    """The model of a flow's one parameter, `request`. Raises `TypeError` for anything else."""
    from prefect import Flow

    if not isinstance(flow, Flow):
        raise TypeError("is no flow")
    if list(inspect.signature(flow.fn).parameters) != ["request"]:
        raise TypeError("does not take exactly one parameter called `request`")
    model = typing.get_type_hints(flow.fn)["request"]
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise TypeError("has a `request` that is no pydantic model")
    return model


def flow_problems(deployment: Deployment, where: str) -> list[Problem]:
    """Whether the flow is there and takes the parameters.

    What a form must ask a person (a required field without a default) may be missing where only
    a person or another flow starts it; a schedule has nobody to ask.
    """
    try:
        flow = load_flow(deployment.entrypoint)
        model = request_model(flow)
    except (ImportError, AttributeError, TypeError) as error:
        return [Problem(f"{where}: entrypoint", str(error), "name a flow: flows.MODULE.FUNCTION")]
    problems = [
        Problem(f"{where}: parameters.{key}", "unknown key", "the one parameter is `request`")
        for key in deployment.parameters
        if key != "request"
    ]
    asked = not deployment.schedules
    problems += _request_problems(model, deployment.parameters.get("request", {}), where, asked)
    for trigger in deployment.triggers:
        at = f"{where}: trigger {trigger.name!r}"
        request = trigger.parameters.get("request", {})
        problems += _request_problems(model, request, at, asked=False)
    return problems


def _request_problems(
    model: type[BaseModel], request: Any, where: str, asked: bool
) -> list[Problem]:
    try:
        model.model_validate(request)
    except ValidationError as error:
        return [
            Problem(
                ".".join([f"{where}: parameters.request", *map(str, one["loc"])]),
                f"{one['msg']} (found {one['input']!r:.80})",
                "see the flow's request in flows/forms.py",
            )
            for one in error.errors()
            if not (asked and one["type"] == "missing" and len(one["loc"]) == 1)
        ]
    return []


def _problem(path: Path, content: Any, detail: Mapping[str, Any]) -> Problem:
    """One of pydantic's errors with its place; a deployment is named, not counted."""
    parts = list(detail["loc"])
    shown = [str(part) for part in parts]
    if parts[:1] == ["deployments"] and len(parts) > 1:
        entry = content["deployments"][parts[1]]
        if isinstance(entry, dict):
            shown[1] = f"{parts[1] + 1} ({entry.get('entrypoint')} / {entry.get('name')})"
    what = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return Problem(f"{path}: {'.'.join(shown)}", "unknown key", "remove or correct it")
    if detail["type"] == "missing":
        return Problem(f"{path}: {'.'.join(shown)}", "is missing", "add it")
    found = f"{detail['input']!r:.80}"
    return Problem(f"{path}: {'.'.join(shown)}", f"{what} (found {found})", "correct the value")


def read_automations(folder: Path = AUTOMATIONS_DIR) -> list[dict[str, Any]]:
    """Every automation of the folder's YAML files, as written; checked as Prefect's own model.

    Raises `UserError` with all mistakes: unknown keys, values, names that are there twice.
    """
    from prefect.events.schemas.automations import AutomationCore

    found: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.yaml")):
        for number, entry in enumerate(_entries(path), start=1):
            where = f"{path}: {number} ({entry.get('name')})"
            try:
                known = AutomationCore.model_validate(entry)
            except ValidationError as error:
                problems += [
                    Problem(
                        ".".join([where, *map(str, one["loc"])]),
                        f"{one['msg']} (found {one['input']!r:.80})",
                        "correct the value",
                    )
                    for one in error.errors()
                ]
                continue
            for key in unknown_keys(entry, known.model_dump(mode="json")):
                problems.append(Problem(f"{where}.{key}", "unknown key", "remove or correct it"))
            for name in unheard([*events_of(entry)]):
                problems.append(
                    Problem(
                        f"{where}.trigger",
                        f"{name!r} is emitted by nobody",
                        f"one of {', '.join(EVENTS)}, or an event of Prefect's",
                    )
                )
            if not str(entry["name"]).startswith(f"{OURS} "):
                problems.append(
                    Problem(f"{where}.name", "is not marked as ours", f"begin it with `{OURS} `")
                )
            found.append(entry)
    for name, count in Counter(entry["name"] for entry in found).items():
        if count > 1:
            problems.append(Problem(f"{folder}: {name}", "stands there twice", "rename one"))
    if problems:
        raise UserError(problems)
    return found


def unheard(names: Sequence[str]) -> list[str]:
    """Those of some names of events that neither our code nor Prefect emits."""
    return [name for name in names if name not in EVENTS and not name.startswith("prefect.")]


def events_of(entry: Mapping[str, Any]) -> list[str]:
    """Every event that an automation names, in triggers inside of triggers too."""
    trigger = entry.get("trigger", entry)
    names = [*trigger.get("after", []), *trigger.get("expect", [])]
    return names + [name for inner in trigger.get("triggers", []) for name in events_of(inner)]


def _entries(path: Path) -> Sequence[dict[str, Any]]:
    content = read_yaml(path)
    unknown = set(content) - {"automations"}
    if unknown or not isinstance(content.get("automations"), list):
        raise UserError.at(path, f"holds {sorted(content)}", "write one list, `automations:`")
    return [entry if isinstance(entry, dict) else {} for entry in content["automations"]]


def unknown_keys(written: Any, known: Any, at: str = "") -> list[str]:
    """Keys of `written` that a model did not take over into `known`, by their place."""
    if isinstance(written, dict) and isinstance(known, dict):
        found = []
        for key, value in written.items():
            where = f"{at}.{key}" if at else str(key)
            found += unknown_keys(value, known[key], where) if key in known else [where]
        return found
    if isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        return [
            key
            for number, (one, other) in enumerate(zip(written, known, strict=True))
            for key in unknown_keys(one, other, f"{at}.{number}")
        ]
    return []
