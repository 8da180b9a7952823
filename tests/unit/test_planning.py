"""A release recipe as a plan: keys before anything runs, and mistakes across files together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval_suites import loader as suites
from eval_suites.schema import KINDS as SUITE_KINDS
from recipes import loader
from recipes.schema import KINDS as RECIPE_KINDS
from registry.errors import UserError
from registry.settings import CHECKOUT
from tasks import planning
from tasks.planning import plan, resolve

TINY = str(CHECKOUT / "tests" / "recipes" / "release_tiny.yaml")


@pytest.fixture(autouse=True)
def no_serve_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests need no engine; its version is all that a plan asks of it."""
    monkeypatch.chdir(CHECKOUT)
    for module in ("serving", "accuracy", "latency"):
        monkeypatch.setattr(f"tasks.{module}.engine_version", lambda: "0.0.test")


def shipped() -> list[Any]:
    listed = []
    for kinds, root in ((RECIPE_KINDS, loader.RECIPES_DIR), (SUITE_KINDS, suites.SUITES_DIR)):
        listed += [
            pytest.param(kind, name, model, root, id=f"{kind}-{name}")
            for kind, model in kinds.items()
            for name in loader.shipped(kind, root)
        ]
    return listed


@pytest.mark.parametrize(("kind", "name", "model", "root"), shipped())
def test_every_shipped_file_loads(kind: str, name: str, model: Any, root: Path) -> None:
    loader.load(name, kind, model, root=root)


@pytest.mark.parametrize("name", loader.shipped("release"))
def test_every_shipped_release_resolves(name: str) -> None:
    resolve(name)


def test_the_plan_has_every_key_before_anything_ran(home: Path) -> None:
    todo = plan(resolve("freight_demo"))
    stages = todo.stages()
    assert len({stage.key for stage in stages}) == len(stages)
    names = [stage.name for stage in stages]
    assert names[:2] == ["prompts", "model"]
    assert names.count("quantize") == 5
    assert names.count("serving") == 7
    assert not list(home.rglob("*"))
    assert [s.key for s in plan(resolve("freight_demo")).stages()] == [s.key for s in stages]


def changed(assignment: str) -> set[str]:
    """Titles of the stages whose keys an override changes."""
    before = {stage.title: stage.key for stage in plan(resolve("freight_demo")).stages()}
    after = {
        stage.title: stage.key for stage in plan(resolve("freight_demo", [assignment])).stages()
    }
    return {title for title, key in after.items() if before.get(title) != key}


def test_a_policy_change_makes_nothing_again() -> None:
    assert changed("policy.max_age_days=7") == set()


def test_a_load_change_measures_latency_again_and_nothing_else() -> None:
    found = changed("load.seed=5")
    assert found
    assert all(title.startswith("latency ") for title in found)


def test_a_quantization_change_touches_only_its_candidate() -> None:
    found = changed("quantize.w8a8_int8.calibration.samples=32")
    assert {title.split()[-1] for title in found} == {"w8a8_int8"}
    assert len(found) == 4


def test_a_distillation_change_keeps_the_teacher_data() -> None:
    found = changed("distill.epochs=7")
    assert "distill" in found
    assert not {"prompts demo", "teacher_data", "model teacher", "accuracy teacher"} & found


def test_mistakes_of_several_files_are_reported_together() -> None:
    with pytest.raises(UserError) as caught:
        resolve("freight_demo", ["distill.epochs=-1", "policy.gates=[]", "draft.num_layers=0"])
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("accuracy.items=100000", "asks 100000 items"),
        ("accuracy.metrics=[hit_rate]", "is not measured by suite"),
        ("load.rates=[0.5]", "is not measured by load profile"),
        ("reference_candidate=w8a8_int8", "is not the unquantized student"),
        ("reference_candidate=nobody", "is no candidate"),
        ("quantize.unknown.x=1", "the release names no such recipe"),
        ("model=team/freight", "cannot be a registered model's name"),
        ("prompts.sizes.load=5", "each with a prompt of its own"),
        ("prompts.sizes.calibration=5", "a quantize recipe asks"),
        ("prompts.sizes.load=0", "every part needs at least one prompt"),
    ],
)
def test_what_only_shows_when_files_are_seen_together(assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve("freight_demo", [assignment])


def test_prompts_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("text,category\n" + "".join(f"message {n},a\n" for n in range(3000)))
    resolved = resolve(
        TINY,
        ["prompts.mapping.prompt=text", "prompts.mapping.reference=category"],
        prompts_file=str(path),
    )
    assert resolved.release.prompts.source == "file"
    assert resolved.release.prompts.sizes["train"] == planning.FILE_SIZES["train"]
    stage = plan(resolved).prompts
    moved = tmp_path / "elsewhere.csv"
    path.rename(moved)
    again = plan(
        resolve(
            TINY,
            ["prompts.mapping.prompt=text", "prompts.mapping.reference=category"],
            prompts_file=str(moved),
        )
    ).prompts
    assert stage.key == again.key
