"""The flow as Prefect sees it: its form, and how a run ends that could not begin."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from flows.accuracy import score_candidate
from flows.benchmark import benchmark_bundle
from flows.candidate import measure_one
from flows.distill import distill_student
from flows.draft import train_release_draft
from flows.forms import (
    AccuracyRequest,
    BenchmarkRequest,
    CandidateRequest,
    DistillRequest,
    DraftRequest,
    PromoteRequest,
    PromptsRequest,
    QuantizeRequest,
    RecipeRequest,
    ReleaseRequest,
    RollbackRequest,
    TeacherRequest,
)
from flows.prompts import split_prompts
from flows.quantize import quantize_student
from flows.release import release_model
from flows.teacher import generate_answers
from recipes.loader import shipped
from registry.errors import UserError


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        (release_model, ReleaseRequest),
        (split_prompts, PromptsRequest),
        (score_candidate, AccuracyRequest),
        (generate_answers, TeacherRequest),
        (distill_student, DistillRequest),
        (quantize_student, QuantizeRequest),
        (train_release_draft, DraftRequest),
        (benchmark_bundle, BenchmarkRequest),
        (measure_one, CandidateRequest),
    ],
)
def test_a_mistake_in_a_recipe_ends_the_run_as_failed(
    prefect: None, asked: Any, form: type[RecipeRequest]
) -> None:
    state = asked(form(recipe="freight_dmo"), return_state=True)
    assert state.is_failed()
    assert state.message.startswith("release 'freight_dmo': no recipe or suite of that name")
    with pytest.raises(UserError, match="did you mean 'freight_demo'"):
        state.result()


def test_a_run_is_named_by_its_recipe(prefect: None) -> None:
    from prefect.client.orchestration import get_client

    state = release_model(ReleaseRequest(recipe="nope"), return_state=True)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(state.state_details.flow_run_id)
    assert run.name == "release-nope"


def test_the_form_has_its_fields_in_order_and_offers_the_shipped_recipes() -> None:
    fields = ReleaseRequest.model_json_schema()["properties"]
    assert [name for name, _ in sorted(fields.items(), key=lambda f: f[1]["position"])] == [
        "recipe",
        "overrides",
        "prompts",
    ]
    of_checkout, own_file = fields["recipe"]["anyOf"]
    assert of_checkout["enum"] == shipped("release")
    assert (of_checkout["type"], own_file["type"]) == ("string", "string")
    assert all(field["description"] for field in fields.values())
    assert release_model.parameters.model_dump()["required"] == ["request"]


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        (PromoteRequest, ["bundle", "alias", "policy", "reason", "expected", "actor", "approve"]),
        (RollbackRequest, ["model", "reason", "to", "smoke", "actor"]),
    ],
)
def test_the_forms_of_promotion_ask_in_order_and_say_for_what(
    form: type[BaseModel], asked: list[str]
) -> None:
    fields = form.model_json_schema()["properties"]
    assert [name for name, _ in sorted(fields.items(), key=lambda f: f[1]["position"])] == asked
    assert all(field["description"] for field in fields.values())


def test_a_rollback_without_a_reason_is_no_request() -> None:
    with pytest.raises(ValidationError, match="reason"):
        RollbackRequest(model="freight-assistant", reason="  ")
