"""The forms: what a browser is told of each field, what a server refuses before a run exists."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError

from eval_suites.loader import shipped as shipped_suites
from flows import forms
from recipes.loader import find, shipped
from registry.settings import CHECKOUT

FORMS = [
    one
    for _, one in inspect.getmembers(forms, inspect.isclass)
    if issubclass(one, BaseModel) and one.__module__ == forms.__name__ and one.model_fields
]
NEEDED: dict[str, dict[str, Any]] = {
    "PromoteRequest": {"bundle": "m@candidate"},
    "RollbackRequest": {"model": "m", "reason": "slow"},
}
"""What a person must say; all other forms are sent as they are."""


def schema_of(form: type[BaseModel]) -> Draft202012Validator:
    return Draft202012Validator(form.model_json_schema())


@pytest.mark.parametrize("form", FORMS, ids=lambda one: one.__name__)
def test_every_field_says_what_it_is_and_stands_in_its_place(form: type[BaseModel]) -> None:
    fields = form.model_json_schema()["properties"]
    assert all(field["description"] for field in fields.values())
    places = [field["position"] for field in fields.values()]
    assert sorted(places) == list(range(len(fields)))
    assert form.model_config["extra"] == "forbid" and form.model_config["frozen"]


@pytest.mark.parametrize("form", FORMS, ids=lambda one: one.__name__)
def test_the_defaults_are_shown_and_are_accepted_by_the_schema_and_the_flow(
    form: type[BaseModel],
) -> None:
    fields = form.model_json_schema()["properties"]
    needed = NEEDED.get(form.__name__, {})
    assert {name for name, field in fields.items() if "default" not in field} <= set(needed)
    filled = {
        name: field["default"] for name, field in fields.items() if "default" in field
    } | needed
    assert list(schema_of(form).iter_errors(filled)) == []
    assert form.model_validate(filled) == form.model_validate(needed)


@pytest.mark.parametrize(
    ("form", "field", "names"),
    [
        (forms.ReleaseRequest, "recipe", shipped("release")),
        (forms.BenchmarkRequest, "load", shipped_suites("load")),
        (forms.GateRequest, "policy", shipped_suites("policy")),
        (forms.BenchmarkRequest, "hardware", shipped("hardware")),
    ],
)
def test_a_drop_down_holds_what_the_folder_holds_and_a_path_is_taken_too(
    form: type[BaseModel], field: str, names: list[str]
) -> None:
    choices = form.model_json_schema()["properties"][field]["anyOf"]
    assert choices[0]["enum"] == names and names
    # The browser takes the first kind of text for a name, and shows the second as a line of text.
    assert [one["type"] for one in choices[:2]] == ["string", "string"]
    check = schema_of(form)
    needed = NEEDED.get(form.__name__, {})
    for value in (*names, "./own.yaml", "own.yml", "../some where/x"):
        assert list(check.iter_errors({field: value, **needed})) == [], value
    for value in ("freight_dmo", "", "own.yaml.bak", 3):
        assert list(check.iter_errors({field: value, **needed})), value


def test_what_the_schema_calls_a_path_is_what_the_loader_takes_for_one() -> None:
    path = CHECKOUT / "tests" / "recipes" / "release_tiny.yaml"
    assert schema_of(forms.ReleaseRequest).is_valid({"recipe": str(path)})
    assert find(str(path), "release") == path


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (forms.ReleaseRequest, {"overrides": ["distill.epochs"]}),
        (forms.ReleaseRequest, {"overrides": [".x=1"]}),
        (forms.ReleaseRequest, {"unknown": 1}),
        (forms.NightlyRequest, {"recipes": []}),
        (forms.NightlyRequest, {"recipes": ["freight_dmo"]}),
        (forms.NightlyRequest, {"hours": 0}),
        (forms.NightlyRequest, {"attempt": 0}),
        (forms.NightlyRequest, {"timezone": "Asia/Shang hai"}),
        (forms.GateRequest, {"candidates": []}),
        (forms.GateRequest, {"candidates": ["x"], "references": ["no name"]}),
        (forms.BenchmarkRequest, {"generator": "wrk"}),
        (forms.MaintainRequest, {"days": 0}),
        (forms.RollbackRequest, {"model": "m", "reason": ""}),
        (forms.PromoteRequest, {"bundle": "m@1", "expected": -1}),
    ],
)
def test_a_server_refuses_it_before_there_is_a_run(
    form: type[BaseModel], value: dict[str, Any]
) -> None:
    assert list(schema_of(form).iter_errors(value))


def test_a_name_that_is_newer_than_the_deployment_is_left_to_the_flow() -> None:
    assert forms.ReleaseRequest(recipe="not_yet_deployed").recipe == "not_yet_deployed"
    with pytest.raises(ValidationError):
        forms.ReleaseRequest(overrides=["no equals sign"])
